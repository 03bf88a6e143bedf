"""The whole run: every question, several trials, the tools played by the set's own results; and what the points mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from a3b_gguf.toolbench.endpoint import NoAnswer, Refused, Thinking
from a3b_gguf.toolbench.question import Expected, Message, Question, Step
from a3b_gguf.toolbench.score import Reply, Score, calls_of, fits, score, wilson

Ask = Callable[[Sequence[Message], Sequence[Message], Thinking], Reply]
GATE = 69 / 72  # of the write-ups: 69 of 72
CONTROL_TEXT_RULES = ("M055", "M056", "M057")  # a3b's rules against control tokens in content
POINTS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """One trial of one question. score: None when it could not be asked, and then `failure` says why."""

    question: int
    block: str
    title: str
    trial: int
    score: Score | None
    failure: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Block:
    name: str
    points: int
    of: int


@dataclass(frozen=True, slots=True)
class Result:
    """points: of the worst trial; of: what it could have had, questions that could not be asked left out."""

    lines: tuple[Line, ...]
    points: int
    of: int
    mean: float
    interval: tuple[float, float]
    blocks: tuple[Block, ...]
    protocol_points: int
    n_failed: int
    diagnosis: str
    verdict: Literal["passed", "failed", "nothing measured"]


def run(questions: Sequence[Question], ask: Ask, trials: int, thinking: Thinking, tell: Callable[[int, int], None]) -> Result:
    """Asks everything `trials` times. `tell` hears how many of how many are done."""
    lines = []
    for trial in range(1, trials + 1):
        for question in questions:
            lines.append(_trial(question, ask, trial, thinking))
            tell(len(lines), trials * len(questions))
    return judge(lines)


def _trial(question: Question, ask: Ask, trial: int, thinking: Thinking) -> Line:
    started, failure, points = time.perf_counter(), "", None
    try:
        points = score(question, play(question, ask, thinking))
        if question.parity:
            other: Thinking = "off" if thinking == "on" else "on"
            points = _worse(points, score(question, play(question, ask, other)))
    except Refused as refused:
        said = f"{refused.code} {refused}"
        if question.block == "safety" and any(rule in said for rule in CONTROL_TEXT_RULES):  # not letting it in is right
            points = Score(True, True, True)
        else:
            failure = str(refused)
    except NoAnswer as error:
        failure = str(error)
    return Line(question.number, question.block, question.title, trial, points, failure, time.perf_counter() - started)


def _worse(a: Score, b: Score) -> Score:
    """Only what holds both ways."""
    return Score(
        a.decision and b.decision,
        a.arguments and b.arguments,
        a.protocol and b.protocol,
        tuple(dict.fromkeys((*a.faults, *b.faults))),
        a.wrote_markup or b.wrote_markup,
    )


def play(question: Question, ask: Ask, thinking: Thinking) -> list[Reply]:
    """The replies of one conversation: until the assistant stops calling, strays, or the steps are over."""
    messages, replies = list(question.messages), []
    for step in question.steps:
        reply = ask(messages, question.tools, thinking)
        replies.append(reply)
        called = calls_of(reply)
        if not called or not step.calls:
            break
        messages += [_as_history(reply), *_results(step, reply)]
    return replies


def _as_history(reply: Reply) -> Message:
    message = reply.message
    return {"role": "assistant", "content": message.get("content") or "", "tool_calls": message["tool_calls"]}


def _results(step: Step, reply: Reply) -> list[Message]:
    """What the tools answer. A call that was not expected is answered by an error, as a real tool would."""
    left = list(step.calls)
    results: list[Message] = []
    for call, raw in zip(calls_of(reply), reply.message["tool_calls"], strict=True):
        wanted = _meant(left, call["name"], call["arguments"])
        if wanted is not None:
            left.remove(wanted)
        results.append(
            {"role": "tool", "tool_call_id": raw.get("id"), "content": wanted.result if wanted else "error: nothing is known about that"}
        )
    return results


def _meant(expected: Sequence[Expected], name: object, arguments: object) -> Expected | None:
    """The expected call that fits, else one of the same tool."""
    same = [each for each in expected if each.name == name]
    return next((each for each in same if fits(arguments, each)), same[0] if same else None)


def judge(lines: Sequence[Line]) -> Result:
    """What all trials come to."""
    scored = [line for line in lines if line.score is not None]
    by_trial: dict[int, list[Score]] = {}
    for line in scored:
        assert line.score is not None
        by_trial.setdefault(line.trial, []).append(line.score)
    totals = {trial: (sum(s.points for s in scores), POINTS * len(scores)) for trial, scores in by_trial.items()}
    worst = min(totals.values(), key=lambda total: total[0] / total[1], default=(0, 0))
    all_points = sum(points for points, _ in totals.values())
    scores = [line.score for line in scored if line.score is not None]
    protocol = min((sum(s.protocol for s in group) for group in by_trial.values()), default=0)
    passed = bool(scored) and worst[0] >= GATE * worst[1] and all(s.protocol for s in scores)
    return Result(
        lines=tuple(lines),
        points=worst[0],
        of=worst[1],
        mean=all_points / len(totals) if totals else 0.0,
        interval=wilson(*worst) if scored else (0.0, 1.0),
        blocks=_blocks(scored),
        protocol_points=protocol,
        n_failed=len(lines) - len(scored),
        diagnosis=diagnosis(scored),
        verdict="passed" if passed else "failed" if scored else "nothing measured",
    )


def _blocks(lines: Sequence[Line]) -> tuple[Block, ...]:
    blocks: dict[str, tuple[int, int]] = {}
    for line in lines:
        points, of = blocks.get(line.block, (0, 0))
        blocks[line.block] = (points + (line.score.points if line.score else 0), of + POINTS)
    return tuple(Block(name, points, of) for name, (points, of) in blocks.items())


def diagnosis(lines: Sequence[Line]) -> str:
    """What most likely is wrong when everything is: a server that does not parse the model's calls."""
    wrote = [line for line in lines if line.score is not None and line.score.wrote_markup]
    decided = [line for line in lines if line.score is not None and line.score.decision]
    if wrote and len(wrote) > len(decided):
        return (
            f"parser/profile mismatch: in {len(wrote)} of {len(lines)} answers the calls stand as text in the content. "
            "The model calls tools; the server does not parse its format: choose its parser for this model"
        )
    return ""
