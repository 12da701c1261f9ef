# Every target sets up what it needs; a second run reuses it.
# PIP_ARGS is passed to pip, for example for an index that serves the CPU build of torch.

VENV ?= .venv
PYTHON ?= python3
PIP_ARGS ?=
BENCH ?=
SEED ?=
SEEDS ?= 40
# Tests, demo and benchmarks start many processes: each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
MODEL = $$($(BIN)/seedrelay model fetch smollm2 --dtype float32 --json | $(BIN)/python -c 'import json, sys; print(json.load(sys.stdin)["path"])')
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) protos/seedrelay/v1/*.proto

.PHONY: help setup model demo test test-all test-gpu chaos lint format proto bench clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## Make the virtual environment

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: no virtual environment could be made; Debian has venv in the package python3-venv"; exit 1; }
	@# Modules are compiled when they are first imported: most of these packages never are.
	@echo "installing the pinned packages into $(VENV) (about a minute)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[engine,models,dev]' $(PIP_ARGS) || \
	  { echo "error: the packages of constraints.txt could not be installed (no network?);"; \
	    echo "       README says how to set up without network"; exit 1; }
	@touch $@

model: $(READY) ## Fetch the small real model
	@$(BIN)/seedrelay model fetch smollm2 --dtype float32 >/dev/null

demo: model ## Run the main job on a real model; writes build/demo.json
	@$(BIN)/python -m benchmarks.demo --model "$(MODEL)"

test: model ## Run the tests (a sample of the large matrices)
	@$(BIN)/pytest -q $(WORKERS) -m "not full and not gpu"

test-all: model ## Run the complete matrices
	@$(BIN)/pytest -q $(WORKERS) -m "not gpu"

chaos: $(READY) ## Kill, stop, cut and corrupt a small fleet at random; SEED=17 plays one seed, SEEDS=200 so many
	@$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

test-gpu: ## Prove the CUDA path on this host's device; without one it says so and passes
	@if $(PYTHON) -c 'import sys, torch; sys.exit(sys.version_info < (3, 11) or not torch.cuda.is_available())' 2>/dev/null; \
	  then $(PYTHON) -m tests.gpu; \
	  else $(MAKE) -s setup && $(BIN)/python -m tests.gpu; fi

lint: $(READY) ## Check style, types, rings, protos and generated code
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "error: run make format"; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code && ../$(BIN)/buf breaking --against image.binpb
	@rm -rf build/protos && mkdir -p build/protos && $(call PROTOC,build/protos)
	@cd build/protos && for file in seedrelay/v1/*; do cmp $$file ../../protos/$$file || \
	  { echo "error: generated code is stale; run make proto"; exit 1; }; done

format: $(READY) ## Format the code and the protos
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format --quiet .
	@cd protos && ../$(BIN)/buf format -w

proto: $(READY) ## Generate code from the protos
	@$(call PROTOC,protos)

bench: model ## Run every benchmark, or one with BENCH=NAME; writes build/bench/NAME.json
	@for name in $(or $(BENCH),relay_transports time_to_ready expert_recovery seed_impact engine_throughput health_latency structure_cost weight_formats loading update_pause pause_modes fanout fleet_simulation); do $(BIN)/python -m benchmarks.$$name || exit 1; done

clean: ## Remove what was built; the model stays in the user's cache
	@rm -rf $(VENV) build *.egg-info
