"""From a file to a verdict on a prompt, and from a model's file to how it is spoken to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.gguf_file import GGUFFile, read_array, read_gguf
from a3b_gguf.prompt import (
    Finding,
    Profile,
    SystemPolicy,
    profile_of_template,
    refused,
    verify_body,
    verify_raw,
    verify_request,
)
from a3b_gguf.template import BadTemplate, ChatTemplate

STDIN = Path("-")
# Source: llama.h, enum llama_token_type
CONTROL, USER_DEFINED = 3, 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """profile: the model that the prompt was checked for. ok: no error among the findings."""

    profile: str
    ok: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Speaker:
    """How a model is spoken to. template: None for a shipped profile, which has no template at hand."""

    profile: Profile
    template: ChatTemplate | None = None


def speaker_of(path: Path) -> Speaker:
    """The profile and template of a GGUF file. Raises BadInput when it cannot be read or has no template that works."""
    file = read_gguf(path)
    template = chat_template_of(file)
    return Speaker(profile_of(file, template), template)


def chat_template_of(file: GGUFFile) -> ChatTemplate:
    """The file's own chat template. Raises BadInput when there is none."""
    text = file.get("tokenizer.chat_template")
    if not isinstance(text, str) or not text.strip():
        raise BadInput(
            f"{file.path}: metadata key tokenizer.chat_template is missing or empty: the file does not say how its model is spoken to",
            "convert the model again with its template (a3b convert --chat-template FILE)",
        )
    try:
        return ChatTemplate(text, *(_token_text(file, which) if f"{which}_token" in text else "" for which in ("bos", "eos")))
    except BadTemplate as error:
        raise BadTemplate(f"{file.path}: {error.message}", error.hint) from error


def profile_of(file: GGUFFile, template: ChatTemplate) -> Profile:
    """How the model of `file` is spoken to: control texts from its vocabulary, everything else by rendering probes."""
    return profile_of_template(template, file.path.name, control_texts(file))


def control_texts(file: GGUFFile) -> tuple[str, ...]:
    """Texts that the vocabulary turns into a CONTROL or USER_DEFINED token wherever they stand.

    Runs of whitespace, which some vocabularies define as tokens of their own, carry no role and are left out.
    """
    tokens, types = read_array(file, "tokenizer.ggml.tokens"), read_array(file, "tokenizer.ggml.token_type")
    if len(tokens) != len(types):
        raise BadInput(f"{file.path}: {len(tokens):,} tokens but {len(types):,} token types", "convert the model again")
    found = (text for text, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED))
    return tuple(text for text in found if text.strip())


def _token_text(file: GGUFFile, which: str) -> str:
    """The text of the `bos` or `eos` token. Reads the whole vocabulary, so only for a template that writes it."""
    index = file.get(f"tokenizer.ggml.{which}_token_id")
    if index is None:
        return ""
    tokens = read_array(file, "tokenizer.ggml.tokens")
    return str(tokens[index]) if isinstance(index, int) and 0 <= index < len(tokens) else ""


def read_input(path: Path) -> bytes:
    """The bytes of a file, or of standard input for `-`. Raises BadInput when it cannot be read."""
    if path == STDIN:
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error


def check_request(path: Path, speaker: Speaker, system: SystemPolicy, tools: Path | None) -> Verdict:
    """Checks a list of messages, or a whole request. Raises BadInput when `path` or `tools` holds no JSON."""
    value, findings = _json(path)
    request: Mapping[str, Any] = value if isinstance(value, Mapping) else {"messages": value}
    if not refused(findings):
        if tools is not None:
            request = {**request, "tools": _tools(tools, request)}
        findings += verify_request(request, speaker.profile, system, speaker.template)
    return Verdict(speaker.profile.name, not refused(findings), tuple(findings))


def check_raw(path: Path, speaker: Speaker, system: SystemPolicy) -> Verdict:
    """Checks a prompt that is already rendered. Raises BadInput when it is no UTF-8 text."""
    data = read_input(path)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{_named(path)}: byte {error.start} is not UTF-8", "encode it again as UTF-8") from error
    findings = verify_raw(text, speaker.profile, system)
    return Verdict(speaker.profile.name, not refused(findings), tuple(findings))


def _tools(path: Path, request: Mapping[str, Any]) -> Any:
    if request.get("tools") is not None:
        raise UsageError(f"--tools {path}: the request has tools of its own", "leave one of them out")
    value, findings = _json(path)
    if refused(findings):
        first = next(finding for finding in findings if finding.severity == "error")
        raise BadInput(f"{_named(path)}, {first.where}: {first.message} ({first.rule})", first.fix)
    return value.get("tools") if isinstance(value, Mapping) and "tools" in value else value


def _json(path: Path) -> tuple[Any, list[Finding]]:
    """The JSON value of a file and the findings about its bytes. Raises BadInput when there is no value at all."""
    value, findings = verify_body(read_input(path))
    for finding in findings:
        if finding.rule in ("M001", "M003") and finding.offset is not None:
            raise BadInput(f"{_named(path)}, {finding.where}: {finding.message} ({finding.rule})", finding.fix)
    return value, findings


def _named(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)
