"""`python -m a3b_quantize.kernels.ahead` compiles every kernel, on all cores: for an image that is built once, and before the tests."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context

from a3b_quantize.kernels import KERNELS, make_ready


def _ready(names: list[str]) -> None:
    make_ready(names, lambda text: _say(f"{text}\n"))


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    """One process for each module: its kernels share parts, which are compiled once in it."""
    by_module = sorted(KERNELS, key=lambda name: str(KERNELS[name].args[0]), reverse=True)  # superblock takes longest
    groups = [list(names) for _, names in groupby(by_module, lambda name: KERNELS[name].args[0])]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(_ready, groups))


if __name__ == "__main__":
    main()
