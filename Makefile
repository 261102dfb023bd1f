# make demo       set everything up in .venv and run the whole story on the miniature
# make demo-real  the same pipeline on real trajectories with real weights (SHARED_DATA names the folder)
# make test       set up the same way and run the tests
# make check      lint, types, import contracts
# EXTRA=gpu       install vllm and flash-attn instead of the CPU build

EXTRA ?= cpu
PIP_ARGS ?=
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
SHARED_DATA ?= $(wildcard ../shared/data)
export LOHA_SHARED_DATA ?= $(SHARED_DATA)

BIN := $(VENV)/bin
# Not compiled ahead: most of these modules are never imported, and those that are get compiled at first use.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS)
STAMP := $(VENV)/.installed-$(EXTRA)

.PHONY: setup demo demo-real test check miniature clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-cpu: requirements/cpu.txt pyproject.toml | $(VENV)/bin/python
	@echo "installing the pinned CPU set-up into $(VENV) (a couple of minutes)"
	$(PIP) --no-deps -r requirements/cpu.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -c "import torch, vllm" 2>/dev/null || { \
	  echo "torch or vllm does not import: torch must be a CPU build (see the head of requirements/cpu.txt)"; exit 1; }
	@touch $@

$(VENV)/.installed-gpu: pyproject.toml | $(VENV)/bin/python
	@echo "installing vllm and flash-attn into $(VENV)"
	$(PIP) packaging ninja setuptools wheel hatchling editables
	$(PIP) -e ".[train,dev]" "vllm==0.32.*"
	$(PIP) --no-build-isolation -e ".[gpu,dev]"
	@touch $@

$(VENV)/.installed-real: requirements/real.txt | $(STAMP)
	$(PIP) --no-deps -r requirements/real.txt
	@touch $@

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

demo-real: $(STAMP) $(VENV)/.installed-real
	$(BIN)/python scripts/demo_real.py --data "$(SHARED_DATA)"

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy loha acd serving miniature
	$(BIN)/lint-imports

miniature: $(STAMP)
	$(BIN)/python scripts/build_miniature.py

clean:
	rm -rf runs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
