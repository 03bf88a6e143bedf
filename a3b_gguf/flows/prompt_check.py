"""From a file to a verdict on what is in it: a request, a data set of them, a rendered prompt, tokens."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.flows.prompts import Speaker, TextSide
from a3b_gguf.prompt import (
    Budget,
    ControlPolicy,
    DeveloperPolicy,
    Finding,
    Rendered,
    SystemPolicy,
    normalise,
    refused,
    render_apart,
    template_finding,
    verify_body,
    verify_budget,
    verify_raw,
    verify_request,
)
from a3b_gguf.prompt.body_rules import MAX_BYTES
from a3b_gguf.prompt.locate import locate
from a3b_gguf.template import NO_OPTIONS, BadTemplate, TemplateRefused

if TYPE_CHECKING:
    from a3b_gguf.prompt import TokenizedPrompt

STDIN = Path("-")
EXCERPT = 100  # characters of a source line that are shown


@dataclass(frozen=True, slots=True)
class Policy:
    """What the caller asks for. complete: a conversation that ends with its answer is whole (data sets). n_ctx: 0 when no context is known;
    reserve: tokens of the answer. strict: warnings refuse too."""

    system: SystemPolicy = "optional"
    controls: ControlPolicy = "refuse"
    developer: DeveloperPolicy = "refuse"
    complete: bool = False
    strict: bool = False
    n_ctx: int = 0
    reserve: int = 0


@dataclass(frozen=True, slots=True)
class Located:
    """A finding with its place in the file: line and column from 1, 0 when it has none. excerpt: what stands there, and where in it."""

    finding: Finding
    line: int = 0
    column: int = 0
    excerpt: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """profile: the model that the prompt was checked for. ok: nothing in it refuses."""

    profile: str
    ok: bool
    findings: tuple[Located, ...]


def read_input(path: Path) -> bytes:
    """The bytes of a file, or of standard input for `-`. Raises BadInput when it cannot be read."""
    if path == STDIN:
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error


def named(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)


def refuses(finding: Finding, policy: Policy) -> bool:
    return finding.severity == "error" or (policy.strict and finding.severity == "warning")


def checker(speaker: Speaker, policy: Policy) -> Callable[[Mapping[str, Any]], list[Finding]]:
    """verify_request with everything but the request settled."""

    def check(request: Mapping[str, Any]) -> list[Finding]:
        return verify_request(request, speaker.profile, policy.system, speaker.template, policy.controls, policy.developer, policy.complete)

    return check


def read_request(path: Path, tools: Path | None) -> tuple[Mapping[str, Any], bytes, list[Finding]]:
    """The request of a file (a list of messages becomes one), its bytes, and the findings about them.

    Raises BadInput when `path` or `tools` holds no JSON; the request is empty when another error is among the findings.
    """
    data = read_input(path)
    value, findings = verify_body(data)
    _raise_unreadable(path, findings)
    if refused(findings):
        return {}, data, findings
    request: Mapping[str, Any] = value if isinstance(value, Mapping) else {"messages": value}
    if tools is not None:
        request = {**request, "tools": _tools(tools, request)}
    return request, data, findings


def check_request(path: Path, speaker: Speaker, policy: Policy, tools: Path | None = None) -> Verdict:
    """Checks a list of messages, or a whole request. Raises BadInput when `path` or `tools` holds no JSON."""
    return examine_request(path, speaker, policy, tools)[1]


def examine_request(path: Path, speaker: Speaker, policy: Policy, tools: Path | None = None) -> tuple[Mapping[str, Any], Verdict]:
    """The request of a file, and the verdict on it, as check_request gives it."""
    request, data, findings = read_request(path, tools)
    if not refused(findings):
        findings += checker(speaker, policy)(request)
    text = data.decode("utf-8", "replace")
    return request, _verdict(speaker, policy, [located(finding, text) for finding in findings])


def check_raw(path: Path, speaker: Speaker, policy: Policy) -> Verdict:
    """Checks a prompt that is already rendered, against the template too. Raises BadInput when it is no UTF-8 text."""
    return examine_raw(path, speaker, policy)[1]


def examine_raw(path: Path, speaker: Speaker, policy: Policy) -> tuple[str, Verdict]:
    """The prompt of a file, and the verdict on it."""
    text = read_text(path)
    return text, _verdict(speaker, policy, [located(finding, text) for finding in raw_checker(speaker, policy)(text)])


def raw_checker(speaker: Speaker, policy: Policy) -> Callable[[str], list[Finding]]:
    template = speaker.rendering() if speaker.profile.is_chatml else None

    def check(text: str) -> list[Finding]:
        return verify_raw(text, speaker.profile, policy.system, template, policy.complete)

    return check


def read_text(path: Path) -> str:
    """The text of a file, its newlines as they are. Raises BadInput when it is no UTF-8 (R022)."""
    data = read_input(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{named(path)}: byte {error.start} is not UTF-8 (R022)", "encode it again as UTF-8") from error


def check_tokens(ids: list[int], speaker: Speaker, policy: Policy, side: TextSide) -> Verdict:
    """Checks token ids with the model's vocabulary."""
    from a3b_gguf.prompt import TokenView, verify_tokens

    findings = verify_tokens(TokenView(ids, speaker.profile, side.vocab, side.kinds, side.controls, side.eog))
    if policy.n_ctx:
        findings += verify_budget(Budget(len(ids), policy.n_ctx, policy.reserve), raw=True)
    return _verdict(speaker, policy, [Located(finding) for finding in findings])


def read_ids(path: Path) -> list[int]:
    """A JSON list of integers. Raises BadInput for anything else."""
    value, findings = verify_body(read_input(path))
    _raise_unreadable(path, findings)
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise BadInput(
            f"{named(path)}: expected a JSON list of token ids, such as [248045, 846, 198]", "--raw reads text, no option reads messages"
        )
    return value


