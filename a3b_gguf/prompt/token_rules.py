"""Rules over token ids: is it what the model's own vocabulary and template would have made?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from a3b_gguf.prompt.findings import Finding, Hit, Rule, apply
from a3b_gguf.prompt.profiles import Profile
from a3b_gguf.prompt.tokens import ControlTokens, Vocabulary
from a3b_gguf.prompt.view import shown

# Source: llama.h, enum llama_token_type
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
TURN_ROLES = ("system", "user", "assistant")
IN_BODIES = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class TokenView:
    """ids: the prompt. kinds: llama.cpp's type of every token of the vocabulary. eog: ids that end a generation.

    apart: what `tokenize_rendered` makes of the request that the ids are said to be of, where it is known.
    """

    ids: Sequence[int]
    profile: Profile
    vocabulary: Vocabulary
    kinds: Sequence[int]
    controls: ControlTokens
    eog: frozenset[int]
    apart: Sequence[int] | None = None

    def kind(self, token: int) -> int:
        return self.kinds[token] if 0 <= token < len(self.kinds) else UNKNOWN

    def id_of(self, text: str) -> int | None:
        return self.controls.ids.get(text)

    @property
    def starts(self) -> frozenset[int]:
        return frozenset(self.controls.ids[text] for text in self.profile.turn_starts if text in self.controls.ids)

    @property
    def known(self) -> list[int]:
        """The ids that the vocabulary has."""
        return [token for token in self.ids if 0 <= token < len(self.kinds)]

    def turns(self) -> Iterator[tuple[int, str, int]]:
        """Index of each opener, the role word behind it, index of the next opener or the end."""
        places = [index for index, token in enumerate(self.ids) if token in self.starts]
        for place, following in zip(places, [*places[1:], len(self.ids)], strict=bool(places)):
            words = b"".join(self.vocabulary.piece(token) for token in self.ids[place + 1 : place + 6] if 0 <= token < len(self.kinds))
            yield place, words.decode("utf-8", "replace").partition("\n")[0], following


def _at(view: TokenView, index: int) -> str:
    token = view.ids[index]
    piece = view.vocabulary.piece(token).decode("utf-8", "replace") if 0 <= token < len(view.kinds) else "?"
    return f"token {index}, id {token} {shown(piece)}"


def ids_are_in_the_vocabulary(view: TokenView) -> Iterator[Hit]:
    for index, token in enumerate(view.ids):
        if not 0 <= token < len(view.kinds):
            yield Hit(f"token {index}", f"id {token} is outside of the vocabulary of {len(view.kinds):,}")


def delimiters_are_single(view: TokenView) -> Iterator[Hit]:
    for text in (*view.profile.turn_starts, view.profile.turn_end):
        if not text:
            continue
        ids = view.vocabulary.tokenize(text, True)
        if len(ids) != 1:
            pieces = " ".join(shown(view.vocabulary.piece(token).decode("utf-8", "replace")) for token in ids)
            yield Hit("the vocabulary", f"{text} is {len(ids)} tokens: {pieces}")
        elif view.kind(ids[0]) != CONTROL:
            yield Hit("the vocabulary", f"{text} is token {ids[0]}, which is no control token")


def first_opens_a_turn(view: TokenView) -> Iterator[Hit]:
    start = int(view.vocabulary.add_bos and list(view.ids[:1]) == [view.vocabulary.bos])
    if view.starts and (len(view.ids) <= start or view.ids[start] not in view.starts):
        yield Hit(f"token {start}", f"the prompt does not begin with {' or '.join(view.profile.turn_starts)}")


def bos_is_right(view: TokenView) -> Iterator[Hit]:
    bos = view.vocabulary.bos
    if bos < 0 or bos in view.starts:
        return
    leading = next((index for index, token in enumerate(view.ids) if token != bos), len(view.ids))
    if leading > 1:
        yield Hit("token 1", f"BOS (id {bos}) stands {leading} times")
    elif leading == 1 and not view.vocabulary.add_bos:
        yield Hit(_at(view, 0), "a BOS that this model does not want")


def turns_alternate(view: TokenView) -> Iterator[Hit]:
    end = view.id_of(view.profile.turn_end)
    if end is None or not view.starts:
        return
    open_at: int | None = None
    for index, token in enumerate(view.ids):
        if token in view.starts:
            if open_at is not None:
                yield Hit(_at(view, index), f"a turn opens while the one of token {open_at} is open")
            open_at = index
        elif token == end:
            if open_at is None:
                yield Hit(_at(view, index), "a turn is closed that was not open")
            open_at = None
    if open_at is None:
        yield Hit(f"token {len(view.ids)}", "the prompt does not end with the opener of the answer")


def no_control_ids_in_content(view: TokenView) -> Iterator[Hit]:
    if view.apart is not None and list(view.ids) != list(view.apart):
        index = next((i for i, (one, other) in enumerate(zip(view.ids, view.apart, strict=False)) if one != other), len(view.apart))
        if index < len(view.ids) and view.kind(view.ids[index]) in (CONTROL, USER_DEFINED):
            yield Hit(_at(view, index), "a control token that the request's own text wrote")
            return
        severity = None if _control_counts(view, view.ids) != _control_counts(view, view.apart) else "warning"
        yield Hit(f"token {index}", "other tokens than the model's template and vocabulary make of this request", "", severity)  # type: ignore[arg-type]
        return
    structural = view.starts | view.eog | {view.id_of(view.profile.turn_end), view.vocabulary.bos}
    for index, token in enumerate(view.ids):
        if view.kind(token) == CONTROL and token not in structural and not _is_media(view, token):
            yield Hit(_at(view, index), "a control token inside of a text")


def _control_counts(view: TokenView, ids: Sequence[int]) -> int:
    return sum(view.kind(token) in (CONTROL, USER_DEFINED) for token in ids)


def _is_media(view: TokenView, token: int) -> bool:
    text = view.vocabulary.piece(token).decode("utf-8", "replace")
    return text.startswith("<|vision_") or text in ("<|image_pad|>", "<|video_pad|>") or text in IN_BODIES


def no_markers_in_what_users_write(view: TokenView) -> Iterator[Hit]:
    results = (view.id_of("<tool_response>"), view.id_of("</tool_response>"))
    markers = {view.id_of(text) for text in IN_BODIES} - {None, *results}
    for start, role, stop in view.turns():
        if role != "user":
            continue
        depth = 0
        for index in range(start, stop):
            token = view.ids[index]
            if token in markers:
                yield Hit(_at(view, index), "a marker of thinking or of calls inside of a user turn")
            depth += (token == results[0]) - (token == results[1])
            if depth not in (0, 1):
                yield Hit(_at(view, index), "markers of results that do not pair inside of a user turn")
                break


def text_round_trips(view: TokenView) -> Iterator[Hit]:
    data = b"".join(map(view.vocabulary.piece, view.known))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        yield Hit("the tokens", f"they spell bytes that are no UTF-8 text (byte {error.start})")
        return
    again = view.vocabulary.tokenize(text, True)
    if again != view.known and b"".join(map(view.vocabulary.piece, again)) != data:
        yield Hit("the tokens", "the text that they spell becomes another text when it is tokenized")


def newlines_are_whole(view: TokenView) -> Iterator[Hit]:
    newline = view.vocabulary.tokenize("\n", False)
    if len(newline) != 1:
        return
    blank = view.vocabulary.tokenize("\n\n", False)
    for start, role, stop in view.turns():
        if role in TURN_ROLES and newline[0] not in view.ids[start + 1 : min(start + 6, stop)]:
            yield Hit(_at(view, start), f"the role word {role!r} is not followed by the newline's own token")
    think = view.id_of("<think>")
    for index, token in enumerate(view.ids):
        if token == think and len(blank) == 1 and list(view.ids[index + 1 : index + 3]) == newline * 2:
            yield Hit(_at(view, index), f"two newlines as two tokens after <think>; the vocabulary has one for both (id {blank[0]})")


def eog_ends_turns(view: TokenView) -> Iterator[Hit]:
    end = view.id_of(view.profile.turn_end)
    for index, token in enumerate(view.ids):
        if token in view.eog and token != end and not (token == view.vocabulary.bos and index == 0):
            yield Hit(_at(view, index), "a token that ends a generation, in the middle of the prompt")


def no_unused(view: TokenView) -> Iterator[Hit]:
    for index, token in enumerate(view.ids):
        if view.kind(token) == UNUSED and 0 <= token < len(view.kinds):
            yield Hit(_at(view, index), "an unused token, which the model was never trained on")


def dump(_: TokenView) -> Iterator[Hit]:
    """K012 is what --show-tokens prints; it finds nothing."""
    return iter(())


TEMPLATE_OF_MODEL = "tokenize the prompt with this model's own vocabulary (a3b verify-prompt --show-tokens)"
TOKEN_RULES: tuple[Rule[TokenView], ...] = (
    Rule("K001", "error", "Each delimiter is one control token.", "use the model's own template", delimiters_are_single),
    Rule("K002", "error", "The first token opens a turn, behind BOS where the model wants one.", TEMPLATE_OF_MODEL, first_opens_a_turn),
    Rule("K003", "error", "BOS stands once where the model wants it, else not at all.", "remove it", bos_is_right),
    Rule("K004", "error", "Turns open and close in turn, the last stays open.", TEMPLATE_OF_MODEL, turns_alternate),
    Rule(
        "K005",
        "error",
        "No control token comes from the request's own text; other merges at its border are a warning.",
        "tokenize content apart from the template's text",
        no_control_ids_in_content,
    ),
    Rule(
        "K006",
        "error",
        "No markers of thinking, calls or results inside of what a user wrote.",
        "break the marker's text before tokenizing: parse_special off does not stop it",
        no_markers_in_what_users_write,
    ),
    Rule("K007", "error", "Ids are in the vocabulary.", TEMPLATE_OF_MODEL, ids_are_in_the_vocabulary),
    Rule("K008", "warning", "The tokens spell a text that becomes the same text again.", TEMPLATE_OF_MODEL, text_round_trips),
    Rule("K009", "warning", "Newlines of the scaffold are the vocabulary's own tokens.", TEMPLATE_OF_MODEL, newlines_are_whole),
    Rule("K010", "error", "Tokens that end a generation end turns only.", "remove it", eog_ends_turns),
    Rule("K011", "warning", "No unused tokens.", "remove it", no_unused),
    Rule("K012", "note", "`--show-tokens` lists id, piece, kind, turn and bytes of every token.", "", dump),
)


def verify_tokens(view: TokenView) -> list[Finding]:
    """What is wrong with a prompt's tokens. Never raises over any list of integers."""
    return list(apply(TOKEN_RULES, view))
