"""docs/prompt-rules.md, from the tables of rules. `python tests/prompt_rules.py` writes it; a test keeps it true."""

from __future__ import annotations

from pathlib import Path

from a3b_gguf.prompt import RULES

PAGE = Path(__file__).parent.parent / "docs" / "prompt-rules.md"
HEAD = """# The rules of a3b verify-prompt

What a prompt must keep before it reaches a model. `a3b verify-prompt` checks it ([verify-prompt.md](verify-prompt.md)), and `a3b serve`
refuses a request that breaks a rule of severity `error` with status 400 and the rule's id; `warning` and `note` refuse nothing, unless
`--strict-warnings` is given. Ids never change.

`M` rules look at the JSON of a request, `R` rules at a prompt that is already rendered (`--raw`), `K` rules at token ids (`--tokens`), `T`
rules at a chat template and `G` rules at the tokenizer's metadata (`--template`).

A prompt without a system message is accepted, with a note, unless `--system required` is given. A late, a second or an empty system
message is always refused.

| rule | severity | what a good prompt keeps | fix |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    rows = (f"| {rule.id} | {rule.severity} | {cell(rule.what)} | {cell(rule.fix)} |" for rule in sorted(RULES, key=lambda rule: rule.id))
    return HEAD + "\n".join(rows) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
