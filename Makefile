# `make help` lists the targets. Each sets up what it needs: a virtual
# environment in .venv, and a build in build/dev. With NO_VENV=1 PYTHON=python3
# everything comes from the machine and nothing is downloaded.

PYTHON ?= python3
NO_VENV ?=
TORCH ?=
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc)
BUILD ?= build/dev
PYTEST_ARGS ?=

export JOBS
# Packages are installed without compiled modules, and tests start hundreds of processes: each of
# them would compile torch, transformers and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(NO_VENV),)
  PY := $(CURDIR)/.venv/bin/python
  SETUP := venv
  WITH_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"
else
  PY := $(PYTHON)
  SETUP :=
  WITH_VENV :=
endif
RUN := $(WITH_VENV) PYTHONPATH="$(CURDIR)/python$${PYTHONPATH:+:$$PYTHONPATH}"
# Two processes share the cores.
THREADS_OF_TWO := $(shell n=$$(($$(env -u OMP_NUM_THREADS nproc) / 2)); echo $$((n > 0 ? n : 1)))

.DEFAULT_GOAL := help

.PHONY: help
help:  ## show this list
	@grep -E '^[a-z_-]+:.*##' $(MAKEFILE_LIST) | \
	  sed -E 's/^([a-z_-]+):[^#]*## /\1|/' | \
	  awk -F'|' '{printf "  make %-9s %s\n", $$1, $$2}'
	@echo "  NO_VENV=1 PYTHON=python3 uses the packages of the machine"

.PHONY: venv
venv:  ## create or update .venv
	@PYTHON="$(PYTHON)" scripts/setup_venv.sh .venv

.PHONY: build
build:  ## build the extension and the C++ tests
	@PYTHON="$(PYTHON)" NO_VENV="$(NO_VENV)" scripts/setup_and_build.sh all $(BUILD)

.PHONY: extension
extension:
	@PYTHON="$(PYTHON)" NO_VENV="$(NO_VENV)" scripts/setup_and_build.sh all $(BUILD) --target smp_for_python

.PHONY: demo
demo:  ## fine-tune a small GPT-J on two processes and check it
	@PYTHON="$(PYTHON)" NO_VENV="$(NO_VENV)" OMP_NUM_THREADS=$(THREADS_OF_TWO) \
	  $(WITH_VENV) scripts/demo.sh $(BUILD) $(PY)

# The last release with the interface that scripts of smp v1 were written for.
.PHONY: transformers
transformers: extension
ifeq ($(NO_VENV),)
	PYTHON=$(PY) scripts/compat.sh transformers 4.30.2 --setup
endif

.PHONY: test
test: transformers  ## every claim: C++, lint rules, one process, several processes
	$(RUN) scripts/test.sh $(BUILD) $(PY) $(PYTEST_ARGS)

# One of ZOO models of the zoo, on two ranks; those of `make zoo` are all.
ZOO ?= 32

# SHARE=k/n runs the k-th of n shares of its Python tests.
SHARE ?= 1/1

.PHONY: test-all
test-all: transformers  ## what `make test` leaves out: larger samples of the same claims
	$(WITH_VENV) scripts/build.sh $(BUILD) $(PY) --target all --target smp_fuzzers
	$(WITH_VENV) ctest --test-dir $(BUILD) --output-on-failure -L others --parallel 2
	$(RUN) SMP_SAMPLES=others SMP_SHARE=$(SHARE) scripts/pytest.sh $(PY) $(PYTEST_ARGS)
	$(RUN) OMP_NUM_THREADS=1 $(PY) -m tests.zoo --mode pp2 --sample $(ZOO) --jobs 2 --check

# One class of each family on two ranks, then a sample in the other modes.
.PHONY: zoo
zoo: extension  ## every model of the zoo: one of each family on two ranks, samples in other modes
	$(RUN) OMP_NUM_THREADS=1 $(PY) -m tests.zoo --mode pp2 --jobs 2 --check
	$(RUN) OMP_NUM_THREADS=1 $(PY) -m tests.zoo --mode outputs --mode pp3 --mode pp2dp2 --mode dp2 \
	  --mode sdp2 --mode tp2 --mode checkpointing --mode bf16 --sample 32 --jobs 2 --check

.PHONY: quick
quick: build  ## C++ and one-process tests only
	$(WITH_VENV) ctest --test-dir $(BUILD) --output-on-failure -L unit
	$(RUN) $(PY) -m pytest tests/lint tests/unit tests/api $(PYTEST_ARGS)

