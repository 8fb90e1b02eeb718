PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# What a user imports; the rest is documented in its sources.
PUBLIC := memtrain memtrain.config memtrain.compressors memtrain.compressors.fewbit.register \
	memtrain.compressors.fewbit.tables memtrain.optim memtrain.precision memtrain.planner \
	memtrain.audit memtrain.audit.live_storages memtrain.audit.peak memtrain.audit.report

.PHONY: demo test nightly reference kernels clean

demo: $(READY) ## set up, then train the demo plain and wrapped
	$(BIN)/memtrain-train

test: $(READY) ## set up, then run everything that CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error
	$(BIN)/python -m pytest -q -n auto --maxprocesses 8

nightly: $(READY) ## the tests that take minutes
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e ".[integrations]"
	$(BIN)/python -m pytest -q -m nightly

reference: $(READY) ## the reference, from docstrings, as pages in build/reference
	$(BIN)/python -m pdoc -d google -o build/reference $(PUBLIC)

kernels: ## rebuild the C++ kernels in place
	$(BIN)/python setup.py -q build_ext --inplace

# The pinned torch goes in first: an open range would pull another build.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard $(foreach suffix,cpp h,memtrain/kernels/cpu/*.$(suffix) memtrain/kernels/cpu/*/*.$(suffix)))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e ".[demo,test]"
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
