# Two commands: `make demo` trains on real images, `make test` runs every test. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
DIGITS := examples/digits/images

.PHONY: demo test test-commands test-others lint docs lock setup
.DELETE_ON_ERROR:

demo: setup $(DIGITS)/.done
	$(BIN)/hotloop train examples/digits/job.toml

# Half of the tests wait for processes that they have started: the commands' run beside the others.
test: lint
	$(MAKE) --jobs 2 --keep-going test-commands test-others

test-commands: setup
	$(BIN)/pytest tests/cli

test-others: setup
	$(BIN)/pytest --ignore tests/cli

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: setup
	$(BIN)/mkdocs build --strict

setup: .venv/.done

.venv/.done: requirements/lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hotloop needs Python 3.11 or newer; $(PYTHON) is older. Fix: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@echo "setting up .venv (once; about 3 GB are downloaded, torch with CUDA most of it) ..."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(DIGITS)/.done: examples/digits/make_images.py
	$(BIN)/python examples/digits/make_images.py $(DIGITS)
	@touch $@

# Versions with hashes, for every supported Python, without download addresses.
lock: setup
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --group dev --no-header --upgrade \
	  --constraints requirements/constraints.txt --generate-hashes --output-file requirements/lock.txt pyproject.toml
