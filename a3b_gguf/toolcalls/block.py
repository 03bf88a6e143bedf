"""What the two readers of a call have in common: tokens go in, and at some point the call has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from a3b_gguf.toolcalls.build import Built
from a3b_gguf.toolcalls.events import Diagnostic
from a3b_gguf.toolcalls.lexer import Token

NO_CALL_CLOSE = Diagnostic("O002", "</tool_call> is missing")


@dataclass(frozen=True, slots=True)
class Ended:
    """A call that has ended. calls: what it came to, each with its own text; raw: all of it as written.

    rest: tokens that were read and do not belong to it. in_block: another call follows before `</tool_call>`.
    """

    calls: tuple[tuple[str, Built], ...]
    raw: str
    rest: tuple[Token, ...] = ()
    remarks: tuple[Diagnostic, ...] = ()
    in_block: bool = False


class CallReader(Protocol):
    """Reads one call. taken: the tokens so far, in order; name: of the declared tool that is called, empty while that is unknown."""

    taken: list[Token]

    @property
    def name(self) -> str: ...

    def progress(self) -> str:
        """What of the first call's arguments has become certain since it was last asked for."""

    def take(self, token: Token) -> Ended | None:
        """Reads on; the call, once it is certain where it ends."""

    def finish(self) -> Ended | None:
        """The call when nothing more comes; None when what was read is none."""


def raw_of(tokens: Sequence[Token]) -> str:
    return "".join(token.raw for token in tokens)
