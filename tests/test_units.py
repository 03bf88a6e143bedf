"""Sizes and token counts as people type them."""

from __future__ import annotations

import pytest

from a3b_gguf.errors import UsageError
from a3b_gguf.units import human_bytes, mib, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GiB", 16 << 30),
        ("16GB", 16 * 10**9),
        ("16G", 16 * 10**9),
        ("512 MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("4096", 4096),
        ("0", 0),
        ("9007199254740993", 9007199254740993),  # a float holds neither this
        ("9223372036854775807", (1 << 63) - 1),  # nor this
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "16 gibs", "1e9", "16GiB!", "nan", "9" * 400, "9" * 5000, "8388608TiB"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="--vram"):
        parse_bytes(text, "--vram")


@pytest.mark.parametrize(("text", "expected"), [("64000", 64000), ("64k", 64000), ("64Ki", 65536), ("1M", 10**6)])
def test_parse_tokens(text: str, expected: int) -> None:
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-5", "64kb", "1.5k", "many", "9" * 5000, "2147483648", "3000M"])
def test_parse_tokens_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="--ctx"):
        parse_tokens(text)


def test_printing() -> None:
    assert mib(1250 << 20) == "1,250.00 MiB"
    assert [human_bytes(n) for n in (0, 1023, 1024, 18 << 30)] == ["0 B", "1023 B", "1.00 KiB", "18.00 GiB"]
