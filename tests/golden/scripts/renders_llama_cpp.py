"""Writes tests/golden/renders_llama_cpp.json: templates and expected prompts of llama.cpp's own test of its template engine (MIT).

python tests/golden/scripts/renders_llama_cpp.py LLAMA_CPP_FOLDER          the source of llama.cpp, as llama-cpp-python carries it

Left out are cases for which llama.cpp first changes the messages, which a3b never does: it merges a system message into the user's where a
template has no place for it, and it adds messages for its tests of tool calls. DeepSeek-V2 is written as two C++ literals.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

LITERAL = r'"((?:[^"\\]|\\.)*)"'
MESSAGE = re.compile(rf"\{{{LITERAL}, {LITERAL}\}}")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "'": "'", "\\": "\\"}
FIELDS = ("name", "template_str", "expected_output", "expected_output_jinja", "bos_token", "eos_token")
LEFT_OUT = ("Old pre-v1", "gemma-7b", "Orion", "Phi-3-mini", "Phi-3-medium", "YandexGPT", "(tool call)", "DeepSeek-V2")


def plain(literal: str) -> str:
    """The text of a C++ string literal."""
    return re.sub(r"\\(.)", lambda match: ESCAPES[match[1]], literal)


def field(block: str, name: str) -> str:
    match = re.search(rf"/\*\s*\.{name}\s*=?\s*\*/\s*{LITERAL}", block)
    return plain(match[1]) if match else ""


source = (Path(sys.argv[1]) / "tests" / "test-chat-template.cpp").read_text(encoding="utf-8")
start = source.index("std::vector<llama_chat_message> conversation")
messages = [{"role": plain(role), "content": plain(text)} for role, text in MESSAGE.findall(source, start)[:6]]
cases = []
for block in re.split(r"\n        \{\n", source[start:])[1:]:
    name, template, expected, with_jinja, bos, eos = (field(block, key) for key in FIELDS)
    unsupported = re.search(r"supported_with_jinja=\s*\*/\s*false", block)
    if name and template and not unsupported and not any(words in name for words in LEFT_OUT):
        cases.append({"name": name, "template": template, "expected": with_jinja or expected, "bos": bos, "eos": eos})
golden = {"messages": messages, "cases": cases}
path = Path(__file__).parent.parent / "renders_llama_cpp.json"
path.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
