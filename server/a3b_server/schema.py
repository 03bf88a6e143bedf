"""What a chat request may hold. A field that is not known, or not served yet, is refused by name: silence would be a lie."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from a3b_server.errors import APIError

MOST_STOPS = 16

# Parameters that this version does not serve, with the values that change nothing and are therefore accepted.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "reasoning_effort": ("none",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}

Text = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """No coercion, no unknown fields. None means that a field was not sent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is obfuscated here; the SDK may say so


class ChatRequest(Strict):
    """A body of POST /v1/chat/completions. What is Any here is judged by the rules of a3b_gguf.prompt, which have ids and fixes."""

    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    model: str | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[Text], BeforeValidator(_listed), Field(max_length=MOST_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none"] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """The request in `body`. Raises APIError 400 that names the field."""
    known = dict(body)
    for name, harmless in NOT_SERVED.items():
        if name not in known:
            continue
        if known[name] is not None and not any(_same(known[name], value) for value in harmless):
            raise _not_served(name, known[name])
        if name not in ChatRequest.model_fields:
            del known[name]
    try:
        request = ChatRequest.model_validate(known)
    except ValidationError as error:
        raise _refusal(error) from error
    if request.max_tokens and request.max_completion_tokens and request.max_tokens != request.max_completion_tokens:
        raise APIError(400, "max_tokens and max_completion_tokens differ; send one of them", "invalid_value", "max_tokens")
    return request


def _same(found: Any, harmless: Any) -> bool:
    """Equal, and not because True is 1 in Python."""
    return bool(found == harmless) and isinstance(found, bool) == isinstance(harmless, bool)


def _not_served(name: str, value: Any) -> APIError:
    shown = json.dumps(value, ensure_ascii=False)
    harmless = " or ".join(json.dumps(one) for one in NOT_SERVED[name])
    message = f"{name}: {shown[:100]} is not served by this version; leave it out or send {harmless}"
    return APIError(400, message, "unsupported_parameter", name)


def _refusal(error: ValidationError) -> APIError:
    """pydantic's findings as one message. Unknown fields are all named, of other faults the first."""
    faults = error.errors(include_url=False, include_context=False)
    unknown = [_where(fault["loc"]) for fault in faults if fault["type"] == "extra_forbidden"]
    if unknown:
        return APIError(400, f"unknown field{'s' if unknown[1:] else ''} {', '.join(unknown)}", "unknown_parameter", unknown[0])
    where = _where(faults[0]["loc"])
    if faults[0]["type"] == "missing":
        return APIError(400, f"{where} is missing", "missing_required_parameter", where)
    found = f", found {str(faults[0]['input'])[:60]!r}" if not isinstance(faults[0]["input"], dict) else ""
    return APIError(400, f"{where or 'a field'}: {faults[0]['msg']}{found}", "invalid_value", where or None)


def _where(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, path))
