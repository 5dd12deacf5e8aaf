"""Every decoder-only model type of the installed transformers: assisted text against plain text.

    python tests/sweep.py [--types llama gpt2 ...] [--output_file sweep.json]

Each type is built tiny and random, and tried at batch 1 and in a ragged batch of three, greedy and sampled, with
drafts that are right (ORACLE), half right, noise, and adaptive; with a cache of the caller's, and with a processor
that counts its calls.
A type is `equal` (every text and every generator state equals plain decoding's), `refused` (one sentence says why, and
plain decoding is left to run), `not built` (no tiny model of it can be made here, or plain decoding itself fails),
`unequal` or `crashed`. The last two are bugs, and the exit status says so.
"""

import argparse
import contextlib
import io
import json
import signal
import sys
import warnings
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from checks import Calls
from tiny import VOCAB, make_drafter, mixed, ragged
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

# Written in the words of most configs; those that use others map these to their own.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": 61,
    "eos_token_id": None,
    "pad_token_id": 62,
    "sliding_window": 8,
}
# Sizes that only some types have, by a part of their name; the first that fits is taken.
PARTS = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "experts_per_tok": 2,
    "top_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "_experts": 4,
    "shared_expert": 32,
    "moe_intermediate": 32,
    "expert_ffn": 32,
    "d_state": 8,
    "state_size": 8,
    "n_groups": 1,
    "n_heads": 4,
    "num_heads": 4,
    "index_topk": 256,
    "index_n_heads": 4,
    "_layers": 4,
    "_ffn_dim": 64,
    "ffn_hidden": 64,
    "d_head": 8,
    "head_dim": 8,
    "_size": 32,
    "_dim": 32,
    "_rank": 8,
}
KEEP = ("kernel", "conv", "chunk", "patch", "image", "multiple", "version", "_id", "window", "block_size", "bit")
LARGEST = 8_000_000
KINDS = {"oracle": (6,), "half": (2,), "mixed": (6, 0, 3, 1)}


class OutOfTime(Exception):
    """A type took too long."""


@contextlib.contextmanager
def limited(seconds: int):
    """Raise OutOfTime after so many seconds."""

    def ring(*args):
        raise OutOfTime(f"over {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def shrink(config) -> dict:
    """Small values for whatever a default config holds as large numbers."""
    small = {}
    for name, value in vars(config).items():
        if name.startswith("_") or not isinstance(value, int) or isinstance(value, bool) or value < 2:
            continue
        if name in SIZES or any(part in name for part in KEEP):
            continue
        part = next((part for part in PARTS if part in name), None)
        if part is not None and value > PARTS[part]:
            small[name] = PARTS[part]
    return small


def tiny_config(kind: str):
    """A tiny config of a model type."""
    cls = CONFIG_MAPPING[kind]
    default = cls()
    text = default.get_text_config(decoder=True)
    if text is not default:
        raise ValueError("its text model is inside another model")
    known = {name: value for name, value in SIZES.items() if hasattr(default, name)}
    known |= shrink(default)
    for name in ("word_embed_proj_dim", "embedding_size", "hidden_size_per_layer_input", "d_model", "n_embd"):
        if hasattr(default, name) and name not in getattr(cls, "attribute_map", {}).values():
            known[name] = 32
    known |= {"is_decoder": True} if hasattr(default, "is_decoder") else {}
    for drop in ((), ("head_dim",), ("num_key_value_heads",), ("head_dim", "num_key_value_heads")):
        try:
            return cls(**{name: value for name, value in known.items() if name not in drop})
        except (TypeError, ValueError, AssertionError) as error:
            last = error
    raise last


def build(kind: str):
    """A tiny random model of a type, fp32, whose choices are clear."""
    config = tiny_config(kind)
    with torch.device("meta"):
        number = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if number > LARGEST:
        raise ValueError(f"{number / 1e6:.0f} M parameters at its smallest")
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.generation_config.pad_token_id = 62
    model.generation_config.eos_token_id = None
    return model


def variants(target):
    """Calls of one type: name, arguments made afresh for each call."""
    one, three = ragged([7]), ragged([7, 3, 9])
    greedy, sampled = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 20}
    yield "greedy 1", lambda: one | greedy
    yield "sampled 1", lambda: one | sampled
    yield "greedy 3", lambda: three | greedy
    yield "sampled 3", lambda: three | sampled
    yield "ends 3", lambda: three | greedy | {"eos_token_id": list(range(0, 60, 7))}
    yield "processor 3", lambda: three | greedy | {"logits_processor": [Calls()], "repetition_penalty": 1.2}
    yield "own cache 3", lambda: three | greedy | {"past_key_values": DynamicCache(config=target.config)}


