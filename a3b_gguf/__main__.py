"""`python -m a3b_gguf` is `a3b`."""

from __future__ import annotations

import sys


def main() -> None:
    """`a3b`, also when Ctrl-C comes while it is still being imported."""
    try:
        from a3b_gguf.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
