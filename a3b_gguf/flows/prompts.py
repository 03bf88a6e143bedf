"""From a model's file to how it is spoken to: its template, its profile, its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import GGUFFile, read_array, read_gguf
from a3b_gguf.prompt import Profile
from a3b_gguf.template import BadTemplate, Template, open_template, published_text

if TYPE_CHECKING:
    from a3b_gguf.llama.vocab import Vocab
    from a3b_gguf.prompt import ControlTokens

# Source: llama.h, enum llama_token_type
CONTROL, USER_DEFINED = 3, 4


@dataclass(frozen=True, slots=True)
class Speaker:
    """How a model is spoken to. file: None for a shipped profile, whose template is opened only when something is rendered."""

    profile: Profile
    template: Template | None = None
    file: GGUFFile | None = None

    def rendering(self) -> Template:
        """The template to render with: the file's own, or the one that ships with the profile."""
        return self.template or open_template(published_text(self.profile.name))


@dataclass(frozen=True, slots=True)
class TextSide:
    """A model's vocabulary at work. kinds: llama.cpp's type of every token. eog: ids that end a generation."""

    vocab: Vocab
    kinds: tuple[int, ...]
    controls: ControlTokens
    eog: frozenset[int]


def speaker_of(path: Path) -> Speaker:
    """The profile and template of a GGUF file. Raises BadInput when it cannot be read or has no template that works."""
    file = read_gguf(path)
    template = chat_template_of(file)
    return Speaker(profile_of(file, template), template, file)


def chat_template_of(file: GGUFFile) -> Template:
    """The file's own chat template. Raises BadInput when there is none, BadTemplate when it cannot be used."""
    text = file.get("tokenizer.chat_template")
    if not isinstance(text, str) or not text.strip():
        raise BadInput(
            f"{file.path}: metadata key tokenizer.chat_template is missing or empty: the file does not say how its model is spoken to",
            "convert the model again with its template (a3b convert --chat-template FILE)",
        )
    try:
        bos, eos = (token_text(file, which) if f"{which}_token" in text else "" for which in ("bos", "eos"))
        return open_template(text, bos, eos)
    except BadTemplate as error:
        raise BadTemplate(f"{file.path}: {error.message}", error.hint) from error


def profile_of(file: GGUFFile, template: Template) -> Profile:
    """How the model of `file` is spoken to: control texts from its vocabulary, everything else by rendering probes."""
    from a3b_gguf.prompt.probes import profile_of_template

    return profile_of_template(template, file.path.name, control_texts(file))


def control_texts(file: GGUFFile) -> tuple[str, ...]:
    """Texts that the vocabulary turns into a CONTROL or USER_DEFINED token wherever they stand.

    Runs of whitespace, which some vocabularies define as tokens of their own, carry no role and are left out.
    """
    types = read_array(file, "tokenizer.ggml.token_type")
    tokens = read_array(file, "tokenizer.ggml.tokens")
    if len(tokens) != len(types):
        raise BadInput(f"{file.path}: {len(tokens):,} tokens but {len(types):,} token types", "convert the model again")
    found = (text for text, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED))
    return tuple(text for text in found if text.strip())


def token_text(file: GGUFFile, which: str) -> str:
    """The text of the `bos` or `eos` token. Reads the whole vocabulary, so only for a template that writes it."""
    index = file.get(f"tokenizer.ggml.{which}_token_id")
    if index is None:
        return ""
    tokens = read_array(file, "tokenizer.ggml.tokens")
    return str(tokens[index]) if isinstance(index, int) and 0 <= index < len(tokens) else ""


@contextmanager
def text_side(speaker: Speaker) -> Iterator[TextSide]:
    """Loads the vocabulary of the speaker's file, and nothing else of it."""
    from a3b_gguf.llama.load import load_model
    from a3b_gguf.llama.params import LoadParams
    from a3b_gguf.llama.vocab import Vocab
    from a3b_gguf.prompt.tokens import control_tokens

    if speaker.file is None:
        raise ValueError("a shipped profile has no vocabulary")
    kinds: list[Any] = read_array(speaker.file, "tokenizer.ggml.token_type")
    with load_model(speaker.file.path, LoadParams(n_ctx=512), vocab_only=True) as model:
        vocab = Vocab(model)
        candidates = {index for index, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)} | {vocab.eos}
        eog = frozenset(token for token in candidates if 0 <= token < vocab.n_tokens and vocab.is_eog(token))
        yield TextSide(vocab, tuple(kinds), control_tokens(speaker.profile.controls, vocab), eog)
