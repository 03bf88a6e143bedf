"""`a3b verify-prompt`: is this request, or this rendered prompt, what the model expects?"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from a3b_gguf.errors import UsageError

if TYPE_CHECKING:
    from a3b_gguf.flows.prompt_check import Policy, Verdict
    from a3b_gguf.flows.prompts import Speaker
    from a3b_gguf.prompt import ControlPolicy, SystemPolicy

LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says about the input: how it is to be read, and what is to be done."""

    form: str
    tools: Path | None
    out: Path | None
    raw: bool
    tokens: bool
    lines: bool


def command(
    files: list[Path] = typer.Argument(
        None,
        metavar="[FILE|-]...",
        help="JSON: a list of messages or a whole request; a .jsonl data set; with --raw a rendered prompt. - is standard input.",
    ),
    model: Path | None = typer.Option(None, "--model", metavar="MODEL.gguf", help="Check against this model's template and vocabulary."),
    profile: str | None = typer.Option(None, "--profile", help="Check against a profile that a3b ships (default: qwen3.6)."),
    raw: bool = typer.Option(False, "--raw", help="FILE is a prompt that is already rendered, not JSON."),
    tokens: bool = typer.Option(False, "--tokens", help="FILE is a JSON list of token ids (with --model)."),
    jsonl: bool = typer.Option(False, "--jsonl", help="FILE holds a request or a list of messages a line, as files named .jsonl do."),
    template: bool = typer.Option(False, "--template", help="Check the model's chat template and tokenizer; without --model FILE is one."),
    system: str = typer.Option("optional", "--system", help="Whether a system message must be there: optional or required."),
    control_text: str = typer.Option("refuse", "--control-text", help="Control tokens in content: refuse, or as-text as a3b tokenizes."),
    map_developer: bool = typer.Option(False, "--map-developer", help="Take role developer as part of the system message."),
    no_gen: bool = typer.Option(False, "--no-gen", help="The conversation ends with its answer, as in data sets."),
    strict: bool = typer.Option(False, "--strict-warnings", help="Refuse for warnings too."),
    tools: Path | None = typer.Option(None, "--tools", metavar="FILE", help="JSON list of tools, for a file that has messages alone."),
    ctx: int = typer.Option(0, "--ctx", min=0, help="Context in tokens that the prompt must fit into (with --model)."),
    reserve: int = typer.Option(0, "--reserve", min=0, help="Tokens of the context that the answer needs."),
    fix: bool = typer.Option(False, "--fix", help="Mend what has one right mending, in place; standard input goes to standard output."),
    out: Path | None = typer.Option(None, "-o", "--output", metavar="FILE", help="Where --fix writes instead."),
    render: bool = typer.Option(False, "--render", help="Print the exact prompt, and nothing else."),
    show_tokens: bool = typer.Option(False, "--show-tokens", help="List the prompt's tokens: id, piece, kind, turn (with --model)."),
    form: str = typer.Option("text", "--format", help="How to print the findings: text, json or sarif."),
    as_json: bool = typer.Option(False, "--json", help="The same as --format json."),
) -> None:
    """Check messages or a rendered prompt against the rules of docs/prompt-rules.md.

    Ends with 0 when there is no error, 1 when there is one, 3 when the input cannot be read.
    """
    from a3b_gguf.flows.prompt_check import STDIN, Policy

    policy = Policy(
        cast("SystemPolicy", _one_of("--system", system, ("optional", "required"))),
        cast("ControlPolicy", _one_of("--control-text", control_text, ("refuse", "as-text"))),
        "system" if map_developer else "refuse",
        no_gen,
        strict,
        ctx,
        reserve,
    )
    form = "json" if as_json else _one_of("--format", form, ("text", "json", "sarif"))
    paths = files or [STDIN]
    asked = Asked(form, tools, out, raw, tokens, jsonl or (not raw and all(path.suffix in LINES for path in paths)))
    _refuse_contradictions(asked, paths, model, fix, render or show_tokens, bool(ctx))
    _refuse_unheard(form, fix, render, show_tokens, bool(reserve) and not ctx)
    if template:
        _lint(paths if files else [], model, form)
        return
    if STDIN in paths and sys.stdin.isatty():
        raise UsageError("there is nothing to check", "give a FILE, or pipe a prompt into standard input")
    speaker = _speaker(model, profile)
    if fix:
        ok = _fix(paths, speaker, policy, asked)
    elif render or show_tokens:
        ok = _render(paths[0], speaker, policy, asked, show_tokens)
    else:
        ok = _check(paths, speaker, policy, asked)
    if not ok:
        raise typer.Exit(1)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"{option} {value}: expected {' or '.join(allowed)}")
    return value


