# Every command of a developer and of CI. `make` alone prints the list; scripts stand in .github/scripts.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
SCRIPTS := .github/scripts
PYTEST_WORKERS ?= 4
SHARE ?= --json target/bench-share.json
LEASES ?=
PROXY ?= --json target/bench-proxy.json
.PHONY: help setup dev demo test test-rust test-python test-contended bench bench-share bench-lease bench-proxy stubs stubs-check lint format wheels-check lock ci audit clean

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

.venv/setup.stamp: pyproject.toml .github/requirements/dev.lock $(SCRIPTS)/setup.sh
	$(SCRIPTS)/setup.sh $(PYTHON)

setup: .venv/setup.stamp ## make .venv with the tools and dependencies

dev: setup ## build the Rust core and install ocgpu into .venv, editable
	PIP_QUIET=1 $(BIN)/maturin develop --release --quiet

demo: setup dev ## two programs share a pretend GPU, and an image job waits for a chat (about 20 s)
	$(BIN)/ocgpu demo

test: test-rust test-python test-contended ## all tests

test-rust: ## tests of the Rust core, no Python needed
	cargo test --quiet -p ocgpu-core

test-python: dev ## tests in Python: real processes, real sockets
	$(BIN)/pytest -n $(PYTEST_WORKERS) -m "not contended and not gpu"

test-contended: dev ## tests that need a core for themselves, one after the other
	$(BIN)/pytest -m "contended and not gpu"

bench: dev ## all benchmarks, each beside its floor or a peer in the same run
	$(BIN)/pytest benches --benchmark-enable --benchmark-only -p no:xdist -o python_files='bench_*.py' -o timeout=0

bench-share: dev ## how one contended core is shared, schedule beside schedule (about 30 min; SHARE="--quick" for less)
	$(BIN)/python -m benches.sharing $(SHARE)

bench-lease: dev ## the lease beside flock, filelock, fasteners and portalocker (about 2 min)
	$(BIN)/python -m benches.leases $(LEASES)

bench-proxy: dev ## the proxy beside nginx, Go's ReverseProxy and no proxy (about 5 min; PROXY="--only get" for less)
	$(BIN)/python -m benches.proxy $(PROXY)

stubs: setup ## generate python/ocgpu/_ocgpu.pyi from the Rust code
	$(SCRIPTS)/stubs.sh

stubs-check: stubs ## fail when the committed stubs differ from the code
	git diff --exit-code -- python/ocgpu/_ocgpu.pyi

lint: dev ## formatting, clippy, ruff, mypy, layers, workflows
	cargo fmt --check
	cargo clippy --quiet --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/zizmor --offline --quiet .github

format: setup ## format Rust and Python
	cargo fmt
	$(BIN)/ruff format
	$(BIN)/ruff check --fix --quiet

wheels-check: setup ## build the wheel, import it on every Python from 3.11 at hand
	$(SCRIPTS)/wheels_check.sh

lock: setup ## resolve .github/requirements/dev.lock anew
	$(SCRIPTS)/lock.sh

ci: lint stubs-check test wheels-check ## all that CI runs offline

audit: setup ## known advisories; needs the network
	cargo audit
	$(BIN)/zizmor .github

clean: ## remove .venv and target
	rm -rf .venv target
