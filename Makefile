# Everything runs from .venv, which the first target that needs it creates.
#
#   make demo                              plain FSDP2 beside two policies, under three minutes
#   make demo POLICIES=one-bit STEPS=900   other policies (names or YAML files), a run each; longer runs
#   make demo LINK=100mbit                 with a rank in each of two network namespaces (needs root)
#   make demo TORCH=torch                  the registry's newest torch; TORCH= keeps what is installed
#   make gpu INSTALLED= BIN=/usr/bin OUT=/tmp/gpu    with the Python that is there, output elsewhere
#   make gpu-quality TEXT=runs/text/tokens.npz   with text in byte pairs; benchmarks/tokens.py makes it
#   make test-device TRITON=3.6.0          kernels as an older Triton compiles them, in an environment of its own
#   make mutants MUTANTS="wait-left-out"   some planted errors; with ALL=1 every test that notices them

PYTHON ?= python3
TORCH ?= torch==2.13.0
RANKS ?= 2
POLICIES ?= hybrid,attn-only
LINK ?=
STEPS ?= $(if $(LINK),60,300)
OUT ?= runs/gpu
TEXT ?=
TRITON ?=
MUTANTS ?=
ALL ?=

VENV := .venv$(if $(TRITON),-triton-$(TRITON))
BIN := $(VENV)/bin
# The stamp names the choice of torch, so that another choice installs again.
INSTALLED := $(VENV)/.installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)

# Compiled modules are kept, whatever the environment says: every rank and command imports them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-device test-gpu test-network test-recipes mutants parity lint docs bench bench-network gpu gpu-quality clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "make %-13s %s\n", $$1, $$2}'

# torch goes first and alone: its version is a choice, the rest follows from pyproject.toml.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install $(foreach word,$(TORCH),'$(word)'))
	$(BIN)/python -m pip install -e '.[demo,test,lint]'
	$(if $(TRITON),$(BIN)/python -m pip install 'triton==$(TRITON)')
	rm -f $(VENV)/.installed-*
	touch $@

# The script sets its own threads; without the variable torchrun prints a notice about them.
demo: $(INSTALLED) ## train a small GPT plain and compressed, compare (RANKS, POLICIES, STEPS, LINK)
	OMP_NUM_THREADS=1 $(if $(LINK),$(BIN)/python -m benchmarks.network.launch --ranks $(RANKS) --rate $(LINK),$(BIN)/torchrun --standalone --nproc-per-node $(RANKS)) \
		examples/train_gpt.py --policies $(POLICIES) --steps $(STEPS) $(if $(LINK),--link $(LINK))

test: $(INSTALLED) ## run the tests that need neither minutes nor a GPU nor root
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not device and not gpu and not network and not recipes"

test-slow: $(INSTALLED) ## run the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-device: $(INSTALLED) ## compile and emulate all GPU kernels without a GPU, for minutes
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not gpu" tests/triton tests/device

test-gpu: $(INSTALLED) ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

test-network: $(INSTALLED) ## run the tests that need root, ip and tc (network namespaces)
	$(BIN)/python -m pytest -m network

test-recipes: $(INSTALLED) ## install Lightning, transformers, Accelerate, torchtitan and torchft, run the recipes with them
	$(BIN)/python -m pip install -e '.[recipes,sites]'
	$(BIN)/python -m pytest -m recipes

mutants: $(INSTALLED) ## plant errors in copies of the library, one at a time: does a test notice? (MUTANTS, ALL)
	PYTHONPATH=tests $(BIN)/python -m mutants $(MUTANTS) $(if $(ALL),--all)

parity: $(INSTALLED) ## native FSDP beside tagc, all combinations, as tables (docs/parity.md)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m parity

lint: $(INSTALLED) ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

docs: $(INSTALLED) ## build the documentation's site in build/docs/site; any warning is an error
	$(BIN)/python -m pip install -e '.[docs]'
	$(BIN)/python docs/site/stage.py build/docs
	$(BIN)/zensical build --strict --config-file build/docs/mkdocs.yml

bench: $(INSTALLED) ## run the kernel benchmark
	$(BIN)/python -m benchmarks kernels

# A part that fails or hangs takes nothing from the others.
gpu: $(INSTALLED) ## GPU tests, benchmark, training steps, each with a time limit (OUT)
	@mkdir -p $(OUT); \
	part() { timeout -s KILL $$2 $(BIN)/python -m $$3 > $(OUT)/$$1 2>&1 || failed="$$failed $$1"; cat $(OUT)/$$1; }; \
	part tests.txt 200 "pytest -n 4 -rfEs -m gpu tests/triton tests/test_no_sync.py"; \
	part kernels.md 170 "benchmarks kernels --device cuda --time-limit 130 --json $(OUT)/kernels.jsonl"; \
	part rank.md 120 "benchmarks rank --json $(OUT)/rank.jsonl"; \
	part captured.md 60 "benchmarks rank --width 512 --captured --policies hybrid thrifty --json $(OUT)/rank.jsonl"; \
	PYTHONPATH="tests:$$PYTHONPATH" part ranks.txt 150 "nccl_ranks --seconds 110"; \
	test -z "$$failed" || { echo "failed or stopped:$$failed" >&2; exit 1; }

# What is known when the time is up is kept: a run that is cut off leaves its curve.
gpu-quality: $(INSTALLED) ## losses of 100 M parameters on a GPU that 4 ranks share, within ten minutes (OUT, TEXT)
	@mkdir -p $(OUT)
	$(BIN)/python -m benchmarks quality gpu --json $(OUT)/gpu-quality.jsonl $(if $(TEXT),--text $(TEXT))

bench-network: $(INSTALLED) ## train over rate-limited links; needs root, ip and tc, under an hour
	$(BIN)/python -m benchmarks network

clean: ## remove build output and caches; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
