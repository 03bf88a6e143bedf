"""Takes the schemas out of llama.cpp's tests/test-json-schema-to-grammar.cpp (MIT): what its converter accepts, ours must know too.

usage: python tests/golden/scripts/grammar_schemas.py PATH/TO/llama.cpp/tests/test-json-schema-to-grammar.cpp
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

CASE = re.compile(r'test\(\{\s*(SUCCESS|FAILURE),\s*"([^"]*)",\s*R"""\((.*?)\)"""', re.DOTALL)


def main() -> None:
    found = [
        {"name": name, "accepted": outcome == "SUCCESS", "schema": json.loads(schema)}
        for outcome, name, schema in CASE.findall(Path(sys.argv[1]).read_text())
        if _is_json(schema)
    ]
    out = Path(__file__).parent.parent / "grammar_schemas.json"
    out.write_text(json.dumps(found, indent=1) + "\n")
    sys.stderr.write(f"{len(found)} schemas: {out}\n")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
