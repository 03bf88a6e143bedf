"""Interrupted at any moment, the next run goes on and writes the same bytes; nothing half-written ever has a final name."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from a3b_convert import convert
from a3b_gguf import fingerprint, part
from a3b_gguf.errors import BadInput, Interrupted, MachineLacks
from a3b_gguf.flows.quantize import Options, quantize_file
from a3b_gguf.flows.quantize_plan import prepare
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_write import lay_out, write_files
from a3b_gguf.metadata import string
from a3b_gguf.tensors import TYPES, TensorJob
from a3b_quantize.imatrix import write_imatrix
from command import a3b, assert_refused
from imatrix_files import made_up
from tiny import Form, Sizes, write_checkpoint

MIB = 1 << 20
CONVERT = ("convert",)
QUANTIZE = ("quantize", "--type", "q8_0", "--no-bounds")
# Runs a3b with a limit on the size of a file: beyond it a write fails, or the system kills the process, or the user presses Ctrl-C.
LIMITED = """
import os, resource, signal, sys
limit, action = int(sys.argv[1]), sys.argv[2]
sys.argv = ["a3b", *sys.argv[3:]]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL if action == "kill" else signal.SIG_IGN)
from a3b_gguf import part
from a3b_gguf.cli import main
part.SYNC_SECONDS, part.AHEAD_BYTES = 0, 0  # so that little work has many places to continue
if action == "ctrl-c":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    write = os.pwrite
    os.pwrite = lambda file, data, at: os.kill(os.getpid(), signal.SIGINT) if at > limit else write(file, data, at)
