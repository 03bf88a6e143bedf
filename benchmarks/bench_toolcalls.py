"""The output parser, token by token: time for each token, and that it does not grow with the length of the output.

Limits: 20 microseconds a token on every row, and 100,000 characters take at most 1.5 times as long a token as 1,000.
CPU time of this process, best of several runs. A token is 4 characters here; parsers are fed as a server does it. A rescanning parser,
one that looks at all of the text again with each token, is shown beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from a3b_gguf.toolcalls import OutputParser  # noqa: E402
from outputs import TOOLS, xml  # noqa: E402

LENGTHS = (1_000, 10_000, 100_000)
CHARACTERS_A_TOKEN, RUNS = 4, 7
LIMIT_US, LIMIT_GROWTH = 20.0, 1.5
CODE = "    if x < 1 and y > 2:  # </parameter> is text\n"


def filled(unit: str, length: int) -> str:
    return (unit * (length // len(unit) + 1))[:length]


OUTPUTS: dict[str, Callable[[int], str]] = {
    "plain text": lambda n: filled("The capital of Chile is Santiago. ", n),
    "reasoning, then text": lambda n: filled("So it goes on. ", n) + "\n</think>\n\nDone.",
    "call, one long text (XML)": lambda n: xml("write_file", ("path", "a"), ("content", filled(CODE, n))),
    "call, one long text (JSON)": lambda n: (
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "content": "' + filled("x = 1\\n", n // 7 * 7) + '"}}\n</tool_call>'
    ),
    "many small calls": lambda n: "\n".join([xml("get_weather", ("city", "Paris"), ("days", "3"))] * (n // 110 + 1)),
    "quoted calls in reasoning": lambda n: "\n".join(["I write " + xml("ping")] * (n // 60 + 1)) + "</think>Done.",
    "half tags": lambda n: filled("a < b <tool_ <param </", n),
}


def tokens(text: str) -> Iterator[str]:
    for at in range(0, len(text), CHARACTERS_A_TOKEN):
        yield text[at : at + CHARACTERS_A_TOKEN]


def microseconds(text: str, thinking: bool) -> float:
    """Best time of several runs, for each token."""
    pieces = list(tokens(text))
    best = float("inf")
    for _ in range(RUNS):
        parser = OutputParser(TOOLS, thinking)
        start = time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish(truncated=False)
        best = min(best, time.process_time() - start)
    return best / len(pieces) * 1e6


def rescanning(text: str) -> float:
    seen = ""
    start = time.process_time()
    for count, piece in enumerate(tokens(text), 1):
        seen += piece
        parser = OutputParser(TOOLS, in_thinking=False)
        parser.feed(seen)
        if count == 2_000:  # enough to see where it goes
            break
    return (time.process_time() - start) / count * 1e6


def main() -> int:
    worst = growth = 0.0
    print(f"{'microseconds a token':30}" + "".join(f"{length:>12,}" for length in LENGTHS) + "   characters")
    for name, make in OUTPUTS.items():
        times = [microseconds(make(length), "reasoning" in name) for length in LENGTHS]
        worst, growth = max(worst, *times), max(growth, times[-1] / times[0])
        print(f"{name:30}" + "".join(f"{each:12.2f}" for each in times))
    shown = rescanning(OUTPUTS["plain text"](LENGTHS[1]))
    print(f"{'rescanning, for comparison':30}{'':12}{shown:12.1f}   (first 2,000 tokens)")
    print(f"limits: {LIMIT_US} us (worst {worst:.2f}), growth {LIMIT_GROWTH} (worst {growth:.2f})")
    return int(worst > LIMIT_US or growth > LIMIT_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
