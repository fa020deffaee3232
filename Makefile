# Two commands set everything up and run: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all test-oldest test-newest lint types unit fuzz mutants test-transformers bench docs clean

demo: $(VENV)/.demo
	$(BIN)/stof demo

# 8 minutes or less on two cores; `make test-all` has the rest: compile checks of all kernels and GPUs, slow tests, the
# newest supported transformers, and what depends most on the oldest supported versions.
test: lint types unit docs

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# One thread per worker: the workers already fill the cores. Idle workers take tests from the others: a few take minutes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

unit: $(VENV)/.dev
	STOF_HYPOTHESIS_PROFILE=quick $(PYTEST) -m "not slow"

# The oldest supported transformers is in constraints.txt, the newest in tests/integrations/transformers-newest.txt.
HF_TESTS := $(addprefix tests/integrations/test_,transformers.py unusual_models.py refused_models.py mask_validation.py packing.py model_mask.py training.py saved_masks.py sequence_positions.py unpadded.py recorded_masks.py)

test-all: $(VENV)/.dev $(VENV)/.triton-3.6 $(VENV)/.transformers-newest
	$(PYTEST) -m "slow or hypothesis"
	PYTHONPATH=$(abspath $(VENV))/transformers-newest $(PYTEST) $(HF_TESTS)
	$(MAKE) test-oldest TESTS="$(VERSION_TESTS)"

# The oldest and the newest supported versions, in an environment each (6 GB: PyTorch comes with CUDA), and compile checks
# with the newest Triton. TESTS="FILE ..." runs these in place of all; CONSTRAINT= installs whatever was released last.
# Where pip's configuration holds PyTorch back: PIP_CONFIG_FILE=/dev/null make test-newest.
VERSION_TESTS := tests/integrations $(addprefix tests/test_,compiled_masks.py empty.py export.py gradients.py operator.py)
CONSTRAINT = --constraint tests/$*/constraints.txt
test-oldest: $(VENV)-oldest/.made
	OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python -m pytest -n auto --dist worksteal -m "not slow" $(TESTS)

test-newest: $(VENV)-newest/.made
	OMP_NUM_THREADS=1 $(VENV)-newest/bin/python -m pytest -n auto --dist worksteal -m "not slow" $(TESTS)
	OMP_NUM_THREADS=1 $(VENV)-newest/bin/python -m pytest -n auto -m slow -k installed \
	  tests/kernels/test_compile.py tests/fusion/test_compile_templates.py

$(VENV)-%/.made: pyproject.toml tests/%/constraints.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINT) \
	  --editable '.[hf,bench]' hatchling hypothesis pytest pytest-xdist
	touch $@

# Random calls against float64: make fuzz N=10000 SEED=1 FUZZ="--device cuda" (or --interpret, for Triton's kernels, or
# --training, for steps of training on a CPU).
N ?= 2000
SEED ?= 0
fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --cases $(N) --seed $(SEED) $(FUZZ)

# Wrong code in one line, which the tests that import it must notice in 93 % of all mutants: make mutants N=30 SEED=1
# (an hour).
mutants: N = 30
mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants --count $(N) --seed $(SEED)

# Tests of transformers' own with stof in place of "sdpa", from a source checkout of the installed version:
# make test-transformers TRANSFORMERS=DIR. Its packages do not have them.
FAMILIES := bert roberta gpt2 opt llama mistral qwen2 qwen3 gemma2 bart t5 vit
test-transformers: $(VENV)/.dev $(VENV)/.transformers-tests
	cd $(or $(TRANSFORMERS),$(error name a checkout: make test-transformers TRANSFORMERS=DIR)) && \
	  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
	  PYTHONPATH=$(CURDIR)/tests/transformers_client:$(abspath $(VENV))/transformers-tests \
	  $(abspath $(BIN))/python -m pytest -p stof_for_sdpa --rootdir . -q -W ignore --tb=short -n auto --dist worksteal \
	  $(foreach family,$(FAMILIES),tests/models/$(family)/test_modeling_$(family).py)

# The figures of the README's table on this machine's CPU (about 4 minutes).
bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks attention --device cpu --masks "full causal window512 longformer bigbird strided dilated" --output benchmarks/results/cpu-attention.json

# The documentation site, in site/. Building it needs no network.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:
	rm -rf site $(VENV) $(VENV)-oldest $(VENV)-newest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "the pinned test packages need Python >= 3.11; name one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# A development install has everything the demo needs.
$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing into $(VENV) (PyTorch, transformers and a small checkpoint: a few minutes the first time)"
	$(INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) --editable '.[docs]'
	touch $@

# Only compile checks use it (tests/kernels/test_compile.py), in a process of their own.
$(VENV)/.triton-3.6: $(VENV)/.made tests/kernels/triton-3.6.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target $(VENV)/triton-3.6 --requirement tests/kernels/triton-3.6.txt
	touch $@

# The newest supported transformers, laid over the one in $(VENV).
$(VENV)/.transformers-newest: $(VENV)/.made tests/integrations/transformers-newest.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target $(VENV)/transformers-newest --requirement tests/integrations/transformers-newest.txt
	touch $@

$(VENV)/.transformers-tests: $(VENV)/.made tests/transformers_client/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target $(VENV)/transformers-tests --requirement tests/transformers_client/requirements.txt
	touch $@
