"""What a rule needs to know about a model: how its turns look and what its template does.

PROFILES holds the models of the family for use without a file at hand; `probes.profile_of_template` finds the same values for any
template by rendering it. A model's name decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from a3b_gguf.errors import UsageError

CallStyle = Literal["xml", "json", "none"]

# The added tokens of the Qwen vocabularies: 151643-151668 of Qwen3, 248044-248069 of Qwen3.5 and 3.6.
QWEN_CONTROLS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Profile:
    """How one model is spoken to.

    turn_start, turn_end: the strings around a turn; both empty when the template does not write ChatML turns.
    generation_on, generation_off: what the template appends for the answer, thinking on and off; equal when it cannot be switched.
    controls: texts that the vocabulary turns into one CONTROL or USER_DEFINED token wherever they occur.
    strict_system: the template itself refuses a late system message. list_content: it takes content as a list of parts.
    call_style: how a tool call in the history is written.
    """

    name: str
    generation_on: str
    generation_off: str
    controls: tuple[str, ...]
    turn_start: str = "<|im_start|>"
    turn_end: str = "<|im_end|>"
    strict_system: bool = False
    list_content: bool = False
    call_style: CallStyle = "none"

    @property
    def is_chatml(self) -> bool:
        return bool(self.turn_start)

    @property
    def thinks(self) -> bool:
        """Whether thinking can be switched, or is always on."""
        return self.generation_on != self.generation_off or "<think>" in self.generation_on


OPEN = "<|im_start|>assistant\n"
OFF = OPEN + "<think>\n\n</think>\n\n"
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("qwen3.6", OPEN + "<think>\n", OFF, QWEN_CONTROLS, strict_system=True, list_content=True, call_style="xml"),
        Profile("qwen3.5", OPEN + "<think>\n", OFF, QWEN_CONTROLS, strict_system=True, list_content=True, call_style="xml"),
        Profile("qwen3", OPEN, OFF, QWEN_CONTROLS, call_style="json"),
        Profile("qwen3-coder", OPEN, OPEN, QWEN_CONTROLS, call_style="xml"),
        Profile("chatml", OPEN, OPEN, ("<|im_start|>", "<|im_end|>", "<|endoftext|>")),
    )
}
DEFAULT_PROFILE = "qwen3.6"


def profile_named(name: str) -> Profile:
    """The shipped profile called `name`. Raises UsageError that lists the names."""
    if name not in PROFILES:
        raise UsageError(f"there is no profile {name!r}", f"known: {', '.join(PROFILES)}; or give the model's file with --model")
    return PROFILES[name]
