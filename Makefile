# Set-up and the commands of the README; no logic here.
PYTHON ?= python3
# Where torch comes from. PyPI's own Linux wheel is the CUDA one: make demo TORCH_INDEX=https://pypi.org/simple
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-warn-conflicts

.PHONY: help setup demo test long sim chaos soak check types rules bench fresh dist

help:
	@echo "make demo    a real swarm of three nodes on this machine: watch it learn (two minutes)"
	@echo "make test    the test suite (TESTS=tests/unit/wire: those alone)"
	@echo "make long    what the suite leaves out, because whole nodes need minutes for what one process shows as well"
	@echo "make check   lint, types, import layers, protocol vectors (make types and make rules, each on a processor of its own)"
	@echo "make fresh   the first two, and a base installation, on fresh Debians without a compiler (root, debootstrap)"
	@echo "make bench   every benchmark in its quick form"
	@echo "make dist    wheel and sdist in dist/, and the demo run from the wheel in a fresh environment"
	@echo "make sim     fresh simulated swarms for a minute (SIM_SECONDS=…)"
	@echo "make soak    eight real nodes for an hour, one coming and going every 20 s: does anything grow? (SOAK=--minutes 10 --nodes 4)"
	@echo "make chaos   real nodes under fresh schedules of faults (CHAOS_COUNT=…), and a table of what each costs"

setup: $(VENV)/.run

# torch comes first and with its dependencies, from where it is small; where that cannot be reached, from PyPI. The lists are complete
# (tools/lock.py makes them), so that pip resolves nothing: that would need a compiler.
$(VENV)/.run: pyproject.toml requirements/torch.txt requirements/bootstrap.txt requirements/trainer.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --retries 1 --index-url $(TORCH_INDEX) -r requirements/torch.txt || $(PIP) -r requirements/torch.txt
	$(PIP) --no-deps -r requirements/trainer.txt
	$(PIP) --no-deps --editable .
	@touch $@

# What the tests and the checks need comes on top.
$(VENV)/.test: $(VENV)/.run requirements/test.txt
	$(PIP) --no-deps -r requirements/test.txt
	@touch $@

demo: $(VENV)/.run
	$(BIN)/swarmnode demo

test: $(VENV)/.test
	$(BIN)/pytest -n 5 --dist loadfile $(TESTS)

long: $(VENV)/.test
	$(BIN)/pytest -m long

check: types rules

types: $(VENV)/.test
	$(BIN)/mypy swarmnode

rules: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python protocol/check.py
	$(BIN)/pytest tests/conformance/test_house_rules.py

# Wheel and sdist in dist/; then the demo from the wheel in a fresh environment. REPOSITORY=https://… makes the links of PyPI's page.
dist:
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --disable-pip-version-check 'hatchling>=1.27' 'twine>=6.1'
	build/tools/bin/python tools/dist.py --torch-index '$(TORCH_INDEX)' --repository '$(REPOSITORY)'

bench: $(VENV)/.test
	for name in sapo trainer packing cards ingest pulls scale eclipse noloco exchange checkfree recovery crew crew_distance hostile served; do $(BIN)/python -m benchmarks.$$name --quick || exit 1; done

fresh:
	$(PYTHON) -m tests.support.fresh

sim: $(VENV)/.test
	$(BIN)/python -m tests.support.sim --seconds $(or $(SIM_SECONDS),60)

chaos: $(VENV)/.test
	$(BIN)/python -m tests.support.chaos --count $(or $(CHAOS_COUNT),5)
	$(BIN)/python -m tests.support.chaos.crews --long

soak: $(VENV)/.test
	$(BIN)/python -m benchmarks.soak $(SOAK)
