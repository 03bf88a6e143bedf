"""Safetensors to tensors and metadata in GGUF's terms."""

from __future__ import annotations

from a3b_convert.conversion import FLOAT_TYPES, Conversion, Converted, TensorLine, convert, prepare
from a3b_convert.model import Mtp, open_checkpoint

__all__ = ["FLOAT_TYPES", "Conversion", "Converted", "Mtp", "TensorLine", "convert", "open_checkpoint", "prepare"]
