"""What a request may hold. A field that is not known, or not served, is named: silence would be a lie."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from a3b_gguf.llama.sampling import MOST_LOGPROBS
from a3b_server.errors import APIError
from a3b_server.fields import Count, GenerationFields, Strict, Text


class JSONSchema(Strict):
    """The inside of OpenAI's response_format json_schema. schema: judged by a3b_gguf.grammar; strict: held to it anyway."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None


class ResponseFormat(Strict):
    """schema: llama.cpp's server takes it beside json_object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None


class ChatRequest(GenerationFields):
    """A body of POST /v1/chat/completions. What is Any here is judged by the rules of a3b_gguf.prompt, which have ids and fixes."""

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Text | None = None
    thinking_budget: Count | None = None

    # Fields that are not served, with the values that change nothing and are therefore accepted.
    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "functions": (),
        "function_call": ("auto", "none"),
    }

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationFields):
    """A body of POST /v1/completions. prompt: text or token ids, or a list of those."""

    prompt: Any = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None

    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",), "best_of": (1,)}


class EmbeddingRequest(Strict):
    """A body of POST /v1/embeddings. input: text or token ids, or a list of those."""

    input: Any = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None


class CancelRequest(Strict):
    """A body of POST /cancel. id: of an answer that is under way, as its chunks and GET /slots tell it."""

    id: Text


class TokenizeRequest(Strict):
    """A body of POST /tokenize, in llama.cpp's words; prompt is vLLM's name for the text."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: str | None = None


class DetokenizeRequest(Strict):
    """A body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def check_chat(request: ChatRequest) -> None:
    """What one field alone does not show. Raises APIError 400 that names the field."""
    limits = (request.max_tokens, request.max_completion_tokens)
    if all(limits) and limits[0] != limits[1]:
        raise _invalid("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
    if request.top_logprobs and not request.logprobs:
        raise _invalid("top_logprobs", "top_logprobs needs logprobs: true")
    wanted = request.response_format
    if wanted and wanted.type == "json_schema" and (wanted.json_schema is None or "schema_" not in wanted.json_schema.model_fields_set):
        raise _invalid("response_format", "response_format: json_schema needs json_schema.schema")
    if wanted and wanted.type != "text" and request.grammar:
        raise _invalid("grammar", "grammar and response_format cannot both be followed; send one of them")
    if request.repetition_penalty and request.repeat_penalty and request.repetition_penalty != request.repeat_penalty:
        raise _invalid("repeat_penalty", "repeat_penalty and repetition_penalty differ; send one of them")


def _invalid(param: str, message: str) -> APIError:
    return APIError(400, message, "invalid_value", param)


def not_served(name: str, value: Any, harmless: tuple[Any, ...]) -> APIError:
    shown = json.dumps(value, ensure_ascii=False)
    instead = f"leave it out or send {' or '.join(json.dumps(one) for one in harmless)}" if harmless else "leave it out"
    return APIError(400, f"{name}: {shown[:100]} is not served by this version; {instead}", "unsupported_parameter", name)
