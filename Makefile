# Set-up and the two commands; no logic here.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup demo test check bench

help:
	@echo "make demo    a real swarm of three nodes on this machine: watch it learn (two minutes)"
	@echo "make test    the whole test suite"
	@echo "make check   lint, types, import layers, protocol vectors"
	@echo "make bench   every benchmark in its quick form"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/swarmnode demo

test: setup
	$(BIN)/pytest -n 2 --dist loadfile

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy swarmnode
	$(BIN)/lint-imports
	$(BIN)/python protocol/check.py
	$(BIN)/pytest tests/conformance/test_house_rules.py tests/conformance/test_nothing_only_tests_know.py

bench: setup
	for name in sapo trainer ingest noloco exchange budget checkfree recovery crew reroute tolerance; do $(BIN)/python -m benchmarks.$$name --quick || exit 1; done
