# Cardwise. `make` or `make help` lists what can be done; each target does its own set-up.
.DEFAULT_GOAL := help
SHELL := /bin/bash
# Compiled modules are kept, whatever the caller's shell says: without them each start of a process of ours takes a
# second of a core more, and the cluster of the tests starts hundreds.
unexport PYTHONDONTWRITEBYTECODE
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
PYTHONS ?= 3.12 3.13 3.14
UV_VERSION := 0.13.8
HATCHLING_VERSION := 1.33.0
# Where helm is: that of PATH, else the pinned one, built into the user cache.
HELM = command -v helm || $(BIN)/python -c 'import sys; from tests.cluster import binaries; print(binaries.helm(lambda said: print(said, file=sys.stderr)) / "helm")'
BIN := .venv/bin
# uv from PATH, else from PyPI into .uv/ (kept out of .venv, which the lock describes exactly).
UV := $(or $(shell command -v uv),.uv/bin/uv)
STAMP := .venv/.locked

.PHONY: help
help: ## show this help
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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
test: env binaries ## check, documents, unit and cluster tests
	@# Most of these run on one core; and what is compiled now, each worker would compile for itself.
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target check compiled docs
	$(BIN)/pytest -q -p no:randomly --numprocesses 4 --dist loadgroup --durations 10 tests/integration tests $(ARGS)

.PHONY: compiled
compiled: .venv/.compiled
.venv/.compiled: $(STAMP) $(shell find cardwise webhook extender deviceplugin mps tests -name '*.py')
	@echo "compiling the tests"
	@$(BIN)/pytest -q --collect-only | tail -n 1
	@touch $@

.PHONY: check
check: env ## lint, types, import contracts and names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.words

ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
.PHONY: workflows
workflows: ## lint the workflows of .github, which run there only (needs Go)
	go run $(ACTIONLINT) -shellcheck= -pyflakes=

.PHONY: docs
docs: env ## the documents as a site in docs/_build, warnings as errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

.PHONY: pictures
pictures: env ## draw the pictures of the documents from their texts and recordings
	$(BIN)/python -m docs.pictures.draw

.PHONY: recordings
recordings: env ## record anew what pictures of the terminal are drawn from (as root; two minutes)
	$(BIN)/python -m docs.pictures.record
	$(BIN)/python -m docs.pictures.draw

# In what order a set of names is gone through is a part of what a history of the black box does: fixed, so that what is
# green stays green; `make soak` draws it. The programs of clusters have none fixed (tests/cluster/processes.py).
test unit integration: export PYTHONHASHSEED = 0

.PHONY: unit
unit: env ## unit and property tests, without a cluster
	$(BIN)/pytest -q -p tests.integration.progress --numprocesses 3 --ignore tests/integration -m "not cluster" --durations 10 $(ARGS)

.PHONY: test-pythons
test-pythons: | $(filter .uv/bin/uv,$(UV)) ## unit tests on other Pythons that this machine has (PYTHONS="3.12 3.13")
	for version in $(PYTHONS); do \
		$(UV) venv --quiet --allow-existing --python $$version .venv-$$version; \
		$(UV) pip sync --quiet --python .venv-$$version/bin/python requirements/dev.lock; \
		$(UV) pip install --quiet --python .venv-$$version/bin/python --no-deps --editable .; \
		.venv-$$version/bin/pytest -q --numprocesses 3 --ignore tests/integration -m "not cluster" $(ARGS); \
	done

.PHONY: test-lowest
test-lowest: | $(filter .uv/bin/uv,$(UV)) ## unit tests with the lowest versions of its dependencies that pyproject.toml states
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-lowest
	$(UV) pip compile --quiet --resolution lowest-direct --python .venv-lowest/bin/python --extra server --extra simulate \
		pyproject.toml -o .venv-lowest/lowest.txt
	$(UV) pip install --quiet --python .venv-lowest/bin/python -r .venv-lowest/lowest.txt --group test
	$(UV) pip install --quiet --python .venv-lowest/bin/python --no-deps --editable .
	.venv-lowest/bin/pytest -q --numprocesses 3 --ignore tests/integration -m "not cluster" $(ARGS)

.PHONY: binaries
binaries: env ## build Kubernetes, containerd and Helm for the tests into the user cache (once)
	$(BIN)/python -m tests.cluster binaries

.PHONY: integration
integration: binaries ## tests on the real Kubernetes of tests/cluster
	$(BIN)/pytest -q -p no:randomly --numprocesses 3 --dist loadgroup --durations 10 -m cluster $(if $(findstring tests/,$(ARGS)),,tests/integration tests/fakes) $(ARGS)

