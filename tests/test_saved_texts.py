"""Texts on disk: the container, the folder that keeps to its size, and chats that go on after a restart."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import openai
import pytest

from a3b_gguf.llama.batch import last_position
from a3b_gguf.llama.load import Context
from a3b_server.checkpoints import CheckpointPool
from a3b_server.messages import Submit
from a3b_server.prefixes import Reuse
from a3b_server.saved_texts import LEAST_TOKENS, SavedTexts
from a3b_server.state_file import BadState, read_text, read_tokens, write_text
from a3b_server.state_folder import SUFFIX, StateFolder
from a3b_server.text_store import SavedText
from command import assert_refused
from engine_bench import GREEDY, PARAMS, Bench, assert_greedy, opened, plain_logits
from inside import inside
from pooling_models import MEAN, decoder
from serving import serving
from test_prefixes import chat

MINE = "model A"


def text_of(n_tokens: int = 300, state_bytes: int = 1000, first: int = 0) -> SavedText:
    values = np.arange(state_bytes, dtype=np.uint64).astype(np.uint8)
    return SavedText(list(range(first, first + n_tokens)), 128, values, ((100, values[:50]), (200, values[50:100])))


def assert_same(found: SavedText | None, wanted: SavedText) -> None:
    assert found is not None
    assert (found.tokens, found.n_exact) == (wanted.tokens, wanted.n_exact)
    assert np.array_equal(found.state, wanted.state)
    assert [count for count, _ in found.checkpoints] == [count for count, _ in wanted.checkpoints]
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(found.checkpoints, wanted.checkpoints, strict=True))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path, text = tmp_path / f"x{SUFFIX}", text_of()
    write_text(path, text, MINE)
    assert_same(read_text(path, MINE), text)
    header, tokens = read_tokens(path, MINE)
    assert (tokens, header.checkpoints, header.n_exact) == (text.tokens, ((100, 50), (200, 50)), 128)
    assert path.stat().st_size <= text.n_bytes
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it holds what somebody wrote"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_exactly_right_is_refused(tmp_path: Path) -> None:
    """Cut anywhere, any byte changed, a byte more, another model: BadState and nothing else."""
    path, text, chance = tmp_path / "x", text_of(20, 60), random.Random(5)
    write_text(path, text, MINE)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(BadState):
            read_tokens(path, MINE)
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= chance.randrange(1, 256)
        path.write_bytes(changed)
        with pytest.raises(BadState):
            read_text(path, MINE)
    for data in (whole + b"\0", b"", b"GGUF" + bytes(100), b"A3BTEXT1" + b"\xff" * 100):
        path.write_bytes(data)
        with pytest.raises(BadState):
            read_text(path, MINE)
    path.write_bytes(whole)
    with pytest.raises(BadState, match="another model"):
        read_text(path, "model B")


def folder_of(path: Path, limit: int = 1 << 20, notes: list[str] | None = None, fingerprint: str = MINE) -> StateFolder:
    return StateFolder(path, limit, fingerprint, (notes if notes is not None else []).append)


def saved(folder: StateFolder, *texts: SavedText) -> None:
    for i, text in enumerate(texts):
        assert folder.save(text)
        folder._writer.submit(lambda: None).result()
        for name, entry in folder.entries.items():
            if entry.tokens == text.tokens:
                os.utime(folder._folder / name, (i, i))


def test_the_folder_keeps_to_its_size_and_drops_the_least_used(tmp_path: Path) -> None:
    first, second, third = (text_of(first=i) for i in (0, 1000, 2000))
    limit = 2 * first.n_bytes + 100
    folder = folder_of(tmp_path, limit)
    saved(folder, first, second)
    entry = next(e for e in folder.entries.values() if e.tokens == first.tokens)
    assert_same(folder.load(entry), first)  # and is the newest now
    saved(folder, third)
    assert sorted(e.tokens[0] for e in folder.entries.values()) == [0, 2000]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    assert not folder.save(text_of(state_bytes=limit)), "larger than all the room there is"
    folder.close()
    assert sorted(e.tokens[0] for e in folder_of(tmp_path, limit).entries.values()) == [0, 2000]


def test_a_text_that_goes_on_from_another_takes_its_place(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    saved(folder, text_of(200), text_of(300), text_of(300))
    assert [len(e.tokens) for e in folder.entries.values()] == [300]
    assert len(list(tmp_path.iterdir())) == 1
    folder.close()


def test_what_is_foreign_or_damaged_is_told_and_left_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    saved(folder, text_of(), text_of(first=5000))
    folder.close()
    good, bad = sorted(tmp_path.iterdir())
    bad.write_bytes(bad.read_bytes()[:-10])
    (tmp_path / f"strange{SUFFIX}").write_bytes(b"hello")
    (tmp_path / f"folder{SUFFIX}").mkdir()
    (tmp_path / "notes.txt").write_text("not ours")
    saved(other := folder_of(tmp_path, fingerprint="model B"), text_of(first=9000))
    other.close()
    notes: list[str] = []
    again = folder_of(tmp_path, notes=notes)
    assert list(again.entries) == [good.name]
    assert len(notes) == 3
    assert sum("cut off" in note for note in notes) == sum("no saved text" in note for note in notes) == 1
    assert f"{tmp_path}: 1 saved texts are of other models, or of other types of cache, and are left out" in notes
    good.write_bytes(good.read_bytes()[:-1] + b"\0")  # behind the folder's back
    notes.clear()
    assert again.load(again.entries[good.name]) is None
    assert "is left out" in notes[0]
    assert not again.entries
    again.close()
    assert (tmp_path / "notes.txt").exists()


def test_unfinished_files_of_the_dead_are_removed(tmp_path: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    dead, alive = (tmp_path / f"x{SUFFIX}.{pid}.part" for pid in (done.pid, os.getpid()))
    dead.touch()
    alive.touch()
    folder_of(tmp_path).close()
    assert list(tmp_path.iterdir()) == [alive]


def test_a_disk_that_takes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    notes: list[str] = []
    folder = folder_of(tmp_path, notes=notes)
    monkeypatch.setattr("a3b_server.state_file.os.fsync", full)
    assert folder.save(text_of())
    folder.close()
    assert "was not saved" in notes[0]
    assert "No space left on device" in notes[0]
    assert list(tmp_path.iterdir()) == []


def test_a_saved_text_must_be_worth_its_reading(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    saved(folder, text_of(300), text_of(4000, first=10_000), text_of(400, first=20_000))
    texts, plain = SavedTexts(cast(Context, None), folder, CheckpointPool(0, 0)), Reuse(False, CheckpointPool(0, 0))
    hybrid, aligned = Reuse(True, CheckpointPool(0, 0)), Reuse(False, CheckpointPool(0, 0), 64)

    def found(prompt: list[int], n_tokens: int, reuse: Reuse) -> int | None:
        entry = texts.better(prompt, n_tokens, reuse)
        return None if entry is None else entry.tokens[0]

    first = list(range(300))
    assert found(first, 0, plain) == 0
    assert found(first, 299 - 64, plain) == 0
    assert found(first, 299 - 63, plain) is None, "hardly better than what the cache has"
    assert found(list(range(10_000, 10_240)), 0, plain) is None, "a sixteenth of it is of use"
    assert found(list(range(10_000, 10_300)), 0, plain) == 10_000
    assert found(list(range(20_000, 20_090)), 0, hybrid) is None, "no checkpoint lies before that"
    assert found(list(range(20_000, 20_120)), 0, hybrid) == 20_000
    assert found(first, 128 - 64, aligned) == 0, "128 tokens were read in whole chunks"
    assert found(first, 128 - 63, aligned) is None
    folder.close()


@contextmanager
def keeping(path: Path, folder: Path, mtp: bool = False, **more: int | bool) -> Iterator[Bench]:
    """An engine that saves to `folder`; when it ends, what it held is there."""
    params = replace(PARAMS, n_ctx=4096, n_batch=512, n_ubatch=512, n_seq_max=2, n_outputs_max=4, n_draft=int(mtp), **more)  # type: ignore[arg-type]
    with opened(path, params, mtp) as bench:
        texts = SavedTexts(bench.context, folder_of(folder, 1 << 28), bench.engine.slots.checkpoints, bench.drafter)
        bench.engine.slots.saved = texts
        yield bench
        bench.engine.close()
        assert [last_position(bench.context, seq) for seq in range(2)] == [-1, -1]
        texts.close()


@pytest.mark.parametrize("mtp", [False, True])
def test_a_chat_goes_on_after_a_restart(tiny_bf16: Path, tmp_path: Path, mtp: bool) -> None:
    """Second start, first turn: only what is new is read, and the answer is the model's own."""
    with keeping(tiny_bf16, tmp_path, mtp) as bench:
        first, marks = chat(bench, "What is the capital of Chile?")
        (answer,) = bench.ask(Submit("1", first, 16, GREEDY, marks))
        said = b"".join(map(bench.vocab.piece, answer)).decode()
        second, marks = chat(bench, "What is the capital of Chile?", said, "And of Japan?")
    with keeping(tiny_bf16, tmp_path, mtp) as bench, plain_logits(bench.context.model, 512) as oracle:
        (again,) = bench.ask(Submit("2", second, 16, GREEDY, marks))
        n_read = len(second) - bench.end("2").n_cached
        assert len(second) > 480
        assert n_read < 100
        assert bench.engine.look().counts.n_loaded == 1
        assert (bench.end("2").n_drafted > 0) is mtp, "the MTP block's cache came back, too"
        assert_greedy(oracle, second, again)
        (twice,) = bench.ask(Submit("3", second, 16, GREEDY, marks))
        assert twice == again
        assert bench.engine.look().counts.n_loaded == 1, "it is in the cache now"


