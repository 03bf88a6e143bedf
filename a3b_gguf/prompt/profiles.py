"""What a rule needs to know about a model: how its turns look and what its template does.

PROFILES holds the models of the family for use without a file at hand; `probes.profile_of_template` finds the same values for any
template by rendering it. A model's name decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from a3b_gguf.errors import UsageError

CallStyle = Literal["xml", "json", "none"]
ToolsPlace = Literal["before", "after", "none"]  # where tools stand beside the system text
Preserve = Literal["never", "on request", "always"]

# The added tokens of the Qwen vocabularies: 151643-151668 of Qwen3, 248044-248069 of Qwen3.5 and 3.6.
QWEN_CONTROLS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
PHI_CONTROLS = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>", "<s>", "</s>", "<unk>")


@dataclass(frozen=True, slots=True)
class Profile:
    """How one model is spoken to.

    turn_start, turn_end: the strings around a turn; turn_start is empty when the template does not write ChatML turns, and turn_end when
    it writes no turns of a form that is known here.
    turn_starts: the control texts that open a turn, of whatever family; empty when none was found.
    generation_on, generation_off: what the template appends for the answer, thinking on and off; equal when it cannot be switched.
    controls: texts that the vocabulary turns into one CONTROL or USER_DEFINED token wherever they occur.
    strict_system: the template itself refuses a late system message. list_content: it takes content as a list of parts.
    call_style: how a tool call in the history is written. tools_place: where the tools stand.
    preserve: whether thinking of earlier turns is shown. efforts: values of reasoning_effort, () when the template does not look at it.
    variables: names that the template reads, None when they are not known.
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
    turn_starts: tuple[str, ...] = ("<|im_start|>",)
    tools_place: ToolsPlace = "none"
    preserve: Preserve = "never"
    efforts: tuple[str, ...] = ()
    variables: frozenset[str] | None = None

    @property
    def is_chatml(self) -> bool:
        return self.turn_start == "<|im_start|>"

    @property
    def is_pipes(self) -> bool:
        """Whether turns are written `<|user|>`, a newline, the text, `<|end|>`, a newline, as Phi-3 writes them."""
        return self.turn_end == "<|end|>" and "<|user|>" in self.turn_starts

    def opener(self, role: str) -> str:
        """How a turn of `role` begins, its newline included."""
        return f"<|{role}|>\n" if self.is_pipes else f"{self.turn_start}{role}\n"

    @property
    def thinks(self) -> bool:
        """Whether thinking can be switched, or is always on."""
        return self.generation_on != self.generation_off or "<think>" in self.generation_on

    @property
    def always_thinks(self) -> bool:
        """Whether the answer begins inside a think block that no option closes."""
        return "<think>" in self.generation_off and "</think>" not in self.generation_off

    @property
    def soft_switch(self) -> bool:
        """Whether `/no_think` in a text means something: the hybrids that open their think block themselves were trained on it."""
        return self.generation_on != self.generation_off and "<think>" not in self.generation_on


OPEN = "<|im_start|>assistant\n"
OFF = OPEN + "<think>\n\n</think>\n\n"
THINKING = frozenset(("enable_thinking",))
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "qwen3.6", OPEN + "<think>\n", OFF, QWEN_CONTROLS, strict_system=True, list_content=True, call_style="xml",
            tools_place="before", preserve="on request", variables=THINKING | {"add_vision_id", "preserve_thinking"},
        ),
        Profile(
            "qwen3.5", OPEN + "<think>\n", OFF, QWEN_CONTROLS, strict_system=True, list_content=True, call_style="xml",
            tools_place="before", variables=THINKING | {"add_vision_id"},
        ),
        Profile("qwen3", OPEN, OFF, QWEN_CONTROLS, call_style="json", tools_place="after", variables=THINKING),
        Profile("qwen3-coder", OPEN, OPEN, QWEN_CONTROLS, call_style="xml", tools_place="after", variables=frozenset()),
        Profile("chatml", OPEN, OPEN, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), variables=frozenset()),
        Profile(
            "phi-3.5", "<|assistant|>\n", "<|assistant|>\n", PHI_CONTROLS, turn_start="", turn_end="<|end|>",
            turn_starts=("<|system|>", "<|user|>", "<|assistant|>"), variables=frozenset(),
        ),
    )
}  # fmt: skip
DEFAULT_PROFILE = "qwen3.6"
# Names that write-ups give to the form `<|system|>...<|end|>`.
PIPES = ("phi3-style", "write-up")


def profile_named(name: str) -> Profile:
    """The shipped profile called `name`. Raises UsageError that lists the names."""
    if name in PIPES:
        raise UsageError(
            f"{name}: the form <|system|>...<|end|> is that of Phi-3; this family writes <|im_start|>system ... <|im_end|>, and "
            "to its vocabularies <|system|> and <|end|> are ordinary letters",
            "use --profile phi-3.5 for a Phi-3.5 model, or --model FILE, which accepts the form where the file's own template writes it",
        )
    if name not in PROFILES:
        raise UsageError(f"there is no profile {name!r}", f"known: {', '.join(PROFILES)}; or give the model's file with --model")
    return PROFILES[name]
