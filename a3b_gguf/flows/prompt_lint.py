"""From a GGUF file, or a template alone, to what is wrong with its chat template and tokenizer metadata."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from a3b_gguf.errors import BadInput
from a3b_gguf.flows.prompts import CONTROL, USER_DEFINED, token_text
from a3b_gguf.gguf_file import GGUFFile, read_array, read_gguf
from a3b_gguf.prompt import (
    Finding,
    Profile,
    TemplateView,
    TokenizerView,
    apply,
    probes_of,
    profile_of_probes,
)
from a3b_gguf.prompt.template_rules import TEMPLATE_RULES
from a3b_gguf.prompt.tokenizer_rules import TOKENIZER_RULES
from a3b_gguf.template import BadTemplate, known_name, open_template, published_names, published_text, template_sha256

KEY = "tokenizer.chat_template"
PREFIX = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class Lint:
    """sha256: of the template's text, "" without one. known: its name, else "". nearest, diff: to the likest that ships."""

    file: str
    sha256: str
    known: str
    findings: tuple[Finding, ...]
    profile: Profile | None
    nearest: str = ""
    diff: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)


def lint_model(path: Path) -> Lint:
    """Template and tokenizer of a GGUF file. Raises BadInput when it is none."""
    file = read_gguf(path)
    text = file.get(KEY)
    tokens, kinds = _vocabulary(file)
    single = frozenset(token for token, kind in zip(tokens, kinds, strict=False) if kind in (CONTROL, USER_DEFINED))
    variants = tuple(key.removeprefix(f"{KEY}.") for key in file.metadata if key.startswith(f"{KEY}."))
    texts = {which: token_text(file, which) for which in ("bos", "eos")}
    view = _view(text if isinstance(text, str) else None, str(path.name), texts, tuple(sorted(single)))
    view = replace(
        view,
        variants=variants,
        bos=texts["bos"],
        eos=texts["eos"],
        add_bos=file.get(f"{PREFIX}add_bos_token") is True,
        single=single if tokens else None,
    )
    keys = {key.removeprefix(PREFIX): field.value for key, field in file.metadata.items() if key.startswith(PREFIX)}
    tokenizer = TokenizerView(tokens, kinds, keys, file.architecture, view.profile)
    return _lint(str(path), view, [*apply(TEMPLATE_RULES, view), *apply(TOKENIZER_RULES, tokenizer)])


def lint_text(path: Path) -> Lint:
    """A template alone, from a file such as chat_template.jinja. Raises BadInput when it is no UTF-8 text."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: byte {error.start} is not UTF-8 (T002)", "encode it again as UTF-8") from error
    view = _view(text, path.name, {"bos": "", "eos": ""}, ())
    return _lint(str(path), view, list(apply(TEMPLATE_RULES, view)))


def _vocabulary(file: GGUFFile) -> tuple[list[Any], list[Any]]:
    """Tokens and types; empty where the file has none, which rules then report."""
    found = []
    for key in (f"{PREFIX}tokens", f"{PREFIX}token_type"):
        found.append(read_array(file, key) if key in file.metadata else [])
    return found[0], found[1]


def _view(text: str | None, name: str, texts: dict[str, str], controls: tuple[str, ...]) -> TemplateView:
    if text is None or not text.strip():
        return TemplateView(text)
    try:
        template = open_template(text, texts["bos"], texts["eos"])
    except BadTemplate as error:
        return TemplateView(text, error.message)
    probes = probes_of(template)
    try:
        profile = profile_of_probes(probes, template, name, controls)
    except BadTemplate:  # the rules say why, by what the probes show
        profile = None
    return TemplateView(text, "", template, probes, profile)


def _lint(name: str, view: TemplateView, findings: list[Finding]) -> Lint:
    known = known_name(view.text or "") or ""
    nearest, diff = ("", ()) if known or not view.text else _nearest(view.text)
    sha = template_sha256(view.text) if view.text else ""
    return Lint(name, sha, known, tuple(findings), view.profile, nearest, diff)


def _nearest(text: str) -> tuple[str, tuple[str, ...]]:
    """The shipped template with the fewest lines that differ, and the difference."""
    lines = text.splitlines()
    found: list[tuple[int, str, tuple[str, ...]]] = []
    for name in published_names():
        diff = tuple(difflib.unified_diff(published_text(name).splitlines(), lines, name, "this file", lineterm="", n=1))
        changed = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in diff)
        found.append((changed, name, diff))
    _, name, diff = min(found)
    return name, diff
