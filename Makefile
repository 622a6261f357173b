# One entry point for people and CI. `make` prints what there is.
#   PYTHON=python3.12   the interpreter to build .venv with (else the first that fits)
#   ARGS="..."          passed on to the demo, to pytest or to the benchmarks
#   REPORT=0            with `make demo`: do without the report, and without Spark
#   AREA=journal        with `make stress`: only this part
#   STRESS=2            with `make stress`: twice the counts

SHELL := /bin/sh
VENV  := .venv
BIN   := $(VENV)/bin
PY    := $(BIN)/python
PYTHON ?=
ARGS   ?=

SUPPORTED := 3.11 3.12 3.13 3.14
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.13 python3.12 python3.11 python3)
USABLE  := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))

# An environment whose Python is gone, or that was copied here from another folder
# (its editable install would still point there), is made anew.
VENV_STATE := $(shell [ "$$(cat $(VENV)/.made 2>/dev/null)" = "$(CURDIR)" ] \
	&& $(PY) -c 'print("usable")' 2>/dev/null)
ifneq ($(VENV_STATE),usable)
.PHONY: $(VENV)/.made
endif

# $(call install,what to say,arguments of pip install): quiet, unless it fails.
define install
	@echo "==> $(1)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --progress-bar off \
		-c constraints.txt $(2) >$(VENV)/pip.log 2>&1 \
		|| { cat $(VENV)/pip.log; echo "pip failed; its output is above." >&2; exit 1; }
	@touch $@
endef

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo quick test stress pythons check fix bench bench-spark soak walk docs mutate clean

help: ## Print this list
	@echo "Targets (each makes $(VENV) by itself if needed):"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) \
		| awk -F'|' '{ printf "%-13s %s\n", $$1, $$2 }'

demo: $(VENV)/$(if $(filter 0,$(REPORT)),.run,.spark) ## Show the bus at work, and its report by Spark (ARGS: options of the demo)
	@$(PY) -m examples.shop $(if $(filter 0,$(REPORT)),--no-report) $(ARGS)

PYTEST := $(PY) -m pytest -n auto --dist loadgroup

quick: $(VENV)/.dev ## Run what needs no JVM and no other process, 2 minutes (ARGS: options of pytest)
	@$(PYTEST) -m "not slow and not spark" tests/unit tests/conformance tests/properties $(ARGS)

test: check ## Run the checks, then every test, 12 minutes (ARGS: options of pytest)
	@echo "==> pytest"
	@$(PYTEST) $(ARGS)

stress: $(VENV)/.dev ## Run the counts that we publish, up to 2 hours, and renew docs/explanation/evidence.md (AREA, STRESS, ARGS)
	@STRESS=$(or $(STRESS),1) $(PYTEST) tests -m stress --area="$(AREA)" --evidence=docs/explanation/evidence.md $(ARGS)

# An interpreter on the PATH that runs, else the newest of pyenv's, activated or not.
pythons: ## Run `make quick` on each supported Python of this machine, each in its own environment
	@missing= failed= passed=; \
	for version in $(SUPPORTED); do \
		found=; \
		for python in "python$$version" $$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python 2>/dev/null | sort -rV); do \
			if "$$python" -c '$(USABLE)' >/dev/null 2>&1; then found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then missing="$$missing $$version"; continue; fi; \
		echo "==> Python $$version: $$found"; \
		if $(MAKE) --no-print-directory quick VENV=.pythons/$$version PYTHON="$$found"; \
		then passed="$$passed $$version"; else failed="$$failed $$version"; fi; \
	done; \
	echo "Passed on:$${passed:- none}. Failed on:$${failed:- none}. Not found:$${missing:- none}."; \
	[ -n "$$passed" ] && [ -z "$$failed" ]

check: $(VENV)/.dev ## Format, lint, types (mypy, pyright) and import rules
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> mypy"
	@$(BIN)/mypy
	@echo "==> basedpyright"
	@$(BIN)/basedpyright --pythonpath $(PY)
	@echo "==> lint-imports"
	@$(BIN)/lint-imports --no-logo

fix: $(VENV)/.dev ## Format the code and fix what ruff can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format --quiet .

bench: $(VENV)/.dev ## Run the benchmarks (ARGS: options of the benchmarks)
	@$(PY) -m benchmarks $(ARGS)

bench-spark: $(VENV)/.dev ## Measure the data pipeline, 40 minutes (ARGS: --rows 500000)
	@$(PY) -m benchmarks.spark $(ARGS)

soak: $(VENV)/.dev ## Run processes on one journal for an hour and kill one each minute (ARGS: --minutes 5)
	@$(PY) -m benchmarks.soak $(ARGS)

walk: $(VENV)/.spark ## Print the files and functions that a message passes (ARGS: command event, --counts)
	@$(PY) -m benchmarks.walk $(ARGS)

docs: $(VENV)/.dev ## Run every snippet of the documentation
	@$(PY) -m pytest tests/docs tests/spark/test_guides.py $(ARGS)
	@echo "The documentation is in docs/; README.md says where to begin."

mutate: $(VENV)/.mutate ## Change resilience in small ways; a test must see each (half an hour)
	@$(PY) tests/mutation/run.py $(ARGS)

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) .pythons .demo build dist htmlcov .coverage .coverage.* .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- The environment -----------------------------------------------------------

$(VENV)/.made:
	@found=; \
	for python in $(PYTHONS); do \
		if "$$python" -c '$(USABLE)' >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "No usable Python found (tried: $(PYTHONS))." >&2; \
		echo "msgbus needs Python 3.11 or newer with the venv module;" >&2; \
		echo "install one, or name it: make PYTHON=/path/to/python test" >&2; \
		exit 1; \
	fi; \
	echo "==> Making $(VENV) with $$found ($$("$$found" -V 2>&1))"; \
	"$$found" -m venv --clear $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --progress-bar off \
		-c constraints.txt pip >$(VENV)/pip.log 2>&1 \
		|| { cat $(VENV)/pip.log; echo "pip could not upgrade itself; see above." >&2; exit 1; }
	@echo "$(CURDIR)" > $@

# What the demo needs: the library itself, in a few seconds.
$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	$(call install,Installing msgbus into $(VENV),--build-constraint constraints.txt -e .)

# What the demo's report needs beside that.
$(VENV)/.spark: $(VENV)/.made pyproject.toml constraints.txt
	$(call install,Installing msgbus and Spark into $(VENV) (some minutes the first time; REPORT=0 does without),\
		--build-constraint constraints.txt -e '.[spark]')

# What work on the library needs: all tools, in a few minutes; Spark is most of it.
$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	$(call install,Installing msgbus and the development tools into $(VENV) (a few minutes the first time),\
		--build-constraint constraints.txt -e '.[otel$(comma)spark]' --group dev)
	@touch $(VENV)/.run $(VENV)/.spark

# What `make mutate` needs beside them.
$(VENV)/.mutate: $(VENV)/.dev
	$(call install,Installing cosmic-ray into $(VENV),--group mutate)

comma := ,