def outcome(call, **extra):
    """Text and generator state, or what was raised."""
    torch.manual_seed(3)
    try:
        text = call(**extra).tolist()
    except OutOfTime:
        raise
    except Exception as error:  # noqa: BLE001 - what is raised is the result
        return error
    return text, torch.get_rng_state().tolist()


def is_refusal(error: Exception) -> bool:
    """Whether an exception is the product's own sentence."""
    ours = ("without assistant_model", "needs the target's cache")
    return isinstance(error, ValueError) and any(words in str(error) for words in ours)


def try_type(kind: str) -> dict:
    """What comes of one type."""
    try:
        target = build(kind)
        make_drafter(target)
        plain = target.generate(**ragged([7]), max_new_tokens=4, do_sample=False)
        assert plain.shape[1] == 11
    except OutOfTime:
        raise
    except Exception as error:  # noqa: BLE001
        return {"result": "not built", "why": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    notes, equal, refused = [], 0, set()
    for name, arguments in variants(target):
        width = arguments()["input_ids"].shape[1]

        def call(arguments=arguments, **extra):
            return target.generate(**arguments(), max_new_tokens=14, **extra)

        plain = outcome(call)
        if isinstance(plain, Exception):
            continue  # plain decoding cannot do it either
        if plain[0] != outcome(call)[0]:
            continue  # nor does it twice alike
        for how in [*KINDS, "noise", "adaptive"]:
            drafter = make_drafter(target, schedule="adaptive" if how == "adaptive" else "constant")
            if how in KINDS:
                mixed(drafter, torch.tensor(plain[0]), KINDS[how])
            ours = outcome(call, assistant_model=drafter)
            if isinstance(ours, Exception):
                if is_refusal(ours):
                    refused.add(str(ours))
                    continue
                notes.append(f"{name}, {how}: crashed: {type(ours).__name__}: {ours}".split("\n")[0][:300])
            elif ours[0] != plain[0]:
                rows = zip(ours[0], plain[0], strict=True)
                at = min(next((i for i, (a, b) in enumerate(zip(*r, strict=True)) if a != b), 99) for r in rows)
                at -= width
                notes.append(f"{name}, {how}: unequal from new token {at}")
            elif ours[1] != plain[1]:
                notes.append(f"{name}, {how}: unequal generator state")
            else:
                equal += 1
    if notes:
        crashed = any("crashed" in note for note in notes)
        return {"result": "crashed" if crashed else "unequal", "equal": equal, "notes": notes}
    if refused and not equal:
        return {"result": "refused", "why": sorted(refused)}
    return {"result": "equal", "equal": equal, "refused": sorted(refused)}


def sweep(kinds, seconds: int = 120) -> dict[str, dict]:
    """Results by type, printed as they come."""
    found = {}
    for kind in kinds:
        try:
            with limited(seconds), contextlib.redirect_stderr(io.StringIO()):
                found[kind] = try_type(kind)
        except OutOfTime as error:
            found[kind] = {"result": "not built", "why": f"{error}"}
        print(kind, json.dumps(found[kind]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--output_file")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = sweep(arguments.types)
    counts = {}
    for kind in found.values():
        counts[kind["result"]] = counts.get(kind["result"], 0) + 1
    print(counts)
    if arguments.output_file:
        Path(arguments.output_file).write_text(json.dumps({"counts": counts, "types": found}, indent=1) + "\n")
    sys.exit(any(name in counts for name in ("unequal", "crashed")))


if __name__ == "__main__":
    main()
