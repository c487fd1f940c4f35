# Everything a developer or a newcomer runs. The virtual environment is made on first use.
#   make serve      set up and serve the demo model on http://127.0.0.1:8000
#   make test       set up, lint, type-check, run the tests that CI runs
#   make check      lint and type-check only          make fix       format and repair lint
#   make test-full  the long grids as well            make test-gpu  the checks that need a CUDA device

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := .ci/constraints.txt
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PROCESSES ?= 2
GPU_PROCESSES ?= 12
ARGS ?=

# What times something runs first and with nothing beside it, the rest in PROCESSES processes, in order, since the
# longest file stands near the beginning. Neighbours of a virtual machine only ever make times worse, so one that is too
# long is taken again, twice at most; what is too slow by itself fails each time.
PYTEST_ALONE := $(BIN)/python -m pytest --reruns 2 --reruns-delay 15 -m
PYTEST_BESIDE := $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder -m

.PHONY: serve test check fix test-full test-gpu wheel clean

serve: $(VENV)/.installed
	$(BIN)/aserve serve $(ARGS)

test: check
	$(PYTEST_ALONE) "alone and not full and not gpu" $(ARGS)
	$(PYTEST_BESIDE) "not alone and not full and not gpu" $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-full: check
	$(PYTEST_ALONE) "alone and not gpu" --timeout 3600 $(ARGS)
	$(PYTEST_BESIDE) "not alone and not gpu" --timeout 3600 $(ARGS)

test-gpu: $(VENV)/.installed-dev
	$(PYTEST_ALONE) "gpu and alone" -p no:cacheprovider --timeout 300 $(ARGS)
	$(BIN)/python -m pytest -n $(GPU_PROCESSES) --dist loadgroup -m "gpu and not alone" -p no:cacheprovider --timeout 300 $(ARGS)

wheel: $(VENV)/.installed
	$(PIP) wheel --no-deps -w dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "aserve needs Python 3.11 or newer; set PYTHON=/path/to/it" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Without an NVIDIA driver the CPU build of torch saves gigabytes. Its index has torch alone to give: what torch
# needs comes with the next rule. If that index does not answer, pip's own settings decide where torch comes from.
$(VENV)/.torch: | $(VENV)/bin/python
	@if nvidia-smi >/dev/null 2>&1; then \
		echo "installing torch for CUDA"; $(PIP) install -q -c $(CONSTRAINTS) torch; \
	else \
		echo "installing torch for CPUs"; \
		$(PIP) install -q --no-deps --retries 0 --timeout 10 -c $(CONSTRAINTS) --index-url $(TORCH_CPU_INDEX) torch \
			2>/dev/null || $(PIP) install -q -c $(CONSTRAINTS) torch; \
	fi
	@touch $@

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) $(VENV)/.torch
	$(PIP) install -q -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) $(VENV)/.torch
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@ $(VENV)/.installed
