# Build, test and check pagedlora. `make help` lists the targets.
#
# Everything Python lives in .venv, pinned by constraints.txt. Overridable on the command line:
#   PYTHON       interpreter that makes .venv                     (make test PYTHON=python3.12)
#   TORCH_INDEX  where to take torch from; empty: only the default index  (the CPU wheels)
#   JOBS         parallel compile and test jobs                   (all cores)
#   CUDA_ARCHS   GPUs that .venv's package is for; empty: all     (this machine's; sm_90 where it has none)
#   FUZZ_SECONDS how long make fuzz runs     (10)
#   PYTEST_ARGS  more arguments for pytest                        (make test-python PYTEST_ARGS='-k cache')

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc)
CUDA_ARCHS ?= $(if $(shell nvidia-smi -L 2>/dev/null),native,90-real)
PYTEST_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
REPORTS := $(CURDIR)/build/reports
REQUIREMENTS := $(BIN)/python .ci/requirements.py
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check

# cmake, ctest and ninja come from .venv; those of older distributions are too old.
export PATH := $(BIN):$(PATH)
export OMP_NUM_THREADS := 1

# Address randomisation with many bits stops the ThreadSanitizer of older compilers.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

PYTHON_PATHS := $(wildcard python tests benchmarks examples .ci)
CPP_FILES = $(shell find cpp csrc_cuda tests/cpp benchmarks -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)
PACKAGE_FILES := pyproject.toml CMakeLists.txt $(wildcard LICENSE README.md) \
  $(shell find cpp csrc_cuda python -type f -not -path '*/__pycache__/*' -not -name '.*')

# ---- what a newcomer needs ---------------------------------------------------------------------

.PHONY: help
help: ## Show this list
	@echo "usage: make TARGET"
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | column -t -s '|'

.PHONY: test
test: test-cpp test-python ## Build everything and run the C++ and the Python tests

.PHONY: demo
demo: $(VENV)/.stamp-package $(VENV)/.stamp-demo ## Serve 208 adapters over a small real model
	$(BIN)/pagedlora demo

# ---- tests -------------------------------------------------------------------------------------

.PHONY: test-cpp
test-cpp: ctest-ci ## Run the C++ tests

# Hashes are the same in all processes, so that all of them name the tests alike.
PYTEST = PYTHONHASHSEED=$${PYTHONHASHSEED:-$$RANDOM} $(BIN)/pytest \
  --numprocesses=$(JOBS) --dist=loadfile --junitxml=$(REPORTS)/pytest$(1).xml $(PYTEST_ARGS) \
  $(wildcard tests/python tests/packaging)

.PHONY: test-python
test-python: $(VENV)/.stamp-package $(VENV)/.stamp-test ## Run the Python tests against the installed package
	@mkdir -p $(REPORTS)
	$(call PYTEST) -m 'not slow'

.PHONY: test-slow
test-slow: $(VENV)/.stamp-package $(VENV)/.stamp-test ## Run the Python tests that take long
	@mkdir -p $(REPORTS)
	$(call PYTEST,-slow) -m slow

.PHONY: sanitize
sanitize: ctest-tsan ctest-asan ## Run the C++ tests under ThreadSanitizer, then AddressSanitizer and UBSan

# ctest-PRESET: configure, build and run the C++ tests with a preset of CMakePresets.json.
.PHONY: ctest-ci ctest-tsan ctest-asan ctest-dev ctest-release
ctest-ci ctest-tsan ctest-asan ctest-dev ctest-release: ctest-%: $(VENV)/.stamp-build gtest
	@mkdir -p $(REPORTS)
	cmake --preset $*
	cmake --build --preset $* --parallel $(JOBS)
	$(NO_ASLR) ctest --preset $* --parallel $(JOBS) --output-junit $(REPORTS)/ctest-$*.xml

