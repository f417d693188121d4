# `make demo` and `make test` each do all their set-up. Every install goes through constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt
WORKERS ?= 2

.PHONY: demo test test-slow lint bench clean

demo: $(VENV)/ready
	$(BIN)/curvoscope verify
	$(BIN)/curvoscope analyze --out demo

test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-slow: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m slow

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/bench
	$(BIN)/python -m benchmarks

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/dev: $(VENV)/ready
	$(PIP_INSTALL) --editable ".[dev,hf,lens,dask,parquet]"
	@touch $@

# The peers, without their dependencies: curvlinops would pull torchvision and with it a CUDA build of torch.
$(VENV)/bench: $(VENV)/dev benchmarks/peers.txt
	$(PIP_INSTALL) --no-deps -r benchmarks/peers.txt
	@touch $@

clean:
	rm -rf $(VENV) demo build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