elif limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
main()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 55 MB, most of it experts of 4 MiB a tensor."""
    return write_checkpoint(tmp_path_factory.mktemp("source") / "m", Form(mtp=False), Sizes(hidden=256, ff=256, n_expert=32, n_layer=4))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """sha256 of what an uninterrupted run writes."""
    folder = tmp_path_factory.mktemp("whole")
    for words in (CONVERT, QUANTIZE):
        assert a3b(words[0], source, *words[1:], "-o", folder / words[0]).returncode == 0
    return {words: sha256(folder / words[0]) for words in (CONVERT, QUANTIZE)}


def limited(n_bytes: int, action: str, source: Path, words: tuple[str, ...], *more: object) -> subprocess.CompletedProcess[str]:
    """`a3b` on `source`, stopped where a file would grow beyond `n_bytes`."""
    command = [sys.executable, "-c", LIMITED, str(n_bytes), action, words[0], str(source), *words[1:], *map(str, more)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("words", "at", "continues"),
    [(CONVERT, 100_000, False), (CONVERT, 45 * MIB + 12_345, True), (QUANTIZE, 26 * MIB + 1, True)],
)
def test_killed_at_a_byte_and_run_again(
    source: Path, whole: dict[tuple[str, ...], str], tmp_path: Path, words: tuple[str, ...], at: int, continues: bool
) -> None:
    out = tmp_path / "out.gguf"
    killed = limited(at, "kill", source, words, "-o", out)
    assert killed.returncode == -signal.SIGXFSZ
    assert names(tmp_path) == ["out.gguf.part"]
    with pytest.raises(BadInput, match="GGUF"):  # the unfinished file is no model
        read_gguf(tmp_path / "out.gguf.part")
    done = a3b(words[0], source, *words[1:], "-o", out)
    assert ("continued after" in done.stderr) == continues, done.stderr
    assert names(tmp_path) == ["out.gguf"]
    assert sha256(out) == whole[words]


def test_a_full_disk(source: Path, whole: dict[tuple[str, ...], str], tmp_path: Path) -> None:
    before = {path.name: sha256(path) for path in source.iterdir()}
    out = tmp_path / "out.gguf"
    full = limited(41 * MIB, "error", source, CONVERT, "-o", out)
    assert_refused(full, 4, "File too large while writing", "the same command continues there")
    assert names(tmp_path) == ["out.gguf.part"]
    assert {path.name: sha256(path) for path in source.iterdir()} == before
    assert "continued after" in a3b("convert", source, "-o", out).stderr
    assert sha256(out) == whole[CONVERT]


def test_ctrl_c_says_how_to_go_on(source: Path, whole: dict[tuple[str, ...], str], tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    done = limited(12 * MIB, "ctrl-c", source, CONVERT, "-o", out)
    assert_refused(done, 130, "interrupted", f"{out}.part: the same command continues there")
    kept = float(done.stderr.split("interrupted; ")[1].split(" MiB")[0])
    assert 8 < kept < 16  # every whole tensor, also what was not synced yet
    assert f"continued after {kept:.2f} MiB" in a3b("convert", source, "-o", out).stderr
    assert sha256(out) == whole[CONVERT]


def job(name: str, n_bytes: int, fill: bytes, stop: Callable[[], None]) -> TensorJob:
    def chunks() -> Iterator[bytes]:
        yield fill * (n_bytes // 2)
        stop()
        yield fill * (n_bytes - n_bytes // 2)

    return TensorJob(name, (n_bytes // 4,), TYPES["f32"], chunks)


def interrupt() -> None:
    raise KeyboardInterrupt


SIZE = 4 * MIB + 4  # not a multiple of the alignment
KEY = b"the source"


def nothing() -> None:
    pass


def write(
    path: Path, stop: Callable[[], None] = nothing, key: bytes = KEY, text: str = "x", early: Callable[[], None] = nothing
) -> tuple[str, ...]:
    """A file of three tensors; `early` is called within the first two, `stop` within the third."""
    jobs = [job("a", SIZE, b"a", early), job("b", SIZE, b"b", early), job("c", SIZE, b"c", stop)]
    return write_files(lay_out(path, {"general.architecture": string(text)}, jobs), key=key)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """out.gguf, of which two tensors of three are in the part."""
    path = tmp_path / "out.gguf"
    with pytest.raises(Interrupted, match="8.00 MiB stay in"):
        write(path, interrupt)
    return path


def expected(tmp_path: Path) -> bytes:
    write(tmp_path / "other", key=b"")
    return (tmp_path / "other").read_bytes()


def test_what_is_behind_the_trusted_length_is_not_believed(stopped: Path, tmp_path: Path) -> None:
    """After a power cut a file can have the length of bytes that never reached the disk."""
    unfinished = tmp_path / "out.gguf.part"
    trusted = part.RECORD.unpack_from(unfinished.read_bytes())[2]
    with unfinished.open("r+b") as out:
        out.seek(trusted)
        out.write(bytes(SIZE + 12_345))
    assert write(stopped) == ("continued after 8.00 MiB of an interrupted run",)
    assert stopped.read_bytes() == expected(tmp_path)


def test_a_part_shorter_than_its_record_says_is_not_believed(stopped: Path, tmp_path: Path) -> None:
    os.truncate(tmp_path / "out.gguf.part", 5 * MIB)
    assert write(stopped) == ()
    assert stopped.read_bytes() == expected(tmp_path)


def test_whole_tensors_are_not_made_again(stopped: Path) -> None:
    assert write(stopped, early=interrupt) == ("continued after 8.00 MiB of an interrupted run",)


@pytest.mark.parametrize("change", [{"key": b"another source"}, {"text": "y"}])
def test_a_part_of_something_else_is_replaced_and_said_so(stopped: Path, tmp_path: Path, change: dict[str, object]) -> None:
    (note,) = write(stopped, **change)  # type: ignore[arg-type]
    assert "out.gguf.part was of another source or other options" in note
    write(tmp_path / "other", **change)  # type: ignore[arg-type]
    assert stopped.read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize("at", [0, 20, 45, 50])
def test_a_damaged_record_is_not_believed(stopped: Path, tmp_path: Path, at: int) -> None:
    unfinished = tmp_path / "out.gguf.part"
    data = bytearray(unfinished.read_bytes())
    data[at] ^= 1
    unfinished.write_bytes(data)
    assert "replaced" in write(stopped)[0]
    assert stopped.read_bytes() == expected(tmp_path)


def test_an_error_of_the_input_leaves_nothing(stopped: Path, tmp_path: Path) -> None:
    def broken() -> None:
        raise BadInput("a weight is NaN")

    with pytest.raises(BadInput):
        write(stopped, broken)
    assert names(tmp_path) == []


def test_two_runs_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"

    def second() -> None:
        with pytest.raises(MachineLacks, match="is being written by another run"):
            write(path)

    assert write(path, second) == ()
    assert path.read_bytes() == expected(tmp_path)
    assert write(path) == ()  # over a finished file, whose lock is gone


def test_a_record_is_written_after_its_bytes_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    pwrite, fsync = os.pwrite, os.fsync

    def seen_write(descriptor: int, data: bytes, offset: int) -> int:
        record = offset == 0 and bytes(data[:8]) == part.MAGIC
        events.append(("record", part.RECORD.unpack_from(data)[2]) if record else ("write", offset))
        return pwrite(descriptor, data, offset)

    def seen_sync(descriptor: int) -> None:
        events.append(("sync", 0))
        fsync(descriptor)

    monkeypatch.setattr(part, "SYNC_SECONDS", 0)
    monkeypatch.setattr(os, "pwrite", seen_write)
    monkeypatch.setattr(os, "fsync", seen_sync)
    write(tmp_path / "out.gguf")
    records = [(index, trusted) for index, (kind, trusted) in enumerate(events) if kind == "record" and trusted]
    assert records
    for index, trusted in records:
        last = max(i for i, (kind, offset) in enumerate(events[:index]) if kind == "write" and offset < trusted)
        assert ("sync", 0) in events[last:index]
    assert max(i for i, event in enumerate(events) if event[0] == "write" and event[1] == 0) > len(events) - 5  # the header comes last


def test_changes_of_the_source_and_of_options_start_anew(tmp_path: Path) -> None:
    """The same size is not enough: the checkpoint's own bytes count, and so do the options."""
    folder = write_checkpoint(tmp_path / "m", Form(mtp=False), Sizes(hidden=256, ff=256, n_expert=8, n_layer=1))
    out = tmp_path / "out.gguf"

    def stop_at_last(done: int, total: int, name: str) -> None:
        if name == "blk.0.ffn_up_exps.weight":
            raise KeyboardInterrupt

    def stopped_notes(run: Callable[[], tuple[str, ...]]) -> str:
        with pytest.raises(Interrupted):
            convert(folder, out, progress=stop_at_last)
        return " ".join(run())

    assert "continued" in stopped_notes(lambda: convert(folder, out).notes)
    assert "replaced" in stopped_notes(lambda: convert(folder, out, float_type="f32").notes)
    assert "replaced" in stopped_notes(lambda: quantize_file(folder, out, Options("bf16", bounds=False)).notes)
    weights = folder / "model.safetensors"
    about = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1

    def edited() -> tuple[str, ...]:
        weights.write_bytes(data)
        os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
        return convert(folder, out).notes

    assert "replaced" in stopped_notes(edited)


