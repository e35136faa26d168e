# make demo | test | campaign | lint | clean. Everything is installed into $(VENV), once; set PYTHON to choose another interpreter.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do "$$name" -c "" 2>/dev/null && { echo "$$name"; break; }; done)
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CREATED := $(VENV)/.created
RUNTIME := $(VENV)/.installed-runtime
DEVELOPMENT := $(VENV)/.installed-development
CAMPAIGN := $(VENV)/.installed-campaign
STRICT := megatron_overlap/config megatron_overlap/schedule megatron_overlap/timeline megatron_overlap/topology/grid.py

export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-pure campaign lint format clean install install-dev
help:
	@echo "make demo      install, then train, evaluate and sample a small GPT on 4 processes (results in demo/)"
	@echo "make test      the test suite, with a fixed sample of the long campaigns"
	@echo "make campaign  all tests, the long ones in full; writes examples/results/campaign.md"
	@echo "make lint      ruff, mypy and the import rules"
	@echo "make clean     remove caches, the demo's files and $(VENV)"

demo: install
	@$(BIN)/python -m tools.demo

test: install-dev
	$(BIN)/python -m pytest

test-pure: install-dev
	$(BIN)/python -m pytest -m "not ranks and not campaign and not gpu"

campaign: $(CAMPAIGN)
	$(BIN)/python -m tools.campaign --output examples/results/campaign.md

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict $(STRICT)
	$(BIN)/lint-imports

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(RUNTIME)
install-dev: $(DEVELOPMENT)

$(CREATED):
	@test -n "$(PYTHON)" || { echo "No python3 found: install Python 3.11, or run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$("$(PYTHON)" --version 2>&1); Python 3.11 or newer is needed: run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Making $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv --clear $(VENV) || { echo "$(PYTHON) could not make a virtual environment (on Debian its venv module is a package of its own)" >&2; exit 1; }
	@touch $@

# The package goes in without dependencies, so that only pinned versions are installed.
$(RUNTIME): requirements.txt setup.py $(CREATED)
	@echo "Installing requirements.txt (once; a few minutes)"
	@$(PIP) install -r requirements.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(DEVELOPMENT): requirements-dev.txt $(RUNTIME)
	@echo "Installing requirements-dev.txt (once)"
	@$(PIP) install -r requirements-dev.txt
	@touch $@

# Without what it depends on: only its data readers are used, to compare with.
$(CAMPAIGN): requirements-campaign.txt $(DEVELOPMENT)
	@echo "Installing requirements-campaign.txt (once)"
	@$(PIP) install --no-deps -r requirements-campaign.txt
	@touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
