# Everything runs in .venv, which `setup` makes; each target works on its own from a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Strict editable installs link every file, so a new or removed file needs the install step again: the stamp's name
# holds a digest of what an install depends on.
NEEDS := $(shell cat pyproject.toml constraints.txt | cksum | tr -d ' ')
FILES := $(shell find toolkit commands analyzers runtime fixtures -name '*.py' -o -name '*.json' -o -name '*.gz' -o -name '*.yaml' | sort | cksum | tr -d ' ')
INSTALL := -q --disable-pip-version-check -c constraints.txt --config-settings editable_mode=strict

.PHONY: setup demo test test-torch slow check bench docs fixtures dist lock audit mutants soak clean

setup: $(VENV)/.files-$(NEEDS)-$(FILES)

$(VENV)/.needs-$(NEEDS):
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python >= 3.11 is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing ddltool and its needs into $(VENV) (about a minute)"
	rm -f $(VENV)/.needs-* $(VENV)/.files-*
	$(BIN)/pip install $(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.files-$(NEEDS)-$(FILES): $(VENV)/.needs-$(NEEDS)
	rm -rf $(VENV)/.files-* build/__editable__*
	$(BIN)/pip install $(INSTALL) --no-deps -e .
	touch $@

demo: setup
	$(BIN)/ddltool demo -o ddltool-demo

test: setup
	$(BIN)/pytest

# Another torch before the one in .venv: make test-torch TORCH=2.15.0 [TESTS=tests/step/costs].
TORCH ?= 2.10.0
OTHER = build/torch-$(TORCH)
TESTS ?= tests/step tests/runtime/hook tests/runtime/elastic tests/job/planning
test-torch: setup
	$(BIN)/python -m venv $(OTHER)
	$(OTHER)/bin/pip install -q --disable-pip-version-check torch==$(TORCH)
	echo "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/python*/site-packages)')" \
	    > $$(echo $(OTHER)/lib/python*/site-packages)/zz_venv.pth
	$(OTHER)/bin/python -m pytest $(TESTS)

slow: setup
	$(BIN)/pytest -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p ddltool
	$(BIN)/pytest tests/house/test_architecture.py

bench: setup
	for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# The site, into build/site; a link that leads nowhere fails.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Traces the zoo again: a change in tracing shows as a diff of fixtures/graphs.
fixtures: setup
	$(BIN)/ddltool show zoo --write fixtures/graphs

# Wheel and sdist of what is committed, with the same bytes whenever they are built from one commit. For a package index:
# make dist REPOSITORY=https://HOST/OWNER/NAME, where README's links then lead.
dist: setup
	PYTHON=$(abspath $(BIN)/python) REPOSITORY=$(REPOSITORY) .ci/dist
	ls -l dist

# Small mistakes put into the analyzers' cores, one at a time: which would their tests not see? (an hour; CORES="fit nccl")
mutants: setup
	$(BIN)/pip install -q -c constraints.txt 'cosmic-ray>=8.4,<9'
	$(BIN)/python benchmarks/mutants.py $(CORES)

# Jobs that last while processes come, leave, stall and die: nothing they hold may grow (make soak SECONDS=600).
SECONDS ?= 3600
soak: setup
	$(BIN)/python benchmarks/soak.py --seconds $(SECONDS)

# requirements-dev.lock: what development installs with the hashes of its files, by pyproject.toml and constraints.txt.
# Versions already in it stay while they fit (make lock UV=--upgrade).
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install -q 'uv>=0.5,<1'
	UV_PYTHON_DOWNLOADS=never build/lock/bin/uv pip compile pyproject.toml --extra dev -c constraints.txt -q $(UV) \
	    --generate-hashes --python-version 3.11.9 --python-platform x86_64-manylinux_2_28 --annotation-style line \
	    --custom-compile-command 'make lock (files on pypi.org, for Python 3.11 on Linux x86-64; torch with CUDA)' \
	    -o requirements-dev.lock

# Licences of all that is installed, and known weaknesses (asks the advisory database over the network).
audit: setup
	$(PYTHON) -m venv build/audit
	build/audit/bin/pip install -q pip-audit pip-licenses
	build/audit/bin/pip-licenses --python $(BIN)/python --from=mixed
	build/audit/bin/pip-audit -r requirements-dev.lock --require-hashes --disable-pip

clean:
	rm -rf $(VENV) build dist ddltool-demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
