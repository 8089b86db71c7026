# Each target is one or two commands that a person could type. `make generate` and `make test` set
# up .venv by themselves on first use.
#
#   FRAMEWORKS   what test-serving tries: diffusion (SGLang's), vllm, sglang (its language models)
#   WHEELS       the versions of Python that get a wheel
#   WORKERS      how many processes run tests: a number, or "logical" for the processors, 8 at most
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
KERNEL_TOOLS := PYTHONPATH=tools $(BIN)/python -m liteattention_tools
NATIVE := CMakeLists.txt pyproject.toml constraints.txt $(wildcard csrc/*/* emulator/src/*/*)
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.hip' \
	'emulator/src/*.h' 'emulator/src/*.cpp')

SHELL_FILES = $(shell git ls-files '*.sh' .ci/run)

FRAMEWORKS ?= diffusion vllm sglang
WORKERS ?= logical
WHEELS ?= 3.10 3.11 3.12 3.13
SPREAD = -n $(WORKERS) --maxprocesses 8 --dist
SETUP_sglang := diffusion
PACKAGED = $(NATIVE) $(shell git ls-files backend integration benchmark emulator report e2e/liteattention_e2e)

.PHONY: generate e2e bench kernels test machine-code test-machine-code test-old-triton test-serving-vllm test-serving-sglang test-serving-diffusion test-serving lint format docs wheels test-wheels test-quickstart test-quickstart-short clean tools

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

## kernels: rebuild the MI300X code objects (Debian: clang-19 lld-19) and show them
kernels: .venv/dev.stamp
	$(KERNEL_TOOLS) build
	$(KERNEL_TOOLS) report

## test: everything that needs no GPU, but for the long proofs
test: .venv/dev.stamp
	$(BIN)/python -m pytest $(SPREAD) loadfile --durations=10

## test-machine-code: rebuild the code objects and the emulator's test programs and compare; then the
## comparisons with LLVM itself and the long proofs on the emulator: every shape, order and rounding,
## every deleted wait, Triton's kernels, which nobody here tuned, and the portable engine's:
## interpreted, and compiled for gfx942, gfx950 and sm_90 (Debian: clang-19 lld-19 llvm-19)
test-machine-code: .venv/dev.stamp .venv/triton.stamp test-old-triton
	$(KERNEL_TOOLS) check
	$(BIN)/python -m pytest $(SPREAD) loadfile --machine-code=compare tests/emulator tests/tools
	$(BIN)/python -m pytest -m "slow or llvm" $(SPREAD) worksteal --durations=10
	$(BIN)/python -m pytest -s tests/emulator/test_triton.py
	$(BIN)/python -m pytest $(SPREAD) worksteal --durations=10 tests/engines/portable
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(SPREAD) worksteal --durations=10 tests/engines/portable

# The oldest Triton that compiles the Hopper kernels, and the oldest of all, which compiles plain ones.
test-old-triton: .venv/dev.stamp .venv/triton-3.6.0.stamp .venv/triton-3.5.1.stamp
	PYTHONPATH=.venv/triton-3.6.0 TRITON_EXPECTED=3.6.0 $(BIN)/python -m pytest $(SPREAD) worksteal \
		tests/engines/portable/test_shipped.py tests/engines/portable/test_short.py
	PYTHONPATH=.venv/triton-3.5.1 TRITON_EXPECTED=3.5.1 $(BIN)/python -m pytest $(SPREAD) worksteal \
		tests/engines/portable/test_shipped.py tests/engines/portable/test_compiled.py \
		-k "asked_for or (plain_kernels and sm_90)"

## machine-code: assemble and compile the emulator's test programs again
## (Debian: clang-19 lld-19 llvm-19)
machine-code: .venv/dev.stamp
	rm -f tests/emulator/machine_code/*.json
	$(BIN)/python -m pytest --machine-code=update tests/emulator tests/tools

## test-serving: vLLM and SGLang, the real ones, serve small models through our attention, offline and
## over HTTP, with the tokens of their own attention (two virtual environments, 6 GB). `make -j2
## test-serving` runs them side by side: on two processors it takes four fifths of the time.
test-serving: $(FRAMEWORKS:%=test-serving-%)

test-serving-vllm: .venv-vllm/ready.stamp
	.venv-vllm/bin/python -m pytest --durations=10 tests/serving/vllm_*.py

# SGLang's two runtimes are apart: the diffusion worker's settings are for the whole process, and it
# polls without pause until the process ends.
test-serving-sglang: .venv-sglang/ready.stamp
	.venv-sglang/bin/python -m pytest --durations=10 tests/serving/sglang_backend.py tests/serving/sglang_graphs.py tests/serving/sglang_serving.py tests/serving/sglang_smollm2.py

test-serving-diffusion: .venv-sglang/ready.stamp
	.venv-sglang/bin/python -m pytest --durations=10 tests/serving/sglang_diffusion*.py

## lint: formatting, lint and types, also of shell scripts and images
lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/shellcheck --exclude=SC1091,SC2016 $(SHELL_FILES)
	$(BIN)/hadolint docker/*.Dockerfile

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

## docs: the site, in out/site; a dead link or anchor fails it
docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

## wheels: for Python 3.10 to 3.13 and any Linux with glibc 2.28, and the sources, in dist
wheels: .venv-wheels/ready.stamp
	PYTHONPATH=tools .venv-wheels/bin/python -m liteattention_tools.wheels --python $(WHEELS)

## test-wheels: each wheel in a fresh environment: every command, and the expected bits of all kernels.
## TORCH may need another value for the versions of Python that it has no build for.
test-wheels: .venv-wheels/ready.stamp
	for version in $(WHEELS); do \
		python=$$(PYTHONPATH=tools .venv-wheels/bin/python -m liteattention_tools.wheels --find $$version) && \
		TORCH="$(TORCH)" PIP_ARGS="$(PIP_ARGS)" tests/wheel/test.sh $$python $(CURDIR)/dist/*.whl || exit 1; \
	done

## test-quickstart: the lines of docs/quickstart.md with the wheels, in clean Debian roots that have no
## checkout and no compiler's output of this machine (needs root, debootstrap, a Python 3.10 and, where
## PyTorch comes as a CUDA build, 20 GB)
test-quickstart:
	TORCH="$(TORCH)" tests/quickstart/run.sh bookworm install doctor python emulate video vllm
	TORCH="$(TORCH)" tests/quickstart/run.sh bookworm-3.10 install doctor python emulate video
	TORCH="$(TORCH)" tests/quickstart/run.sh trixie install doctor python emulate video vllm
	TORCH= tests/quickstart/run.sh trixie install doctor python emulate

# The part of it that takes two minutes, with the wheel of this tree as this machine compiles it.
test-quickstart-short: build/wheel/stamp
	WHEEL="$$(ls $(CURDIR)/build/wheel/*.whl)" TORCH="$(TORCH)" \
		tests/quickstart/run.sh bookworm install doctor python

clean:
	rm -rf .venv .venv-vllm .venv-sglang .venv-wheels build dist out

# What the set-up needs from the machine: all that is missing in one message.
tools:
	@python="$(PYTHON)"; debian=; what=; \
	lacks() { what="$${what:+$$what, }$$1"; debian="$$debian $$2"; }; \
	name=$$(basename "$${python:-python3.11}"); \
	if test -z "$$python"; then \
		lacks "Python 3.11 or newer" "python3.11 python3.11-venv python3.11-dev"; \
	else \
		$$python -c 'import ensurepip, venv' 2>/dev/null || lacks "the venv module of $$name" "$$name-venv"; \
		$$python -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
			|| lacks "the C headers of $$name" "$$name-dev"; \
	fi; \
	test -n "$(CXX_FOUND)" || lacks "a C++ compiler" "g++"; \
	test -z "$$what" || { echo "missing: $$what (Debian: apt-get install$$debian)"; exit 1; }

# What builds the package: pyproject.toml's build requirements, and what they would fetch for each build.
.venv/build.stamp: pyproject.toml constraints.txt | tools
	$(PYTHON) -m venv .venv
	$(BIN)/python -c 'import tomllib; build = tomllib.load(open("pyproject.toml", "rb"))["build-system"]; \
		print(*build["requires"], "cmake>=3.24", "ninja>=1.10", sep="\n")' > .venv/build.txt
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -r .venv/build.txt
	@touch $@

.venv/torch.stamp: | .venv/build.stamp
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt "$(TORCH)"
	@touch $@

# Every build runs in .venv, not in an environment of its own, so that all share the object files in
# build/: what one has compiled, the next does not compile again.
BUILD = --no-build-isolation $(PIP_ARGS)

.venv/run.stamp: .venv/torch.stamp $(NATIVE)
	$(BIN)/python -m pip install -q $(BUILD) -c constraints.txt -e '.[diffusers,bench]'
	@touch $@

.venv/dev.stamp: .venv/torch.stamp $(NATIVE)
	$(BIN)/python -m pip install -q $(BUILD) -c constraints.txt -e '.[diffusers,bench,dev]'
	@touch .venv/run.stamp $@

build/wheel/stamp: $(PACKAGED) | .venv/build.stamp
	rm -rf build/wheel
	$(BIN)/python -m pip wheel -q $(BUILD) --no-deps -w build/wheel .
	@touch $@

# An environment of a framework: by the recipe that is there to read, with the wheel of this tree.
.venv-%/ready.stamp: build/wheel/stamp tests/serving/setup_%.sh $(wildcard tests/serving/*.txt) \
		$(wildcard tests/serving/*/pyproject.toml tests/serving/*/*/*.py)
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" PIP_ARGS="$(PIP_ARGS)" PRODUCT="$$(ls $(CURDIR)/build/wheel/*.whl)" \
		tests/serving/setup_$*.sh .venv-$* $(SETUP_$*)
	@touch $@

.PRECIOUS: .venv-%/ready.stamp

# What builds and audits wheels: a C++ compiler for an older glibc among it.
.venv-wheels/ready.stamp: pyproject.toml constraints.txt | tools
	$(PYTHON) -m venv .venv-wheels
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
		print(*project["build-system"]["requires"], *project["project"]["optional-dependencies"]["wheels"], sep="\n")' \
		> .venv-wheels/wheels.txt
	.venv-wheels/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt -r .venv-wheels/wheels.txt
	@touch $@

# Reads the sources, so that nothing is built for it. Material for MkDocs ends in May 2027, which the
# variable in `docs` silences; Zensical takes the same mkdocs.yml.
.venv/docs.stamp: pyproject.toml constraints.txt | .venv/build.stamp
	$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["docs"], sep="\n")' > .venv/docs.txt
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -r .venv/docs.txt
	@touch $@

.venv/triton-%.stamp: | .venv/build.stamp
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps --target .venv/triton-$* triton==$*
	@touch $@

.PRECIOUS: .venv/triton-%.stamp

.venv/triton.stamp: .venv/dev.stamp
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt triton
	@touch $@
