# rfstream: `make demo` and `make test` work from a fresh clone with Python 3.11 or newer and nothing else installed.

VENV := .venv
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c pass 2>/dev/null && echo $$p && break; done)
TORCH := torch==2.14.1 torchvision==0.29.1
DEMO_EXTRAS := train
TEST_EXTRAS := train,gcs,s3,rfdetr,episodes,dev
MOSAICML := mosaicml-streaming==0.13.0
BENCH_DATA ?= ../shared/data/cards
BENCH_ARGS ?=

# The whole test run is stopped after this many seconds (one test after 600: pyproject.toml).
TEST_SECONDS ?= 4500
# Processes that run tests, a file at a time, each with a Ray of its own.
TEST_PROCESSES ?= 2
PYTEST_ARGS ?=

BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

export NO_ALBUMENTATIONS_UPDATE := 1
export RAY_USAGE_STATS_ENABLED := 0
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench performance clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 8

venv: $(VENV)/.test ## make .venv with everything that tests and development need

demo: $(VENV)/.demo ## pack generated scenes, train a small detector on them, draw what it finds
	RAY_ADDRESS=local $(BIN)/python pipelines/demo.py

test: $(VENV)/.test ## run all tests
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --session-timeout=$(TEST_SECONDS) $(PYTEST_ARGS)

lint: $(VENV)/.test ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict rfstream

bench: $(VENV)/.bench ## measure all that docs/performance.md shows, in turn, on BENCH_DATA (an hour of a quiet machine)
	$(BIN)/rfstream bench loaders $(BENCH_DATA) $(BENCH_ARGS)
	$(BIN)/rfstream bench hand_off
	$(BIN)/rfstream bench split_scale
	$(BIN)/rfstream bench plan_prediction $(BENCH_DATA)
	$(BIN)/rfstream bench regimes $(BENCH_DATA)
	$(BIN)/rfstream bench first_batch $(BENCH_DATA)
	$(BIN)/rfstream bench epoch_gap $(BENCH_DATA)
	$(BIN)/rfstream bench scaled_decoding $(BENCH_DATA)

performance: $(VENV)/.test ## write what was measured last into docs/performance.md
	$(BIN)/rfstream bench report

clean: ## remove the environment, what runs wrote and all caches
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp a set of packages: nothing is installed again until pyproject.toml changes.
# PyTorch first and pinned, so that nothing that follows chooses another version.

$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "make: no python3.11 or python3 on PATH; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("make: Python %d.%d is too old; set PYTHON= to Python 3.11 or newer" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.torch
	$(PIP) --editable ".[$(DEMO_EXTRAS)]" $(TORCH)
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.torch
	$(PIP) --editable ".[$(TEST_EXTRAS)]" $(TORCH)
	@touch $(VENV)/.demo $@

# mosaicml-streaming pins NumPy and others to releases that RF-DETR can't live with, and works without.
$(VENV)/.bench: $(VENV)/.test
	$(PIP) --editable ".[$(TEST_EXTRAS),bench]" $(TORCH)
	$(PIP) --no-deps $(MOSAICML)
	@touch $@
