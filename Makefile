# make demo   set up, train three networks on the digits, measure them, disguise one, write report.html
# make test   set up, run every test and doctest
# make lint   formatting, style and types
# make bench  time products, the sweep and eigenvalues beside peers (see docs/performance.md)
# make docs   regenerate the pages made from the registry

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q install -c constraints.txt

.PHONY: demo test lint bench docs clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[data]"
	@touch $@

# Networks of other people for the tests, without dependencies: they would bring another torch.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps pytorchcv==0.0.74
	@touch $@ $(VENV)/.run

# Peers bring dependencies that do not import beside a CPU-only torch, so they come without them;
# a peer that cannot be installed is skipped by the benchmark, not fatal.
$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -r benchmarks/peers-requirements.txt
	$(PIP) --no-deps -r benchmarks/peers.txt
	@touch $@

demo: $(VENV)/.run
	$(BIN)/flatgauge demo

# The test networks are tiny: two processes of one thread each beat one process of two. Each takes
# one half of the tests in their order, so that what neighbours share is computed once.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.products
	$(BIN)/python -m benchmarks.blocks

docs: $(VENV)/.dev
	$(BIN)/flatgauge catalogue --markdown > docs/catalogue.md

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