def test_an_evicted_text_comes_back_while_another_takes_its_slot(tiny_bf16: Path, tmp_path: Path) -> None:
    with keeping(tiny_bf16, tmp_path) as bench, plain_logits(bench.context.model, 512) as oracle:
        chats = [bench.text(f"<|im_start|>user\n{word} " + f"{word} and " * 150) for word in ("apple", "train", "river")]
        assert min(map(len, chats)) > 2 * LEAST_TOKENS
        said = []
        for i, prompt in enumerate(chats):  # two slots: the third pushes the first out
            said += bench.ask(Submit(str(i), prompt, 4, GREEDY))
            bench.engine.slots.saved._store._writer.submit(lambda: None).result()  # type: ignore[union-attr]
        assert bench.engine.look().counts.n_saved == 1
        longer = (*chats[0], *said[0], *bench.text(" and what else?"))
        (answer,) = bench.ask(Submit("again", longer, 8, GREEDY))
        assert bench.end("again").n_cached >= len(chats[0]) - 8
        assert bench.engine.look().counts.n_loaded == 1
        assert_greedy(oracle, longer, answer)


@pytest.mark.parametrize("split", [False, True])
def test_plain_models_go_on_from_the_middle_of_a_saved_text(tiny_bf16: Path, tmp_path: Path, split: bool) -> None:
    path = decoder(tmp_path / "plain.gguf", tiny_bf16, MEAN)
    prompt = tuple((7 * i) % 4000 for i in range(900))
    (tmp_path / "states").mkdir()
    with keeping(path, tmp_path / "states", kv_unified=not split, reproducible=split) as bench:
        bench.ask(Submit("1", prompt, 4, GREEDY))
    with keeping(path, tmp_path / "states", kv_unified=not split, reproducible=split) as bench:
        other = (*prompt[:700], 5, 6, 7)
        (answer,) = bench.ask(Submit("2", other, 8, GREEDY))
        assert bench.end("2").n_cached == (512 if split else 700)
    (tmp_path / "none").mkdir()
    with keeping(path, tmp_path / "none", kv_unified=not split, reproducible=split) as bench:
        (plain,) = bench.ask(Submit("2", other, 8, GREEDY))
    assert not split or plain == answer, "with --kv-split the same bits"


