"""Tables and plots of `a3b inspect clip_bounds.bin`."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from statistics import median

from a3b_gguf.clip_bounds import Record
from a3b_gguf.flows.clip_bounds import BoundsSummary, SiteRow
from a3b_gguf.report.console import say, say_table

BARS = "▁▂▃▄▅▆▇█"
SHOWN = 8  # records that are listed before "and n more"
COLUMNS = ("layer", "site", "expert", "values", "not finite", "p50", "p99", "p99.9", "p99.99", "max", "sum over 32")


def show_bounds(summary: BoundsSummary, every_record: bool) -> None:
    """Whose ranges they are, a table by site, a plot of the maxima by layer, and what follows."""
    header, records = summary.bounds.header, summary.bounds.records
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    say(f"{summary.path}: activation ranges of {header.model} ({header.architecture}), {len(records):,} records")
    say(f"  measured on {header.tokens:,} tokens of {header.data_name}; {versions}; model_id {header.model_id[:12]}\n")
    columns = ("site", "layers", "experts", "p50", "p99.9", "max", "in layer", "sum over 32", "not finite", "max by layer, in octaves")
    rows = [_site_row(row) for row in summary.sites]
    say_table("|x| over all layers (p50 and p99.9: of the median layer)", columns, rows, numeric=(1, 2, 3, 4, 5, 6, 7, 8))
    if every_record:
        say_table("Records", COLUMNS, [_record_row(record) for record in records], numeric=(0, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    for standout in summary.standouts:
        reaches = f"its down projection reaches {standout.absmax:,.4g}, {standout.times:,.0f} times the median"
        say(f"layer {standout.layer} stands out: {reaches}")
    for record in summary.overflow[:SHOWN]:
        largest = max(record.sum32, record.absmax)
        say(f"layer {record.layer}, {record.site}: reaches {largest:,.4g}, too near to the end of float16 (65,504) for types that need it")
    if len(summary.overflow) > SHOWN:
        say(f"  and {len(summary.overflow) - SHOWN} more")
    if summary.advice:
        say(f"KV cache: keys {summary.advice.k}, values {summary.advice.v} or finer ({summary.advice.why})")


def bars(values: Sequence[float]) -> str:
    """One character for each value, its height by the logarithm; a space for 0. The range shown is at least 8 octaves."""
    logs = [log2(value) if value > 0 else None for value in values]
    known = [value for value in logs if value is not None]
    if not known:
        return " " * len(values)
    high = max(known)
    span = max(8.0, high - min(known))
    return "".join(" " if value is None else BARS[min(7, int(8 * (1 - (high - value) / span)))] for value in logs)


def _site_row(row: SiteRow) -> tuple[str, ...]:
    middle = (median(getattr(record, name) for record in row.layers) for name in ("p50", "p99_9"))
    largest = row.largest
    numbers = [f"{value:.4g}" for value in (*middle, largest.absmax)]
    sums = f"{max(record.sum32 for record in row.layers):.4g}"
    bad = f"{sum(record.non_finite for record in row.layers):,}"
    plot = bars([record.absmax for record in row.layers])
    return row.site, str(len(row.layers)), f"{row.experts:,}", *numbers, str(largest.layer), sums, bad, plot


def _record_row(record: Record) -> tuple[str, ...]:
    ranges = (record.p50, record.p99, record.p99_9, record.p99_99, record.absmax, record.sum32)
    expert = "all" if record.expert < 0 else str(record.expert)
    return str(record.layer), record.site, expert, f"{record.count:,}", f"{record.non_finite:,}", *(f"{value:.4g}" for value in ranges)
