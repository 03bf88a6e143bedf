"""tokenizer.json as llama.cpp wants it: tokens, their types, merges and special ids, without transformers.

Sources: get_vocab_base in conversion/base.py and SpecialVocab in gguf-py/gguf/vocab.py of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3b_convert.config import Config, read_json
from a3b_convert.pretokenizer import recognise
from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import Field, Metadata, array, boolean, string, u32

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # enum llama_token_type in llama.h, as files have it
# name in tokenizer_config.json ("bos_token") and config.json ("bos_token_id") -> key in the file, in llama.cpp's order
SPECIAL = {
    "bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "sep": "seperator_token_id", "pad": "padding_token_id",
    "mask": "mask_token_id",
}  # fmt: skip
# key of tokenizer.json's model -> the values with which it is the BPE that llama.cpp calls gpt2
PLAIN: dict[str, tuple[Any, ...]] = {
    "type": ("BPE", None), "byte_fallback": (False, None), "ignore_merges": (False, None), "dropout": (None, 0, 0.0), "unk_token": (None,),
    "continuing_subword_prefix": ("", None), "end_of_word_suffix": ("", None),
}  # fmt: skip
ADDED_BY_ITSELF = ("bos", "eos", "sep")
AGAIN = "take the tokenizer files of the original model"


@dataclass(frozen=True, slots=True)
class Added:
    """A token that is cut out of the text before BPE. special: part of the format, never of the text."""

    content: str
    special: bool


@dataclass(frozen=True, slots=True)
class Files:
    """The three files that say what the tokenizer is; the second may be absent (empty)."""

    folder: Path
    tokenizer: dict[str, Any]
    config: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.folder / "tokenizer.json"


def tokenizer_metadata(config: Config, n_tokens: int) -> Metadata:
    """tokenizer.ggml.* for a model whose embedding has `n_tokens` rows.

    Raises BadInput when the tokenizer is no BPE that llama.cpp cuts the same way, or has more tokens than the model.
    """
    files = _read(config.path.parent)
    model = _bpe(files)
    pre = recognise(files.path, files.tokenizer)
    vocab, added = _vocab(files, model), _added_tokens(files)
    tokens, kinds = _tokens(files, vocab, _with_extra_tokens(files, vocab, added), n_tokens)
    out: Metadata = {
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string(pre),
        "tokenizer.ggml.tokens": array("str", tokens),
        "tokenizer.ggml.token_type": array("i32", kinds),
        "tokenizer.ggml.merges": array("str", list(_merges(files, model))),
    }
    ids = _special_ids(files, config, added, n_tokens)
    out |= {f"tokenizer.ggml.{SPECIAL[name]}": u32(number) for name, number in ids.items()}
    return out | _added_by_itself(files)


def _read(folder: Path) -> Files:
    if not (folder / "tokenizer.json").is_file():
        raise BadInput(f"{folder} has no tokenizer.json", AGAIN)
    path = folder / "tokenizer_config.json"
    return Files(folder, read_json(folder / "tokenizer.json"), read_json(path) if path.is_file() else {})


def _bpe(files: Files) -> dict[str, Any]:
    """The model section, of the one kind that llama.cpp calls gpt2."""
    model = files.tokenizer.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        raise BadInput(f"{files.path}: key model holds no vocab and merges", AGAIN)
    for key, plain in PLAIN.items():
        if model.get(key) not in plain:
            raise BadInput(f"{files.path}: key model.{key} is {model[key]!r}, supported: {plain[0]!r}", "only byte-level BPE is converted")
    return model


def _vocab(files: Files, model: Mapping[str, Any]) -> dict[int, str]:
    """Token by id, without the added ones."""
    vocab: dict[int, str] = {}
    for token, number in model["vocab"].items():
        if type(number) is not int or number < 0:
            raise BadInput(f"{files.path}: token {token!r} has id {number!r}, expected a whole number", AGAIN)
        if number in vocab:
            raise BadInput(f"{files.path}: token {token!r} has id {number}, which is taken by {vocab[number]!r}", AGAIN)
        vocab[number] = token
    return vocab


def _added_tokens(files: Files) -> dict[int, Added]:
    """Added tokens by id: of tokenizer.json, then of tokenizer_config.json, which has the last word on what is special."""
    added: dict[int, Added] = {}
    for entry in _entries(files):
        number, content, special = entry.get("id"), entry.get("content"), bool(entry.get("special"))
        if type(number) is not int or number < 0 or not isinstance(content, str):
            raise BadInput(f"{files.folder}: added token {entry} lacks an id or a content", AGAIN)
        if number in added and added[number].content != content:
            raise BadInput(
                f"{files.folder}: id {number} is {added[number].content!r} in tokenizer.json and {content!r} in tokenizer_config.json",
                AGAIN,
            )
        added[number] = Added(content, special)
    return added


def _entries(files: Files) -> Iterator[Mapping[str, Any]]:
    listed = files.tokenizer.get("added_tokens") or []
    decoder = files.config.get("added_tokens_decoder") or {}
    if not isinstance(listed, list) or not isinstance(decoder, dict):
        raise BadInput(f"{files.folder}: added_tokens or added_tokens_decoder have another form than tokenizers write", AGAIN)
    for entry in listed:
        yield entry if isinstance(entry, dict) else {}
    for number, entry in decoder.items():
        yield {**entry, "id": int(number)} if isinstance(entry, dict) and number.isdecimal() and len(number) < 10 else {}


def _with_extra_tokens(files: Files, vocab: Mapping[int, str], added: Mapping[int, Added]) -> dict[int, Added]:
    """Tokens that tokenizer_config.json calls special: a named one becomes special, a new one gets the next free id, as in transformers."""
    extra, older = files.config.get("extra_special_tokens"), files.config.get("additional_special_tokens")
    listed = [value for values in (extra, older) if isinstance(values, list) for value in values]
    named = [files.config.get(f"{name}_token") for name in SPECIAL] + (list(extra.values()) if isinstance(extra, dict) else [])
    special = {text for value in named if (text := _content(value))}
    out = {number: Added(token.content, token.special or token.content in special) for number, token in added.items()}
    known = {token.content for token in out.values()}
    ids = {token: number for number, token in vocab.items()}
    for value in [*named, *listed]:
        text = _content(value)
        if text and text not in known:
            known.add(text)
            out[ids.get(text, max((*vocab, *out), default=-1) + 1)] = Added(text, True)
    return out


def _content(value: Any) -> str:
    """A token that is given as its text or as an object; "" for anything else."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _tokens(files: Files, vocab: Mapping[int, str], added: Mapping[int, Added], n_tokens: int) -> tuple[list[str], list[int]]:
    """Text and type of each id; ids without a token, as at the end of an embedding that was rounded up, become [PAD{id}]."""
    last = max((*vocab, *added), default=-1)
    if last >= n_tokens:
        text = added[last].content if last in added else vocab[last]
        raise BadInput(f"{files.path}: token {text!r} has id {last}, the model has {n_tokens} tokens", AGAIN)
    tokens, kinds = [], []
    for number in range(n_tokens):
        if number in added:
            token = added[number]
            if number in vocab and vocab[number] != token.content:
                raise BadInput(
                    f"{files.path}: id {number} is {vocab[number]!r} in the vocabulary and {token.content!r} among the added tokens", AGAIN
                )
            is_control = token.special or _looks_special(token.content)
            tokens.append(token.content if is_control else token.content.replace("\u2581", " "))
            kinds.append(CONTROL if is_control else USER_DEFINED)
        else:
            tokens.append(vocab.get(number, f"[PAD{number}]"))
            kinds.append(NORMAL if number in vocab else UNUSED)
    return tokens, kinds


