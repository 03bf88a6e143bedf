"""Each architecture's random checkpoint computes in llama.cpp what the Hugging Face implementation computes from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from a3b_convert import convert
from a3b_gguf.llama.batch import Batch, decode, logits
from a3b_gguf.llama.load import load_model, open_context
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from forms import COMPUTED
from golden_files import GOLDEN
from tiny import write_checkpoint

LIMIT, MARGIN = 0.002, 0.05  # of logits that span 6 and more
N_PROMPTS, N_ROWS = 3, 64
PARAMS = LoadParams(n_ctx=256, n_batch=N_ROWS, n_ubatch=N_ROWS, n_outputs_max=N_ROWS, kv_type_k="f32", kv_type_v="f32", flash_attn=False)


@pytest.mark.parametrize("name", COMPUTED)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    form, sizes = COMPUTED[name]
    convert(write_checkpoint(tmp_path / "tiny", form, sizes), tmp_path / "x.gguf", float_type="f32")
    with np.load(GOLDEN / "logits_random.npz") as arrays, LlamaLog(), load_model(tmp_path / "x.gguf", PARAMS) as model:
        for number in range(N_PROMPTS):
            tokens, theirs = arrays[f"{name} tokens {number}"].tolist(), arrays[f"{name} logits {number}"]
            batch = Batch(N_ROWS)
            with open_context(model, PARAMS) as context:
                last = batch.add(0, 0, tokens, outputs=len(theirs))
                assert decode(context, batch) == 0
                ours = np.stack([logits(context, last - len(theirs) + 1 + row, theirs.shape[1]) for row in range(len(theirs))])
            assert theirs.max() - theirs.min() > 5
            assert np.abs(ours - theirs).max() <= LIMIT
            best = np.sort(theirs, axis=1)
            clear = best[:, -1] - best[:, -2] > MARGIN
            assert (ours.argmax(1) == theirs.argmax(1))[clear].all()
