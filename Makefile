# Everything happens in a virtual environment of its own, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
C_FILES := $(wildcard csrc/*.[ch] csrc/*/*.[ch] csrc/*/*.cu tests/c/*.[ch] tests/cuda_emulation/*)
BUILD_INPUTS := setup.py pyproject.toml $(wildcard csrc/*.* csrc/*/*)
JOBS ?= 2
SECONDS ?= 600
tests = $(1:%=tests/test_%.py)
SANITIZED = ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONPATH=build/sanitize \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)"

.PHONY: help demo test test-arm test-cuda cuda gpu-check sanitize fuzz lint format bench docs notebooks wheel test-wheel clean

help: ## what the commands do
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1 \2/p' $(MAKEFILE_LIST) | while read -r name text; do printf '%-12s %s\n' "$$name" "$$text"; done

demo: $(VENV)/demo ## trains a small ViT on handwritten digits with RoPE and with others, on larger grids, too; writes vit.png
	$(BIN)/python examples/vit.py

test: $(VENV)/test ## builds with warnings as errors, runs the Python tests and the kernels' own tests in C
	$(BIN)/python -m pytest -n $(JOBS) -q
	$(MAKE) -C tests/c cuda native

notebooks: $(VENV)/test ## runs the notebooks from top to bottom; what they show stays as it is
	$(BIN)/python -m pytest --nbmake notebooks -n $(JOBS) -q

test-arm: ## the kernels' own tests as AArch64 code under emulation, and that they give the bits of this machine
	command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null || \
		{ apt-get update -q && apt-get install -y -q gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user; }
	$(MAKE) -C tests/c arm

EMULATION := $(CURDIR)/build/tests_c/cuda/libemulation.so
test-cuda: $(VENV)/test ## the CUDA kernels on an emulated device: tests in C, then Python tests with CPU tensors sent there
	$(MAKE) -C tests/c cuda
	ND_ROTARY_EMULATION=$(EMULATION) $(BIN)/python -m pytest -n $(JOBS) -q $(call tests,rotate queries_and_keys precision angles autograd \
		transforms operators operator_limits compile subclasses encoding encoding_in_place encoding_state errors same_bits)

# The CUDA compiler comes from PyPI where there is none
CUDA_PACKAGES := nvcc crt runtime cccl
NVCC = command -v nvcc || command -v $(CUDA_HOME)/bin/nvcc || command -v /usr/local/cuda/bin/nvcc || \
	$(BIN)/pip install -q 'nvidia-nvvm>=13,<13.1' $(CUDA_PACKAGES:%='nvidia-cuda-%>=13,<13.1')

cuda: $(VENV)/python ## compiles the CUDA kernels for every architecture, warnings and spilled registers as errors
	$(NVCC) || \
		{ echo "no nvcc here and none to install: the CUDA kernels are not compiled"; exit 0; }; \
	ND_ROTARY_CUDA=1 $(BIN)/python setup.py -q build_cuda

# With PYTHON as it is, as there may be no network
gpu-check: ## with a GPU and torch for it, in eight minutes: build, checks, compute-sanitizer, benchmarks (docs/cuda.md)
	$(PYTHON) benchmarks/gpu_check.py

sanitize: build/sanitize ## kernel tests in C and Python that stop at the first invalid access or undefined operation
	$(MAKE) -C tests/c sanitize cuda-sanitize
	$(SANITIZED) $(BIN)/pytest -q -p no:randomly \
		$(call tests,rotate queries_and_keys precision same_bits angles errors operator_limits fuzz)
	$(SANITIZED) ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
		ND_ROTARY_EMULATION=$(CURDIR)/build/tests_c/cuda-sanitize/libemulation.so \
		$(BIN)/pytest -q -p no:randomly $(call tests,rotate queries_and_keys angles)

fuzz: build/sanitize ## arbitrary calls of the operators on that build, for SECONDS=600
	$(SANITIZED) TORCH_CPP_LOG_LEVEL=FATAL $(BIN)/python tests/test_fuzz.py --seconds $(SECONDS)

