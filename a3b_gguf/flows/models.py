"""Opens whatever a user may point at as a Model."""

from __future__ import annotations

from pathlib import Path

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.tensors import Model


def open_model(source: Path) -> Model:
    """A checkpoint folder or a GGUF file as a Model. Raises BadInput when it is neither."""
    try:
        source.stat()
    except FileNotFoundError:
        from a3b_gguf.catalog import absent  # models.toml is read only when there is no such file

        raise absent(source, "give a folder with config.json and safetensors, or a .gguf file") from None
    except OSError as error:
        raise BadInput(f"{source}: {error.strerror}", "check the path") from error
    if source.is_dir():
        from a3b_convert import open_checkpoint

        return open_checkpoint(source)
    return open_gguf_model(source)