def test_a_saved_text_for_which_there_is_no_room_is_read_again(tiny_bf16: Path, tmp_path: Path) -> None:
    prompt = tuple((7 * i) % 4000 for i in range(900))
    with keeping(tiny_bf16, tmp_path) as bench:
        bench.ask(Submit("1", prompt, 4, GREEDY))
    with opened(tiny_bf16, replace(PARAMS, n_ctx=512, n_batch=128, n_ubatch=128, n_seq_max=1, n_outputs_max=1)) as bench:
        bench.engine.slots.saved = texts = SavedTexts(bench.context, folder_of(tmp_path), bench.engine.slots.checkpoints)
        (answer,) = bench.ask(Submit("2", prompt[:400], 4, GREEDY))
        assert len(answer) == 4
        assert bench.engine.look().counts.n_loaded == 0
        bench.engine.close()
        texts.close()


def test_texts_that_are_too_short_or_there_already_are_not_saved(tiny_bf16: Path, tmp_path: Path) -> None:
    with keeping(tiny_bf16, tmp_path) as bench:
        bench.ask(Submit("1", tuple(range(100, 100 + LEAST_TOKENS - 10)), 2, GREEDY))
    assert list(tmp_path.iterdir()) == []


def test_the_pool_names_what_a_text_begins_with() -> None:
    pool = CheckpointPool(8, 80)
    for tokens in ([1, 2], [1, 2, 3], [1, 3], [1, 2, 3, 4]):
        pool.take(tokens)
    assert sorted(c.n_tokens for c in pool.of([1, 2, 3])) == [2, 3]


