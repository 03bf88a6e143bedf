"""What `a3b convert` shows."""

from __future__ import annotations

from collections.abc import Sequence

from a3b_convert import Conversion, Converted
from a3b_gguf.gguf_write import FileLine
from a3b_gguf.report.console import note, say, say_table
from a3b_gguf.units import human_bytes


def show_conversion(facts: Conversion) -> None:
    """Every tensor and the size of the file, before it is written."""
    rows = [(t.name, " x ".join(map(str, t.shape)), t.source_type, t.type, f"{t.n_bytes:,}") for t in facts.tensors]
    say_table(f"{facts.architecture}, {facts.type}", ("tensor", "shape", "from", "to", "bytes"), rows, numeric=(4,))
    say(f"{len(facts.tensors)} tensors, {facts.n_bytes:,} bytes ({human_bytes(facts.n_bytes)}) with the header; nothing was written")
    show_files(facts.files)
    show_notes(facts.notes)


def show_converted(done: Converted) -> None:
    """One line for the file that was written."""
    types = ", ".join(f"{count} {name}" for name, count in done.types.items())
    size = f"{done.n_bytes:,} bytes ({human_bytes(done.n_bytes)})"
    say(f"{named(done.files)}: {done.architecture}, {done.n_tensors} tensors ({types}), {size}")
    show_files(done.files)
    show_notes(done.notes)


def named(files: Sequence[FileLine]) -> str:
    """What was written, in a few words."""
    return str(files[0].path) + (f" and {len(files) - 1} more files" if len(files) > 1 else "")


def show_files(files: Sequence[FileLine]) -> None:
    """The parts of a split model; a single file was named already."""
    if len(files) > 1:
        for file in files:
            say(f"  {file.path}: {file.n_bytes:,} bytes")


def show_notes(notes: Sequence[str]) -> None:
    for text in notes:
        note(f"note: {text}")
