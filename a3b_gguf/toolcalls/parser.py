"""Splits a model's output into reasoning, content and tool calls while it is generated.

Whatever arrives, in whatever pieces, comes out the same: nothing is decided before it is certain, each character is read once.
A call is delivered when its end is certain, and only when its tool is declared and its arguments fit; else what was written is
content and a Diagnostic says why. What of its arguments is certain before that goes out in pieces (argument_stream.py). Nothing here
raises over a model's output.

Reasoning that quotes a call: what stands from the quoted call on is held back until `</think>` proves it reasoning, or the end
of the output proves the call real.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from a3b_gguf.toolcalls.block import NO_CALL_CLOSE, CallReader, Ended, raw_of
from a3b_gguf.toolcalls.build import Built
from a3b_gguf.toolcalls.content import ContentTail
from a3b_gguf.toolcalls.events import Content, Diagnostic, Event, Reasoning, ToolCall, ToolCallDelta
from a3b_gguf.toolcalls.json_call import JsonCall
from a3b_gguf.toolcalls.lexer import Lexer, Token
from a3b_gguf.toolcalls.tools import Tools, declared_tools
from a3b_gguf.toolcalls.xml_call import XmlCall

MAX_BLANK_IN_OPENER = 64  # characters of whitespace between <tool_call> and what confirms it
MAX_RESUMED = 16  # times that text behind a broken call is read again at the end of the output
State = Literal["reasoning", "content", "opener", "call", "quoted call"]


class OutputParser:
    """Parses one output. tools: as in the request; in_thinking: whether the prompt ended inside an open `<think>`."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | Tools | None, in_thinking: bool) -> None:
        self._tools = tools if isinstance(tools, Tools) else declared_tools(tools or ())
        self._lexer = Lexer()
        self._events: list[Event] = []
        self._in_reasoning = in_thinking
        self._state: State = "reasoning" if in_thinking else "content"
        self._thought = False  # some reasoning is out
        self._thought_blank: list[str] = []
        self._tail = ContentTail()
        self._opener: list[Token] = []  # <tool_call> and the whitespace behind it
        self._call: CallReader | None = None
        self._held: list[Token] = []  # reasoning that may be a call
        self._in_block = False
        self._owes_close = False  # the last call came to its end without </tool_call>, which may still come
        self._n_calls = 0
        self._call_id = ""  # of the open call
        self._shown: list[str] = []  # of its arguments, what is out
        self._n_resumed = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._in_reasoning

    def feed(self, text: str) -> list[Event]:
        """What is certain after the next piece of output."""
        for token in self._lexer.feed(text):
            self._take(token)
        return self._flush()

    def finish(self, truncated: bool) -> list[Event]:
        """The rest, at the end of the output. truncated: it was cut off, so what is open is no call whatever it looks like."""
        for token in self._lexer.finish():
            if truncated and self._state == "opener":
                self._opener.append(token)  # half a tag behind <tool_call> is the start of a call that was cut off
            else:
                self._take(token)
        while self._state in ("opener", "call", "quoted call"):
            self._settle(truncated)
        rest = self._tail.finish()
        if rest:
            self._events.append(Content(rest))
        return self._flush()

    def _flush(self) -> list[Event]:
        """The events so far, neighbouring pieces of text joined."""
        events, self._events = self._events, []
        joined: list[Event] = []
        for kind, group in groupby(events, type):
            run = list(group)
            if kind is Content or kind is Reasoning:
                joined.append(kind("".join(event.text for event in run if isinstance(event, (Content, Reasoning)))))
            else:
                joined += run
        return joined

    # -- tokens ----------------------------------------------------------------------------------------------------------

    def _take(self, token: Token) -> None:
        waiting = deque([token])
        states = {
            "reasoning": self._in_thought,
            "content": self._in_content,
            "opener": self._in_opener,
            "call": self._in_call,
            "quoted call": self._in_quoted_call,
        }
        while waiting:
            waiting.extendleft(reversed(states[self._state](waiting.popleft())))

    def _in_thought(self, token: Token) -> Sequence[Token]:
        if token.kind == "/think":
            self._in_reasoning, self._state, self._thought_blank = False, "content", []
            self._tail.border("reasoning")
        elif token.kind == "call" and self._tools.by_name:
            self._opener, self._state = [token], "opener"
        elif token.kind != "think" or self._thought:
            self._think(token.raw)
        return ()

    def _in_content(self, token: Token) -> Sequence[Token]:
        before, quoted = self._tail.before, token.quoted or self._tail.in_fence
        if token.kind == "call" and self._tools.by_name and not quoted:
            self._opener, self._state = [token], "opener"
        elif token.kind == "function" and not quoted and self._opens_call(token):
            if not self._in_block:
                self._remark("O001", "<tool_call> is missing before <function=")
            self._start(XmlCall(self._tools, token))
        elif token.kind == "think" and before == "nothing":
            self._in_reasoning, self._state = True, "reasoning"
        elif token.kind == "/think" and before in ("nothing", "reasoning"):
            self._remark("O021", "a second </think> was left out")
        elif self._is_stray(token):
            if not self._in_block:
                self._remark("O021", f"a stray {token.raw} behind the call was left out")
            self._in_block = self._owes_close = False
        else:
            if token.kind == "call" and quoted:
                self._remark("O006", "<tool_call> in quoted text was taken for text")
            self._say(token.raw)
        return ()

    def _is_stray(self, token: Token) -> bool:
        """Whether it is a closer that belongs to the call before."""
        if token.kind == "/call" and self._owes_close:
            return True
        return token.kind in ("/call", "/function", "/parameter", "stray") and self._tail.before == "call"

    def _opens_call(self, token: Token) -> bool:
        """Whether a `<function=` without `<tool_call>` is a call: inside a block always, else with a declared name on its own line."""
        return self._in_block or (token.at_line_start and self._tools.exactly(token.name) is not None)

    def _in_opener(self, token: Token) -> Sequence[Token]:
        blank = sum(len(held.raw) for held in self._opener[1:]) + len(token.raw) - len(token.raw.lstrip())
        if token.is_blank and blank <= MAX_BLANK_IN_OPENER:
            self._opener.append(token)
            return ()
        is_json = token.kind == "text" and token.raw.lstrip().startswith("{") and blank <= MAX_BLANK_IN_OPENER
        if self._in_reasoning and (is_json or (token.kind == "function" and self._tools.meant(token.name))):
            self._held, self._opener, self._state = [*self._opener, token], [], "quoted call"
        elif not self._in_reasoning and token.kind == "function":
            self._start(XmlCall(self._tools, token))
        elif not self._in_reasoning and is_json:
            self._start(JsonCall(self._tools))
            return (token,)
        else:
            self._not_an_opener()
            return (token,)
        return ()

    def _in_call(self, token: Token) -> Sequence[Token]:
        assert self._call is not None
        ended = self._call.take(token)
        self._show(self._call.name, self._call.progress())
        return () if ended is None else self._deliver(ended)

    def _in_quoted_call(self, token: Token) -> Sequence[Token]:
        if token.kind != "/think":
            self._held.append(token)
            return ()
        self._remark("O006", "a call inside the reasoning was taken for a quotation, since the reasoning went on")
        self._release()
        return (token,)

    # -- what comes out --------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self._tail.before == "call" and text.strip():
            self._remark("O020", "text follows a call")
            self._in_block = False
        out = self._tail.add(text)
        if out:
            self._events.append(Content(out))

    def _think(self, text: str) -> None:
        """Reasoning, without the whitespace at its ends."""
        body = text.rstrip()
        if not body:
            self._thought_blank.append(text)
            return
        whole = "".join((*self._thought_blank, body))
        self._events.append(Reasoning(whole if self._thought else whole.lstrip()))
        self._thought, self._thought_blank = True, [text[len(body) :]]

    def _remark(self, rule: str, message: str, raw: str = "") -> None:
        self._events.append(Diagnostic(rule, message, raw))

    def _start(self, call: CallReader) -> None:
        self._call, self._state, self._in_block = call, "call", False

    def _show(self, name: str, piece: str) -> None:
        """A piece of the open call's arguments, which is out for good then."""
        if piece:
            if not self._call_id:
                self._call_id = f"call_{secrets.token_hex(12)}"
            self._events.append(ToolCallDelta(self._n_calls, self._call_id, name, piece, is_first=not self._shown))
            self._shown.append(piece)

    def _as_shown(self, built: Built) -> Built:
        """The call, unless it is another one than what is out: a repair can do that."""
        if not built.is_call or built.arguments.startswith("".join(self._shown)):
            return built
        return Built(remarks=(*built.remarks, Diagnostic("O012", "a repair would take back what was shown of the call")))

    def _close_shown(self) -> None:
        """The open call is over. One that was shown has used up its index, whether it became a call or not."""
        self._n_calls += bool(self._shown)
        self._call_id, self._shown = "", []

    def _not_an_opener(self) -> None:
        raw, self._opener = raw_of(self._opener), []
        self._state = "reasoning" if self._in_reasoning else "content"
        if self._in_reasoning:
            self._think(raw)
        else:
            self._say(raw)

    def _release(self) -> None:
        held, self._held, self._state = self._held, [], "reasoning"
        self._think(raw_of(held))

    def _deliver(self, ended: Ended) -> Sequence[Token]:
        """The calls as events; what is none as content. Returns the tokens that come after it."""
        opener, self._opener, self._call, self._state = raw_of(self._opener), [], None, "content"
        self._events += ended.remarks
        calls = [(text, self._as_shown(built) if index == 0 else built) for index, (text, built) in enumerate(ended.calls)]
        worked = any(built.is_call for _, built in calls)
        for text, built in calls:
            self._events += built.remarks
            if built.is_call:
                self._show(built.name, built.arguments[sum(map(len, self._shown)) :])
                self._events.append(ToolCall(self._n_calls, self._call_id, built.name, built.arguments))
                self._tail.border("call")
            self._close_shown()
            if worked and not built.is_call:
                self._say(text)
        if not worked:
            self._say(opener + ended.raw)
        self._in_block, self._owes_close = ended.in_block, worked and NO_CALL_CLOSE in ended.remarks
        return ended.rest

    # -- the end of the output ---------------------------------------------------------------------------------------------

    def _settle(self, truncated: bool) -> None:
        """Decides about what is open when nothing more comes."""
        if self._state == "opener" and not (truncated and not self._in_reasoning):
            self._not_an_opener()
        elif self._state == "quoted call":
            self._settle_quoted_call(truncated)
        elif truncated:
            taken = self._call.taken if self._call else []
            self._remark("O003", "the output was cut off inside a call, which is dropped", raw_of([*self._opener, *taken]))
            self._opener, self._call, self._state = [], None, "content"
            self._close_shown()
        else:
            self._settle_call()

    def _settle_call(self) -> None:
        assert self._call is not None
        ended = self._call.finish()
        if ended is None:
            raw = raw_of([*self._opener, *self._call.taken])
            self._opener, self._call, self._state = [], None, "content"
            self._close_shown()
            self._remark("O002", "the call is not closed")
            self._say(raw)
            return
        rest = self._deliver(ended)
        self._n_resumed += 1
        for token in rest:
            if self._n_resumed > MAX_RESUMED:
                self._say(token.raw)
            else:
                self._take(token)

    def _settle_quoted_call(self, truncated: bool) -> None:
        """Nothing closed the reasoning: the call in it is real if it is whole."""
        raw = raw_of(self._held)
        inner = OutputParser(self._tools, in_thinking=False)
        events = [] if truncated else [*inner.feed(raw), *inner.finish(truncated=False)]
        if any(isinstance(event, ToolCall) for event in events):
            self._held, self._in_reasoning, self._state = [], False, "content"
            self._remark("O005", "the call stands in reasoning that was not closed")
            self._tail.border("call")
            self._events += events
        else:
            self._release()
