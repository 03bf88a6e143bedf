"""Text to tokens and back. Reads a model's vocabulary only, so any thread may call it, also while another one decodes."""

from __future__ import annotations

import ctypes
from functools import cached_property

import llama_cpp.llama_cpp as C

from a3b_gguf.errors import BadInput
from a3b_gguf.llama.load import LoadedModel


class Vocab:
    """The vocabulary of `model`, which it keeps alive. A model loaded with `vocab_only` is enough."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.pointer = C.llama_model_get_vocab(model.pointer)
        self._pieces: dict[int, bytes] = {}
        self.n_tokens = int(C.llama_vocab_n_tokens(self.pointer))
        self.bos, self.eos = int(C.llama_vocab_bos(self.pointer)), int(C.llama_vocab_eos(self.pointer))  # -1: the model has none
        self.add_bos = bool(C.llama_vocab_get_add_bos(self.pointer))

    def tokenize(self, text: str, parse_special: bool, add_special: bool = False) -> list[int]:
        """Tokens of `text`. parse_special: control tokens in the text become themselves, else their letters. add_special: with those that
        the model wants around a text, BOS, EOS or [CLS] and [SEP].

        Tokens of the user-defined kind (`<think>`, `<tool_call>` in some files) are recognised either way: llama-vocab.cpp,
        tokenizer_st_partition. Raises BadInput for text that is not Unicode (a lone surrogate).
        """
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise BadInput(f"character {error.start} of the text is half of a surrogate pair", "send whole characters") from error
        room = len(raw) + 8  # a token is at least one byte, but for a few added by normalizers
        while True:
            found = (C.llama_token * room)()
            count = C.llama_tokenize(self.pointer, raw, len(raw), found, room, add_special, parse_special)
            if count >= 0:
                return list(found[:count])
            room = -count

    def piece(self, token: int) -> bytes:
        """Bytes of one token, control tokens as their text. May begin or end inside a character."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._read_piece(token)
        return known

    def _read_piece(self, token: int) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise BadInput(f"token {token} is outside the vocabulary of {self.n_tokens:,}")
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = C.llama_token_to_piece(self.pointer, token, buffer, room, 0, True)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    @cached_property
    def eog_tokens(self) -> tuple[int, ...]:
        """All tokens that end a generation."""
        return tuple(filter(self.is_eog, range(self.n_tokens)))

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(C.llama_vocab_is_eog(self.pointer, token))