def test_fingerprint_of_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond WHOLE_BYTES: name, size, time and samples count, among them both ends; the folder does not."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", MIB)
    paths = [tmp_path / folder / "model.safetensors" for folder in "ab"]
    data = bytearray(10 * MIB)

    def written(path: Path, time_ns: int) -> bytes:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(time_ns, time_ns))
        return fingerprint.fingerprint([path], "x")

    first = written(paths[0], 10**18)
    assert written(paths[1], 10**18) == first
    assert written(paths[1], 10**18 + 1) != first
    for at in (0, len(data) - 1):
        data[at] ^= 1
        assert written(paths[1], 10**18) != first
        data[at] ^= 1
    assert fingerprint.fingerprint([paths[0]], "y") != first


def part_bytes(folder: Path) -> int:
    """Bytes in the parts of `folder`; a part may get its final name between two looks."""
    total = 0
    for path in folder.glob("*.part"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@pytest.mark.prove
@pytest.mark.parametrize("words", [CONVERT, QUANTIZE, (*CONVERT, "--max-shard-size", "60M")])
def test_killed_at_20_random_moments(tmp_path: Path, words: tuple[str, ...]) -> None:
    """SIGKILL at a random moment of a run, then another run: 20 times the sha256 of an uninterrupted one. 150 MB of safetensors."""
    folder = write_checkpoint(tmp_path / "m", Form(shards=3), Sizes(hidden=512, ff=256, n_expert=36, n_layer=4))
    assert sum(path.stat().st_size for path in folder.iterdir()) > 145e6
    chance, seen, part_way = random.Random(7), tmp_path / "out", 0
    seen.mkdir()

    def run() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LIMITED, "0", "", words[0], str(folder), *words[1:], "-o", str(seen / "out.gguf")]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def hashes() -> dict[str, str]:
        return {path.name: sha256(path) for path in seen.iterdir()}

    with run() as process:
        assert process.communicate(timeout=300)[1]
    expected, moments = hashes(), 0
    while moments < 20:
        for path in seen.iterdir():
            path.unlink()
        target = chance.randrange(sum(map(len, expected)), 150 * MIB if words[0] == "convert" else 80 * MIB)
        process = run()
        while process.poll() is None and part_bytes(seen) < target:
            os.sched_yield()
        process.kill()
        process.communicate()
        if process.returncode == 0:  # it was done before
            continue
        moments += 1
        assert not [path for path in seen.iterdir() if path.suffix == ".gguf"]
        again = run()
        part_way += "continued after" in again.communicate(timeout=300)[1]
        assert again.returncode == 0
        assert hashes() == expected
    assert part_way >= 5


