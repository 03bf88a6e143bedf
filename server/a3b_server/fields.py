"""The fields that every request for generated text may have: limits, how tokens are drawn, and how the answer is sent."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MOST_STOPS, MOST_CHOICES, MOST_BIASES = 16, 16, 1024
MOST_COUNT = 1 << 53  # beyond it JSON's numbers are not exact

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Penalty = Annotated[float, Field(ge=0.01, le=10)]  # a factor: nearer to 0 logits would leave the range of a float


class Strict(BaseModel):
    """No coercion, no unknown fields. None means that a field was not sent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is obfuscated here; the SDK may say so


class GenerationFields(Strict):
    """OpenAI's fields, and those of llama.cpp's and vLLM's servers that clients send along."""

    model: str | None = None
    max_tokens: Count | None = None
    stop: Annotated[list[Text], BeforeValidator(listed), Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    grammar: Text | None = None  # GBNF, as llama.cpp's server takes it
    time_limit_s: Annotated[float, Field(gt=0)] | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = None  # llama.cpp's name for it
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    penalty_last_n: Annotated[int, Field(ge=-1)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0)] | None = None
    dry_base: Annotated[float, Field(ge=1)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] | None = None
    dry_breakers: list[Text] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)] | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def n_choices(self) -> int:
        return self.n or 1
