# The two commands of a fresh machine: make demo, make test. `make help` lists the rest.
PY   ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN  := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
export MLFLOW_DISABLE_TELEMETRY := true
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test test-all soak lint lab ui
help:            ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

demo: $(STAMP)   ## install, run the demo grids, print the comparison
	$(BIN)/specexp grid run notebooks/grids/demo_*.yaml

test: $(STAMP)   ## install, lint, type-check, run the tests
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-all: $(STAMP)  ## the tests that take longer too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow or not slow"

soak: $(STAMP)   ## kill runners at random, 1,000 times, and count what is lost (hours); KILLS=, SEED=
	$(BIN)/python tests/soak.py --kills $(or $(KILLS),1000) --seed $(or $(SEED),0)

lab: $(STAMP)    ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab notebooks

ui: $(STAMP)     ## open the MLflow UI on this machine
	$(BIN)/specexp ui

$(STAMP):
	$(PY) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "specexp needs Python 3.11 or newer; set PY=/path/to/python3.11")'
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(head -n 1 constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[lab,dev]"
	@rm -f $(VENV)/.installed-* && touch $@
