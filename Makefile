# Every target sets up .venv by itself; a second run is quick.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where compiled modules may not be kept, each of some thousand processes compiles them anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check bench bench-peers chaos docs clean

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing hearthnet into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . --group dev
	@touch $@

demo: $(STAMP)
	@$(BIN)/hearthnet demo

check: $(STAMP)
	$(BIN)/ruff format --check mesh tui tests tools examples
	$(BIN)/ruff check mesh tui tests tools examples
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --no-warn-unreachable --cache-dir .mypy_cache/darwin -p mesh -p tui -p tools
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest -m "not chaos and not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

bench: $(STAMP)
	$(BIN)/python -m tests.bench

bench-peers: $(STAMP)
	$(BIN)/python -m tests.bench.peers

chaos: $(STAMP)
	-@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group fuzz
	$(BIN)/python -m pytest -m chaos -s tests tests/simulation

docs: $(STAMP)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV)
