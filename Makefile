# `make demo` and `make test` each do all their set-up. Every install goes through constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt
WORKERS ?= 2
THREADS ?= 1
# A thread that waits for another must not keep a core busy that a third one needs.
export OMP_WAIT_POLICY := PASSIVE
# Neighbouring tests stay in one process, which makes what they share once.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Other CPUs, as far as the environment can tell torch and its libraries.
SSE := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
COMPATIBLE := MKL_CBWR=COMPATIBLE
ORDER ?= 1
SHUFFLED = --random-order-bucket=module --random-order-seed=$(ORDER)

.PHONY: demo test test-slow test-other-cpu test-portable fuzz lint bench docs clean

demo: $(VENV)/ready
	$(BIN)/curvoscope verify
	$(BIN)/curvoscope analyze --out demo

test: $(VENV)/dev $(VENV)/browser
	OMP_NUM_THREADS=$(THREADS) $(PYTEST) -m "not slow"

test-slow: $(VENV)/dev $(VENV)/browser
	OMP_NUM_THREADS=$(THREADS) $(PYTEST) -m slow

# `make test` on the CPU that differs most from a new one, in another order.
test-other-cpu: $(VENV)/dev $(VENV)/browser
	$(SSE) OMP_NUM_THREADS=$(THREADS) $(PYTEST) $(SHUFFLED) -m "not slow"

# All tests on every kind of CPU, with one and with two threads, in another order: some hours. ORDER=7 for a seventh one.
test-portable: $(VENV)/dev $(VENV)/browser
	for threads in 1 2; do for cpu in "$(SSE)" "$(AVX2)" "$(COMPATIBLE)"; do \
	    echo "$$cpu, $$threads threads" && env $$cpu OMP_NUM_THREADS=$$threads $(PYTEST) $(SHUFFLED) || exit 1; \
	done; done

# Ten minutes of fresh examples against autodiff; prints how many, and the seed that repeats a failure.
fuzz: $(VENV)/dev
	FUZZ_MINUTES=$${FUZZ_MINUTES:-10} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) tests/fuzz

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --recursive -ll src
	-$(BIN)/pip-audit --local --skip-editable --progress-spinner off # its data may be out of reach: it says what it skipped

bench: $(VENV)/dev $(VENV)/browser
	$(BIN)/python -m benchmarks > benchmarks/results.json
	$(BIN)/python -m benchmarks.page benchmarks/results.json > docs/benchmarks.md

# Warnings are errors. The pages in docs/_build/html need no network, nor do their formulas.
docs: $(VENV)/dev $(VENV)/mathjax
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -E -q -b html docs docs/_build/html

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable .
	@touch $@

# The peers, without their dependencies: curvlinops would pull torchvision and with it a CUDA build of torch.
$(VENV)/dev: $(VENV)/ready benchmarks/peers.txt
	$(PIP_INSTALL) --editable ".[dev,docs,hf,lens,dask,parquet,lightning,tensorboard,digits,explore]"
	$(PIP_INSTALL) --no-deps -r benchmarks/peers.txt
	@touch $@

# What the tests of the pages drive: Debian's Chromium, axe-core, MathJax. Without them those tests are skipped, and say so.
$(VENV)/browser: $(VENV)/ready
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -qq -y chromium >/dev/null) || true
	npm install --silent --no-save --prefix $(VENV) axe-core@4.14.0 || true
	-$(MAKE) --no-print-directory $(VENV)/mathjax
	@touch $@

# In a folder of its own: npm would remove what else it has put in $(VENV).
$(VENV)/mathjax: $(VENV)/ready
	npm install --silent --no-save --prefix $(VENV)/share/mathjax mathjax@3.2.2
	@touch $@

clean:
	rm -rf $(VENV) demo build dist docs/_build docs/gallery src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
