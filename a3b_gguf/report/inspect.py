"""Tables of `a3b inspect`."""

from __future__ import annotations

from pathlib import Path

from a3b_gguf.flows.inspect import Difference, RoleRow, Summary
from a3b_gguf.report.console import say, say_table
from a3b_gguf.units import human_bytes


def show_summary(summary: Summary, tensors: bool) -> None:
    """One line for the file, its metadata, its sizes by role, and each tensor when asked."""
    say(
        f"{summary.path}: GGUF v{summary.version}, {summary.architecture}, {summary.n_tensors} tensors, "
        f"{summary.n_weights / 1e9:.3f} B weights, {human_bytes(summary.n_bytes)}, {summary.bits:.3f} bits a weight\n"
    )
    say_table("Metadata", ("key", "value"), list(summary.metadata.items()))
    rows = [_role_row(row, summary.data_bytes) for row in summary.roles]
    say_table("Sizes by role", ("role", "type", "tensors", "weights", "bytes", "bits", "share"), rows, numeric=(2, 3, 4, 5, 6))
    if tensors:
        listed = [(row.name, row.role, row.type, " x ".join(map(str, row.shape)), human_bytes(row.n_bytes)) for row in summary.tensors]
        say_table("Tensors (shape with columns last)", ("name", "role", "type", "shape", "bytes"), listed, numeric=(4,))


def _role_row(row: RoleRow, data_bytes: int) -> tuple[str, ...]:
    share = f"{row.n_bytes / data_bytes:.1%}"
    return row.role, row.type, str(row.n_tensors), f"{row.n_weights:,}", human_bytes(row.n_bytes), f"{row.bits:.2f}", share


def show_differences(left: Path, right: Path, found: tuple[Difference, ...]) -> None:
    if not found:
        say(f"{left} and {right} have the same metadata and the same tensor table")
        return
    say_table(f"{len(found)} differences", ("what", str(left), str(right)), [(d.what, d.left or "-", d.right or "-") for d in found])