# The kernels know nothing of torch or Python, nor the CPU's and CUDA's of each other
lint: $(VENV)/lint ## ruff, clang-format, pyright, and which folder of csrc may include what
	! grep -nE '#include .*(torch|Python|cuda/)' csrc/cpu/*
	! grep -nE '#include .*(torch|Python|cpu/)' csrc/cuda/*
	! grep -nE '#include .*(torch|Python|cpu/|cuda/)' $(filter-out csrc/module.c,$(wildcard csrc/*.[ch]))
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/lint ## does what lint wants
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(C_FILES)

# PEERS: a folder of checkouts to compare with, see benchmarks/peers.py
PEERS := peers
bench: $(VENV)/test ## the benchmarks, half an hour; writes benchmarks/results
	$(BIN)/python benchmarks/op.py --output benchmarks/results
	$(BIN)/python benchmarks/peers.py --output benchmarks/results --peers $(PEERS)
	$(BIN)/python benchmarks/scaling.py --output benchmarks/results
	$(BIN)/python benchmarks/layer.py --output benchmarks/results

docs: $(VENV)/docs ## the documentation, into site/
	$(BIN)/python benchmarks/plots.py docs/plots
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

# Its manylinux is as new as this machine's glibc
WHEEL := build/wheel
wheel: $(VENV)/release ## sdist and, from that, a wheel with CUDA kernels in dist/, audited; wants Python 3.11 or later
	$(NVCC)
	rm -rf dist $(WHEEL)
	ND_ROTARY_CUDA=1 $(BIN)/python -m build --no-isolation --outdir $(WHEEL)
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir dist $(WHEEL)/*.whl
	mv $(WHEEL)/*.tar.gz dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/abi3audit --strict --summary dist/*.whl
	$(BIN)/python -m zipfile -e dist/*.whl $(WHEEL)
	$(BIN)/torch-abi-audit --check both ./$(WHEEL)/nd_rotary_encodings
	find dist -size +3M | (! grep .)

# Away from the package's source
TEST_WHEEL := build/test_wheel
test-wheel: ## that wheel in a new environment of PYTHON=python3, and the tests of the sdist there
	rm -rf $(TEST_WHEEL)
	$(PYTHON) -m venv $(TEST_WHEEL)/venv
	tar xf dist/*.tar.gz -C $(TEST_WHEEL) --strip-components 1
	rm -r $(TEST_WHEEL)/nd_rotary_encodings
	$(TEST_WHEEL)/venv/bin/pip install -q $(TORCH) "$$(ls dist/*.whl)[test]"
	cd $(TEST_WHEEL) && venv/bin/pytest -n $(JOBS) -q

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH) numpy setuptools
	touch $@

# CUDA kernels take a minute to compile, each time, and no test without a GPU needs them: `make cuda` compiles them
$(VENV)/test $(VENV)/demo $(VENV)/docs $(VENV)/lint $(VENV)/release build/sanitize: export ND_ROTARY_CUDA := 0

# ND_ROTARY_WERROR: warnings of the C compiler are errors here, not for users
$(VENV)/test: $(VENV)/python $(BUILD_INPUTS)
	ND_ROTARY_WERROR=1 $(BIN)/pip install -q -e '.[test]'
	touch $@

build/sanitize: $(VENV)/test $(wildcard nd_rotary_encodings/*.py)
	rm -rf $@
	ND_ROTARY_SANITIZE=1 $(BIN)/python setup.py -q build --build-lib $@ --build-temp $@-objects
	touch $@

$(VENV)/demo: $(VENV)/python $(BUILD_INPUTS)
	$(BIN)/pip install -q -e '.[demo]'
	touch $@

$(VENV)/docs: $(VENV)/test pyproject.toml
	$(BIN)/pip install -q -e '.[docs]'
	touch $@

$(VENV)/lint: $(VENV)/test pyproject.toml
	$(BIN)/pip install -q -e '.[lint]'
	touch $@

$(VENV)/release: $(VENV)/python $(BUILD_INPUTS)
	$(BIN)/pip install -q -e '.[release]'
	touch $@

clean: ## removes all that the others made
	rm -rf $(VENV) build dist site docs/plots *.egg-info nd_rotary_encodings/*.so .hypothesis .pytest_cache .ruff_cache *.png
	find . -name __pycache__ -prune -exec rm -rf {} +
