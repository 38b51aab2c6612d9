# Two commands: `make demo` trains on real images, `make test` runs the tests. Both set up .venv first.
# `make test-all` runs the slow ones too; before, it installs the engines that tests start, where it can.
PYTHON ?= python3
BIN := .venv/bin
DIGITS := examples/digits/images
MARKED := not slow

.PHONY: demo test test-all engines test-commands test-engines test-others lint docs lock setup
.DELETE_ON_ERROR:

demo: setup $(DIGITS)/.done
	$(BIN)/hotloop train examples/digits/job.toml

# Many tests wait for processes that they have started, those of engines most of all: they run side by side. Two threads
# of tiny networks wait for each other more than they compute: with one, test_training.py takes 62 s and not 101.
test test-commands test-engines test-others: export OMP_NUM_THREADS = 1
test: setup
	$(MAKE) --jobs 4 --keep-going lint test-commands test-engines test-others

test-commands: setup
	$(call pytest,commands,tests/cli)

test-engines: setup
	$(call pytest,engines,tests/engines tests/ranks tests/unit)

test-others: setup
	$(call pytest,others,$(addprefix --ignore tests/,cli engines ranks unit))

# Three lanes on two cores are no even machine: what has failed is run once more.
define pytest
$(BIN)/pytest --durations 25 -m "$(MARKED)" -o cache_dir=.pytest_cache/$(1) $(2) || { [ $$? -eq 1 ] && echo "once more, what has failed:" && \
  $(BIN)/pytest -m "$(MARKED)" -o cache_dir=.pytest_cache/$(1) --last-failed $(2); }
endef

test-all: engines
	$(MAKE) test MARKED=

engines:
	@command -v slurmctld >/dev/null && command -v buildah >/dev/null && command -v mmdebstrap >/dev/null && \
	  command -v prometheus >/dev/null && command -v chromium >/dev/null || \
	  { [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && apt-get update --quiet=2 && \
	    DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends \
	      slurm-wlm munge buildah mmdebstrap tini prometheus chromium >/dev/null; } || echo "without engines: their tests are skipped"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: setup
	$(BIN)/mkdocs build --strict

setup: .venv/.done

# pip compiles its 26,000 files one after another, which takes a minute and a half. Some are templates that do not compile.
.venv/.done: requirements/lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hotloop needs Python 3.11 or newer; $(PYTHON) is older. Fix: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@echo "setting up .venv (once; about 3 GB are downloaded, torch with CUDA most of it) ..."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements/lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

$(DIGITS)/.done: examples/digits/make_images.py
	$(BIN)/python examples/digits/make_images.py $(DIGITS)
	@touch $@

# Versions with hashes, for every supported Python, without download addresses.
lock: setup
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --group dev --no-header --upgrade \
	  --constraints requirements/constraints.txt --generate-hashes --output-file requirements/lock.txt pyproject.toml
