# Two commands do everything on a fresh machine with Python 3.11+ and a C compiler: make demo, make test.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: setup demo check kernels test prove bench peers clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "a3b needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 4; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || { echo "a3b needs a C and C++ compiler, for llama.cpp"; exit 4; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --upgrade pip
	@echo "Installing. The first time, llama-cpp-python is compiled from source: 4 to 15 minutes without a word. pip keeps its wheel; the next set-up skips it."
	$(RUN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: setup
	$(RUN)/python models/tiny-a3b/demo.py

check: setup
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/mypy tests benchmarks
	$(RUN)/lint-imports --no-cache --no-logo
	$(RUN)/python tests/module_sizes.py

# Each worker of the suite would compile the kernels that it uses; numba keeps them beside their sources.
kernels: setup
	$(RUN)/python -m a3b_quantize.kernels.ahead

# Hundreds of short processes are started: where bytecode is not kept, each would compile our sources again.
test: setup
	@$(MAKE) --no-print-directory -j2 check kernels
	PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(RUN)/python -m pytest -q -m "not prove" -n auto --dist loadfile

prove: setup
	OMP_WAIT_POLICY=passive $(RUN)/python -m pytest -q -m prove

bench: setup
	@for script in benchmarks/bench_*.py; do echo; echo "== $$script"; $(RUN)/python $$script || exit 1; done

# llama.cpp's own tools, from the very source that llama-cpp-python is built from; for comparison only.
peers: setup
	$(RUN)/python benchmarks/build_peers.py build/peers

clean:
	rm -rf build dist $(VENV)
