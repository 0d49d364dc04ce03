# `make train` trains; `make test` tests. Each target makes .venv on first use and installs what it needs.
PYTHON ?= python3
BACKEND ?= torch
RECIPE ?=
ARGS ?=
# Exact versions of everything; `CONSTRAINTS=/dev/null` takes the newest of each.
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
# As many workers as cores, at most four: each imports three frameworks. A worker that is done takes tests from another.
# Tests start hundreds of processes: without bytecode each would compile the package, and each worker the tests, anew.
export PYTHONDONTWRITEBYTECODE :=
# What XLA compiled for a test is there for the next command, too.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/$(VENV)/.jax
PYTEST := -m pytest -q -n auto --maxprocesses 4 --dist worksteal

.PHONY: train test check check-tests prove prove-changed lint format bench docs site site-serve release clean

# Train a small transformer, in a precision chosen by measurement: `make train`,
# `make train RECIPE=gpt2 ARGS='--out x'`, `make train BACKEND=jax`.
train: $(VENV)/.$(BACKEND)
	$(BIN)/halfstep train $(RECIPE) --backend $(BACKEND) $(ARGS)

# Every test but the exhaustive and the slow: at most five minutes on two cores.
test: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m 'not prove'

# What to run before every commit: at most one minute. mypy uses one core only, so it runs next to the tests.
check: $(VENV)/.dev
	$(MAKE) -j2 lint check-tests

check-tests: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m 'not prove' tests/core tests/config tests/report tests/architecture

# Everything exhaustive or slow, in the parts of benchmarks/prove/run.py; the record is docs/measurements/proofs.md.
# `make prove PARTS='jax mlx'` runs these.
prove: $(VENV)/.dev
	$(BIN)/python benchmarks/prove/run.py $(if $(PARTS),--only $(PARTS))
	$(BIN)/python docs/generate.py

# One part, chosen by the commit, and those about folders that changed since they last passed: for CI.
prove-changed: $(VENV)/.dev
	$(BIN)/python benchmarks/prove/run.py --changed

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Measurements without a GPU; docs/measurements/ keeps what they printed.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/measure/overhead.py
	$(BIN)/python benchmarks/measure/presets.py

# Write what is generated: reference pages from the schema, tables of docs/models.md from prepared models, figures of the
# lessons.
docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/models.py
	$(BIN)/python docs/figures.py

# Build the site of docs/ into site/, without a network; a link or an anchor that leads nowhere is an error, and so is a
# page that the navigation of mkdocs.yml lacks.
site: $(VENV)/.site
	rm -rf site
	$(BIN)/zensical build --clean --strict
	$(BIN)/python docs/check.py site

# Show the site while you write; pages load again when their files change.
site-serve: $(VENV)/.site
	$(BIN)/zensical serve

# Build what is released, into dist/, and try it in environments that have nothing else.
release: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python -m pytest -q tests/packaging

clean:
	rm -rf $(VENV) site

# One stamp per set of extras, made again when the files it depends on change. pip makes bytecode on one core: for tests, all
# cores make it; otherwise it is made of what is imported, when it is.
$(VENV)/.torch $(VENV)/.jax $(VENV)/.mlx $(VENV)/.site: $(VENV)/.%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/pip install -q --no-compile -c $(CONSTRAINTS) -e '.[$*]'
	touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/pip install -q --no-compile -c $(CONSTRAINTS) -e '.[torch,jax,mlx,dev]'
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "halfstep needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c $(CONSTRAINTS) pip