def _looks_special(text: str) -> bool:
    return text.startswith("<|") and text.endswith("|>")


def _merges(files: Files, model: Mapping[str, Any]) -> Iterator[str]:
    """ "left right" for each merge; a space inside a part is written as the byte alphabet writes it."""
    for merge in model["merges"]:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
            raise BadInput(f"{files.path}: merge {merge!r} is not a pair", AGAIN)
        yield " ".join(part.replace(" ", chr(ord(" ") + 256)) for part in parts)


def _special_ids(files: Files, config: Config, added: Mapping[int, Added], n_tokens: int) -> dict[str, int]:
    """Ids of the special tokens: named in tokenizer_config.json, else by number in config.json, text_config, generation_config.json."""
    ids: dict[str, int] = {}
    by_text = {token.content: number for number, token in sorted(added.items(), reverse=True)}
    for name in SPECIAL:
        text = _content(files.config.get(f"{name}_token"))
        if text in by_text:
            ids[name] = by_text[text]
    generation = files.folder / "generation_config.json"
    inner = config.root.get("text_config")
    for source in (config.root, inner if isinstance(inner, dict) else {}, read_json(generation) if generation.is_file() else {}):
        for name in SPECIAL:
            value = source.get(f"{name}_token_id")
            value = value[0] if name == "eos" and isinstance(value, list) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                ids.setdefault(name, value)
    for name, number in ids.items():
        if not 0 <= number < n_tokens:
            raise BadInput(f"{config.path}: {name}_token_id is {number}, the model has {n_tokens} tokens", AGAIN)
    if "eos" not in ids:
        raise BadInput(f"{files.folder}: no file says which token ends a text (eos_token, eos_token_id)", AGAIN)
    return ids


def _added_by_itself(files: Files) -> dict[str, Field]:
    """add_bos_token and its like: what the post-processor adds to each text, else what tokenizer_config.json says."""
    out: dict[str, bool] = {}
    for step in _post_processors(files):
        if step.get("type") == "ByteLevel":
            out |= {"bos": False, "eos": False}
        elif step.get("type") != "TemplateProcessing" or "SpecialToken" in str(step.get("single")):
            raise BadInput(f"{files.path}: the post-processor {step.get('type')} adds tokens to each text, which is not implemented", AGAIN)
    for name in ADDED_BY_ITSELF:
        value = files.config.get(f"add_{name}_token")
        if isinstance(value, bool):
            out.setdefault(name, value)
    return {f"tokenizer.ggml.add_{name}_token": boolean(value) for name, value in out.items()}


def _post_processors(files: Files) -> list[dict[str, Any]]:
    found = files.tokenizer.get("post_processor")
    steps = found.get("processors", [found]) if isinstance(found, dict) else found or []
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise BadInput(f"{files.path}: post_processor has another form than tokenizers write", AGAIN)
    return steps
