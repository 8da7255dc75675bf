# Cardwise. `make` or `make help` lists what can be done; each target does its own set-up.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
UV_VERSION := 0.13.8
BIN := .venv/bin
# uv from PATH, else from PyPI into .uv/ (kept out of .venv, which the lock describes exactly).
UV := $(or $(shell command -v uv),.uv/bin/uv)
STAMP := .venv/.locked

.PHONY: help
help: ## show this help
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(STAMP): requirements/dev.lock pyproject.toml | $(filter .uv/bin/uv,$(UV))
	@echo "installing the locked Python environment into .venv"
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv
	$(UV) pip sync --quiet --python $(BIN)/python requirements/dev.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

.PHONY: env
env: $(STAMP) ## install the locked Python environment into .venv

.PHONY: demo
demo: env ## bring a real cluster up and watch pods share cards (ARGS=--once: without waiting)
	$(BIN)/python -m demo $(ARGS)

.PHONY: test
test: check binaries unit integration ## everything that CI runs

.PHONY: check
check: env ## lint, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: unit
unit: env ## unit and property tests, without a cluster
	$(BIN)/pytest -q --numprocesses 2 --ignore tests/integration $(ARGS)

.PHONY: binaries
binaries: env ## build Kubernetes, containerd and Helm for the tests into the user cache (once)
	$(BIN)/python -m tests.cluster binaries

.PHONY: integration
integration: binaries ## tests on the real Kubernetes of tests/cluster
	$(BIN)/pytest -v -p no:randomly tests/integration $(ARGS)

.PHONY: soak
soak: env ## the big counts: hours; results go to docs/measured.md
	CARDWISE_SOAK=1 $(BIN)/pytest -v -p no:randomly tests/integration -m soak $(ARGS)

.PHONY: bench
bench: env ## measure, as tables with p50 and p99
	$(BIN)/python -m bench $(ARGS)

.PHONY: format
format: env ## format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: lock
lock: | $(filter .uv/bin/uv,$(UV)) ## renew requirements/*.lock from pyproject.toml
	$(UV) pip compile --quiet --upgrade --universal --generate-hashes --no-annotate \
		--custom-compile-command "make lock" pyproject.toml -o requirements/run.lock
	$(UV) pip compile --quiet --upgrade --universal --generate-hashes --no-annotate --group dev \
		--custom-compile-command "make lock" pyproject.toml -o requirements/dev.lock

.PHONY: proto
proto: env ## regenerate the gRPC code of deviceplugin/api
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --grpc_python_out=. deviceplugin/api/*.proto

.PHONY: clean
clean: ## remove the environment and caches of this folder
	rm -rf .venv .uv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
