"""The nano model's chat template, item by item of the GLM-4.7 format, and where templates come from."""
import copy
import json
import shutil

import pytest

from trueup.models import zoo
from trueup.models.config import ModelConfig
from trueup.models.tokenizer import Tokenizer

NANO = zoo.path("glm-4.7-flash-nano")
CONFIG = ModelConfig.from_folder(NANO)
TOKENIZER = Tokenizer.from_folder(NANO, CONFIG)

USER = {"role": "user", "content": "What's 1 < 2 & 'so'?"}
TOOL = {"type": "function", "function": {"name": "天气", "description": "<city> & 'country'", "parameters": {}}}
CALL = {"id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": {"city": "北京", "days": 2, "units": {"t": "°C"}, "now": True}}}


def render(*messages, add_generation_prompt=False, **kwargs):
    first = TOKENIZER.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **kwargs)
    again = TOKENIZER.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **kwargs)
    assert first == again
    assert first.startswith("[gMASK]<sop>")
    return first.removeprefix("[gMASK]<sop>")


def test_prefix_system_and_user():
    assert render({"role": "system", "content": "Be brief."}, USER) == (
        "<|system|>Be brief.<|user|>What's 1 < 2 & 'so'?"
    )


def test_content_may_come_in_parts():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render({"role": "user", "content": parts}) == "<|user|>one two"


def test_generation_prompt_with_and_without_thinking():
    assert render(USER, add_generation_prompt=True).endswith("?<|assistant|><think>")
    assert render(USER, add_generation_prompt=True, enable_thinking=True).endswith("?<|assistant|><think>")
    assert render(USER, add_generation_prompt=True, enable_thinking=False).endswith("?<|assistant|></think>")
    default = TOKENIZER.apply_chat_template([USER])
    assert default == "[gMASK]<sop><|user|>What's 1 < 2 & 'so'?<|assistant|><think>"


def test_tools_are_one_json_schema_a_line_unescaped():
    text = render(USER, tools=[TOOL, TOOL])
    head, user = text.split("<|user|>")
    assert head.startswith("<|system|>") and user == USER["content"]
    lines = head.splitlines()
    between = lines[lines.index("<tools>") + 1 : lines.index("</tools>")]
    assert [json.loads(line) for line in between] == [TOOL, TOOL]
    assert "天气" in head and "<city> & 'country'" in head
    assert "<arg_key>" in head[head.index("</tools>") :]
    assert render(USER, tools=[]) == render(USER, tools=None) == "<|user|>" + USER["content"]


def test_reasoning_of_earlier_turns_is_dropped_unless_asked_for():
    earlier = {"role": "assistant", "content": "\n 3 \n", "reasoning_content": "\nadd\n"}
    later = {"role": "assistant", "content": "4", "reasoning_content": "again"}
    said = f"<|user|>{USER['content']}"
    assert render(USER, earlier, USER, later) == (
        f"{said}<|assistant|></think>3{said}<|assistant|><think>again</think>4"
    )
    assert render(USER, earlier, USER, later, clear_thinking=False) == (
        f"{said}<|assistant|><think>add</think>3{said}<|assistant|><think>again</think>4"
    )
    assert render(USER, {"role": "assistant", "content": "5"}) == f"{said}<|assistant|></think>5"


def test_reasoning_inside_the_content_is_found():
    message = {"role": "assistant", "content": "<think>add</think>\n3"}
    assert render(USER, message).endswith("<|assistant|><think>add</think>3")
    assert render(USER, message, USER).count("add") == 0


def test_tool_calls_and_results():
    call = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": "12 °C", "tool_call_id": "c1"}, {"role": "tool", "content": "13 °C"}]
    once = (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>北京</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value>"
        '<arg_key>units</arg_key><arg_value>{"t": "°C"}</arg_value>'
        "<arg_key>now</arg_key><arg_value>true</arg_value></tool_call>"
    )
    answers = (
        "<|observation|><tool_response>12 °C</tool_response><tool_response>13 °C</tool_response>"
    )
    text = render(USER, call, *results, call, results[0])
    assert text.removeprefix("<|user|>" + USER["content"]) == (
        f"<|assistant|></think>{once}{once}{answers}"
        f"<|assistant|></think>{once}{once}<|observation|><tool_response>12 °C</tool_response>"
    )


