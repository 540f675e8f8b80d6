# Every target does its own set-up in .venv: once, then a look at one stamp file. `make` lists the targets.
#
#   PYTHON=python3.12   the interpreter of a new .venv (constraints.txt is made for and tested with 3.11)
#   RANKS=4             how many ranks `make train` starts
#   ARGS="-x -k torus"  more arguments for the program that a target runs

PYTHON ?= python3
RANKS ?= 2
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
FRAMEWORKS := .venv/.frameworks
BEGUN := .venv/.begun

# One thread per rank: ranks that share a machine otherwise fight for its cores.
export OMP_NUM_THREADS ?= 1

# Tests start many processes: without bytecode each of them compiles everything anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup train quick test frameworks check format results docs study-gossip study-large-batch bench clean FORCE

help:  ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## only the set-up

train: $(READY)  ## a small CNN on 8x8 digits, 2 ranks (RANKS=n): accuracy, checkpoints and report in runs/digits
	@$(BIN)/phalanx train --ranks $(RANKS) $(ARGS)

# Ranks as threads, two files at a time: schedules, the optimizer against one process, the order of data, checkpoints, settings.
QUICK := tests/test_rooms.py tests/schedule/test_text.py tests/schedule/test_verify.py \
	tests/comm/test_choose.py tests/comm/test_codec.py tests/comm/test_hosts.py tests/comm/test_launch.py tests/comm/test_run_local.py \
	tests/grad/test_groups.py tests/grad/test_arena.py tests/grad/test_wire.py tests/optim/test_lr.py \
	tests/optim/test_equals_one_process.py tests/data/test_order.py tests/data/test_position.py tests/data/test_batch.py \
	tests/data/test_draws.py tests/nn/test_init.py tests/nn/test_loss.py tests/train/test_config.py \
	tests/train/test_rows.py tests/train/test_tree.py tests/train/test_checkpoint.py tests/train/test_progress.py \
	tests/cli/test_main.py tests/cli/test_show.py

quick: $(READY)  ## the tests worth running on every save, less than a minute
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile $(QUICK) $(ARGS)

# Three files at a time on two cores, the longest first (tests/conftest.py): much of the tests' time is waiting for deadlines.
test: $(READY)  ## all tests
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

frameworks: $(FRAMEWORKS)  ## the tests with Lightning, accelerate, transformers, Ray, wandb, MLflow and MLPerf's checker, which it installs (400 MB)
	@PHALANX_TEST_FRAMEWORKS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/integrations $(ARGS)

test-%: $(READY)  ## the world tests on N ranks: make test-4
	@PHALANX_TEST_WORLD=$* $(BIN)/python -m pytest tests/world $(ARGS)

check: $(READY)  ## format, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY)  ## rewrite the files as `make check` wants them
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

results: $(READY)  ## docs/results.md and its chart anew, from benchmarks/results
	@$(BIN)/python docs/images/draw_results.py
	@$(BIN)/python docs/generate

docs: results  ## the documentation as a site, out/site/index.html; broken links fail
	@$(BIN)/zensical build --clean --strict

study-gossip: $(READY)  ## GossipGraD's accuracy against all-reduce, about an hour; ARGS="--data fashion-mnist:DIR cifar10:DIR"
	@$(BIN)/python benchmarks/study_gossip.py $(ARGS)

study-large-batch: $(READY)  ## accuracy over batch size, about two hours; ARGS="--data fashion-mnist:DIR cifar10:DIR"
	@$(BIN)/python benchmarks/study_large_batch.py $(ARGS)

bench: $(READY)  ## the programs in benchmarks/
	@for program in $(filter-out benchmarks/study_%,$(wildcard benchmarks/*.py)); do echo "== $$program"; $(BIN)/python "$$program" $(ARGS) || exit 1; done
	@if [ -d data/fashion-mnist ]; then echo "== benchmarks/study_large_batch.py --quick"; \
		$(BIN)/python benchmarks/study_large_batch.py --quick --data fashion-mnist:data/fashion-mnist --out out/study_large_batch_quick.jsonl; \
		else echo "== benchmarks/study_large_batch.py --quick: left out, there is no data/fashion-mnist"; fi

clean:  ## remove .venv, caches and build products
	rm -rf .venv build dist out .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info src/phalanx/*.so
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The stamp holds the directory for which .venv was made: an editable install that was copied along with the tree would run,
# unnoticed, the sources of the tree that it came from.
HOME_OF_VENV := $(shell cat $(READY) 2>/dev/null)
ifneq ($(HOME_OF_VENV),$(CURDIR))
$(READY): FORCE
endif

# $(BEGUN) exists only while a set-up runs and holds its process. If that is alive we wait for it; if not it was interrupted,
# maybe half-way through a package, and we start again. pip talks a lot when all is well: its words go to a log, shown on failure.
# MPICH, for the launch tests, has a place of its own: its files are called like Open MPI's.
$(READY): pyproject.toml constraints.txt Makefile setup.py $(wildcard csrc/*)
	@set -e; log=.venv/setup.log; \
	run() { "$$@" >>$$log 2>&1 || { status=$$?; tail -n 40 $$log >&2; echo "set-up failed: $$*" >&2; exit $$status; }; }; \
	other() { kill -0 "$$(cat $(BEGUN) 2>/dev/null)" 2>/dev/null; }; \
	if other; then echo "set-up: waiting for process $$(cat $(BEGUN)), which is at it"; while other; do sleep 1; done; \
		if [ -e $(READY) ]; then exit 0; fi; fi; \
	if [ -e $(BEGUN) ]; then echo "set-up: the last one did not finish, starting again"; rm -rf .venv; \
	elif [ -n "$(HOME_OF_VENV)" ] && [ "$(HOME_OF_VENV)" != "$(CURDIR)" ]; then \
		echo "set-up: .venv was made elsewhere, starting again"; rm -rf .venv; \
	elif ! $(BIN)/python -m pip --version >/dev/null 2>&1; then rm -rf .venv; fi; \
	echo "set-up: .venv as constraints.txt has it (once, a minute or two) ..."; \
	mkdir -p .venv; echo $$$$ >$(BEGUN); rm -f $(READY); : >$$log; \
	[ -e $(BIN)/python ] || run $(PYTHON) -m venv .venv; \
	run $(BIN)/python -m pip install -c constraints.txt setuptools; \
	run $(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[dev]'; \
	run $(BIN)/python -m pip install -c constraints.txt --no-deps --prefix .venv/mpich mpich; \
	run $(BIN)/python -m pip check; \
	printf '%s\n' "$(CURDIR)" >$(READY); rm -f $(BEGUN)

$(FRAMEWORKS): $(READY)
	@echo "set-up: the frameworks, as constraints.txt has them (once, two minutes) ..."
	@$(BIN)/python -m pip install -c constraints.txt 'phalanx[frameworks,logging]' >.venv/frameworks.log 2>&1 \
		|| { tail -n 40 .venv/frameworks.log >&2; exit 1; }  # Phalanx itself is there, so pip adds what the extras name
	@$(BIN)/python -m pip check
	@touch $@
