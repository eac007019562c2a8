# make demo   set up, train three networks on the digits, measure them, disguise one, write report.html
# make test   set up, run the first tier of tests, in minutes
# make test-all  run the second tier: what every measure does not claim, further networks, long pages
#             and studies, memory, the demo, the site
# make lint   formatting, style and types
# make bench  time everything beside peers, in gradients (see docs/performance.md); takes hours, and
#             make bench BENCH=--quick minutes
# make dist   build sdist and wheel, and use the wheel in a fresh environment
# make docs   run the gallery and build the site: open site/index.html

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BENCH  ?=
PEERS  := benchmarks/peer-dependencies.txt benchmarks/peers.txt
# What is never imported need not be compiled.
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q install --no-compile -c constraints.txt

.PHONY: demo test test-all lint bench dist docs clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

# Networks of other people for the tests, without dependencies: they would bring another torch.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps pytorchcv==0.0.74
	@touch $@ $(VENV)/.run

# Peers bring dependencies that do not import beside a CPU-only torch, so they come without them;
# a peer that cannot be installed is skipped by the benchmark, not fatal.
$(VENV)/.bench: $(PEERS) $(VENV)/.dev
	$(PIP) -r benchmarks/peer-dependencies.txt
	$(PIP) --no-deps -r benchmarks/peers.txt
	@touch $@

demo: $(VENV)/.run
	$(BIN)/flatgauge demo

# The test networks are tiny: two processes of one thread each beat one process of two. Each takes
# one half of the tests in their order, so that what neighbours share is computed once.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-all: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --json bench.json --markdown bench.md --png bench.png $(BENCH)

dist: $(VENV)/.dev
	rm -rf dist build
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(BIN)/python .ci/check_wheel.py dist/*.whl

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -W --keep-going -q docs site

clean:
	rm -rf $(VENV) build dist site docs/measures docs/reference docs/examples .pytest_cache .mypy_cache .ruff_cache
