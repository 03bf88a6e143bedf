"""Where a command is told to read or to write: what is no file is refused, links are followed, nothing is replaced that should stay."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from a3b_gguf.errors import UsageError
from a3b_gguf.part import part_file, write_file, written
from command import assert_refused
from inside import inside as a3b
from small_gguf import write_arrays

LATE = '[{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}]'


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe that nobody writes: whoever opens it waits for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_arrays(tmp_path / "small.gguf", {"token_embd.weight": np.zeros((4, 32), np.float32)})


WRITERS: dict[str, Sequence[str]] = {
    "convert": ("-o",),
    "quantize": ("--type", "q8_0", "--no-bounds", "-o"),
    "quantize, report": ("--type", "q8_0", "--no-bounds", "--report"),
    "eval": ("--embed",),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_devices_pipes_and_folders_are_not_replaced(tiny_checkpoint: Path, small: Path, pipe: Path, tmp_path: Path, writer: str) -> None:
    """For root, a rename puts a file even where /dev/null stands."""
    command = writer.split(",")[0]
    source = tiny_checkpoint if command == "convert" else small
    for place, kind in ((pipe, "a device or a pipe"), (tmp_path, "a folder")):
        before = sorted(tmp_path.iterdir())
        assert_refused(a3b(command, source, *WRITERS[writer], place, cwd=tmp_path), 2, f"{place} is {kind}, not a file")
        assert sorted(tmp_path.iterdir()) == before
        assert not stat.S_ISREG(place.stat().st_mode)
    assert_refused(a3b(command, source, *WRITERS[writer], "-", cwd=tmp_path), 2, "- is a pipe, not a file")


def test_mended_prompts_go_into_pipes_and_through_links(tmp_path: Path, pipe: Path) -> None:
    """`-o /dev/stdout` and `-o >(a program)` are written as they are; what a link names keeps its place and the link too."""
    (tmp_path / "late.json").write_text(LATE)
    (tmp_path / "link.json").symlink_to("late.json")
    (tmp_path / "new.json").symlink_to("made.json")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert a3b("verify-prompt", "late.json", "--fix", "-o", pipe, cwd=tmp_path).returncode == 0
    mended = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert a3b("verify-prompt", "late.json", "--fix", "-o", "new.json", cwd=tmp_path).returncode == 0
    assert a3b("verify-prompt", "link.json", "--fix", cwd=tmp_path).returncode == 0
    assert [(tmp_path / name).is_symlink() for name in ("link.json", "new.json", "late.json", "made.json")] == [True, True, False, False]
    assert (tmp_path / "late.json").read_text() == (tmp_path / "made.json").read_text() == mended != LATE
    assert_refused(a3b("verify-prompt", "late.json", "--fix", "-o", tmp_path, cwd=tmp_path), 2, "is a folder, not a file")
    assert_refused(a3b("verify-prompt", "late.json", "--fix", "-o", tmp_path / "no" / "x", cwd=tmp_path), 2, "No such file or directory")


def test_a_link_is_written_through(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A model's name on a small disk may be a link to a large one."""
    (tmp_path / "large").mkdir()
    (tmp_path / "m.gguf").symlink_to("large/m.gguf")
    assert a3b("convert", tiny_checkpoint, "-o", tmp_path / "m.gguf", "--json").returncode == 0
    assert (tmp_path / "m.gguf").is_symlink()
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["m.gguf"]
    (tmp_path / "lost.gguf").symlink_to("nowhere/m.gguf")
    assert_refused(a3b("convert", tiny_checkpoint, "-o", tmp_path / "lost.gguf"), 2, f"{tmp_path / 'nowhere'}: No such file")


def test_a_small_file_that_is_written_again_keeps_its_permissions(tmp_path: Path) -> None:
    place = tmp_path / "report.json"
    write_file(place, b"old")
    place.chmod(0o640)
    write_file(place, b"new")
    assert (place.read_bytes(), place.stat().st_mode & 0o777) == (b"new", 0o640)

    def half() -> Iterator[bytes]:
        yield b"ne"
        raise ValueError("half")

    with pytest.raises(ValueError, match="half"), part_file(place, 3) as out:
        out.writelines(half())
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("report.json", b"new")]


def test_places_of_small_files(tmp_path: Path, pipe: Path) -> None:
    (tmp_path / "link").symlink_to("there")
    assert written(tmp_path / "link") == tmp_path.resolve() / "there"
    assert written(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "loop").symlink_to("loop")
    for place in (tmp_path, pipe, tmp_path / "loop"):
        with pytest.raises(UsageError), part_file(place, 1) as out:
            out.write(b"x")


@pytest.mark.parametrize("command", ["inspect", "plan", "serve", "calibrate", "eval", "quantize"])
def test_what_is_no_model_is_told_apart(command: str, tiny_checkpoint: Path, small: Path, pipe: Path, tmp_path: Path) -> None:
    """One message, exit code 3, and what to do: each of these was taken for a model by somebody."""
    words = ("--type", "q8_0") if command == "quantize" else ()
    starts = {
        "lfs.gguf": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        "page.gguf": (b"<!doctype html><html>not found</html>", "a web page"),
        "model.bin": (b"PK\x03\x04 and what follows in an archive", "safetensors and GGUF"),
        "x.gguf.part": (b"A3BPART1 and what follows in a part", "run the command that wrote it again"),
    }
    for name, (start, hint) in starts.items():
        (tmp_path / name).write_bytes(start)
        assert_refused(a3b(command, tmp_path / name, *words), 3, f"{name} is not a GGUF file", hint)
    assert_refused(a3b(command, pipe, *words), 3, "is a device or a pipe, expected a .gguf file")
    assert_refused(a3b(command, tiny_checkpoint / "model.safetensors", *words), 3, "give the folder to a3b convert")
    if command != "quantize":  # which takes a checkpoint
        assert_refused(a3b(command, tiny_checkpoint), 3, "is a folder", str(tiny_checkpoint))
        assert_refused(a3b(command, small.parent), 3, "is a folder", "name a file in it, like")


def test_a_name_of_the_catalog_is_no_folder(tmp_path: Path) -> None:
    hint = "hf download Qwen/Qwen3.6-35B-A3B --local-dir Qwen3.6-35B-A3B"
    assert_refused(a3b("convert", "qwen3.6", cwd=tmp_path), 3, "qwen3.6 does not exist here", hint)
    assert_refused(a3b("quantize", "qwen3.6", "--type", "iq4_nl", cwd=tmp_path), 3, "qwen3.6 does not exist here", hint)
    assert_refused(a3b("serve", "qwen3.6", cwd=tmp_path), 3, "a3b plan Qwen3.6-35B-A3B --type iq4_nl")