def test_a_server_that_was_stopped_goes_on_where_it_was(tiny_bf16: Path, tmp_path: Path) -> None:
    """`a3b serve --states`: SIGTERM saves, the next start reads only what is new."""
    history = [{"role": "user", "content": "Tell me about Chile. " * 80}]

    def turn(messages: list[dict[str, str]]) -> tuple[str, int, int]:
        with (tmp_path / "errors").open("ab") as errors, serving(
            tiny_bf16, "--ctx", "4096", "--states", tmp_path / "kept", "--states-limit", "1GiB", errors=errors
        ) as served:
            with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
                answer = client.chat.completions.create(
                    model=tiny_bf16.stem, messages=messages, max_tokens=8, temperature=0, extra_body={"enable_thinking": False},  # type: ignore[arg-type]
                )  # fmt: skip
            assert served.end(signal.SIGTERM) == 0
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0

    said, n_prompt, n_cached = turn(history)
    assert n_cached == 0
    assert n_prompt > 300
    (tmp_path / "kept" / f"strange{SUFFIX}").write_bytes(b"hello")
    messages = [*history, {"role": "assistant", "content": said}, {"role": "user", "content": "And Japan?"}]
    _, n_prompt, n_cached = turn(messages)
    assert n_prompt - n_cached < 80, (n_prompt, n_cached)
    assert "strange.a3btext is left out: it is no saved text" in (tmp_path / "errors").read_text()


def test_folders_that_cannot_be_used(tiny_bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert_refused(inside("serve", tiny_bf16, "--states", tmp_path / "file"), 2, "--states", "give a folder")
    assert_refused(inside("serve", tiny_bf16, "--states", tmp_path / "x", "--states-limit", "many"), 2, "--states-limit")
    assert_refused(inside("serve", tiny_bf16, "--states", tmp_path / "x", "--keep-texts", "1GiB"), 2, "--keep-texts", "give one of them")
    assert_refused(inside("serve", tiny_bf16, "--keep-texts", "much"), 2, "--keep-texts")
