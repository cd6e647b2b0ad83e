PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

# Downloads and compiled kernels stay in the project folder too.
export PIP_CACHE_DIR ?= $(CURDIR)/$(VENV)/cache/pip
export TRITON_CACHE_DIR ?= $(CURDIR)/$(VENV)/cache/triton
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/$(VENV)/cache/inductor

.PHONY: demo test slow lint docs check clean

demo: $(VENV)/.installed
	$(BIN)/attn-backends demo

test: $(VENV)/.installed
	@$(BIN)/python -m pytest -n 2 -q -m "not slow" || { echo "make test: FAILED, see above"; exit 1; }
	@echo "make test: now every Triton kernel in Triton's interpreter"
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -q -m "not slow" tests/interpreter || { \
		echo "make test: FAILED in the interpreter, see above"; exit 1; }
	@echo "make test: every test passed"

# Statistics, and whole kits in the interpreter: minutes each.
slow: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 -q -m slow
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -q -m slow tests/interpreter

lint: $(VENV)/.linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A link, an anchor or a name of the reference that leads nowhere fails it. Never with -q: strict counts only the warnings
# that are shown. The variable hides an advertisement.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/python docs/_site/check_links.py build/site

check: lint test

clean:
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# torch comes first and alone, so that nothing else decides on its version.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + \
		sys.version.split()[0] + "; run make with PYTHON=python3.11, say")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) torch 'triton; sys_platform == "linux"'
	$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.linters: $(VENV)/.installed
	$(PIP) ruff mypy
	@touch $@
