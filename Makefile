# The commands of this repository; each makes its own environment (.venv) when it needs one.
#   make demo PYTHON=/path/to/python3.12    choose the Python that .venv is made with
#   make demo DEMO="--iterations 100"       options of tools/demo.py
#   make test PYTEST="-k ring -x"           options of pytest

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

DEMO ?=
PYTEST ?=
PYTHON ?=
export PYTHON

.PHONY: help
help: ## say what the commands are
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

.PHONY: demo
demo: venv ## train a GPT with --distflash-attn next to stock Megatron and compare the losses
	@.venv/bin/python tools/demo.py $(DEMO)

.PHONY: test
test: lint ## check style and formatting, then run the tests
	@.venv/bin/python -m pytest $(PYTEST)

.PHONY: test-slow
test-slow: venv ## run the tests that take minutes each: many training runs, sanitizer builds
	@.venv/bin/python -m pytest -m slow $(PYTEST)

.PHONY: lint
lint: venv ## check style and formatting
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

.PHONY: format
format: venv ## repair style and formatting where ruff can
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

.PHONY: build
build: venv ## compile cpp/ in place again, and with nvcc the CUDA kernels
	@.venv/bin/python setup.py -q build_ext --inplace

.PHONY: venv
venv: ## make .venv: the pinned packages and this project, editable
	@tools/make_venv.sh

.PHONY: clean
clean: ## remove what runs, tests and builds left; .venv stays
	rm -rf out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## remove .venv too
	rm -rf .venv
