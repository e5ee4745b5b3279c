"""The wire format: what POST /v1/completions takes, and how answers and errors look.

Source: OpenAI's API reference, "Completions".  A field that would change the answer and is not built is refused;
none is silently ignored.
"""
from collections.abc import Callable
from typing import Annotated, Any

from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import WrapValidator

Prompt = str | list[int]


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status)


def _only(*neutral: Any) -> AfterValidator:
    """Accepts a field that is not built only where it changes nothing."""

    def check(value: Any) -> Any:
        if value not in neutral:
            expected = f"only {neutral[0]!r} is" if neutral else "it is not"
            raise ValueError(f"{value!r} is not supported; {expected} built, or leave it out")
        return value

    return AfterValidator(check)


def _prompt(value: Any, parse: Callable[[Any], Any]) -> Any:
    try:
        return parse(value)
    except ValidationError:
        raise ValueError("expected a string, a list of strings, token ids, or a list of token id lists") from None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class StreamOptions(_Strict):
    include_usage: bool = False


class CompletionRequest(_Strict):
    """The body of POST /v1/completions; defaults are OpenAI's.  ``ignore_eos`` is this server's own, as in vLLM."""

    model: str
    prompt: Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_prompt)]
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    user: str | None = None  # who asks; changes no answer
    best_of: Annotated[Any, _only(1)] = 1
    echo: Annotated[Any, _only(False)] = False
    frequency_penalty: Annotated[Any, _only(0)] = 0
    logit_bias: Annotated[Any, _only({})] = None
    logprobs: Annotated[Any, _only()] = None
    n: Annotated[Any, _only(1)] = 1
    presence_penalty: Annotated[Any, _only(0)] = 0
    stop: Annotated[Any, _only([])] = None
    suffix: Annotated[Any, _only("")] = None
    top_p: Annotated[Any, _only(1)] = 1

    @property
    def prompts(self) -> list[Prompt]:
        """One entry a prompt.  An empty list is one empty prompt, which the engine refuses with advice."""
        p = self.prompt
        if isinstance(p, str):
            return [p]
        if not p:
            return [[]]
        return [p] if isinstance(p[0], int) else list(p)


def invalid(errors: list[dict[str, Any]]) -> ApiError:
    """The first complaint about a body, by field."""
    error = errors[0]
    field = ".".join(str(part) for part in error["loc"][1:]) or None
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "the field is not supported"
    elif error["type"] == "json_invalid":
        field, message = None, f"the body is not valid JSON: {error['ctx']['error']}"
    return ApiError(400, f"{field}: {message}" if field else message, param=field)


def choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens}
