"""Where the reading of a prompt pauses, so that a hybrid's state of that moment can be kept."""

from __future__ import annotations

from collections.abc import Iterable

EVERY = 8192  # tokens between checkpoints of a long text
LEAST_GAP = 32  # a call for fewer rows costs more than reading them again some day
NEAR_END = 64  # a mark that close to the end makes the one at the end needless
BEFORE_END = 4  # the same prompt again needs a state before its last token; tokenizers may join what follows with the last few
LONG = 1024  # from so many new tokens on a call more does not weigh, and keeps the text up to its last lines


def stops(start: int, n_prompt: int, marks: Iterable[int]) -> list[int]:
    """Token counts after `start` and before `n_prompt`, ascending, at which a checkpoint is to be taken.

    marks: counts at which other prompts may part from this one, ascending. Of many, the first (the system message), the last two (this
    turn's and the one before, for a turn that is written anew) and some between are worth a call of their own.
    """
    inside = sorted({mark for mark in marks if start < mark < n_prompt})
    near = [mark for mark in inside if mark >= n_prompt - NEAR_END]
    end = near[-1] if near else n_prompt - BEFORE_END
    wanted = {*inside[:1], *inside[-2:], *_spread(inside), *range(-(-(start + 1) // EVERY) * EVERY, n_prompt, EVERY), end}
    if n_prompt - start >= LONG and not any(end - NEAR_END - LEAST_GAP < count < end for count in wanted):
        wanted.add(end - NEAR_END)
    kept: list[int] = []
    before = start
    for count in sorted(count for count in wanted if count <= end):
        if count - before >= LEAST_GAP:  # of those that are close to each other the first serves all
            kept.append(count)
            before = count
    return kept


def _spread(marks: list[int]) -> list[int]:
    """Marks that are EVERY tokens or more apart."""
    found: list[int] = []
    for mark in marks:
        if not found or mark - found[-1] >= EVERY:
            found.append(mark)
    return found


def aligned_stops(start: int, n_prompt: int, chunk: int) -> list[int]:
    """The same where every prompt must be cut alike, whatever was read before: the last multiple of `chunk`, and some on the way."""
    last = (n_prompt - 1) // chunk * chunk
    every = max(chunk, EVERY // chunk * chunk)
    return sorted({count for count in (*range(every, last, every), last) if count > start})
