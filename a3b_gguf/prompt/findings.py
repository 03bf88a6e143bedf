"""What a rule is and what it finds. A rule is a row of a table: an id that never changes, and a pure function over a view."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Severity = Literal["error", "warning", "note"]
View = TypeVar("View")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing, with its place.

    rule: its id, stable. where: a JSON path such as `messages[2].content`, or `byte 17, line 3`.
    fix: what to do. offset: the byte of a raw prompt or of a request's text, else None. at: the character of the string at `where`.
    """

    rule: str
    severity: Severity
    where: str
    message: str
    fix: str
    offset: int | None = None
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """What a check reports; the rule's row supplies the id, and the fix and severity that are not given here."""

    where: str
    message: str
    fix: str = ""
    severity: Severity | None = None
    offset: int | None = None
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Rule(Generic[View]):
    """One row. what: the promise that a good prompt keeps, with what its severity depends on. fix: what to do when it is broken."""

    id: str
    severity: Severity
    what: str
    fix: str
    check: Callable[[View], Iterable[Hit]]


def apply(rules: Sequence[Rule[View]], view: View) -> Iterator[Finding]:
    """Every rule's hits, in the order of the table."""
    for rule in rules:
        for hit in rule.check(view):
            yield Finding(rule.id, hit.severity or rule.severity, hit.where, hit.message, hit.fix or rule.fix, hit.offset, hit.at)


def refused(findings: Iterable[Finding]) -> bool:
    """Whether an error is among them: the prompt must not reach the model."""
    return any(finding.severity == "error" for finding in findings)