# What asks something of kube-scheduler, kubelet or admission that another minor could answer in another way.
VERSIONS ?= $(sort $(notdir $(patsubst %/,%,$(wildcard tests/cluster/kube/*/))))
VERSIONED := $(addprefix tests/integration/,test_cluster.py test_kube_client.py admission security quotas/test_types.py \
	$(patsubst %,scheduler/test_%.py,articles simulated ahead gangs podgroups preemption mps_places claims) \
	$(patsubst %,node/test_%.py,articles_inside deviceplugin pairs podfeatures other_devices mps claimed_pods mode_of_claims) \
	failures/test_extender.py failures/test_two_apiservers.py \
	$(patsubst %,chart/test_%.py,gpushare gpu_operator claims_mode))

.PHONY: test-versions
test-versions: env ## cluster tests of scheduler, kubelet and admission on each Kubernetes (VERSIONS="1.34 1.37": on these)
	@failed=; for version in $(VERSIONS); do \
		echo "Kubernetes $$version"; \
		CARDWISE_KUBERNETES=$$version $(BIN)/python -m tests.cluster binaries; \
		CARDWISE_KUBERNETES=$$version $(BIN)/pytest -q -p no:randomly --numprocesses 2 --dist loadgroup \
			$(VERSIONED) $(ARGS) || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "red on$$failed"; exit 1; fi

.PHONY: test-frameworks
test-frameworks: env .venv-frameworks/.locked ## the hook under the real TensorFlow, PyTorch, JAX (loads 3 GB)
	$(BIN)/pytest -v tests/frameworks $(ARGS)

.venv-frameworks/.locked: requirements/frameworks.lock | $(filter .uv/bin/uv,$(UV))
	@echo "installing the frameworks into .venv-frameworks: 3 GB to load, 7 GB on disk"
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv-frameworks
	$(UV) pip sync --quiet --python .venv-frameworks/bin/python requirements/frameworks.lock
	@touch $@

.PHONY: test-mps-real
test-mps-real: env ## MPS contract tests against NVIDIA's own control program (Debian non-free, into the user cache)
	$(BIN)/python -m tests.mps.fetch
	CARDWISE_MPS_REAL=1 $(BIN)/pytest -v tests/mps/contract $(ARGS)

.PHONY: test-gpu
test-gpu: env ## MPS, frameworks and pods on a real card, as root: limits, faults, healing (tests/realcard/conftest.py)
	$(BIN)/pytest -v -p no:randomly tests/realcard $(ARGS)

.PHONY: test-gpu-pack
test-gpu-pack: binaries ## pack what test-gpu needs on a machine that has nothing and is there for minutes (CONTRIBUTING.md)
	$(BIN)/python -m tests.realcard pack

.PHONY: soak
soak: env ## the big counts, and property tests with new examples: hours; results go to docs/measured.md
	CARDWISE_SOAK=1 $(BIN)/pytest -q --numprocesses 2 --ignore tests/integration -m hypothesis --timeout 3600
	CARDWISE_SOAK=1 $(BIN)/pytest -v -p no:randomly tests/integration -m soak $(ARGS)
	CARDWISE_SOAK=1 $(BIN)/pytest -v -p no:randomly tests/integration/chart/test_chart.py

.PHONY: mutants
mutants: env ## changes to placement, quotas, grants and the extender's decisions that fast tests must tell of: an hour, then again where it ended; ARGS="extender.*" for some
	PATH="$(CURDIR)/$(BIN):$$PATH" nice -n 10 timeout --signal INT --kill-after 30 3600 $(BIN)/mutmut run --max-children 1 $(ARGS) \
		|| [ $$? -eq 124 ]
	$(BIN)/mutmut results

.PHONY: planted
planted: env ## plant faults that the black box and the tests of claims must find: minutes
	$(BIN)/python -m tests.property.plantedclaims
	$(BIN)/python -m tests.property.planted

.PHONY: bench
bench: env ## measure, as tables with p50 and p99
	$(BIN)/python -m bench $(ARGS)

.PHONY: bench-placement
bench-placement: env ## what the policies fill on the trace openb (CARDWISE_OPENB names its folder)
	$(BIN)/python -m bench placement $(ARGS)

.PHONY: release
release: env .release/bin/hatchling ## a release's files into dist/; ARGS=--final refuses what is unfinished
	$(BIN)/python -m release --hatchling "$(CURDIR)/.release/bin/hatchling" --helm "$$($(HELM))" $(ARGS)

.release/bin/hatchling:
	$(PYTHON) -m venv .release
	.release/bin/pip install --quiet --disable-pip-version-check hatchling==$(HATCHLING_VERSION)

.PHONY: format
format: env ## format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: lock
lock: | $(filter .uv/bin/uv,$(UV)) ## renew requirements/*.lock from pyproject.toml
	$(UV) pip compile --quiet --upgrade --universal --generate-hashes --no-annotate \
		--extra server --custom-compile-command "make lock" pyproject.toml -o requirements/run.lock
	$(UV) pip compile --quiet --upgrade --universal --generate-hashes --no-annotate --group dev \
		--extra server --custom-compile-command "make lock" pyproject.toml -o requirements/dev.lock
	$(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command "make lock" requirements/frameworks.in -o requirements/frameworks.lock

.PHONY: proto
proto: env ## regenerate the messages of deviceplugin/api
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. deviceplugin/api/*.proto

.PHONY: clean
clean: ## remove the environment and caches of this folder
	rm -rf .venv .venv-* .release .uv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache mutants
