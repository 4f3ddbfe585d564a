# `make` lists what can be done. Each target sets up what it needs and can be run again.

PYTHON ?= python3
VENV := .venv/bin
PYTEST_ARGS ?=
WORKERS ?= 2
FAMILIES ?= gemma3 llama lfm2 mistral llama4
REQUESTS ?= 40
SEED ?= 1
RUNS ?= 2000
LENGTH ?= 300
VLLM ?= 0.32.0
MINUTES ?= 20
CANARY ?=
SECONDS ?= 300
KILLS ?= 100
STORMS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test model live soak outage kills worker-kills storms lint format pins jars clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with everything in it (quick when nothing changed)
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) is not installed; install Python 3.11 or newer (Debian, Ubuntu: apt-get install python3 python3-venv)" >&2; exit 1; }
	@$(PYTHON) .make/environment.py

demo: setup ## replay three recorded engines through Kafka, Faust and Redis, and compare with the engines' own answers
	@$(VENV)/kvledger demo

test: setup ## run all tests, against a real Kafka and Redis (PYTEST_ARGS='-k name' for some, WORKERS=0 for one after the other)
	@$(VENV)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

model: setup ## play random schedules of all faults through the model of the protocol (RUNS=2000 SEED=1 LENGTH=300)
	@$(VENV)/python tests/model/protocol/protocol_schedules.py run $(RUNS) --seed $(SEED) --length $(LENGTH)

live: setup ## predict a real vLLM on this CPU, request by request (6 GB; FAMILIES="llama" REQUESTS=40 VLLM=0.32.0)
	@$(VENV)/python -m kvledger.live --families "$(FAMILIES)" --requests $(REQUESTS) --vllm $(VLLM) --seed $(SEED) --verify

soak: setup ## use 4 replicas and break everything else by a seed; engines, log and index must agree (MINUTES=20 SEED=1; with CANARY=1 it must fail)
	@PYTHONPATH=tests/faults:tests/integration:tests/soak $(VENV)/python tests/soak/soaking.py $(MINUTES) $(SEED) $(CANARY)

outage: setup ## each fault of a server by itself, Kafka away for SECONDS=300: time until all is live again
	@PYTHONPATH=tests/faults:tests/integration:tests/soak $(VENV)/python tests/soak/outage.py $(SECONDS)

kills: setup ## kill a bridge at KILLS=100 random moments (SEED=1) over an engine that remembers 32 batches; answers must stay exact
	@PYTHONPATH=tests/faults $(VENV)/python tests/faults/killing.py $(KILLS) $(SEED)

worker-kills: setup ## kill, freeze and double the stream worker at KILLS=100 random moments (SEED=1); the index must be as of single delivery
	@PYTHONPATH=tests/integration:tests/streams $(VENV)/python tests/integration/workerkills.py $(KILLS) $(SEED)

storms: setup ## engines out of all proportion (STORMS="batch prompts tokens replicas clears"): the cost, and what neighbours see
	@PYTHONPATH=tests/faults $(VENV)/python tests/faults/storms.py $(STORMS)

lint: setup ## ruff, mypy and the import rules
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports --no-cache

format: setup ## let ruff rewrite what it can
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

pins: setup ## write the versions in .venv to constraints.txt
	@$(VENV)/python .make/environment.py pins > constraints.new && mv constraints.new constraints.txt

jars: setup ## write the digests of Kafka's jars, as pom.xml resolves them, to the committed list
	@$(VENV)/python -c 'from kvledger.stack.cache import print_jars; print_jars()' > jars.new && mv jars.new streams/kvledger/stack/kafka-jars.sha256

clean: ## delete .venv and what tools left; the download cache (~/.cache/kvledger) stays
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