def _refuse_contradictions(asked: Asked, paths: list[Path], model: Path | None, fix: bool, render: bool, ctx: bool) -> None:
    for wrong, message, hint in (
        (
            asked.raw and asked.tools is not None,
            "--tools has no meaning with --raw: a rendered prompt holds its tools",
            "leave one of them out",
        ),
        (asked.raw and asked.tokens, "--raw and --tokens cannot both be given", "a FILE holds text or ids"),
        (asked.tokens and model is None, "--tokens needs --model: ids mean nothing without a vocabulary", "give the model's file"),
        (ctx and model is None, "--ctx needs --model: only a vocabulary counts tokens", "give the model's file"),
        (fix and asked.tokens, "--fix cannot mend token ids", "tokenize the prompt again"),
        (fix and render, "--fix with --render or --show-tokens: one of them at a time", "mend first"),
        (render and len(paths) > 1, "--render and --show-tokens take one FILE", "run it for each"),
        (render and asked.lines, "--render and --show-tokens take one request, not a data set", "give one line of it"),
        (asked.out is not None and not fix, "-o has no meaning without --fix", "leave it out"),
        (asked.out is not None and len(paths) > 1, "-o takes one FILE", "run it for each"),
    ):
        if wrong:
            raise UsageError(message, hint)


def _refuse_unheard(form: str, fix: bool, render: bool, show_tokens: bool, reserve_alone: bool) -> None:
    """Raises UsageError for a flag that would change nothing."""
    for wrong, message, hint in (
        (render and form != "text", f"--render prints the prompt and nothing else, not {form}", "for JSON: --show-tokens --json"),
        ((fix or show_tokens) and form == "sarif", "--format sarif is for findings, not with --fix or --show-tokens", "take --json"),
        (reserve_alone, "--reserve needs --ctx: it is what the answer takes of it", "give --ctx too"),
    ):
        if wrong:
            raise UsageError(message, hint)


def _speaker(model: Path | None, profile: str | None) -> Speaker:
    from a3b_gguf.flows.prompts import Speaker, speaker_of
    from a3b_gguf.prompt import DEFAULT_PROFILE, profile_named

    if model is not None and profile is not None:
        raise UsageError("--model and --profile cannot both be given", "--model finds the profile in the file itself")
    return speaker_of(model) if model is not None else Speaker(profile_named(DEFAULT_PROFILE if profile is None else profile))


def _check(paths: list[Path], speaker: Speaker, policy: Policy, asked: Asked) -> bool:
    from a3b_gguf.flows.prompt_check import check_lines, named
    from a3b_gguf.report.prompts import say_verdicts_json, show_verdict, stream_json, stream_sarif, stream_text

    if asked.lines:
        if asked.form == "sarif":
            return stream_sarif(((str(path), place) for path in paths for place in check_lines(path, speaker, policy)), policy)
        places = (place for path in paths for place in check_lines(path, speaker, policy))
        if asked.form == "json":
            return stream_json(speaker.profile.name, places, policy)
        return all([stream_text(speaker.profile.name, named(path), check_lines(path, speaker, policy), policy) for path in paths])
    verdicts: list[tuple[str, Verdict]] = [(str(path), _verdict(path, speaker, policy, asked)) for path in paths]
    if asked.form == "json":
        say_verdicts_json(verdicts)
    elif asked.form == "sarif":
        stream_sarif(((name, place) for name, verdict in verdicts for place in verdict.findings), policy)
    else:
        for name, verdict in verdicts:
            show_verdict(verdict, name if len(verdicts) > 1 else "")
    return all(verdict.ok for _, verdict in verdicts)