def test_arguments_may_be_json_text_and_the_messages_are_left_alone():
    as_text = copy.deepcopy(CALL)
    as_text["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [as_text]}]
    before = copy.deepcopy(messages)
    assert render(*messages) == render(USER, {"role": "assistant", "content": "", "tool_calls": [CALL]})
    assert messages == before
    nothing = {"type": "function", "function": {"name": "now", "arguments": ""}}
    assert render({"role": "assistant", "tool_calls": [nothing]}).endswith("<tool_call>now</tool_call>")


@pytest.mark.parametrize("message, error", [
    ("hello", r"messages\[0\] is 'hello'; expected an object with a 'role'"),
    ({"content": "hi"}, r"expected an object with a 'role'"),
    ({"role": "wizard", "content": "hi"}, r"cannot render these messages: role wizard is unknown; expected system"),
    ({"role": "assistant", "tool_calls": 3}, r"messages\[0\]\.tool_calls is 3; expected a list"),
    ({"role": "user", "content": 3}, r"cannot render these messages: content must be text"),
    ({"role": "user", "content": {"text": "hi"}}, r"cannot render these messages: content must be text"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, r"only text parts"),
])
def test_messages_that_cannot_be_rendered_are_refused(message, error):
    with pytest.raises(ValueError, match=error):
        render(message)


@pytest.mark.parametrize("call", [
    "now", {}, {"function": "f"}, {"function": {"name": "f"}}, {"function": {"name": "f", "arguments": "{"}},
    {"function": {"name": "f", "arguments": [1]}}, {"function": {"name": "f", "arguments": "null"}},
])
def test_tool_calls_without_readable_arguments_are_refused(call):
    with pytest.raises(ValueError, match=r"messages\[1\]\.tool_calls\[0\] is .*; expected .* its JSON text"):
        render(USER, {"role": "assistant", "tool_calls": [call]})


def test_transformers_renders_the_same_text():
    transformers = pytest.importorskip("transformers")
    library = transformers.AutoTokenizer.from_pretrained(NANO)
    conversation = [
        {"role": "system", "content": "Be brief."}, USER,
        {"role": "assistant", "content": "3", "reasoning_content": "r"}, USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "ü <b>"},
    ]
    for kwargs in ({}, {"tools": [TOOL]}, {"enable_thinking": False, "clear_thinking": False}):
        kwargs["add_generation_prompt"] = True
        text = TOKENIZER.apply_chat_template(conversation, **kwargs)
        assert text == library.apply_chat_template(conversation, tokenize=False, **kwargs)
        assert TOKENIZER.encode(text) == library.encode(text, add_special_tokens=False)


# Where a template comes from, and what it may do


@pytest.fixture
def folder(tmp_path):
    """A copy of the nano folder's small files, to change."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(NANO / name, tmp_path)
    return tmp_path


def changed_json(file, **keys):
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def from_template(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder, CONFIG)


def test_the_template_file_wins_over_tokenizer_config(folder):
    changed_json(folder / "tokenizer_config.json", chat_template="old {{ messages[0].content }}")
    tokenizer = from_template(folder, "new {{ messages[0].content }}")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "new x"
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.from_folder(folder, CONFIG).apply_chat_template([{"role": "user", "content": "x"}]) == "old x"


def test_without_a_template_only_chat_fails(folder):
    (folder / "chat_template.jinja").unlink()
    for _ in range(2):
        tokenizer = Tokenizer.from_folder(folder, CONFIG)
        assert tokenizer.encode("import") == TOKENIZER.encode("import")
        with pytest.raises(ValueError, match=r"no chat template there, neither chat_template\.jinja nor"):
            tokenizer.apply_chat_template([USER])
        (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not a JSON object"):
        tokenizer.apply_chat_template([USER])


def test_a_template_with_an_error_names_file_and_line(folder):
    with pytest.raises(ValueError, match=r"chat_template\.jinja: not a valid jinja template, line 2"):
        from_template(folder, "a\n{% if %}").apply_chat_template([USER])


def test_environment_is_the_one_that_published_templates_expect(folder):
    def rendered(template, **kwargs):
        return from_template(folder, template).apply_chat_template([USER], **kwargs)

    # trim_blocks and lstrip_blocks: a block's own line leaves nothing.
    assert rendered("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    value = {"b": "<é>", "a": 1}
    assert rendered("{{ v | tojson }}", v=value) == '{"b": "<é>", "a": 1}'
    assert rendered("{{ v | tojson(ensure_ascii=True, indent=1) }}", v=value) == json.dumps(value, indent=1)
    with pytest.raises(ValueError, match="cannot render these messages: no such luck"):
        rendered("{{ raise_exception('no such luck') }}")


def test_a_template_is_sandboxed(folder):
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ tojson.__globals__ }}"):
        with pytest.raises(ValueError, match=r"cannot render"):
            from_template(folder, template).apply_chat_template([USER])
