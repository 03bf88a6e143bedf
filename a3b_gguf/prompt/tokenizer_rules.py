"""Rules over the tokenizer's metadata in a file, beside what its template writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.profiles import Profile

CONTROL, USER_DEFINED = 3, 4  # llama.h, enum llama_token_type
THINK_TAGS = ("<think>", "</think>")
CALL_TAGS = ("<tool_call>", "</tool_call>")
# Texts that llama.cpp takes for ends of a generation whatever the file says. Source: llama-vocab.cpp, llama_vocab::impl::load
EOG_TEXTS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
))  # fmt: skip
PRE_OF_ARCH = {"qwen35": "qwen35", "qwen35moe": "qwen35", "qwen3moe": "qwen2", "qwen3next": "qwen2", "qwen3": "qwen2"}
# Sizes of the published vocabularies, with and without padding. Smaller models of other makers have others, and may.
SIZES_OF_PRE = {"qwen35": frozenset((248_044, 248_070, 248_077, 248_320)), "qwen2": frozenset((151_643, 151_669, 151_936, 152_064))}
NEW_ARCHS = ("qwen35", "qwen35moe")


@dataclass(frozen=True, slots=True)
class TokenizerView:
    """tokens, kinds: the vocabulary. keys: tokenizer.ggml.* of the file, without that prefix. arch: general.architecture."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    keys: Mapping[str, Any]
    arch: str
    profile: Profile | None

    def text(self, which: str) -> str | None:
        """The text of the bos or eos token, None when the file names none."""
        index = self.keys.get(f"{which}_token_id")
        return self.tokens[index] if isinstance(index, int) and 0 <= index < len(self.tokens) else None

    def kind_of(self, text: str) -> int | None:
        """The type of the token that is `text`, None when there is no such token."""
        try:
            index = self.tokens.index(text)
        except ValueError:
            return None
        return self.kinds[index] if index < len(self.kinds) else None

    @property
    def turn_end(self) -> str:
        return self.profile.turn_end if self.profile else ""


def eos_ends_a_turn(view: TokenizerView) -> Iterator[Hit]:
    eos, end = view.text("eos"), view.turn_end
    if not end or eos == end:
        return
    where = "tokenizer.ggml.eos_token_id"
    if eos == "<|endoftext|>":
        yield Hit(where, f"EOS is {eos}; the turn ends with {end}, which llama.cpp takes for an end by its text", severity="warning")
    else:
        yield Hit(where, f"EOS is {eos or 'not given'}; the turn ends with {end}")


def something_ends_a_turn(view: TokenizerView) -> Iterator[Hit]:
    end = view.turn_end
    if end and view.text("eos") != end and end not in EOG_TEXTS:
        yield Hit("tokenizer.ggml.eos_token_id", f"nothing stops the model at {end}: an answer would never end")


def bos_is_settled(view: TokenizerView) -> Iterator[Hit]:
    if view.profile is None or not view.profile.is_chatml:
        return
    if view.keys.get("add_bos_token") is True:
        yield Hit(
            "tokenizer.ggml.add_bos_token", "BOS is added before every prompt, which this family was not trained with", severity="error"
        )
    for key in ("bos_token_id", "add_bos_token"):
        if key not in view.keys:
            other = "token 11, a comma, would be taken for it" if key == "bos_token_id" else "a reader must guess"
            yield Hit(f"tokenizer.ggml.{key}", f"{key} is missing: {other}")


def delimiters_are_control(view: TokenizerView) -> Iterator[Hit]:
    marks = (*view.profile.turn_starts, view.turn_end) if view.profile else ()
    for text in marks:
        kind = view.kind_of(text) if text else None
        if kind is not None and kind != CONTROL:
            yield Hit("tokenizer.ggml.token_type", f"{text} has type {kind}, expected {CONTROL} (control)")


def markers_are_user_defined(view: TokenizerView) -> Iterator[Hit]:
    for text in (*THINK_TAGS, *CALL_TAGS):
        if view.kind_of(text) == CONTROL:
            yield Hit("tokenizer.ggml.token_type", f"{text} is a control token: programs that hide those lose it from the output")


def markers_are_tokens(view: TokenizerView) -> Iterator[Hit]:
    missing = [text for text in (*THINK_TAGS, *CALL_TAGS) if view.kind_of(text) not in (CONTROL, USER_DEFINED)]
    if missing and view.profile and view.profile.is_chatml:
        yield Hit("tokenizer.ggml.tokens", f"{', '.join(missing)}: no tokens of their own")


def pre_is_the_archs(view: TokenizerView) -> Iterator[Hit]:
    expected, found = PRE_OF_ARCH.get(view.arch), view.keys.get("pre")
    if expected and found != expected:
        yield Hit("tokenizer.ggml.pre", f"the pre-tokenizer is {found!r}, expected {expected!r} for {view.arch}")


def sizes_agree(view: TokenizerView) -> Iterator[Hit]:
    if len(view.tokens) != len(view.kinds):
        yield Hit("tokenizer.ggml.token_type", f"{len(view.tokens):,} tokens, {len(view.kinds):,} types")
    pre = view.keys.get("pre")
    for other, sizes in SIZES_OF_PRE.items():
        if pre in SIZES_OF_PRE and pre != other and len(view.tokens) in sizes:
            yield Hit("tokenizer.ggml.tokens", f"{len(view.tokens):,} tokens is the size of the vocabulary for {other!r}, not for {pre!r}")


def tokens_are_distinct(view: TokenizerView) -> Iterator[Hit]:
    if len(set(view.tokens)) != len(view.tokens):
        text, count = Counter(view.tokens).most_common(1)[0]
        yield Hit("tokenizer.ggml.tokens", f"{len(view.tokens) - len(set(view.tokens)):,} tokens occur again, {text!r} {count} times")


def template_is_the_archs(view: TokenizerView) -> Iterator[Hit]:
    profile = view.profile
    claims = view.arch if view.arch in NEW_ARCHS else view.keys.get("pre")
    if claims in NEW_ARCHS and profile and profile.is_chatml and not (profile.strict_system and profile.call_style == "xml"):
        yield Hit("tokenizer.chat_template", f"the file says {claims}, the template behaves as that of an older model")


RECONVERT = "convert the model again from its checkpoint"
TOKENIZER_RULES: tuple[Rule[TokenizerView], ...] = (
    Rule("G001", "error", "EOS is the end of a turn; `<|endoftext|>` is a warning.", "set eos_token_id to the turn's end", eos_ends_a_turn),
    Rule(
        "G002", "error", "Some token ends a generation at the end of a turn.", "set eos_token_id to the turn's end", something_ends_a_turn
    ),
    Rule(
        "G003", "warning", "BOS is settled: named, and add_bos_token false; true is an error.", "set add_bos_token to false", bos_is_settled
    ),
    Rule("G004", "error", "Delimiters of turns are control tokens.", RECONVERT, delimiters_are_control),
    Rule("G005", "error", "Markers of thinking and calls are user-defined tokens.", RECONVERT, markers_are_user_defined),
    Rule("G006", "warning", "Markers of thinking and calls are tokens.", RECONVERT, markers_are_tokens),
    Rule("G007", "error", "The pre-tokenizer is the architecture's.", RECONVERT, pre_is_the_archs),
    Rule(
        "G008", "error", "There are as many types as tokens, and as many tokens as the pre-tokenizer's family has.", RECONVERT, sizes_agree
    ),
    Rule("G009", "warning", "No token occurs twice.", RECONVERT, tokens_are_distinct),
    Rule("G010", "warning", "Template and architecture are of one generation.", RECONVERT, template_is_the_archs),
)
