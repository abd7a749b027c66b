# `make` alone says what there is. Everything runs from .venv, which is made on first use with python3 and pip only;
# test-oldest and test-newest from one of their own, with the oldest and the newest torch that pyproject.toml allows.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
JOBS ?= auto
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
FOLDERS := ir passes runtime visualize shardfx
CODE := $(wildcard $(FOLDERS) tests examples benchmarks docs/*.py)
PYTEST = $(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist worksteal

# More threads than cores make a small tensor program many times slower.
test test-long test-all test-oldest test-newest pages fuzz line-coverage coverage: export OMP_NUM_THREADS := 1
# What one process has compiled, those beside it need not: also where images of containers say otherwise.
test test-long test-all test-oldest test-newest: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-long test-all test-oldest test-newest pages fuzz lint format types bench gpu coverage line-coverage clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## parallelize a model, prove it, draw it
	$(BIN)/shardfx demo $(ARGS)

test: $(READY) ## the quick tests (unit, virtual)
	$(PYTEST) -m "not slow and not long" $(ARGS)

test-long: $(READY) ## those that take half a second or more (torchrun too), and are not slow
	$(PYTEST) -m "long and not slow" $(ARGS)

test-all: $(READY) ## every test, the slow ones too
	$(PYTEST) $(ARGS)

test-oldest: BIN := .venv-oldest/bin
test-oldest: .venv-oldest/.ready ## the quick tests in one process (unit, virtual) under torch 2.11.0
test-newest: BIN := .venv-newest/bin
test-newest: .venv-newest/.ready ## the same under torch 2.15.0
test-oldest test-newest:
	$(PYTEST) -m "not slow and not long" tests/unit tests/virtual $(ARGS)

pages: $(READY) ## README and docs/: what their sessions print now, links, scripts and pictures
	$(PYTEST) tests/unit/test_docs.py $(ARGS)

fuzz: $(READY) ## random models, meshes, hints and passes beside one device (2,000 cases)
	$(BIN)/python -m tests.fuzz --cases 2000 $(ARGS)

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

format: $(READY) ## let ruff mend what it can
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# mypy reads names from folders, so show it the package as it installs: build/types/shardfx/ir -> ir, ...
types: $(READY) ## mypy, strict
	@rm -rf build/types && mkdir -p build/types/shardfx
	@ln -s $(CURDIR)/shardfx/* $(filter-out %/shardfx,$(addprefix $(CURDIR)/,$(FOLDERS))) build/types/shardfx/
	@cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p shardfx | sed -E 's#^shardfx/(ir|passes|runtime|visualize)/#\1/#'

bench: $(READY) ## the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

# A machine with a GPU has a torch of its own, which is not to be replaced: without one, the environment here serves.
gpu: ## with a GPU: its tests, correctness, speed and memory, in six minutes (ARGS=--rehearse: small, on the CPU)
	if $(PYTHON) -c "import torch" 2> /dev/null; then run=$(PYTHON); else $(MAKE) $(READY); run=$(BIN)/python; fi; \
		PYTHONPATH=$(CURDIR) $$run -m benchmarks.gpu $(ARGS)

coverage: $(READY) ## soundness and completeness of the rules over PyTorch's operator database, DTensor beside them
	$(BIN)/python -m benchmarks.op_coverage $(ARGS)

line-coverage: $(READY) ## line and branch coverage of the tests that CI runs, also in htmlcov/
	$(PYTEST) -m "not slow" $(addprefix --cov=,$(FOLDERS)) --cov-report=term:skip-covered --cov-report=html $(ARGS)

clean: ## remove what was built, but no environment
	rm -rf build dist out demo_out htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# Other versions of torch want other versions of setuptools. A configuration of pip's may keep back the newest torch.
.venv-oldest/.ready: PINS := s/^torch==.*/torch==2.11.0/; s/^setuptools==.*/setuptools==81.0.0/
.venv-newest/.ready: PINS := s/^torch==.*/torch==2.15.0/; s/^setuptools==.*/setuptools==81.0.0/
.venv-newest/.ready: export PIP_CONFIG_FILE := /dev/null

# setuptools comes first and the build is not isolated: pip then builds with the pinned tools and fetches nothing twice.
$(READY) .venv-oldest/.ready .venv-newest/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed '$(PINS)' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt setuptools wheel
	$(@D)/bin/pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@
