"""Renders small conversations with the chat template that is written, and says what the rules for prompts find in them."""

from __future__ import annotations

import re

from a3b_convert.tokenizer import CONTROL, USER_DEFINED
from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import Metadata
from a3b_gguf.prompt import Profile, profile_of_template, verify_raw
from a3b_gguf.template import BadTemplate, Template, TemplateRefused, open_template

CHATS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "Hello"},),
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ),
)
MARK = re.compile(r"<\|[A-Za-z0-9_]+\|>")  # how this family writes its control tokens


def lint_template(metadata: Metadata) -> list[str]:
    """Notes on tokenizer.chat_template, by the vocabulary beside it; none when all is well or there is no template.

    Raises BadInput when the template is no template: nothing could be served with it, and it is quickly replaced.
    """
    if "tokenizer.chat_template" not in metadata:
        return []
    tokens, kinds = (metadata[f"tokenizer.ggml.{key}"].value for key in ("tokens", "token_type"))
    controls = tuple(token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED))
    texts = {name: tokens[metadata[key].value] if (key := f"tokenizer.ggml.{name}_token_id") in metadata else "" for name in ("bos", "eos")}
    try:
        template = open_template(str(metadata["tokenizer.chat_template"].value), texts["bos"], texts["eos"])
    except BadTemplate as error:
        raise BadInput(error.message, "mend it, or give another with --chat-template FILE") from error
    try:
        profile = profile_of_template(template, "this checkpoint", controls)
    except BadTemplate as error:
        return [f"{error.message}: chats cannot be served; give another with --chat-template FILE"]
    return _notes(template, profile)


def _notes(template: Template, profile: Profile) -> list[str]:
    notes: dict[str, str] = {}
    if not profile.generation_on:
        notes["generation"] = "the chat template opens no answer (add_generation_prompt changes nothing): the model is not asked to reply"
    if not profile.is_chatml:
        notes["turns"] = "the chat template does not write <|im_start|> turns, which this family is trained on"
    for thinking in (True, False):
        for chat in CHATS:
            try:
                text = template.render(chat, None, bool(profile.generation_on), {"enable_thinking": thinking})
            except (TemplateRefused, BadTemplate) as error:
                notes.setdefault("refused", error.message)
                continue
            unknown = sorted(set(MARK.findall(text)) - set(profile.controls))
            if unknown:
                notes["tokens"] = f"the chat template writes {', '.join(unknown)}, which the tokenizer does not have as a token"
            for finding in verify_raw(text, profile) if profile.is_chatml else ():
                if finding.severity == "error" and not (finding.rule == "R013" and not profile.generation_on):
                    notes.setdefault(finding.rule, f"the chat template breaks rule {finding.rule}: {finding.message} ({finding.fix})")
    return list(notes.values())
