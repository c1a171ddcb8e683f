# The commands of this project; `make` lists them.
PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
RUN := .venv/bin/python
TREE := build/sglang/python
TESTS ?= test/unit test/e2e test/registered benchmark/routed_experts/tests

# Every process of a server imports the same hundred thousand lines: compile them once.
unexport PYTHONDONTWRITEBYTECODE

include mk/*.mk

.PHONY: help
help:
	@grep -hE '^[a-z][a-z -]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z -]+):.*## /\1\t/' | \
	    awk -F'\t' '{printf "make %-14s %s\n", $$1, $$2}'

.PHONY: env
env: ## .venv: the locked environment of the CPU engine and the tests
	@PYTHON='$(PYTHON)' requirements/install.sh

.PHONY: installed
installed: env wheel
	@$(RUN) examples/demo/install.py dist/*.whl

.PHONY: demo
demo: installed ## a real server on the CPU: rows of three endpoints against transformers, and a picture
	@$(RUN) examples/demo/demo.py

# The branch and its forms of delivery need Python, git and two small packages, not the environment of the server: a few
# seconds on a fresh machine.
PATCHKIT_ENV := build/patchkit-env
PATCHKIT := $(PATCHKIT_ENV)/bin/python -m patchkit

# The stamp is written last: an environment that was interrupted is made again.
$(PATCHKIT_ENV)/complete: requirements/build.txt
	@echo "installing what patchkit needs (requirements/build.txt)"
	@rm -rf $(PATCHKIT_ENV)
	@$(PYTHON) -m venv $(PATCHKIT_ENV)
	@$(PATCHKIT_ENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --require-hashes -r requirements/build.txt
	@touch $@

.PHONY: branch
branch: export ONTO := $(ONTO)
branch: $(PATCHKIT_ENV)/complete ## build/sglang: base + our commits; ONTO=PATH: onto a fork's HEAD
	@$(PATCHKIT) branch $(if $(ONTO),--onto "$$ONTO")

.PHONY: patch wheel seams
patch: $(PATCHKIT_ENV)/complete ## dist/*.patch: the branch for `git apply`
	@$(PATCHKIT) patch

wheel: $(PATCHKIT_ENV)/complete ## dist/*.whl: the patched SGLang, installs over the official one
	@$(PATCHKIT) wheel

seams: $(PATCHKIT_ENV)/complete ## print the table of the seams and put it into README.md
	@$(PATCHKIT) seams

# Tests run the built tree, so that `make branch` is all it takes to try an edit.
.PHONY: test
test: env branch ## all tests; TESTS=test/e2e/test_main_job.py ARGS='-x -k stop' for some
	@PYTHONPATH=$(TREE) $(RUN) -m pytest $(TESTS) $(ARGS)

.PHONY: accuracy
accuracy: env branch ## the registered test at the published scale: 28.7 million ids on one rank, 2.1 million on two
	@PYTHONPATH=$(TREE) ROUTED_EXPERTS_IDS=9517440 \
	    $(RUN) test/registered/rl/test_return_routed_experts.py

.PHONY: lint
lint: env ## ruff: rules and formatting
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

.PHONY: lock
lock: env ## write the lock files anew from their .in files
	@for name in build uv cpu; do echo "requirements/$$name.txt" && .venv/bin/uv pip compile --quiet \
	    --universal --python-version 3.10 --only-binary :all: --generate-hashes --no-header \
	    --excludes requirements/cpu.exclude requirements/$$name.in -o requirements/$$name.txt || exit 1; done
