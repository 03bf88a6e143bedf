"""The converted model computes what the Hugging Face implementation computes: logits and tokens, stored by a script that has torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from a3b_convert import convert
from a3b_gguf.llama.batch import Batch, decode, drop, logits
from a3b_gguf.llama.load import Context, LoadedModel, load_model, open_context
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from golden_files import read_golden

LIMIT, MARGIN = 0.002, 0.05  # of logits; measured differences are below 1e-5
N_PROMPTS, N_ROWS = 5, 64
PARAMS = LoadParams(
    n_ctx=256, n_batch=N_ROWS, n_ubatch=N_ROWS, n_outputs_max=N_ROWS, kv_type_k="f32", kv_type_v="f32", flash_attn=False
)  # fmt: skip
Golden = dict[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def golden(tiny_checkpoint: Path) -> Golden:
    return read_golden("logits_tiny_a3b.npz", "logits_transformers.py", tiny_checkpoint)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    path = tmp_path_factory.mktemp("logits") / "f32.gguf"
    convert(tiny_checkpoint, path, float_type="f32")
    with LlamaLog(), load_model(path, PARAMS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def context(model: LoadedModel) -> Iterator[Context]:
    with open_context(model, PARAMS) as opened:
        yield opened


@pytest.mark.parametrize("number", range(N_PROMPTS))
def test_logits_are_those_of_transformers(golden: Golden, context: Context, number: int) -> None:
    theirs, tokens = golden[f"logits_{number}"], golden[f"tokens_{number}"].tolist()
    batch = Batch(N_ROWS)
    last = batch.add(0, 0, tokens, outputs=len(theirs))
    drop(context, 0)
    assert decode(context, batch) == 0
    ours = np.stack([logits(context, last - len(theirs) + 1 + row, theirs.shape[1]) for row in range(len(theirs))])
    assert np.abs(ours - theirs).max() <= LIMIT
    best = np.sort(theirs, axis=1)
    clear = best[:, -1] - best[:, -2] > MARGIN
    assert (ours.argmax(1) == theirs.argmax(1))[clear].all()


@pytest.mark.parametrize("number", range(N_PROMPTS))
def test_tokens_are_those_of_transformers(golden: Golden, model: LoadedModel, number: int) -> None:
    assert Vocab(model).tokenize(str(golden[f"text_{number}"]), parse_special=True) == golden[f"tokens_{number}"].tolist()
