"""From a file to the exact prompt, and to its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from a3b_gguf.flows.prompt_check import (
    Policy,
    Verdict,
    check_tokens,
    examine_raw,
    examine_request,
    read_ids,
    render_or_find,
    tokens_of,
    with_budget,
    with_finding,
)
from a3b_gguf.flows.prompts import Speaker, TextSide, text_side
from a3b_gguf.prompt import Finding, Rendered, TokenizedPrompt
from a3b_gguf.prompt.tokens import borders_of_ids


def rendered_prompt(path: Path, speaker: Speaker, policy: Policy, raw: bool, tools: Path | None) -> tuple[Verdict, Rendered | None]:
    """The verdict on a file, and its prompt when nothing refuses. A raw prompt is its own."""
    if raw:
        text, verdict = examine_raw(path, speaker, policy)
        return verdict, Rendered(text) if verdict.ok else None
    request, verdict = examine_request(path, speaker, policy, tools)
    if not verdict.ok:
        return verdict, None
    found = render_or_find(request, speaker, policy)
    return (with_finding(verdict, found), None) if isinstance(found, Finding) else (verdict, found)


@contextmanager
def tokenized_file(
    path: Path, speaker: Speaker, policy: Policy, kind: tuple[bool, bool], tools: Path | None
) -> Iterator[tuple[Verdict, TokenizedPrompt | None, TextSide]]:
    """The verdict on a file and its tokens, None when it is refused. kind: whether it is a raw prompt, whether it holds ids.

    Ids are shown also when they are refused: to see what is wrong with them is what they are shown for.
    """
    raw, ids = kind
    with text_side(speaker) as side:
        if ids:
            found = read_ids(path)
            borders = borders_of_ids(found, side.vocab, side.controls, speaker.profile.turn_starts, len(side.kinds))
            yield check_tokens(found, speaker, policy, side), TokenizedPrompt(tuple(found), borders, 0), side
            return
        verdict, rendered = rendered_prompt(path, speaker, policy, raw, tools)
        prompt = tokens_of(rendered, speaker, side) if rendered is not None else None
        if prompt is not None:
            verdict = with_budget(verdict, len(prompt.tokens), policy, raw)
        yield verdict, prompt, side


def check_budget(path: Path, speaker: Speaker, policy: Policy, raw: bool, tools: Path | None) -> Verdict:
    """The verdict on a file, its number of tokens included."""
    with tokenized_file(path, speaker, policy, (raw, False), tools) as (verdict, _, _):
        return verdict
