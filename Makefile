# Every command runs in .venv, which is made on first use from any Python of at least 3.10 and
# follows constraints.txt.
.DEFAULT_GOAL := help
.PHONY: help install lint format check test test-all conformance docs dist demo gpu gpu-bench clean some-tests test-slice most-tests

BIN := .venv/bin
INSTALLED := .venv/.installed
INTEROP := .venv/.installed-interop
# Packages that do not fit beside the others have an environment of their own, and pins of their own.
APART := .venv/apart
APART_INSTALLED := $(APART)/.installed
NOT_APART := ^(anyio|cloudpickle|fastapi|httpcore2|httpx2?|importlib_metadata|pyarrow|python-multipart|starlette|urllib3)==
APART_TESTS := tests/lightning/callbacks/test_trackers.py tests/project/test_cluster_launchers.py -k "mlflow or nemo_run"
# What pytest reports, for benchmarks.slices: skips by module, and the record of docs/support.md.
REPORT := .pytest_cache/report.xml
REPORT_APART := .pytest_cache/apart.xml
# One thread a rank: the tests start up to eight processes, and more threads only take the cores
# from one another.
export OMP_NUM_THREADS ?= 1
CASE ?=
MODE ?= one
PARTS ?=
# Which seventh of the slow tests `make test-slice` runs.
SLICE ?= $(shell expr $$(date +%s) / 86400 % 7)/7
# Ranks often wait for one another and for imports, so two files run at a time; the order stays, so
# that no long file is last.
TWO_AT_ONCE := -n 2 --dist loadfile --no-loadscope-reorder
# What belongs into the long matrix, at the end of the usual run.
LONG_ONES := --durations=20 --durations-min=5

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED)  ## make .venv and install the project with its test tools

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@test -x $(BIN)/python || { \
	  for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10; do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	      echo "making .venv with $$($$python --version)"; $$python -m venv .venv && exit 0 || exit 1; \
	    fi; \
	  done; \
	  echo "no Python >= 3.10 with the venv module found; install one or name it: make test PYTHON=/path/to/python" >&2; exit 1; }
	# Python compiles each module when it is first imported; pip would compile all of torch's.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test]'
	@touch $@

lint: $(INSTALLED)  ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED)  ## apply ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(INSTALLED)  ## lint beside the tests of one process, on two cores: for the edit loop
	@$(MAKE) --no-print-directory -j2 lint some-tests SOME=tests/unit

test: $(INSTALLED)  ## lint, and every test but the slow and the GPU ones
	@$(MAKE) --no-print-directory -j2 lint some-tests SOME="$(TWO_AT_ONCE) $(LONG_ONES) tests"

some-tests: $(INSTALLED)
	$(BIN)/python -m pytest -q $(SOME)

test-all: lint  ## lint, then every test that needs no GPU
	@$(MAKE) --no-print-directory most-tests MOST='-m "not gpu"'

test-slice:  ## a seventh of the slow tests, another one every day of a week
	@$(MAKE) --no-print-directory most-tests MOST='-m "slow and not gpu" --slice=$(SLICE)'

$(INTEROP): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test,interop]'
	# Alone: it asks for a torchvision, and PyPI's does not run beside a CPU build of torch.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-deps litdata
	@touch $@

$(APART_INSTALLED): $(INSTALLED)
	$(BIN)/python -m venv $(APART)
	grep -Ev '$(NOT_APART)' constraints.txt > $(APART)/constraints.txt
	$(APART)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(APART)/constraints.txt -e '.[test,interop-apart]'
	@touch $@

# Both environments run before the result counts, and a skip without a reason fails.
most-tests: $(INTEROP) $(APART_INSTALLED)
	@failed=0; \
	$(BIN)/python -m pytest -q $(TWO_AT_ONCE) $(MOST) --junitxml=$(REPORT) || failed=1; \
	$(APART)/bin/python -m pytest -q $(APART_TESTS) -m "not gpu" --junitxml=$(REPORT_APART) || failed=1; \
	$(BIN)/python -m benchmarks.slices $(REPORT) $(REPORT_APART) || failed=1; \
	exit $$failed

conformance: $(INSTALLED)  ## Lightning's own tests: make conformance LIGHTNING=/path/to/checkout MODE=one|two|pipeline PARTS="core loops"
	$(BIN)/python -m tests.conformance.run "$(LIGHTNING)" --mode $(MODE) $(PARTS)

docs: $(INSTALLED)  ## build the documentation site into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

dist: $(INSTALLED)  ## build wheel and sdist into dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

demo: $(INSTALLED)  ## preprocess, train on 2 x 2 processes, resume on another layout, generate
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

gpu: $(INSTALLED)  ## GPU tests and benchmarks within a budget; says so when there is no GPU
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.gpu

gpu-bench: $(INSTALLED)  ## one longer GPU benchmark: make gpu-bench CASE=name
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.gpu --case "$(CASE)"

clean:  ## remove caches; the environment stays
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist site *.egg-info
