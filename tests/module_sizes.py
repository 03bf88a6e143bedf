"""Fails when a Python module is longer than 400 lines: `make check` calls it.

python tests/module_sizes.py
"""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT = 400
FOLDERS = ("a3b_gguf", "convert", "quantize", "server", "tests", "benchmarks", "models")


def too_long(root: Path) -> list[str]:
    """`path: lines` of each module over the limit."""
    modules = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    counted = ((path.relative_to(root), path.read_text().count("\n")) for path in modules)
    return [f"{path}: {lines} lines, at most {LIMIT}" for path, lines in counted if lines > LIMIT]


def main() -> int:
    found = too_long(Path(__file__).parent.parent)
    sys.stdout.writelines(line + "\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
