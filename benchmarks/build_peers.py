"""Builds llama-quantize, llama-server and llama-perplexity from the very source that llama-cpp-python is built from.

    python benchmarks/build_peers.py build/peers

For comparison only; nothing of a3b needs them. Needs cmake and a C++ compiler; takes 5 to 30 minutes the first time.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

TARGETS = ("llama-quantize", "llama-server", "llama-perplexity")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
)  # fmt: skip


def source(folder: Path) -> Path:
    """The vendored llama.cpp of the installed version's sdist, unpacked under `folder`."""
    version = importlib.metadata.version("llama-cpp-python")
    unpacked = folder / f"llama_cpp_python-{version}"
    if not unpacked.is_dir():
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder))
        subprocess.run((*pip, f"llama-cpp-python=={version}"), check=True)
        with tarfile.open(folder / f"{unpacked.name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return unpacked / "vendor" / "llama.cpp"


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/peers")
    if shutil.which("cmake") is None:
        print("cmake is missing: install it from your system's packages, or with `pip install cmake`")
        return 4
    folder.mkdir(parents=True, exist_ok=True)
    build = folder / "cmake"
    subprocess.run(("cmake", "-S", str(source(folder)), "-B", str(build), *OPTIONS), check=True)
    subprocess.run(("cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 1), "--target", *TARGETS), check=True)
    for name in TARGETS:
        print(build / "bin" / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
