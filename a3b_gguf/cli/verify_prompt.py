"""`a3b verify-prompt`: is this request, or this rendered prompt, what the model expects?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from a3b_gguf.errors import UsageError

if TYPE_CHECKING:
    from a3b_gguf.flows.prompts import Speaker, Verdict
    from a3b_gguf.prompt import SystemPolicy


def command(
    file: Path = typer.Argument(
        Path("-"),
        metavar="[FILE|-]",
        help="JSON: a list of messages or a whole request; with --raw a rendered prompt. - is standard input.",
    ),
    model: Path | None = typer.Option(None, "--model", metavar="MODEL.gguf", help="Check against this model's template and vocabulary."),
    profile: str | None = typer.Option(None, "--profile", help="Check against a profile that a3b ships (default: qwen3.6)."),
    raw: bool = typer.Option(False, "--raw", help="FILE is a prompt that is already rendered, not JSON."),
    system: str = typer.Option("optional", "--system", help="Whether a system message must be there: optional or required."),
    tools: Path | None = typer.Option(None, "--tools", metavar="FILE", help="JSON list of tools, for a file that has messages alone."),
    form: str = typer.Option("text", "--format", help="How to print the findings: text or json."),
    as_json: bool = typer.Option(False, "--json", help="The same as --format json."),
) -> None:
    """Check messages or a rendered prompt against the rules of docs/prompt-rules.md.

    Ends with 0 when there is no error, 1 when there is one, 3 when the input cannot be read.
    """
    from a3b_gguf.flows.prompts import STDIN, check_raw, check_request
    from a3b_gguf.report.console import say_json

    policy = cast("SystemPolicy", _one_of("--system", system, ("optional", "required")))
    as_json |= _one_of("--format", form, ("text", "json")) == "json"
    if raw and tools is not None:
        raise UsageError("--tools has no meaning with --raw: a rendered prompt holds its tools", "leave one of them out")
    if file == STDIN and sys.stdin.isatty():
        raise UsageError("there is nothing to check", "give a FILE, or pipe a prompt into standard input")
    speaker = _speaker(model, profile)
    verdict = check_raw(file, speaker, policy) if raw else check_request(file, speaker, policy, tools)
    if as_json:
        say_json(verdict)
    else:
        _show(verdict)
    if not verdict.ok:
        raise typer.Exit(1)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"{option} {value}: expected {' or '.join(allowed)}")
    return value


def _speaker(model: Path | None, profile: str | None) -> Speaker:
    from a3b_gguf.flows.prompts import Speaker, speaker_of
    from a3b_gguf.prompt import DEFAULT_PROFILE, profile_named

    if model is not None and profile is not None:
        raise UsageError("--model and --profile cannot both be given", "--model finds the profile in the file itself")
    return speaker_of(model) if model is not None else Speaker(profile_named(profile or DEFAULT_PROFILE))


def _show(verdict: Verdict) -> None:
    from a3b_gguf.report.console import say

    for finding in verdict.findings:
        say(f"{finding.rule} {finding.severity} {finding.where}: {finding.message}")
        say(f"     fix: {finding.fix}")
    counts = [(sum(finding.severity == severity for finding in verdict.findings), severity) for severity in ("error", "warning", "note")]
    numbers = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for count, severity in counts if count) or "no findings"
    say(f"profile {verdict.profile}: {'ok' if verdict.ok else 'refused'}, {numbers}")
