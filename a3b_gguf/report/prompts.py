"""Shows findings about prompts: text with a caret, JSON, SARIF; what was mended; tokens; templates."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from a3b_gguf.flows.prompt_check import Located, Verdict, refuses
from a3b_gguf.flows.prompt_check import Policy as CheckPolicy
from a3b_gguf.prompt.findings import Severity
from a3b_gguf.report.console import say, say_json, say_table

if TYPE_CHECKING:
    from a3b_gguf.flows.prompt_fix import Mended
    from a3b_gguf.flows.prompt_lint import Lint
    from a3b_gguf.flows.prompts import TextSide
    from a3b_gguf.prompt import TokenizedPrompt

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
KINDS = {1: "normal", 2: "unknown", 3: "control", 4: "user-defined", 5: "unused", 6: "byte"}
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MAX_DIFF_LINES = 60
TOOLS = {"before": "in front of the system text", "after": "behind the system text", "none": "not shown"}


def finding_lines(place: Located, name: str = "") -> Iterator[str]:
    """One finding for a person: what, where, the line with a caret under the place, what to do."""
    finding = place.finding
    line = f"{name}:{place.line}: " if name and place.line else f"{name}: " if name else ""
    yield f"{line}{finding.rule} {finding.severity} {finding.where}: {finding.message}"
    if place.excerpt:
        text, caret = place.excerpt
        yield f"{place.line or 1:>6} | {_printable(text)}"
        yield f"       | {' ' * len(_printable(text[:caret]))}^"
    yield f"     fix: {finding.fix}"


def _printable(text: str) -> str:
    return "".join(ch if ch.isprintable() else "?" if ord(ch) >= 0x20 else " " for ch in text)


def counted(counts: Mapping[Severity, int]) -> str:
    """`2 errors, 1 note`."""
    parts = [f"{n} {severity}{'s' * (n != 1)}" for severity in SEVERITIES if (n := counts.get(severity, 0))]
    return ", ".join(parts) or "no findings"


def show_verdict(verdict: Verdict, name: str = "", tell: Any = say) -> None:
    for place in verdict.findings:
        for line in finding_lines(place, name):
            tell(line)
    counts = Counter(place.finding.severity for place in verdict.findings)
    where = f"{name}: " if name else ""
    tell(f"{where}profile {verdict.profile}: {'ok' if verdict.ok else 'refused'}, {counted(counts)}")


def plain_finding(place: Located) -> dict[str, Any]:
    """A finding as JSON shows it. line and column are 0 where the finding has no place in the file."""
    finding = place.finding
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "where": finding.where,
        "message": finding.message,
        "fix": finding.fix,
        "offset": finding.offset,
        "line": place.line,
        "column": place.column,
    }


def plain_verdict(verdict: Verdict) -> dict[str, Any]:
    return {"profile": verdict.profile, "ok": verdict.ok, "findings": [plain_finding(place) for place in verdict.findings]}


def say_verdicts_json(verdicts: Sequence[tuple[str, Verdict]]) -> None:
    """One object for one file; for several an object that lists them."""
    if len(verdicts) == 1:
        say_json(plain_verdict(verdicts[0][1]))
    else:
        files = [{"file": name, **plain_verdict(verdict)} for name, verdict in verdicts]
        say_json({"ok": all(verdict.ok for _, verdict in verdicts), "files": files})


def stream_json(profile: str, places: Iterable[Located], policy: CheckPolicy) -> bool:
    """The findings of a data set as one JSON object, written as they come. Returns whether nothing refuses."""
    say(f'{{\n "profile": {json.dumps(profile)},\n "findings": [')
    ok, first = True, True
    for place in places:
        ok = ok and not refuses(place.finding, policy)
        say(("" if first else ",") + json.dumps(plain_finding(place), ensure_ascii=False))
        first = False
    say(f' ],\n "ok": {json.dumps(ok)}\n}}')
    return ok


def stream_text(profile: str, name: str, places: Iterable[Located], policy: CheckPolicy) -> bool:
    """The findings of a data set for a person, as they come."""
    ok = True
    counts: Counter[Severity] = Counter()
    for place in places:
        ok = ok and not refuses(place.finding, policy)
        counts[place.finding.severity] += 1
        for line in finding_lines(place, name):
            say(line)
    say(f"profile {profile}: {'ok' if ok else 'refused'}, {counted(counts)}")
    return ok


def stream_sarif(places: Iterable[tuple[str, Located]], policy: CheckPolicy) -> bool:
    """SARIF 2.1.0, one result a finding, written as they come. Returns whether nothing refuses."""
    from a3b_gguf import __version__
    from a3b_gguf.prompt.rules import RULES

    index = {rule.id: number for number, rule in enumerate(RULES)}
    rules = [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.what},
            "help": {"text": rule.fix or rule.what},
            "defaultConfiguration": {"level": rule.severity},
        }
        for rule in RULES
    ]
    driver = {"name": "a3b verify-prompt", "version": __version__, "rules": rules}
    head = {"$schema": SARIF_SCHEMA, "version": "2.1.0"}
    say(
        json.dumps(head)[:-1]
        + ', "runs": [{"tool": '
        + json.dumps({"driver": driver}, ensure_ascii=False)
        + ', "columnKind": "unicodeCodePoints",'
    )
    say('"results": [')
    ok, first = True, True
    for name, place in places:
        ok = ok and not refuses(place.finding, policy)
        say(("" if first else ",") + json.dumps(_sarif_result(name, place, index), ensure_ascii=False))
        first = False
    say("]}]}")
    return ok


def _sarif_result(name: str, place: Located, index: dict[str, int]) -> dict[str, Any]:
    finding = place.finding
    physical: dict[str, Any] = {"artifactLocation": {"uri": name}}
    if place.line:
        physical["region"] = {"startLine": place.line, "startColumn": max(place.column, 1)}
    return {
        "ruleId": finding.rule,
        "ruleIndex": index[finding.rule],
        "level": finding.severity,
        "message": {"text": f"{finding.message}. What to do: {finding.fix}"},
        "locations": [{"physicalLocation": physical, "logicalLocations": [{"fullyQualifiedName": finding.where}]}],
    }


def show_mended(mended: Mended, tell: Any) -> None:
    """What was done, what is left."""
    for line, change in mended.changes:
        tell(f"{f'line {line}: ' if line else ''}{change.rule} mended {change.where}: {change.what}")
    if mended.n_changes > len(mended.changes):
        tell(f"… and {mended.n_changes - len(mended.changes):,} more changes")
    for place in mended.left:
        for text in finding_lines(place, f"line {place.line}" if mended.changes and mended.changes[0][0] and place.line else ""):
            tell(text)
    counts = Counter(place.finding.severity for place in mended.left)
    n = mended.n_changes
    tell(f"profile {mended.profile}: {n:,} change{'s' * (n != 1)}, {'ok' if mended.ok else 'refused'}, left: {counted(counts)}")


def plain_mended(mended: Mended) -> dict[str, Any]:
    changes = [{"rule": c.rule, "where": c.where, "what": c.what, "line": line} for line, c in mended.changes]
    return {"profile": mended.profile, "ok": mended.ok, "changes": changes, "findings": [plain_finding(place) for place in mended.left]}


def token_rows(prompt: TokenizedPrompt, side: TextSide) -> list[dict[str, Any]]:
    """Every token: id, piece, kind, turn, first byte in the prompt."""
    from a3b_gguf.prompt.tokens import spans_of_tokens, turn_of

    rows = []
    for index, (token, (start, _)) in enumerate(zip(prompt.tokens, spans_of_tokens(prompt.tokens, side.vocab), strict=True)):
        turn = turn_of(prompt.borders, index)
        known = 0 <= token < len(side.kinds)
        rows.append(
            {
                "index": index,
                "id": token,
                "piece": side.vocab.piece(token).decode("utf-8", "replace") if known else "",
                "kind": KINDS.get(side.kinds[token], "?") if known else "outside",
                "turn": turn,
                "role": prompt.borders[turn].role if turn >= 0 else "",
                "byte": start,
            }
        )
    return rows


def show_tokens(rows: Sequence[dict[str, Any]]) -> None:
    cells = [[str(r["index"]), str(r["id"]), repr(r["piece"]), r["kind"], f"{r['turn']} {r['role']}".strip(), str(r["byte"])] for r in rows]
    say_table(f"{len(rows):,} tokens", ["", "id", "piece", "kind", "turn", "byte"], cells, numeric=(0, 1, 5))


def show_lint(lint: Lint) -> None:
    for finding in lint.findings:
        for line in finding_lines(Located(finding)):
            say(line)
    if lint.profile is not None:
        profile = lint.profile
        say(
            f"calls {profile.call_style}, tools {TOOLS[profile.tools_place]}, thinking {_thinking(profile.generation_on)}, "
            f"thinking of earlier turns kept: {profile.preserve}, late system message {'refused' if profile.strict_system else 'taken'}"
        )
    if lint.diff:
        say(f"nearest known template: {lint.nearest}")
        for line in lint.diff[:MAX_DIFF_LINES]:
            say(f"  {line}")
        if len(lint.diff) > MAX_DIFF_LINES:
            say(f"  … {len(lint.diff) - MAX_DIFF_LINES} more lines")
    counts = Counter(finding.severity for finding in lint.findings)
    name = f", {lint.known}" if lint.known else ""
    say(f"template sha256 {lint.sha256 or 'none'}{name}: {'ok' if lint.ok else 'refused'}, {counted(counts)}")


def _thinking(opener: str) -> str:
    return "begins with the answer" if "<think>" in opener else "is the model's choice"


def plain_lint(lint: Lint) -> dict[str, Any]:
    return {
        "file": lint.file,
        "sha256": lint.sha256,
        "known": lint.known,
        "nearest": lint.nearest,
        "ok": lint.ok,
        "findings": [plain_finding(Located(finding)) for finding in lint.findings],
    }
