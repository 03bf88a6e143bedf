"""Golden files: read, and refused when they were made for other weights than those in models/tiny-a3b."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"


def read_golden(name: str, script: str, checkpoint: Path) -> dict[str, Any]:
    """A golden of the embedded model. Fails with the command that makes it anew when the weights have changed since."""
    path = GOLDEN / name
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            golden: dict[str, Any] = dict(arrays)
    else:
        golden = json.loads(path.read_text(encoding="utf-8"))
    if str(golden["safetensors_sha256"]) != sha256(checkpoint / "model.safetensors"):
        raise AssertionError(
            f"{path} was made for other weights than {checkpoint}/model.safetensors; run: python tests/golden/scripts/{script}"
        )
    return golden


@cache
def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
