# Two commands do everything: `make train` and `make test`. Each target makes .venv once and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test lint format bench clean

test: $(VENV)/.dev
	$(BIN)/pytest -q

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The long proofs; docs/measurements/ keeps what they printed.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/split_all.py

clean:
	rm -rf $(VENV)

# A stamp a set of extras: remade when what it was made from changes.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "halfstep needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt pip
