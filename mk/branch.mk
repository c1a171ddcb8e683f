# The branch and its forms of delivery. They need Python, git and two small packages, not the
# environment of the server: a few seconds on a fresh machine.
PYTHON ?= python3
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
