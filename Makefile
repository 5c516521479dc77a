# Two commands on a fresh machine (Python 3.11 or newer): `make demo` trains and samples a small hybrid, `make test` checks
# everything. Each makes .venv by itself from requirements/*.txt. Another Python: `make demo PYTHON=python3.12`.
# Extra pip options (a CPU-only torch index, a mirror): PIP_FLAGS="...".

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
RUN = $(VENV)/bin/python

.PHONY: demo test lint unit bench clean

demo: $(VENV)/demo.stamp
	$(RUN) -m openkda demo

test: lint unit

lint: $(VENV)/test.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy openkda

unit: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --maxprocesses 8

bench: $(VENV)/test.stamp
	$(RUN) benchmarks/cpu_kda.py

$(RUN):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"openkda needs Python 3.11 or newer, found {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: requirements/demo.txt pyproject.toml | $(RUN)
	$(RUN) -m pip install $(PIP_FLAGS) -r requirements/demo.txt
	$(RUN) -m pip install $(PIP_FLAGS) --no-deps --editable .
	touch $@

# The pinned Triton is the one the kernels are compiled and tested with; --no-deps because torch's own pin may name another.
$(VENV)/test.stamp: requirements/test.txt $(VENV)/demo.stamp
	$(RUN) -m pip install $(PIP_FLAGS) -r requirements/test.txt
	$(RUN) -m pip install $(PIP_FLAGS) --no-deps -r requirements/kernels.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
