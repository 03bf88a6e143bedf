"""--clip: what lies beyond the calibrated ranges is counted, or clamped; ranges of another model are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from a3b_gguf.clip_bounds import Bounds, Record, read_bounds
from a3b_gguf.flows.clipping import clip_config
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.llama.batch import Batch, decode, logits
from a3b_gguf.llama.load import load_model, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_server.clip import Clip, ClipConfig, Mode, limits_of
from command import a3b, assert_refused
from inside import inside
from serving import serving
from test_server_ops import numbers

TOKENS = [(37 * i + 11) % 2000 for i in range(24)]


@pytest.fixture(scope="module")
def measured(tiny_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """clip_bounds.bin of the embedded model."""
    out = tmp_path_factory.mktemp("clip")
    done = a3b("quantize", tiny_bf16, "--type", "q8_0", "-o", out / "tiny-q8_0.gguf")
    assert done.returncode == 0, done.stderr
    return out / "clip_bounds.bin"


@pytest.fixture(scope="module")
def run(tiny_bf16: Path) -> Callable[[Clip | None], NDArray[np.float32]]:
    def computed(clip: Clip | None) -> NDArray[np.float32]:
        """Logits behind TOKENS, one batch."""
        load = LoadParams(n_ctx=256, n_batch=64, n_ubatch=64, use_mmap=False)
        with load_model(tiny_bf16, load) as model, open_context(model, load, clip.gate if clip else None) as context:
            batch = Batch(64)
            last = batch.add(0, 0, TOKENS, 1)
            if clip:
                clip.turn()
            assert decode(context, batch) == 0
            return np.array(logits(context, last, read_gguf(tiny_bf16).hparam("vocab_size", 2048)))

    return computed


def config(measured: Path, tiny_bf16: Path, mode: Mode, scale: float) -> ClipConfig:
    found = clip_config(tiny_bf16, measured, mode)
    assert found is not None
    return ClipConfig(mode, {site: limit * scale for site, limit in found.limits.items()}, found.recurrent, found.routed)


def test_watching_counts_and_changes_nothing(
    measured: Path, tiny_bf16: Path, run: Callable[[Clip | None], NDArray[np.float32]]
) -> None:
    plain = run(None)
    inside, tight = (Clip(config(measured, tiny_bf16, "watch", scale)) for scale in (100.0, 0.25))
    assert (run(inside) == plain).all()
    assert (inside.counts.n_beyond, inside.failure) == (0, None)
    assert inside.counts.n_watched > 24 * 256 * 4
    assert (run(tight) == plain).all()
    assert tight.counts.n_beyond == sum(tight.counts.by_site.values()) > 0
    assert tight.counts.n_watched == inside.counts.n_watched
    assert 1 < tight.counts.worst
    assert tight.counts.n_clamped == 0


def test_clamping_changes_only_what_lies_beyond(
    measured: Path, tiny_bf16: Path, run: Callable[[Clip | None], NDArray[np.float32]]
) -> None:
    plain = run(None)
    wide, tight = (Clip(config(measured, tiny_bf16, "enforce", scale)) for scale in (100.0, 0.25))
    assert (run(wide) == plain).all()
    assert wide.counts.n_clamped == 0
    changed = run(tight)
    assert np.isfinite(changed).all()
    assert np.abs(changed - plain).max() > 0.01
    assert tight.counts.n_clamped > 0
    watched = Clip(config(measured, tiny_bf16, "watch", 0.25))
    run(watched)
    assert {layer for layer, _ in tight.counts.by_site} <= {layer for layer, _ in watched.counts.by_site} | {0, 1, 2, 3}
    assert not {site for _, site in tight.counts.by_site} & {"k_cache", "v_cache"}


def test_one_call_in_so_many_is_watched() -> None:
    clip = Clip(ClipConfig("watch", {(0, "residual"): 1.0}, every=4))
    active = []
    for _ in range(9):
        clip.turn()
        active.append(clip._active)
    assert active == [i % 4 == 0 for i in range(9)]
    always = Clip(ClipConfig("enforce", {(0, "residual"): 1.0}, every=4))
    always.turn()
    always.turn()
    assert always._active


def test_a_failure_ends_the_watching_and_not_the_engine() -> None:
    clip = Clip(ClipConfig("watch", {(0, "residual"): 1.0}))
    clip.turn()
    clip._names = None  # type: ignore[assignment]
    from a3b_gguf.llama.watch import GGMLTensor

    tensor = GGMLTensor(name=b"l_out-0")
    import ctypes

    assert clip._callback(ctypes.addressof(tensor), True, None) is False
    assert clip.failure is not None
    assert "TypeError" in clip.counts.failure
    clip.turn()
    assert not clip._active


def test_limits_are_of_all_experts_and_spare_the_caches(measured: Path) -> None:
    bounds = read_bounds(measured)
    watch, enforce = limits_of(bounds, "watch"), limits_of(bounds, "enforce")
    assert {site for _, site in watch} - {site for _, site in enforce} == {"k_cache", "v_cache"}
    assert watch[0, "residual"] == next(r.absmax for r in bounds.records if (r.layer, r.site, r.expert) == (0, "residual", -1))
    one = Record(3, "down_in", 7, 1, 0, 5.0, 1, 1, 1, 1, 1)
    assert limits_of(Bounds(bounds.header, (one,)), "watch") == {}


def test_wrong_flags_and_ranges_of_another_model(measured: Path, tiny_bf16: Path, tmp_path: Path) -> None:
    assert_refused(inside("serve", tiny_bf16, "--clip", "watch"), 2, "--clip-bounds and --clip go together")
    assert_refused(inside("serve", tiny_bf16, "--clip-bounds", measured), 2, "--clip-bounds and --clip go together")
    assert_refused(inside("serve", tiny_bf16, "--clip-bounds", tiny_bf16, "--clip", "watch"), 3, "not a clip_bounds file")
    other = tmp_path / "other.bin"
    data = bytearray(measured.read_bytes())
    at = data.index(b'"model_id"') + 14
    data[at : at + 4] = b"beef" if data[at : at + 4] != b"beef" else b"feed"
    other.write_bytes(data)
    assert_refused(inside("serve", tiny_bf16, "--clip-bounds", other, "--clip", "watch"), 3, "another model")


def test_a_server_that_watches_tells_on_its_metrics(measured: Path, tiny_bf16: Path) -> None:
    with serving(tiny_bf16, "--ctx", "1024", "--no-dry-run", "--clip-bounds", measured, "--clip", "watch") as served:
        with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            client.chat.completions.create(model=tiny_bf16.stem, messages=[{"role": "user", "content": "What is 7 plus 8?"}], max_tokens=5)
            found = numbers(client._client.get(served.url.removesuffix("/v1") + "/metrics").text)
    assert found["a3b_activations{watched}"] > 0
    assert found["a3b_activations{beyond}"] <= found["a3b_activations{watched}"]
