# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := .venv-peers/.installed
WORKERS ?= 2
FOLDERS := foundation data_pipeline tokenizers training evaluation pipelines
# mypy reads the code that needs no torch, through links that give it its import name, and the benchmarks, which no test
# runs whole.
TYPED := foundation data_pipeline tokenizers training evaluation pipelines

.PHONY: demo test lint schedules bench clean

demo: $(INSTALLED)
	$(BIN)/gristmill run demo --workdir work/demo --workers $(WORKERS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/support/naming.py
	mkdir -p build/types/gristmill
	ln -sfn $(addprefix $(CURDIR)/,$(FOLDERS)) build/types/gristmill/
	ln -sfn $(CURDIR)/benchmarks/published build/types/published
	MYPYPATH=build/types $(BIN)/mypy $(addprefix -p gristmill.,$(TYPED)) -p published
	MYPYPATH=build/types:benchmarks $(BIN)/mypy --cache-dir .mypy_cache/benchmarks --disable-error-code union-attr benchmarks/*.py

# 100,000 schedules of publication (tests/simulation): too many for `make test`, of which each run has some thousands.
schedules: $(INSTALLED)
	folder=$$(mktemp -d) && $(BIN)/python -m tests.simulation.schedules "$$folder" 0 100000 small; \
	code=$$?; rm -rf "$$folder"; exit $$code

bench: $(INSTALLED) $(PEERS)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/run_all.py --output docs/results.md

# Peers of the benchmarks whose pins hold ours back live in an environment of their own.
$(PEERS): benchmarks/peers/requirements.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -q -r benchmarks/peers/requirements.txt
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("gristmill needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) work .pytest_cache .mypy_cache .ruff_cache
