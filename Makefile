# Set-up, tests, lint, demos. Needs Python 3.11 or later as `python3`, GNU make and a package
# registry that pip is set up for. Everything is installed into .venv, here in the checkout.

.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
SCHEDULES ?= 10000
PROGRAMS ?= 1000
SEED ?= 0
JOBS ?= $(shell nproc 2>/dev/null || echo 1)

.PHONY: help demo demo-cartpole demo-rnn demo-parameter-server test lint format sim bench bench-all clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Done again only when what is to be installed changes.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: demo-cartpole ## Run the main demo; output under demo-out/. Options: DEMO_ARGS="--seed 3"

demo-cartpole: $(INSTALLED) ## Balance a pole: one agent learns, observers play.
	$(BIN)/farcall demo cartpole --out demo-out/cartpole $(DEMO_ARGS)

demo-rnn: $(INSTALLED) ## Learn to predict words: a model on two workers.
	$(BIN)/farcall demo rnn --out demo-out/rnn $(DEMO_ARGS)

demo-parameter-server: $(INSTALLED) ## Tell digits apart: trainers around one parameter server.
	$(BIN)/farcall demo parameter-server --out demo-out/parameter-server $(DEMO_ARGS)

test: $(INSTALLED) ## Run the tests. Options: TEST_ARGS="tests/unit -k wire"
	$(BIN)/python -m pytest $(TEST_ARGS)

lint: $(INSTALLED) ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Reformat, and fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sim: $(INSTALLED) ## Simulate protocols, run random programs. Options: SCHEDULES=100000 PROGRAMS=10000 SEED=0 JOBS=2
	$(BIN)/python -m farcall.testing.sim --schedules $(SCHEDULES) --seed $(SEED) --jobs $(JOBS)
	$(BIN)/python -m farcall.testing.sim --protocol backward --schedules $(SCHEDULES) --seed $(SEED) --jobs $(JOBS)
	$(BIN)/python -m farcall.testing.gradients --programs $(PROGRAMS) --seed $(SEED) --jobs $(JOBS)

bench: $(INSTALLED) ## Measure against torch.distributed.rpc; output under bench-out/. Options: BENCH_ARGS="--rounds 5"
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

$(VENV)/.bench: $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	@touch $@

bench-all: $(VENV)/.bench ## Measure against Ray, RPyC and gRPC, too.
	$(BIN)/python benchmarks/run.py --implementations farcall,torch,ray,rpyc,grpc $(BENCH_ARGS)

clean: ## Delete .venv, demo-out, bench-out and all caches.
	rm -rf $(VENV) build dist demo-out bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