def _verdict(path: Path, speaker: Speaker, policy: Policy, asked: Asked) -> Verdict:
    from a3b_gguf.flows.prompt_check import check_raw, check_request, check_tokens, read_ids
    from a3b_gguf.flows.prompts import text_side

    if asked.tokens:
        with text_side(speaker) as side:
            return check_tokens(read_ids(path), speaker, policy, side)
    if policy.n_ctx:
        from a3b_gguf.flows.prompt_tokens import check_budget

        return check_budget(path, speaker, policy, asked.raw, asked.tools)
    return check_raw(path, speaker, policy) if asked.raw else check_request(path, speaker, policy, asked.tools)


def _render(path: Path, speaker: Speaker, policy: Policy, asked: Asked, show_tokens: bool) -> bool:
    from a3b_gguf.flows.prompt_tokens import rendered_prompt, tokenized_file
    from a3b_gguf.report.console import note, say_json
    from a3b_gguf.report.prompts import show_tokens as show
    from a3b_gguf.report.prompts import show_verdict, token_rows

    if show_tokens and speaker.file is None:
        raise UsageError("--show-tokens needs --model: a profile has no vocabulary", "give the model's file")
    if not show_tokens:
        verdict, rendered = rendered_prompt(path, speaker, policy, asked.raw, asked.tools)
        if rendered is None or verdict.findings:
            show_verdict(verdict, tell=note)
        if rendered is not None and verdict.ok:
            sys.stdout.write(rendered.text)
        return verdict.ok
    with tokenized_file(path, speaker, policy, (asked.raw, asked.tokens), asked.tools) as (verdict, prompt, side):
        if prompt is not None:
            rows = token_rows(prompt, side)
            if asked.form == "json":
                say_json(rows)
            else:
                show(rows)
        if prompt is None or verdict.findings:
            show_verdict(verdict, tell=note)
    return verdict.ok


def _fix(paths: list[Path], speaker: Speaker, policy: Policy, asked: Asked) -> bool:
    from a3b_gguf.flows.prompt_check import STDIN
    from a3b_gguf.flows.prompt_fix import mend_lines, mend_raw, mend_request
    from a3b_gguf.report.console import note, say, say_json
    from a3b_gguf.report.prompts import plain_mended, show_mended

    ok = True
    for path in paths:
        if asked.raw:
            mended = mend_raw(path, asked.out, speaker, policy)
        elif asked.lines:
            mended = mend_lines(path, asked.out, speaker, policy)
        else:
            mended = mend_request(path, asked.out, speaker, policy, asked.tools)
        piped = STDIN in (path, asked.out) and asked.out in (None, STDIN)
        if asked.form == "json" and not piped:
            say_json(plain_mended(mended))
        else:
            show_mended(mended, note if piped else say)
        ok = ok and mended.ok
    return ok


def _lint(paths: list[Path], model: Path | None, form: str) -> None:
    from a3b_gguf.flows.prompt_check import Located, Policy
    from a3b_gguf.flows.prompt_lint import lint_model, lint_text
    from a3b_gguf.report.console import say_json
    from a3b_gguf.report.prompts import plain_lint, show_lint, stream_sarif

    if model is not None and paths:
        raise UsageError("--template takes --model MODEL.gguf or a template's FILE, not both", "leave one of them out")
    if model is None and not paths:
        raise UsageError("--template needs a model or a template", "give --model MODEL.gguf, or a FILE such as chat_template.jinja")
    lints = [lint_model(model)] if model is not None else [lint_text(path) for path in paths]
    if form == "json":
        say_json(plain_lint(lints[0]) if len(lints) == 1 else [plain_lint(lint) for lint in lints])
    elif form == "sarif":
        stream_sarif(((lint.file, Located(finding)) for lint in lints for finding in lint.findings), Policy())
    else:
        for lint in lints:
            show_lint(lint)
    if not all(lint.ok for lint in lints):
        raise typer.Exit(1)
