"""What Domino's parts cost on a CUDA GPU at Qwen3-8B's shapes; one go, under 8 minutes, nothing to download.

    make bench-gpu                              # or: make bench-gpu GPU_PYTHON=python3, with a CUDA torch of your own
    python -m domino_spec.benchmarks.gpu --output_dir runs/bench-gpu \\
        [--batch_size 1 2 4 8 16 32] [--accepted 4 8 15 1 mixed]
    python -m domino_spec.benchmarks.gpu --output_dir OUT --tiny    # on tiny shapes, also without a GPU

Target and drafter have Qwen3-8B's sizes (from config values) and random bf16 weights, so no text and no tau of theirs
means anything: how many drafts are accepted is forced (`forced_acceptance`), round by round as `--accepted` says.
Every forward, draft and correction is really made, then the target's logits of the drafted ids are moved so that so
many are right. What comes out is the cost of every part and the share of the limit that arrives at a given tau:

    limit = tau * T_target(1) / (T_draft(15) + T_verify(16))

Losslessness is shown on a tiny float32 model, whose drafts are the target's own continuation with wrong tokens put in
after 1, 4, 8 or 15 right ones: all texts must be plain decoding's. A failed check ends the script with exit status 1.
"""

import argparse
import itertools
import json
import sys
import time
import warnings
from pathlib import Path

import torch
from domino_spec import DominoConfig, DominoForSpeculation
from domino_spec.benchmarks.report import table_of, wide_console
from domino_spec.benchmarks.timing import drafting, machine, profile
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

# Qwen3-8B's config.json, and the paper's drafter for it; 15 drafts, so that a verification has 16 positions.
QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
DRAFTER = {"num_hidden_layers": 5, "block_size": 16, "head_hidden_size": 1024, "head_rank": 256, "shift_label": False}
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}
TINY_DRAFTER = DRAFTER | {"num_hidden_layers": 2, "head_hidden_size": 32, "head_rank": 16}
PATTERNS = {"4": [4], "8": [8], "15": [15], "1": [1], "mixed": [1, 4, 8, 15]}


def build(target_sizes: dict, drafter_sizes: dict, dtype: torch.dtype, device: str):
    """Random target and drafter, made where they will stay."""
    torch.manual_seed(0)
    config = Qwen3Config(**target_sizes)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        drafter_config = DominoConfig.from_target(config, mask_token_id=config.vocab_size - 1, **drafter_sizes)
        drafter = DominoForSpeculation(drafter_config).to(dtype).eval()
    # A fresh head corrects nothing; its work is the same with any weights.
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=0.02)
    target.generation_config.eos_token_id = None
    return target, drafter


