"""Arguments on their way out before the call is whole. What is out can only be continued, so little goes out early:

- nothing, until every required parameter is there or open, everything so far fits, and the open parameter takes any text whatever;
- of that text nothing that might still turn out not to belong to it: the last line break, or what follows a possible end of the call.

After that only the output's own end, or a later optional argument that does not fit, can spoil the call; its JSON then stays open.
"""

from __future__ import annotations

from a3b_gguf.strict_json import dumps
from a3b_gguf.toolcalls.build import Building


class ArgumentStream:
    """Owns what of a call's arguments has been handed out, and the text of the open value that is held back."""

    def __init__(self, building: Building) -> None:
        self._building = building
        self._out: list[str] = []
        self._started = False
        self._value_open = False
        self._trims = True
        self._at_start = False  # the template's own line break may still come
        self._held = ""
        self._n_value = 0  # characters of the open value that are out

    def take(self) -> str:
        """What has become certain since it was last asked for."""
        out = "".join(self._out)
        self._out.clear()
        return out

    def open_value(self, key: str, trims: bool = True) -> bool:
        """A parameter opens; whether its value streams. trims: a line break at each end is the template's own."""
        self._value_open = self._may_stream(key)
        if self._value_open:
            self._trims, self._at_start, self._held, self._n_value = trims, trims, "", 0
            if not self._started:
                self._out.append("{" + ",".join(map(self._member, self._building.arguments)))
                self._started = True
            self._out.append(f"{',' if self._building.arguments else ''}{dumps(key)}:\"")
        return self._value_open

    def text(self, piece: str) -> None:
        """More of the open value, that is certain to belong to it."""
        if not self._value_open:
            return
        text = self._held + piece
        if self._at_start:
            if text in ("", "\r"):
                self._held = text
                return
            text = text.removeprefix("\r\n") if text.startswith("\r\n") else text.removeprefix("\n")
            self._at_start = False
        keep = 0
        if self._trims:
            keep = 2 if text.endswith("\r\n") else 1 if text.endswith(("\n", "\r")) else 0
        certain, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._n_value += len(certain)
        self._out.append(dumps(certain)[1:-1])

    def close_value(self, key: str, text: str, is_in: bool) -> None:
        """The value ended, and was `text`. is_in: it became an argument."""
        if self._value_open:
            self._out.append(dumps(text[self._n_value :])[1:-1] + '"')
        elif self._started and is_in:
            self._out.append("," + self._member(key))
        self._value_open = False

    def _member(self, key: str) -> str:
        return f"{dumps(key)}:{dumps(self._building.arguments[key])}"

    def _may_stream(self, key: str) -> bool:
        building, tool = self._building, self._building.tool
        if building.failed or tool is None or key in building.arguments or not tool.takes_any_text(key):
            return False
        if self._started:
            return True
        there = {**building.arguments, key: ""}
        return tool.is_plain() and all(name in there for name in tool.required) and tool.check.problem(there) is None
