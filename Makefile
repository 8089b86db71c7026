# Each target is one or two commands that a person could type. `make generate` and `make test` set
# up .venv by themselves on first use.
#
#   TORCH   which PyTorch to install (a requirement; add pip options such as an index to PIP_ARGS)

TORCH ?= torch==2.13.0
PIP_ARGS ?=
PROMPT ?= a red circle moves right on a blue background
OUT ?= out

PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	&& echo $$p && break; done)
CXX_FOUND := $(shell command -v $(CXX) 2>/dev/null)
BIN := .venv/bin
NATIVE := CMakeLists.txt pyproject.toml constraints.txt $(wildcard csrc/*/* emulator/src/*)
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.hip' \
	'emulator/src/*.h' 'emulator/src/*.cpp')

.PHONY: generate e2e bench kernels test test-machine-code lint format clean tools

## generate: a video from a text prompt, dense and with LiteAttention, and the table of both
generate: .venv/run.stamp
	$(BIN)/liteattention-rocm generate "$(PROMPT)" --out "$(OUT)/generate"

## e2e: the generation-time suite on the small model, all thresholds
e2e: .venv/run.stamp
	$(BIN)/liteattention-rocm e2e --model e2e/model/wan-shapes --prompts e2e/prompts/shapes.txt \
		--threshold=-10,-8,-6,-5,-4,-3,-2 --out "$(OUT)/e2e"

## bench: the CPU engine against torch's SDPA
bench: .venv/run.stamp
	$(BIN)/liteattention-rocm bench cpu --json

## kernels: rebuild the MI300X code objects (Debian: clang-19 lld-19 llvm-19) and show them
kernels: .venv/run.stamp
	$(BIN)/liteattention-rocm kernels build
	$(BIN)/liteattention-rocm kernels report

## test: everything that needs no GPU, but for the long proofs
test: .venv/dev.stamp
	$(BIN)/python -m pytest

## test-machine-code: rebuild the code objects and compare, then the long proofs on the emulator:
## every shape, order and rounding, every deleted wait, and Triton's kernels, which nobody here tuned
## (Debian: clang-19 lld-19 llvm-19)
test-machine-code: .venv/dev.stamp .venv/triton.stamp
	$(BIN)/liteattention-rocm kernels check
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest -s tests/emulator/test_triton.py

## lint: formatting, lint and types
lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf .venv build dist out

# What the set-up needs from the machine, said in one line when it is missing.
tools:
	@test -n "$(PYTHON)" || { echo "missing: Python 3.11 or newer (Debian: apt-get install python3.11-venv)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "missing: the venv module of $(PYTHON) (Debian: apt-get install python3.11-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
		|| { echo "missing: the C headers of $(PYTHON) (Debian: apt-get install $(PYTHON)-dev)"; exit 1; }
	@test -n "$(CXX_FOUND)" || { echo "missing: a C++ compiler (Debian: apt-get install g++)"; exit 1; }

.venv/torch.stamp: | tools
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt "$(TORCH)"
	@touch $@

.venv/run.stamp: .venv/torch.stamp $(NATIVE)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[diffusers,bench]'
	@touch $@

.venv/dev.stamp: .venv/torch.stamp $(NATIVE)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[diffusers,bench,dev]'
	@touch .venv/run.stamp $@

.venv/triton.stamp: .venv/dev.stamp
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt triton
	@touch $@