def prompts(batch_size: int, length: int, vocab: int, device: str, seed: int) -> dict[str, torch.Tensor]:
    """Random ids as `generate` inputs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab - 2, (batch_size, length), generator=generator).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# Losslessness -------------------------------------------------------------------------------------------------------


def guided(drafter, texts: torch.Tensor, pattern: list[int]):
    """`drafter.draft` as it is, with its tokens then replaced: some of the right ones, and wrong ones after them.

    Args:
        texts (int `[batch, length]`): plain decoding's sequences, prompts included.
        pattern (list[int]): right drafts, by the length of the row.
    """
    own = drafter.draft

    def draft(target, *args, input_ids, **kwargs):
        output = own(target, *args, input_ids=input_ids, **kwargs)
        n = output.token_ids.shape[1]
        for i, row in enumerate(input_ids):
            start = len(row)
            follow = [text[start : start + n] for text in texts if torch.equal(text[:start], row)]
            if follow:
                right = torch.nn.functional.pad(follow[0], (0, n - len(follow[0])))
                slots = torch.arange(n, device=right.device)
                output.token_ids[i] = torch.where(slots < pattern[start % len(pattern)], right, right ^ 1)
        return output

    return draft


def lossless(device: str, max_new_tokens: int = 48) -> dict[str, int]:
    """Equal texts of a tiny float32 model over batch sizes, schedules, rollouts and accepted drafts."""
    target, drafter = build(TINY, TINY_DRAFTER, torch.float32, device)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}
    checked, equal, kept = 0, 0, 0
    for batch_size in (1, 3):
        inputs = prompts(batch_size, 12, TINY["vocab_size"], device, seed=batch_size)
        if batch_size > 1:
            inputs["attention_mask"][0, :5] = 0  # left padding
        plain = target.generate(**inputs, **options)
        for schedule, rollout, pattern in itertools.product(
            ("constant", "adaptive"), ("sequential", "parallel"), (None, PATTERNS["mixed"])
        ):
            if pattern is not None:
                drafter.draft = guided(drafter, plain, pattern)
            with drafting(drafter, num_assistant_tokens_schedule=schedule, rollout=rollout):
                texts = target.generate(**inputs, **options, assistant_model=drafter)
            vars(drafter).pop("draft", None)
            checked += batch_size
            equal += sum(torch.equal(a, b) for a, b in zip(texts, plain, strict=True))
            kept += drafter.last_speculation.num_accepted
    return {"texts": checked, "equal_texts": equal, "accepted_drafts": kept}


# Costs --------------------------------------------------------------------------------------------------------------


def row_of(cell: dict) -> list[str]:
    """A cell of the report as a line of the table."""

    def ms(name: str) -> str:
        return f"{1000 * cell[name]:.2f}"

    return [
        str(cell["batch_size"]),
        cell["accepted"],
        f"{cell['tau']:.2f}",
        *(ms(name) for name in ("target_forward", "target_generate", "verify", "base_draft", "draft")),
        f"{cell['head_share']:.1%}",
        ms("loop"),
        f"{cell['achieved']:.2f}x",
        f"{cell['limit']:.2f}x",
        f"{cell['ratio']:.2f}",
        "-" if cell["peak_gib"] is None else f"{cell['peak_gib']:.1f}",
    ]


COLUMNS = ["batch", "accepted", "tau", "target(1)", "generate", "verify(16)", "head off", "draft(15)"]
COLUMNS += ["head share", "loop", "speedup", "limit", "ratio", "peak GiB"]
LEGEND = (
    "ms: target(1) is a bare forward, generate a token of plain generate, head off and draft(15) a draft without and "
    "with the head; head share: of draft + verify; loop: of a round, neither draft nor target forward; speedup: after "
    "the prefill, of calls that wait for nothing; ratio: speedup over limit."
)


def measure(arguments, device: str, console) -> dict:
    """All cells that the time allows; the JSON is rewritten after each."""
    started = time.perf_counter()
    report = {"machine": machine(), "device": device, "lossless": lossless(device), "cells": [], "left_out": []}
    console.print(f"tiny float32 model: {report['lossless']}")
    sizes, drafter_sizes = (TINY, TINY_DRAFTER) if arguments.tiny else (QWEN3_8B, DRAFTER)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    report |= {"target": sizes, "drafter": drafter_sizes, "dtype": str(dtype).removeprefix("torch.")}
    target, drafter = build(sizes, drafter_sizes, dtype, device)
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "pad_token_id": 0}
    longest = 0.0
    # Patterns outside: should time run out, every batch size has been seen.
    for accepted, batch_size in itertools.product(arguments.accepted, arguments.batch_size):
        begun = time.perf_counter()
        if begun - started + longest > arguments.budget_seconds:
            report["left_out"].append({"batch_size": batch_size, "accepted": accepted})
            continue
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        inputs = [
            prompts(batch_size, arguments.prompt_tokens, sizes["vocab_size"], device, seed)
            for seed in range(arguments.repeats)
        ]
        drafts = drafter.config.num_drafts
        cell = profile(target, drafter, inputs, options, lengths=[drafts], force=PATTERNS[accepted])
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
        report["cells"].append(cell | {"accepted": accepted, "peak_gib": peak})
        longest = max(longest, time.perf_counter() - begun)
        report["seconds"] = time.perf_counter() - started
        write(report, arguments.output_dir)
        values = zip(COLUMNS, row_of(report["cells"][-1]), strict=True)
        console.print(", ".join(f"{name} {value}" for name, value in values))
    return report


def write(report: dict, directory: str) -> Path:
    """The JSON in the output directory."""
    path = Path(directory) / "benchmark_gpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--batch_size", type=int, nargs="+", default=None, help="default: 1 2 4 8 16 32; tiny: 1 2")
    parser.add_argument("--accepted", nargs="+", default=list(PATTERNS), choices=PATTERNS, help="drafts of each round")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2, help="prompts of each cell")
    parser.add_argument(
        "--budget_seconds", type=float, default=400, help="no further cell is begun that may end later"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU where there is no GPU")
    arguments = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    if not cuda and not arguments.tiny:
        sys.exit("gpu: no CUDA GPU here; run it where torch sees one, or with --tiny to try it on a CPU.")
    if arguments.batch_size is None:
        arguments.batch_size = [1, 2] if arguments.tiny else [1, 2, 4, 8, 16, 32]
    if min(arguments.batch_size) < 1 or arguments.repeats < 1 or arguments.max_new_tokens < 2:
        sys.exit("gpu: expected batch_size and repeats of at least 1, and max_new_tokens of at least 2.")
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    console = wide_console()
    report = measure(arguments, "cuda" if cuda else "cpu", console)
    title = (
        f"{'tiny' if arguments.tiny else 'Qwen3-8B'} shapes, {report['dtype']}, {report['machine']['hardware']}; ms"
    )
    cells = sorted(report["cells"], key=lambda cell: cell["batch_size"])
    console.print(table_of(title, COLUMNS, [row_of(cell) for cell in cells]), LEGEND)
    if report["left_out"]:
        console.print(f"left out for time: {report['left_out']}")
    console.print(f"written to {write(report, arguments.output_dir)}")
    if report["lossless"]["equal_texts"] != report["lossless"]["texts"]:
        sys.exit(f"gpu: texts differ from plain decoding's: {report['lossless']}; this is a bug.")


if __name__ == "__main__":
    main()
