# On a fresh machine: make demo, make test. `make help` lists all targets.
PY   ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3.14 || command -v python3)
VENV ?= .venv
BIN  := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
export MLFLOW_DISABLE_TELEMETRY := true
export TOKENIZERS_PARALLELISM := false
unexport PYTHONDONTWRITEBYTECODE  # else each of hundreds of processes compiles all that it imports
QUIETLY := --quiet --disable-pip-version-check --no-compile  # what is imported is compiled then

# For make gpu: the machine's own Python on this checkout, the output folder, the time limit of a
# stage.
HERE  = PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(PY)
OUT  ?= data/measurements
MINUTES ?= 9

.PHONY: help demo test test-all gpu overhead soak lab ui
help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

demo: $(STAMP)   ## install, run the demo grids, compare, recommend (REAL=1: with a pretrained 135M model)
ifdef REAL
	$(BIN)/specexp zoo fetch smollm2
	$(BIN)/specexp zoo train --draft --target smollm2 --minutes 6
	$(BIN)/specexp grid run notebooks/grids/real.yaml
else
	$(BIN)/specexp grid run notebooks/grids/demo_*.yaml
endif
	$(BIN)/specexp recommend

test: $(STAMP)   ## install, lint, type-check, run the tests
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-all: $(STAMP)  ## run all tests, slow ones included: hours (no lint)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow or not slow"

gpu:             ## on a GPU: tests, kernels, passes and bench, in stages (STAGE=smoke, MINUTES=9), with PY's packages
	$(HERE) -m support.gpu_stages $(if $(STAGE),--stage $(STAGE)) --minutes $(MINUTES) --out $(OUT)

overhead: $(STAMP)  ## measure a grid's overhead per point, against plain papermill
	PYTHONPATH=tests $(BIN)/python -m support.overhead

soak: $(STAMP)   ## kill runners a thousand times and check that nothing is lost
	PYTHONPATH=tests $(BIN)/python -m support.soak

lab: $(STAMP)    ## open JupyterLab on copies of the notebooks
	$(BIN)/specexp lab

ui: $(STAMP)     ## open the MLflow UI on this machine
	$(BIN)/specexp ui

$(STAMP):
	$(PY) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "specexp needs Python 3.11 or newer; set PY=/path/to/python3.11")'
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt --upgrade pip  # older ones take twice as long
	$(BIN)/python -m pip install $(QUIETLY) "$$(head -n 1 constraints.txt)"
	$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt -e ".[lab,dev,quant,ray,real]"
	@rm -f $(VENV)/.installed-* && touch $@
