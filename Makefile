PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test nightly docs kernels clean

demo: $(READY) ## set up, then train the demo plain and wrapped
	$(BIN)/memtrain-train

# Tests start processes that import torch: the first one's bytecode serves the others.
test nightly: export PYTHONDONTWRITEBYTECODE =

test: $(READY) ## set up, then run everything that CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error
	$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal

nightly: $(READY) ## the tests that take minutes
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e ".[integrations]"
	$(BIN)/python -m pytest -q -m nightly

docs: $(READY) ## the documentation as a site, with the reference from docstrings, in build/site
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/site

kernels: ## rebuild the C++ kernels in place
	$(BIN)/python setup.py -q build_ext --inplace

# The pinned torch goes in first: an open range would pull another build.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard $(foreach suffix,cpp h,memtrain/kernels/cpu/*.$(suffix) memtrain/kernels/cpu/*/*.$(suffix)))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e ".[docs,test]"
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
