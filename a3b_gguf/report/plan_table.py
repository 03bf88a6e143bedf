"""The table of contexts and cache types for one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from a3b_gguf.planner.plan import DEFAULT_MARGIN
from a3b_gguf.planner.table import Cell
from a3b_gguf.report.console import say, say_table
from a3b_gguf.units import MIB


def show_table(name: str, device: str, cells: Sequence[Cell]) -> None:
    """A row for each pair, sizes in MiB."""
    columns = ("context", "KV type", "KV cache", f"{device} in all", "left", "tokens/s", "verdict")
    rows = [
        (f"{cell.n_ctx:,}", cell.kv_type, *(sizes(cell) if cell.fits else ("", "", "", "")), cell.verdict)
        for cell in cells
    ]  # fmt: skip
    say_table(f"{name}: what each context and cache type takes, in MiB", columns, rows, numeric=(0, 2, 3, 4, 5))
    kept = f"at least {DEFAULT_MARGIN / MIB:,.0f} MiB of a GPU are kept free unless --margin says otherwise"
    say(f"left: free on {device} after loading; {kept}")


def sizes(cell: Cell) -> tuple[str, str, str, str]:
    return f"{cell.cache / MIB:,.1f}", f"{cell.need / MIB:,.1f}", f"{cell.left / MIB:,.1f}", f"{cell.decode:.0f}"


def table_json(device: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """What --json prints: bytes, and null where nothing fits."""
    found = [{**asdict(cell), **({} if cell.fits else dict.fromkeys(("cache", "need", "left", "decode")))} for cell in cells]
    return {"device": device, "cells": found}