def test_other_flags_start_again(tmp_path: Path) -> None:
    """What the bytes depend on and the header may not tell: effort, group sizes, importance, dropped experts."""
    source = write_checkpoint(tmp_path / "m", Form(mtp=False), Sizes())
    gguf = convert(source, tmp_path / "m.gguf").path
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        write_imatrix(tmp_path / name / "imatrix.gguf", made_up(gguf, seed))
        (tmp_path / name / "drops.toml").write_text(f'[drop]\n"0--1" = [{seed}]')

    def key(**more: Any) -> bytes:
        prepared = prepare(gguf, tmp_path / "out.gguf", Options("iq4_nl", bounds=False, **more))
        return prepared.key + prepared.files[0].start

    cases: list[dict[str, Any]] = [
        {"effort": 1}, {"effort": 2}, {"effort": 3}, {"kernel": "ggml"},
        {"group_sizes": ("expert_up=64",)}, {"group_sizes": ("expert_up=128",)},
        {"tensor_types": ("ffn_up_exps=q8_0",)}, {"experts": 1}, {"set_kv": ("general.name=x",)},
        {"calibration": tmp_path / "a"}, {"calibration": tmp_path / "b"},
        {"prune": tmp_path / "a" / "drops.toml"}, {"prune": tmp_path / "b" / "drops.toml"},
    ]  # fmt: skip
    assert len({key(**each) for each in cases}) == len(cases)
    assert key(calibration=tmp_path / "a") == key(calibration=tmp_path / "a")
    before = key(prune=tmp_path / "a" / "drops.toml")
    shutil.copy(tmp_path / "b" / "drops.toml", tmp_path / "a" / "drops.toml")  # the same name and the same number of experts
    assert key(prune=tmp_path / "a" / "drops.toml") != before
    policy = tmp_path / "own.toml"
    policy.write_text('[[rule]]\nroles = ["experts"]\ngroup_size = 64')
    before = key(policy=str(policy))
    policy.write_text('[[rule]]\nroles = ["experts"]\ngroup_size = 128')  # the header says nothing of it
    assert key(policy=str(policy)) != before
    before = key(imatrix=tmp_path / "a" / "imatrix.gguf")
    shutil.copy(tmp_path / "b" / "imatrix.gguf", tmp_path / "a" / "imatrix.gguf")
    assert key(imatrix=tmp_path / "a" / "imatrix.gguf") != before