def rendered_request(request: Mapping[str, Any], speaker: Speaker, policy: Policy) -> Rendered:
    """The prompt of a request without errors. Raises TemplateRefused, BadTemplate or NotApart."""
    options = request.get("chat_template_kwargs") or NO_OPTIONS
    messages = normalise(request["messages"], policy.developer)
    final = request.get("continue_final_message") is True
    return render_apart(speaker.rendering(), messages, request.get("tools") or None, speaker.profile.controls, options, final)


def tokens_of(rendered: Rendered, speaker: Speaker, side: TextSide) -> TokenizedPrompt:
    from a3b_gguf.prompt import tokenize_rendered

    return tokenize_rendered(rendered, side.vocab, side.controls, speaker.profile.turn_starts)


def with_budget(verdict: Verdict, n_tokens: int, policy: Policy, raw: bool) -> Verdict:
    """The verdict with M059 or R024 added, when a context is known."""
    found = verify_budget(Budget(n_tokens, policy.n_ctx, policy.reserve), raw) if policy.n_ctx else []
    return replace(verdict, ok=verdict.ok and not found, findings=(*verdict.findings, *map(Located, found)))


def render_or_find(request: Mapping[str, Any], speaker: Speaker, policy: Policy) -> Rendered | Finding:
    """The prompt, or the template's refusal as a finding."""
    try:
        return rendered_request(request, speaker, policy)
    except (TemplateRefused, BadTemplate, BadInput) as error:
        return template_finding(error)


def with_finding(verdict: Verdict, finding: Finding) -> Verdict:
    return replace(verdict, ok=False, findings=(*verdict.findings, Located(finding)))


def check_lines(path: Path, speaker: Speaker, policy: Policy) -> Iterator[Located]:
    """Checks a data set, a request or a list of messages a line; OpenAI's batch lines are opened. Bounded memory however long it is.

    A line that is no JSON is a finding too. Raises BadInput when the file cannot be read.
    """
    check = checker(speaker, policy)
    for number, data in lines_of(path):
        for finding in line_findings(data, check):
            place = located(finding, data.decode("utf-8", "replace"))
            yield replace(place, line=number)


def line_findings(data: bytes, check: Callable[[Mapping[str, Any]], list[Finding]]) -> list[Finding]:
    value, findings = verify_body(data)
    if refused(findings):
        return findings
    request, prefix = line_request(value)
    found = check(request)
    return findings + ([replace(finding, where=prefix + finding.where) for finding in found] if prefix else found)


def line_request(value: Any) -> tuple[Mapping[str, Any], str]:
    """The request of a line, and the path that leads to it: a batch line holds it under `body`."""
    if isinstance(value, Mapping) and "messages" not in value and isinstance(value.get("body"), Mapping):
        return value["body"], "body."
    return (value, "") if isinstance(value, Mapping) else ({"messages": value}, "")


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank. A line longer than a request may be is cut, which a rule then reports."""
    try:
        stream: BinaryIO = sys.stdin.buffer if path == STDIN else path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    try:
        for number in itertools.count(1):
            line = stream.readline(MAX_BYTES + 2)
            if not line:
                return
            rest = line
            while not rest.endswith(b"\n") and len(rest) == MAX_BYTES + 2:
                rest = stream.readline(MAX_BYTES + 2)
            if line.strip():
                yield number, line.rstrip(b"\r\n")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    finally:
        if stream is not sys.stdin.buffer:
            stream.close()


def located(finding: Finding, text: str) -> Located:
    """The finding with its line and column in `text`, the file's own."""
    at = _character(finding, text)
    if at is None:
        return Located(finding)
    start = text.rfind("\n", 0, at) + 1
    stop = text.find("\n", at)
    line = text[start : stop if stop >= 0 else len(text)]
    column = at - start
    if column > EXCERPT - 20 or len(line) > EXCERPT:
        first = max(0, column - EXCERPT // 2)
        line, caret = line[first : first + EXCERPT], column - first
    else:
        caret = column
    offset = finding.offset if finding.offset is not None else len(text[:at].encode("utf-8", "surrogatepass"))
    return Located(replace(finding, offset=offset), text.count("\n", 0, at) + 1, column + 1, (line, caret))


def _character(finding: Finding, text: str) -> int | None:
    if finding.offset is not None:
        return len(text.encode("utf-8", "surrogatepass")[: finding.offset].decode("utf-8", "replace"))
    try:
        return locate(text.removeprefix("\ufeff"), finding.where, finding.at)
    except (ValueError, RecursionError, IndexError):  # no JSON, or none that can be walked
        return None


def _verdict(speaker: Speaker, policy: Policy, findings: list[Located]) -> Verdict:
    return Verdict(speaker.profile.name, not any(refuses(place.finding, policy) for place in findings), tuple(findings))


def _tools(path: Path, request: Mapping[str, Any]) -> Any:
    if request.get("tools") is not None:
        raise UsageError(f"--tools {path}: the request has tools of its own", "leave one of them out")
    value, findings = verify_body(read_input(path))
    _raise_unreadable(path, findings)
    if refused(findings):
        first = next(finding for finding in findings if finding.severity == "error")
        raise BadInput(f"{named(path)}, {first.where}: {first.message} ({first.rule})", first.fix)
    return value.get("tools") if isinstance(value, Mapping) and "tools" in value else value


def _raise_unreadable(path: Path, findings: list[Finding]) -> None:
    """Raises BadInput when there is no value at all."""
    for finding in findings:
        if finding.rule in ("M001", "M003") and finding.offset is not None:
            raise BadInput(f"{named(path)}, {finding.where}: {finding.message} ({finding.rule})", finding.fix)
