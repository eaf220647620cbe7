# Two commands: `make demo` and `make test`. Each makes .venv and installs what it needs; the second time is quick.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test check bench bench-accuracy bench-engine bench-search clean

help:
	@echo "make demo    solve sample problems with every part of the service running on this machine"
	@echo "make test    run the tests"
	@echo "make check   lint, types, import contract"
	@echo "make bench   every table of the README: bench-accuracy (about 20 minutes), bench-engine (about an hour),"
	@echo "             bench-search (some minutes)"
	@echo "make clean   remove .venv and what the tools left"

demo: .venv/.installed
	@$(BIN)/reasoner demo

test: .venv/.installed-test
	@echo "Running the tests, two at a time, and then those that need the machine for themselves (some minutes) ..."
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not alone"
	@$(BIN)/python -m pytest -m alone

check: .venv/.installed-test
	@echo "Checking style, types and the import contract ..."
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: bench-accuracy bench-engine bench-search

bench-accuracy: .venv/.installed
	@$(BIN)/reasoner eval countdown --limit 300 --out benchmarks/results/countdown
	@$(BIN)/reasoner eval words --limit 300 --out benchmarks/results/words

bench-engine: .venv/.installed-bench
	@$(BIN)/reasoner bench engine --out benchmarks/results/engine
	@$(BIN)/reasoner bench engine --speculation --out benchmarks/results/speculation

bench-search: .venv/.installed
	@$(BIN)/reasoner bench search --out benchmarks/results/search

.venv/.installed: pyproject.toml constraints.txt
	@echo "Installing Reasoner into .venv (once; one to two minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/.installed-test: .venv/.installed
	@echo "Installing the test tools into .venv (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

.venv/.installed-bench: .venv/.installed
	@echo "Installing the engines to compare with into .venv (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
