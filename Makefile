# Two commands do everything: `make train` and `make test`. Each target makes .venv and installs what it needs, once.
PYTHON ?= python3
BACKEND ?= torch
RECIPE ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test lint format bench docs clean

# A transformer learns, in a precision chosen by measurement: `make train`, `make train RECIPE=gpt2 ARGS='--out x'`,
# `make train BACKEND=jax`.
train: $(VENV)/.$(BACKEND)
	$(BIN)/halfstep train $(RECIPE) --backend $(BACKEND) $(ARGS)

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
	$(BIN)/python benchmarks/prove/split_all.py
	$(BIN)/python benchmarks/measure/overhead.py
	$(BIN)/python benchmarks/measure/presets.py

# Reference pages come out of the schema, the tables of docs/models.md out of models that are prepared.
docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/models.py

clean:
	rm -rf $(VENV)

# A stamp for each set of extras: remade when what it was made from changes.
$(VENV)/.torch $(VENV)/.jax $(VENV)/.mlx: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -q -c constraints.txt -e '.[$*]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -q -c constraints.txt -e '.[torch,jax,mlx,dev]'
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "halfstep needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt pip