.PHONY: gtest
gtest: # Debian's GoogleTest where we may install it; elsewhere CMake downloads the sources
	@if [ ! -e /usr/include/gmock/gmock.h ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  { apt-get update -q && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -qy --no-install-recommends libgtest-dev libgmock-dev; } || true; \
	fi

FUZZ_SECONDS ?= 10

.PHONY: fuzz
fuzz: ## Fuzz the parser of safetensors headers (needs clang); FUZZ_SECONDS=600 for a long run
	.ci/fuzz.sh $(FUZZ_SECONDS)

# ---- checks of style ---------------------------------------------------------------------------

LINTS := lint-ruff lint-ruff-format lint-mypy lint-clang-format lint-clang-tidy

.PHONY: lint $(LINTS)
lint: $(LINTS) ## Run ruff, mypy, clang-format and clang-tidy

lint-ruff: $(VENV)/.stamp-dev
	$(BIN)/ruff check $(PYTHON_PATHS)

lint-ruff-format: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check $(PYTHON_PATHS)

lint-mypy: $(VENV)/.stamp-dev $(VENV)/.stamp-test
	$(BIN)/mypy

lint-clang-format: $(VENV)/.stamp-dev
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

# In a tree of its own, which is not built: it has a command for each source.
lint-clang-tidy: $(VENV)/.stamp-dev gtest
	cmake --preset ci -B build/tidy -DCMAKE_UNITY_BUILD=OFF
	.ci/clang-tidy.sh build/tidy $(JOBS)

.PHONY: format
format: $(VENV)/.stamp-dev ## Format the C++ and Python sources in place
	$(BIN)/ruff check --fix-only --select I $(PYTHON_PATHS)
	$(BIN)/ruff format $(PYTHON_PATHS)
	$(BIN)/clang-format -i $(CPP_FILES)

# ---- the rest ----------------------------------------------------------------------------------

.PHONY: bench
bench: $(VENV)/.stamp-package $(VENV)/.stamp-test $(VENV)/.stamp-demo gtest ## Run the benchmarks; the table of ratios comes last
	@if [ -e benchmarks/cpp/CMakeLists.txt ]; then \
	  cmake --preset release -DPAGEDLORA_BENCH=ON; \
	  cmake --build --preset release --parallel $(JOBS); \
	  for source in benchmarks/cpp/*_bench.cc; do \
	    build/release/benchmarks/cpp/$$(basename "$$source" .cc); \
	  done; \
	fi
	$(BIN)/python -m benchmarks.python.run

.PHONY: install
install: $(VENV)/.stamp-package ## Build the package and install it into .venv

.PHONY: clean
clean: ## Remove everything that was built, .venv too
	rm -rf build dist .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- .venv, in steps that are done once --------------------------------------------------------

$(VENV)/.stamp-venv:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-build: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	$(PIP_INSTALL) -c constraints.txt $$($(REQUIREMENTS) build)
	@touch $@

# torch alone first: the default index has a CUDA build of several gigabytes under the same name.
# Without --no-deps an unreachable TORCH_INDEX would be asked again for each dependency.
$(VENV)/.stamp-torch: constraints.txt | $(VENV)/.stamp-venv
	$(PIP_INSTALL) --no-deps $(if $(TORCH_INDEX),--retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX)) \
	  "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.stamp-test $(VENV)/.stamp-dev $(VENV)/.stamp-demo: \
$(VENV)/.stamp-%: pyproject.toml constraints.txt $(VENV)/.stamp-build $(VENV)/.stamp-torch
	$(PIP_INSTALL) -c constraints.txt $$($(REQUIREMENTS) runtime $*)
	@touch $@

# A plain install from an own build directory: C++ is rebuilt incrementally, and neither an
# isolated build (pip wheel .) nor an editable one shares that directory.
$(VENV)/.stamp-package: $(PACKAGE_FILES) $(VENV)/.stamp-build $(VENV)/.stamp-torch
	$(PIP_INSTALL) -c constraints.txt $$($(REQUIREMENTS) runtime)
	$(PIP_INSTALL) --no-deps --no-build-isolation --config-settings=build-dir=build/package \
	  $(if $(CUDA_ARCHS),--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHS)) .
	@touch $@
