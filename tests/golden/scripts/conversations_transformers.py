"""Writes tests/golden/conversations_transformers.json: what Hugging Face makes of 200 conversations with each template, as sha256.

python tests/golden/scripts/conversations_transformers.py          needs transformers
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

TESTS = Path(__file__).parent.parent.parent
sys.path.insert(0, str(TESTS))

from chats import conversations  # noqa: E402 - the folder of the tests is no package
from templates import NAMES, template_text  # noqa: E402

SEED, COUNT = 8, 200


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def rendered(name: str, chat: dict[str, Any]) -> str | None:
    """The digest of the prompt, None when the template raises or fails."""
    try:
        texts, _ = render_jinja_template(
            [chat["messages"]], chat["tools"], chat_template=template_text(name), add_generation_prompt=True, **chat["chat_template_kwargs"]
        )
    except Exception:  # a template may fail in any way
        return None
    return digest(texts[0])


chats = conversations(SEED, COUNT)
golden = {
    "transformers": transformers.__version__,
    "seed": SEED,
    "chats": digest(json.dumps(chats)),
    "renders": {name: [rendered(name, chat) for chat in chats] for name in NAMES},
}
(TESTS / "golden" / "conversations_transformers.json").write_text(json.dumps(golden, indent=0) + "\n", encoding="utf-8")
