"""Every rule of every table, in the order in which they are checked."""

from __future__ import annotations

from typing import Any

from a3b_gguf.prompt.body_rules import BODY_RULES
from a3b_gguf.prompt.findings import Rule
from a3b_gguf.prompt.raw_rules import RAW_RULES
from a3b_gguf.prompt.raw_text_rules import RAW_TEXT_RULES
from a3b_gguf.prompt.render_rules import RAW_BUDGET, RENDER_RULES, REQUEST_BUDGET
from a3b_gguf.prompt.round_trip import ROUND_TRIP_RULES
from a3b_gguf.prompt.template_rules import TEMPLATE_RULES
from a3b_gguf.prompt.token_rules import TOKEN_RULES
from a3b_gguf.prompt.tokenizer_rules import TOKENIZER_RULES
from a3b_gguf.prompt.verify import REQUEST_RULES

RULES: tuple[Rule[Any], ...] = (
    *BODY_RULES, *REQUEST_RULES, *REQUEST_BUDGET, *RENDER_RULES, *RAW_RULES, *RAW_TEXT_RULES, *RAW_BUDGET, *ROUND_TRIP_RULES, *TOKEN_RULES,
    *TEMPLATE_RULES, *TOKENIZER_RULES,
)  # fmt: skip
