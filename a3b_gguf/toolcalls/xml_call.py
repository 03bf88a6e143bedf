"""Reads a call in Qwen's XML form, from `<function=NAME>` on. The form has no escaping, so structure decides what is a tag:

- a value ends at a `</parameter>` behind which, whitespace aside, another parameter opens or the function closes;
- a function closes at a `</function>` behind which, whitespace aside, `</tool_call>`, another call or the end of the output stands;
- a call quoted inside a value, from its `<function=` to its `</function>`, is text.

Closers that fail the test are text of the value. When the output ends with the value still open, the last place that could have
been the end of the call is taken for it.
"""

from __future__ import annotations

from a3b_gguf.toolcalls.argument_stream import ArgumentStream
from a3b_gguf.toolcalls.block import NO_CALL_CLOSE, Ended, raw_of
from a3b_gguf.toolcalls.build import Building, Built
from a3b_gguf.toolcalls.events import Diagnostic
from a3b_gguf.toolcalls.lexer import Kind, Token
from a3b_gguf.toolcalls.tools import Tools

NO_PARAMETER_CLOSE = Diagnostic("O002", "</parameter> is missing")
NO_FUNCTION_CLOSE = Diagnostic("O002", "</function> is missing")
GUESSED = Diagnostic("O002", "where the call ends is ambiguous, the last place that fits was taken")
MALFORMED = Diagnostic("O021", "a malformed, doubled or stray tag inside the call was left out")
LITERAL = Diagnostic("O004", "a closing tag inside a value was taken for text")


