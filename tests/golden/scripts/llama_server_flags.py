"""Writes tests/golden/llama_server_flags.json: every flag in llama-server's own --help, and what it says of its value.

    make peers && python tests/golden/scripts/llama_server_flags.py build/peers/cmake/bin/llama-server

The oracle of `a3b plan --export`: {flag: what stands behind it in the help, "" where it takes no value}.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

FLAGS = re.compile(r"^((?:--?[A-Za-z][\w-]*,? *)+)(\S[^ ]*(?: \S+)*?)?(?: {2,}|$)")


def flags(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := FLAGS.match(line):
            for name in re.findall(r"--?[A-Za-z][\w-]*", match[1]):
                found[name] = (match[2] or "").strip()
    return found


def main() -> None:
    done = subprocess.run([sys.argv[1], "--help"], capture_output=True, text=True, check=True)
    path = Path(__file__).parent.parent / "llama_server_flags.json"
    path.write_text(json.dumps(flags(done.stdout), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
