# Every target sets itself up from a fresh clone: a virtual environment, the locked versions, then the job.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
LOCK   := pyproject.toml constraints.txt

.PHONY: demo test test-foreign test-scale check format bench evidence docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(LOCK) | $(BIN)/python
	$(PIP) -e '.[data,report]'
	@touch $@

$(VENV)/.dev: $(LOCK) | $(BIN)/python
	$(PIP) -e '.[data,report,dev]'
	@touch $@

$(VENV)/.docs: $(LOCK) | $(BIN)/python
	$(PIP) -e '.[data,report,docs]'
	@touch $@

demo: $(VENV)/.demo  ## the whole job on embedded real data, CPU
	$(BIN)/loka demo

test: $(VENV)/.dev  ## every test a machine without a GPU can run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# In an environment of its own: these libraries bring a hundred others, and some ask for versions that nobody has any more (hence --no-deps).
FOREIGN := $(VENV)-foreign
$(FOREIGN)/.done: $(LOCK) tests/foreign/requirements.txt
	$(PYTHON) -m venv $(FOREIGN)
	$(FOREIGN)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[data,report,dev]'
	$(FOREIGN)/bin/python -m pip install --disable-pip-version-check -q --no-deps -r tests/foreign/requirements.txt
	@touch $@

test-foreign: $(FOREIGN)/.done  ## mods and the whole loop on models of other libraries; docs/foreign-models.md lists the results
	OMP_NUM_THREADS=1 $(FOREIGN)/bin/python -m pytest -n auto --dist worksteal -m foreign tests/foreign
	OMP_NUM_THREADS=1 $(FOREIGN)/bin/python tests/foreign/table.py

# TorchRec asks for versions of its dependencies that do not run together on a CPU, hence --no-deps here too.
SCALE := $(VENV)-scale
$(SCALE)/.done: $(LOCK) tests/training/requirements-scale.txt
	$(PYTHON) -m venv $(SCALE)
	$(SCALE)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[data,report,dev]'
	$(SCALE)/bin/python -m pip install --disable-pip-version-check -q --no-deps -r tests/training/requirements-scale.txt
	@touch $@

test-scale: $(SCALE)/.done  ## sharded training: every way to shard on 2 and 4 ranks, and ranks killed at random moments; records in benchmarks/results/cpu
	OMP_NUM_THREADS=1 $(SCALE)/bin/python -m pytest -q tests/comms/test_torchrec.py tests/training/test_sharding.py tests/nn/test_quantized_collection.py
	OMP_NUM_THREADS=1 $(SCALE)/bin/python tests/training/scale_matrix.py --anew --out benchmarks/results/cpu/scale-matrix.json
	OMP_NUM_THREADS=1 $(SCALE)/bin/python tests/training/scale_kills.py --out benchmarks/results/cpu/scale-kills.json
	OMP_NUM_THREADS=1 $(SCALE)/bin/python tests/training/scale_kills.py --sharding row --seed 1 --out benchmarks/results/cpu/scale-kills-row.json

check: $(VENV)/.dev  ## lint, format, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.dev  ## what this machine can measure: data loading; kernels where there is a GPU
	$(BIN)/python benchmarks/data.py
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(BIN)/loka bench kernels; else echo 'kernels: not timed, no CUDA GPU on this machine'; fi

evidence: $(VENV)/.dev  ## every published number made again; EVIDENCE="--data FOLDER --seconds 1800 --only zoo" narrows it
	$(BIN)/python benchmarks/evidence.py $(EVIDENCE)

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(VENV)-foreign $(VENV)-scale build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