.PHONY: grid
grid: extension  ## all of what the tests run samples of, and thousands of random programs: hours
	$(RUN) SMP_NUM_PROGRAMS=5000 SMP_GRID=all $(PY) -m pytest $(PYTEST_ARGS)

.PHONY: lint
lint: extension  ## check format (clang-format, ruff) and types (mypy)
	$(WITH_VENV) scripts/lint.sh $(PY)

.PHONY: format
format: $(SETUP)  ## format everything
	$(WITH_VENV) scripts/lint.sh $(PY) --fix

.PHONY: headers
headers: $(SETUP)  ## compile every header alone
	$(WITH_VENV) scripts/build.sh $(BUILD) $(PY) --target smp_headers

.PHONY: asan
asan: $(SETUP)  ## C++ tests under the address and undefined-behaviour sanitizers
	$(WITH_VENV) scripts/build.sh build/asan $(PY) -DSMP_SANITIZE=address \
	  -DSMP_PYTHON_MODULE=OFF --target all --target smp_fuzzers
	$(WITH_VENV) ctest --test-dir build/asan --output-on-failure

.PHONY: tsan
tsan: $(SETUP)  ## C++ tests under the thread sanitizer
	$(WITH_VENV) scripts/build.sh build/tsan $(PY) -DSMP_SANITIZE=thread \
	  -DSMP_PYTHON_MODULE=OFF
	$(WITH_VENV) ctest --test-dir build/tsan --output-on-failure

# RUNS: inputs of each decoder; SEED=2 makes others.
RUNS ?= 1000000
SEED ?= 1

.PHONY: fuzz
fuzz: extension  ## RUNS inputs that are nearly right for each decoder
	$(WITH_VENV) scripts/fuzz.sh $(BUILD) $(PY) $(RUNS) $(SEED)
	$(RUN) $(PY) -m tests.fuzz --runs $(RUNS) --seed $(SEED)

.PHONY: bench
bench: $(SETUP)  ## run the benchmarks; one JSON line per result
	$(WITH_VENV) scripts/build.sh $(BUILD) $(PY)
	$(RUN) $(PY) benchmarks/run.py

# Parts by name, e.g. PART="kernels graph"; all of them without. DEVICE=cpu: a dry run.
PART ?=
DEVICE ?= cuda
GPU_OUT ?= build/gpu$(if $(filter cpu,$(DEVICE)),-dry)

.PHONY: gpu
gpu: $(SETUP)  ## what one GPU has to answer; PART=kernels runs one part, CALL=1 to 4 a quarter
	$(WITH_VENV) DEVICE="$(DEVICE)" scripts/gpu.sh $(PY) "$(GPU_OUT)" $(if $(CALL),--call $(CALL),$(PART))

.PHONY: compat
compat:  ## build and test against another torch: make compat TORCH=2.6.0
	@PYTHON="$(PYTHON)" scripts/compat.sh "$(TORCH)"

# STAGE="package tests": some of root, package, tests and install.
STAGE ?=

.PHONY: debian
debian:  ## on Debian 13's own packages: build, test, make python3-smp and try it (as root)
	scripts/debian.sh $(STAGE)

# One wheel for each Python, with an extension for each torch: make wheel TORCH="2.11.0 2.15.0" PYTHON=python3.12
.PHONY: wheel
wheel:  ## build a wheel for PYTHON and each TORCH into dist/
	scripts/wheel.sh build "$(PYTHON)" $(TORCH)

.PHONY: wheel-check
wheel-check:  ## try PYTHON's wheel of dist/ with each torch that it has, and nothing else
	scripts/wheel.sh check "$(PYTHON)" $(TORCH)

# Its packages have an environment of their own; with NO_VENV=1 they are in that of PYTHON.
SITE := $(if $(NO_VENV),$(PYTHON),.venv-site/bin/python)

.PHONY: site
site: extension  ## the documentation as a site, in build/site/html
ifeq ($(NO_VENV),)
	scripts/setup_site.sh .venv-site "$(PYTHON)"
endif
	$(RUN) OMP_NUM_THREADS=1 $(PY) -m website.timeline build/site/timelines
	$(SITE) -m website --out build/site

.PHONY: clean
clean:  ## remove everything that was built; .venv stays
	rm -rf build dist *.egg-info python/*.egg-info
	rm -f python/*.so python/smp/*.so python/smp/_build_info.py
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests benchmarks examples -name __pycache__ -prune \
	  -exec rm -rf {} +
