"""The tables of `a3b toolbench`."""

from __future__ import annotations

from a3b_gguf.report.console import say, say_table
from a3b_gguf.toolbench.bench import Line, Result


def show_result(result: Result) -> None:
    """A row for each question with its worst trial, the blocks, and what it comes to."""
    worst: dict[int, Line] = {}
    for line in result.lines:
        known = worst.get(line.question)
        if known is None or _points(line) < _points(known):
            worst[line.question] = line
    rows = [(str(line.question), line.block, line.title, *_marks(line), _why(line)) for line in worst.values()]
    say_table("Questions, each with its worst trial", ("", "block", "question", "D", "A", "P", "why not"), rows, numeric=(0,))
    say_table("Blocks, all trials", ("block", "points", "of"), [(b.name, str(b.points), str(b.of)) for b in result.blocks], numeric=(1, 2))
    low, high = result.interval
    say(f"{result.points} of {result.of} points in the worst trial, {result.mean:.1f} on average; 95 % interval {low:.1%} to {high:.1%}")
    if result.n_failed:
        say(f"{result.n_failed} of {len(result.lines)} could not be asked and do not count")
    if result.diagnosis:
        say(result.diagnosis)
    say(result.verdict)


def _points(line: Line) -> int:
    return -1 if line.score is None else line.score.points


def _marks(line: Line) -> tuple[str, str, str]:
    if line.score is None:
        return "", "", ""
    return ("1" if line.score.decision else "0"), ("1" if line.score.arguments else "0"), ("1" if line.score.protocol else "0")


def _why(line: Line) -> str:
    return line.failure if line.score is None else "; ".join(line.score.faults)
