"""A checkpoint's chat template: messages and tools to the prompt text that its model was trained on."""
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trueup.models.delta import folders_of


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """jinja2's own filter escapes <, >, & and ' for HTML and takes no ``ensure_ascii``; both break schemas."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """The settings that published templates are written for; sandboxed, as a template is foreign code."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


class ChatTemplate:
    """``chat_template.jinja`` of a folder, else ``chat_template`` in its ``tokenizer_config.json``; else its base's.

    Raises:
        ValueError: the folder has neither, or the template is not valid jinja.
    """

    def __init__(self, folder: str | Path) -> None:
        self.source, text = _read(Path(folder))
        try:
            self.template: Template = _environment().from_string(text)
        except TemplateSyntaxError as error:
            raise ValueError(f"{self.source}: not a valid jinja template, line {error.lineno}: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Prompt text of the messages; ``variables`` are the template's own (``tools``, ``enable_thinking``, ...).

        Raises:
            ValueError: not a list of messages with roles, or the template refuses them.
        """
        checked = [_checked(i, message) for i, message in enumerate(messages)]
        try:
            return self.template.render(messages=checked, **variables)
        # A value of a type that the template did not expect arrives as TypeError.
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{self.source} cannot render these messages: {error}") from error


def _read(folder: Path) -> tuple[Path, str]:
    for place in folders_of(folder):
        file, config = place / "chat_template.jinja", place / "tokenizer_config.json"
        if file.is_file():
            return file, file.read_text(encoding="utf-8")
        if config.is_file():
            try:
                found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{config}: not a JSON object ({error})") from None
            if isinstance(found, str):
                return config, found
    raise ValueError(
        f"{folder}: no chat template there, neither chat_template.jinja nor chat_template in tokenizer_config.json; "
        "copy one from the model's publisher, or send a plain prompt"
    )


def _checked(i: int, message: Any) -> Mapping[str, Any]:
    """A message fit for a template: tool-call arguments as objects, where OpenAI's protocol has JSON text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{i}] is {message!r}; expected an object with a 'role'")
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, Sequence):
        raise ValueError(f"messages[{i}].tool_calls is {calls!r}; expected a list")
    return {**message, "tool_calls": [_call(f"messages[{i}].tool_calls[{j}]", call) for j, call in enumerate(calls)]}


def _call(where: str, call: Any) -> Mapping[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        return {**call, "function": {**function, "arguments": dict(**arguments)}}
    except (TypeError, KeyError, json.JSONDecodeError):
        raise ValueError(
            f"{where} is {call!r}; expected a 'function' with 'arguments': an object, or its JSON text"
        ) from None