class XmlCall:
    """Owns the value that is open and the closers behind it that may still turn out to be text.

    _value: pieces of the open value, None before the first parameter. _closers: the first closer behind it and what followed;
    _stage: the last of them; _whole: the first is a `</parameter>`. _quoted: functions quoted in the value that are open.
    _listed: parameters quoted in it that are open. _guess: (pieces of the value, tokens of the call) of the last place that could
    be the end.
    """

    def __init__(self, tools: Tools, opener: Token) -> None:
        self._tools, self._building = tools, Building(tools, opener.name)
        self._stream = ArgumentStream(self._building)
        self.taken: list[Token] = [opener]
        self._remarks: list[Diagnostic] = []
        self._parameter = ""
        self._value: list[str] | None = None
        self._seen: set[str] = set()
        self._closers: list[Token] = []
        self._stage: Kind = "text"
        self._whole = self._doubled = self._closers_quoted = False
        self._function_end = 0  # tokens up to the </function> among the closers
        self._quoted = self._listed = 0
        self._guess: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self._building.tool.name if self._building.tool else ""

    def progress(self) -> str:
        return self._stream.take()

    def take(self, token: Token) -> Ended | None:
        self.taken.append(token)
        if self._closers:
            return self._behind_closers(token)
        return self._before_parameters(token) if self._value is None else self._in_value(token, self._value)

    def finish(self) -> Ended | None:
        if self._closers and not self._closers_quoted:
            missing = {"/parameter": (NO_FUNCTION_CLOSE, NO_CALL_CLOSE), "/function": (NO_CALL_CLOSE,)}
            return self._end(len(self.taken), *missing.get(self._stage, ()))
        if self._closers and self._stage == "/function" and self._value is not None:
            self._guess = (len(self._value), len(self.taken))
        if self._guess is None or self._value is None:
            return None
        pieces, tokens = self._guess
        del self._value[pieces:]
        return self._end(tokens, GUESSED)

    # -- where a token stands ------------------------------------------------------------------------------------------

    def _before_parameters(self, token: Token) -> Ended | None:
        if token.kind in ("parameter", "bad parameter"):
            self._open(token)
        elif token.kind == "/function":
            self._close(token)
        elif token.kind == "/call":
            return self._end(len(self.taken), NO_FUNCTION_CLOSE)
        elif token.kind == "call":
            raw = raw_of(self.taken[:-1])
            return Ended(((raw, Built(remarks=(NO_FUNCTION_CLOSE,))),), raw, (token,))
        elif not token.is_blank:
            self._remark(MALFORMED)
        return None

    def _in_value(self, token: Token, value: list[str]) -> Ended | None:
        if token.kind == "/parameter" or (token.kind == "/function" and (token.at_line_start or self._quoted)):
            self._close(token)
            return None
        if token.kind == "function" and token.at_line_start:
            self._quoted += 1
        elif token.kind == "parameter" and token.at_line_start and not self._quoted:
            if self._is_awaited(token.name):
                self._remark(NO_PARAMETER_CLOSE)
                self._store()
                self._open(token)
                return None
            self._listed += 1
        self._append(token.raw)
        return None

    def _behind_closers(self, token: Token) -> Ended | None:
        if token.is_blank:
            self._closers.append(token)
            return None
        if self._stage == "/parameter" and token.kind in ("/parameter", "/function"):
            self._close(token)
            return None
        if self._value is None:
            return self._behind_empty_call(token)
        if self._closers_quoted:
            if token.kind == "/call" and self._stage == "/function" and self._whole:
                self._guess = (len(self._value), len(self.taken))
            return self._as_text(token)
        return self._behind_value(token) if self._stage == "/parameter" else self._behind_function(token)

    def _behind_empty_call(self, token: Token) -> Ended | None:
        """`<function=f></function>`: no value is open, so nothing can be text."""
        if token.kind == "/call":
            return self._end(len(self.taken))
        return self._end_before(token)

    def _behind_value(self, token: Token) -> Ended | None:
        if token.kind == "/call":
            return self._end(len(self.taken), NO_FUNCTION_CLOSE)
        if token.kind == "bad parameter" or (token.kind == "parameter" and (self._is_awaited(token.name) or not self._listed)):
            self._store()
            self._open(token)
            return None
        self._listed = max(self._listed - 1, 0)
        return self._as_text(token)

    def _behind_function(self, token: Token) -> Ended | None:
        if token.kind == "/call" and self._stage == "/function":
            if self._whole:
                return self._end(len(self.taken))
            self._close(token)  # `</function></tool_call>` behind no `</parameter>`: what follows decides
            return None
        if token.kind == "call" or (self._whole and token.kind == "function" and token.at_line_start and self._tools.exactly(token.name)):
            return self._end_before(token)
        assert self._value is not None
        if self._whole or self._stage == "/call":
            self._guess = (len(self._value), self._function_end if self._whole else len(self.taken) - 1)
        return self._as_text(token)

    # -- what happens there ----------------------------------------------------------------------------------------------

    def _close(self, token: Token) -> None:
        if not self._closers:
            self._closers_quoted, self._whole, self._doubled = self._quoted > 0, token.kind == "/parameter", False
        elif token.kind == self._stage:
            self._doubled = True
        self._stage = token.kind
        if token.kind == "/function":
            self._function_end = len(self.taken)
            self._quoted = max(self._quoted - 1, 0)
        self._closers.append(token)

    def _as_text(self, token: Token) -> Ended | None:
        """The closers were text, and `token` is read as part of the value."""
        assert self._value is not None
        self._remark(LITERAL)
        for closer in self._closers:
            self._append(closer.raw)
        self._closers, self._doubled = [], False
        return self._in_value(token, self._value)

    def _append(self, raw: str) -> None:
        """More of the value. Behind a place that could have been the end of the call, it is not certain."""
        assert self._value is not None
        self._value.append(raw)
        if self._guess is None:
            self._stream.text(raw)

    def _is_awaited(self, name: str) -> bool:
        """Whether `name` is a parameter of the tool that has not been given."""
        tool = self._building.tool
        return tool is not None and name in tool.properties and name not in self._seen

    def _open(self, token: Token) -> None:
        self._parameter, self._value, self._closers, self._guess = token.name, [], [], None
        self._doubled, self._quoted, self._listed = False, 0, 0
        self._seen.add(token.name)
        self._stream.open_value(token.name)

    def _store(self, may_repair: bool = True) -> None:
        """Keeps the open value, one newline taken off each end: the template's own. A parameter without a name is dropped."""
        if self._doubled or not self._parameter:
            self._remark(MALFORMED)
        if not self._parameter:
            return
        text = "".join(self._value or ())
        text = text.removeprefix("\r\n") if text.startswith("\r\n") else text.removeprefix("\n")
        text = text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")
        is_in = self._building.add_text(self._parameter, text, may_repair)
        self._stream.close_value(self._parameter, text, is_in)

    def _remark(self, remark: Diagnostic) -> None:
        if remark not in self._remarks:
            self._remarks.append(remark)

    def _end_before(self, token: Token) -> Ended:
        if token.kind == "function":
            return self._end(len(self.taken) - 1, in_block=True)
        upto = self._function_end if self._value is None else len(self.taken) - 1
        return self._end(upto, NO_CALL_CLOSE)

    def _end(self, upto: int, *remarks: Diagnostic, in_block: bool = False) -> Ended:
        if self._value is not None:
            if self._closers and not self._whole:
                self._remark(NO_PARAMETER_CLOSE)
            self._store(may_repair=not remarks)  # where the block was not closed nothing is mended by guessing
        raw = raw_of(self.taken[:upto])
        call = self._building.whole()
        return Ended(((raw, call),), raw, tuple(self.taken[upto:]), (*self._remarks, *remarks), in_block)
