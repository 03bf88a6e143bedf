"""What llama.cpp's memory does with parts of sequences on a hybrid: right and wrong orders of calls, and what a failed call leaves.

The wrong ones are wrong without a word, which is why the engine keeps to its rules. When one of them becomes right, llama.cpp has changed.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from a3b_gguf.llama.batch import Batch, decode, drop, last_position, logits
from a3b_gguf.llama.load import Context, LoadedModel, load_model, open_context
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.sequences import copy, cut, load_state, save_state, state_size

N_DRAFT = 3
PARAMS = LoadParams(n_ctx=1024, n_seq_max=3, n_batch=512, n_ubatch=512, n_outputs_max=12, n_draft=N_DRAFT)
RNG = np.random.default_rng(0)
TEXT, MORE, OTHER = (RNG.integers(10, 4000, n).tolist() for n in (100, 20, 50))
NEXT = 77
WRONG = 2e-2  # wrong logits differ by more than 5e-2, right ones by rounding at most

Part = tuple[int, int, Sequence[int]]  # sequence, position of the first token, tokens


class Memory:
    """A context and the plainest use of it."""

    def __init__(self, context: Context) -> None:
        self.context, self.batch = context, Batch(512)

    def rows(self, *parts: Part) -> NDArray[np.float32]:
        """Logits of the last row of one call."""
        self.batch.clear()
        for seq, pos, tokens in sorted(parts, key=lambda part: part[0]):
            last = self.batch.add(seq, pos, tokens, 1)
        assert decode(self.context, self.batch) == 0
        return logits(self.context, last, 4096).copy()

    def result(self, *rows: Part) -> int:
        self.batch.clear()
        for seq, pos, tokens in rows:
            self.batch.add(seq, pos, tokens, 1)
        return decode(self.context, self.batch)

    def state(self, seq: int, flags: int = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) -> NDArray[np.uint8]:
        buffer = np.zeros(state_size(self.context, seq, flags), np.uint8)
        assert save_state(self.context, seq, buffer, flags) == len(buffer)
        return buffer


@pytest.fixture(scope="module")
def model(tiny_bf16: Path) -> Iterator[LoadedModel]:
    with LlamaLog(), load_model(tiny_bf16, PARAMS) as found:
        yield found


@pytest.fixture(scope="module")
def context(model: LoadedModel) -> Iterator[Context]:
    with open_context(model, PARAMS) as found:
        yield found


@pytest.fixture
def memory(context: Context) -> Memory:
    """Every sequence holds TEXT."""
    for seq in range(3):
        drop(context, seq)
    found = Memory(context)
    for seq in range(3):
        found.rows((seq, 0, TEXT))
    return found


@pytest.fixture(scope="module")
def expected(context: Context) -> list[NDArray[np.float32]]:
    """Logits of NEXT after TEXT and 0 to 3 tokens of MORE."""
    found = []
    for n in range(4):
        for seq in range(3):
            drop(context, seq)
        memory = Memory(context)
        memory.rows((0, 0, TEXT))
        if n:
            memory.rows((0, 100, MORE[:n]))
        found.append(memory.rows((0, 100 + n, [NEXT])))
    return found


def off(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(found - expected).max())


@pytest.mark.parametrize("n_back", [1, 2, 3])
def test_rows_that_were_just_verified_can_be_taken_back(memory: Memory, expected: list[NDArray[np.float32]], n_back: int) -> None:
    memory.rows((0, 100, MORE[:4]))
    assert cut(memory.context, 0, 104 - n_back)
    assert off(memory.rows((0, 104 - n_back, [NEXT])), expected[4 - n_back]) < WRONG


def test_no_more_than_there_are_states(memory: Memory) -> None:
    memory.rows((0, 100, MORE[:4]))
    assert not cut(memory.context, 0, 100)
    assert last_position(memory.context, 0) == 103


@pytest.mark.parametrize("n_rows", [1, 2])
def test_wrong_to_take_back_all_rows_of_a_call(memory: Memory, expected: list[NDArray[np.float32]], n_rows: int) -> None:
    """So a token that was drawn and evaluated is never taken back, whatever stop string it completes."""
    memory.rows((0, 100, MORE[:n_rows]))
    assert cut(memory.context, 0, 100)
    assert off(memory.rows((0, 100, [NEXT])), expected[0]) > WRONG


def test_wrong_once_others_were_decoded(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    memory.rows((1, 100, MORE[:4]))
    memory.rows((0, 100, [5]))
    memory.rows((0, 101, [9]), (2, 100, [9]))
    assert cut(memory.context, 1, 102)
    assert off(memory.rows((1, 102, [NEXT])), expected[2]) > WRONG


def test_right_when_others_are_decoded_after_it(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    memory.rows((1, 100, MORE[:4]))
    assert cut(memory.context, 1, 102)
    memory.rows((0, 100, [5]))
    memory.rows((0, 101, [9]), (2, 100, [9]))
    assert off(memory.rows((1, 102, [NEXT])), expected[2]) < WRONG


def test_wrong_in_a_call_with_prompts_of_others(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    memory.rows((1, 100, MORE[:4]), (0, 100, OTHER), (2, 100, OTHER))
    assert cut(memory.context, 1, 102)
    assert off(memory.rows((1, 102, [NEXT])), expected[2]) > WRONG


def test_rows_are_taken_back_once(memory: Memory) -> None:
    memory.rows((0, 100, MORE[:4]))
    assert cut(memory.context, 0, 103)
    assert not cut(memory.context, 0, 102)


def test_a_copy_of_a_cut_sequence_has_the_state_before_the_cut(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    memory.rows((0, 100, MORE[:4]))
    assert cut(memory.context, 0, 102)
    drop(memory.context, 1)
    copy(memory.context, 0, 1)
    assert off(memory.rows((1, 102, [NEXT])), expected[2]) > WRONG
    assert off(memory.rows((0, 102, [NEXT])), expected[2]) < WRONG


def test_a_saved_state_of_a_cut_sequence_is_right(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    memory.rows((0, 100, MORE[:4]))
    assert cut(memory.context, 0, 102)
    state = memory.state(0)
    drop(memory.context, 1)
    copy(memory.context, 0, 1)
    assert load_state(memory.context, 1, state)
    assert cut(memory.context, 1, 102)
    assert off(memory.rows((1, 102, [NEXT])), expected[2]) < WRONG


def test_a_checkpoint_brings_an_earlier_point_back(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    state = memory.state(0)
    memory.rows((0, 100, MORE))
    assert not cut(memory.context, 0, 100)  # not without the state
    assert load_state(memory.context, 0, state)
    assert cut(memory.context, 0, 100)
    assert off(memory.rows((0, 100, [NEXT])), expected[0]) == 0


def test_wrong_without_the_cut(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    state = memory.state(0)
    memory.rows((0, 100, MORE))
    assert load_state(memory.context, 0, state)
    assert last_position(memory.context, 0) == 99
    assert off(memory.rows((0, 100, [NEXT])), expected[0]) > WRONG


def test_wrong_without_the_attention_rows(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    state = memory.state(0)
    drop(memory.context, 0)
    assert load_state(memory.context, 0, state)
    assert cut(memory.context, 0, 100)
    assert off(memory.rows((0, 100, [NEXT])), expected[0]) > WRONG


def test_a_state_that_was_cut_off_is_refused_and_leaves_pieces(memory: Memory) -> None:
    state = memory.state(0)
    assert not load_state(memory.context, 0, state[: len(state) // 2])
    drop(memory.context, 0)
    assert last_position(memory.context, 0) == -1
    assert memory.rows((0, 0, TEXT)).size


def test_a_whole_state_goes_where_nothing_is(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    state = memory.state(0, 0)
    drop(memory.context, 0)
    drop(memory.context, 2)
    assert load_state(memory.context, 2, state, 0)
    assert off(memory.rows((2, 100, [NEXT])), expected[0]) == 0


# The table of results


def test_refused_batches_change_nothing_and_leave_old_logits_readable(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    for rows in ((0, 10, [5]), (0, 100, [10**7]), (3, 0, [5])):
        assert memory.result(rows) == -1
        assert last_position(memory.context, 0) == 99
    assert bool(C.llama_get_logits_ith(memory.context.pointer, 99))
    assert off(memory.rows((0, 100, [NEXT])), expected[0]) == 0


def test_a_gap_in_the_positions_of_a_hybrid_is_accepted(memory: Memory) -> None:
    """So check_call compares every position with what the cache holds."""
    assert memory.result((0, 400, [5])) == 0


def test_a_full_cache_changes_nothing(memory: Memory, expected: list[NDArray[np.float32]]) -> None:
    memory.rows((1, 100, RNG.integers(10, 4000, 500).tolist()))
    assert memory.result((2, 100, RNG.integers(10, 4000, 300).tolist())) == 1
    assert [last_position(memory.context, seq) for seq in range(3)] == [99, 599, 99]
    assert off(memory.rows((0, 100, [NEXT])), expected[0]) < WRONG
    drop(memory.context, 1)
    assert memory.result((2, 100, RNG.integers(10, 4000, 300).tolist())) == 0


def test_an_aborted_call_leaves_a_state_that_must_be_dropped(model: LoadedModel, expected: list[NDArray[np.float32]]) -> None:
    flag = ctypes.create_string_buffer(b"\1", 2)
    aborts = ctypes.cast(ctypes.CDLL(None).strlen, C.ggml_abort_callback)  # a bool of C that needs no interpreter: 1 as long as flag is set
    with open_context(model, replace(PARAMS, n_ubatch=64)) as context:
        memory = Memory(context)
        memory.rows((0, 0, TEXT))
        C.llama_set_abort_callback(context.pointer, aborts, ctypes.addressof(flag))
        assert memory.result((0, 100, RNG.integers(10, 4000, 200).tolist())) == 2
        flag[0] = b"\0"
        drop(context, 0)
        memory.rows((0, 0, TEXT))
        assert off(memory.rows((0, 100, [NEXT])), expected[0]) < WRONG


DIES = """
import sys
from dataclasses import replace
from pathlib import Path
from a3b_gguf.llama.batch import Batch, decode
from a3b_gguf.llama.load import load_model, open_context
from a3b_gguf.llama.params import LoadParams
params = LoadParams(n_ctx=512, n_seq_max=2, n_batch=64, n_ubatch=64, n_outputs_max=2)
with load_model(Path(sys.argv[1]), params) as model, open_context(model, params) as context:
    batch = Batch(128)
    batch.add(0, 0, list(range(int(sys.argv[2]))), int(sys.argv[3]))
    print(decode(context, batch))
"""


@pytest.mark.parametrize(("n_rows", "n_outputs"), [(65, 1), (8, 3)])
def test_what_ends_the_process(tiny_bf16: Path, n_rows: int, n_outputs: int) -> None:
    """More rows than n_batch, more outputs than n_outputs_max: check_call refuses both."""
    words = [sys.executable, "-c", DIES, str(tiny_bf16), str(n_rows), str(n_outputs)]
    ended = subprocess.run(words, capture_output=True, text=True, env={"GGML_NO_BACKTRACE": "1"}, check=False)
    assert ended.returncode == -6
    assert "GGML_ASSERT" in ended.stderr
