"""Compare Domino with what a user would pick instead: same prompts, one process, methods interleaved per prompt.

    python benchmark_domino.py --target_model_name_or_path T --draft_model_name_or_path D --prompts FILE.jsonl ... \\
        --output_dir O [--max_prompts 20] [--max_new_tokens 128] [--dtype bfloat16] [--batch_size 1 4 16] \\
        [--temperature 0 0.7] [--methods adaptive "adaptive, no lookup"]

Methods: plain `generate`, the library's prompt lookup, the drafter with its head off (parallel only) and Domino, both
with whole blocks every round, and Domino as it decides for itself (adaptive), with and without lookup.
tau is (new tokens - 1) / (target forwards - 1), counted by a hook on the target for every method alike; in a batch it
is each row's kept tokens over its rounds, and the hook's count must agree with the drafter's statistics. Means are
kept tokens over rounds summed over a set's prompts; medians are over prompts. Wall clock is tokens per second over
those of plain `generate` at the same batch size, all taken in this run. Greedy outputs are compared with plain ones
and the number of equal texts is reported.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from domino_spec import DominoForSpeculation
from domino_spec.answer_prompts import ended, left_padded, read_jsonl, tokenize_prompt
from domino_spec.report_domino import processor_name
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

# Knobs of the methods that draft with Domino.
KNOBS = {
    "head off": {"num_assistant_tokens_schedule": "constant", "use_head": False, "lookup": False},
    "domino": {"num_assistant_tokens_schedule": "constant", "use_head": True, "lookup": False},
    "adaptive": {"num_assistant_tokens_schedule": "adaptive", "use_head": True, "lookup": True},
    "adaptive, no lookup": {"num_assistant_tokens_schedule": "adaptive", "use_head": True, "lookup": False},
}
METHODS = ("plain", "lookup", *KNOBS)


@contextmanager
def counted_forwards(target):
    """Yields a list whose length is the number of target forwards so far."""
    calls: list[int] = []
    handle = target.register_forward_hook(lambda module, inputs, output: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


def run(method: str, target, drafter, inputs: dict[str, torch.Tensor], sampling: dict, pad: int) -> list[dict]:
    """One generation; per row the new ids, its rounds, and its share of the seconds."""
    extra = {}
    if method == "lookup":
        extra = {"prompt_lookup_num_tokens": drafter.config.num_drafts, "max_matching_ngram_size": 2}
    elif method != "plain":
        for name, value in KNOBS[method].items():
            setattr(drafter.generation_config, name, value)
        extra = {"assistant_model": drafter}
    batch_size, prompt_length = inputs["input_ids"].shape
    with counted_forwards(target) as calls:
        synchronize(target)
        started = time.perf_counter()
        output = target.generate(**inputs, **sampling, **extra, pad_token_id=pad)
        synchronize(target)
        seconds = time.perf_counter() - started
    rows = []
    for i, ids in enumerate(ended(target, output[:, prompt_length:])):
        row = {"ids": ids, "seconds": seconds / batch_size, "rounds": len(calls) - 1}
        if "assistant_model" in extra:
            stats = drafter.last_speculation
            if stats.num_rounds != len(calls) - 1:
                raise RuntimeError(f"statistics say {stats.num_rounds} rounds, the hook counted {len(calls) - 1}.")
            row["rounds"] = len(stats.acceptance_lengths[i])
            row["draft_seconds"] = stats.draft_seconds / batch_size
            row["verify_seconds"] = stats.verify_seconds / batch_size
        elif batch_size > 1:
            row["rounds"] = len(ids) - 1
        rows.append(row)
    return rows


def run_set(methods, target, drafter, inputs, sampling: dict, pad: int, seed: int) -> dict[str, list[dict]]:
    """All methods on all `inputs` in turn; per method the rows of `run`."""
    runs: dict[str, list[dict]] = {method: [] for method in methods}
    for number, batch in enumerate(tqdm(list(inputs), unit="batch")):
        if number == 0:
            for method in methods:
                run(method, target, drafter, batch, sampling | {"max_new_tokens": 4}, pad)
        # Another order for every prompt, so that no method always runs after the same one.
        shift = number % len(methods)
        for method in methods[shift:] + methods[:shift]:
            torch.manual_seed(seed + number)
            runs[method] += run(method, target, drafter, batch, sampling, pad)
    return runs


def synchronize(target) -> None:
    """Wait for the device, so that a reading of the clock means something."""
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def batches(rows: list[dict], tokenizer, batch_size: int, device: str, pad: int):
    """Left-padded `generate` inputs of the prompts, in order."""
    for start in range(0, len(rows), batch_size):
        prompts = [tokenize_prompt(row, tokenizer) for row in rows[start : start + batch_size]]
        yield left_padded(prompts, pad, device)


def tau_of(results: list[dict]) -> tuple[float, float]:
    """Mean over a set (summed tokens / summed rounds) and median over its prompts."""
    pairs = [(len(r["ids"]) - 1, r["rounds"]) for r in results if r["rounds"]]
    tokens, rounds = map(sum, zip(*pairs, strict=True))
    return tokens / rounds, statistics.median(t / n for t, n in pairs)


def speed(results: list[dict]) -> float:
    """New tokens a second; sampled texts differ in length, so seconds alone would not compare."""
    return sum(len(r["ids"]) for r in results) / sum(r["seconds"] for r in results)


def summarise(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """Per method: tau, speed against plain (of the whole set, median over prompts), equal texts."""
    plain = runs["plain"]
    summary = {}
    for method, results in runs.items():
        mean, median = tau_of(results)
        ratios = [speed([r]) / speed([p]) for p, r in zip(plain, results, strict=True)]
        summary[method] = {
            "tau_mean": mean,
            "tau_median": median,
            "tokens_per_second": speed(results),
            "speedup": speed(results) / speed(plain),
            "speedup_median": statistics.median(ratios),
            "equal_texts": sum(p["ids"] == r["ids"] for p, r in zip(plain, results, strict=True)),
            "prompts": len(results),
            "seconds": sum(r["seconds"] for r in results),
            "draft_seconds": sum(r.get("draft_seconds", 0.0) for r in results),
            "verify_seconds": sum(r.get("verify_seconds", 0.0) for r in results),
        }
    return summary


def machine() -> dict[str, str]:
    """What a reader needs to judge the numbers."""
    name = processor_name()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        name += ", avx512_bf16" if "avx512_bf16" in cpuinfo.read_text() else ", no avx512_bf16"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return {
        "hardware": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
    }


def print_table(console: Console, title: str, summary: dict[str, dict]) -> None:
    """One set as a table."""
    table = Table(title=title)
    columns = ("method", "tau mean", "tau median", "tokens/s", "wall clock", "median", "texts equal")
    for column in (*columns, "draft s", "verify s"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, row in summary.items():
        table.add_row(
            method,
            f"{row['tau_mean']:.2f}",
            f"{row['tau_median']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['speedup_median']:.2f}x",
            f"{row['equal_texts']}/{row['prompts']}",
            f"{row['draft_seconds']:.1f}",
            f"{row['verify_seconds']:.1f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target_model_name_or_path", help="default: SmolLM2-135M-Instruct from its PyPI package")
    parser.add_argument("--draft_model_name_or_path", required=True)
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files with `messages` or `prompt`")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_prompts", type=int, default=20, help="of each file")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument(
        "--batch_size", type=int, nargs="+", default=[1], help="above 1 the library's lookup cannot take part"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="0 decodes greedily")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["lookup", "head off", "domino", "adaptive"], choices=METHODS)
    arguments = parser.parse_args()
    for path in arguments.prompts:
        if not Path(path).is_file():
            parser.error(f"no prompts file '{path}'; expected JSONL with `messages` or `prompt` in each row.")
    console = Console()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if arguments.target_model_name_or_path is None:
        from domino_spec.smollm2_target import smollm2_path

        arguments.target_model_name_or_path = smollm2_path()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, arguments.dtype)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target_model_name_or_path)
    target = AutoModelForCausalLM.from_pretrained(arguments.target_model_name_or_path, dtype=dtype).eval().to(device)
    drafter = DominoForSpeculation.from_pretrained(arguments.draft_model_name_or_path, dtype=dtype).eval().to(device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    prompts = {Path(path).stem: list(read_jsonl(path))[: arguments.max_prompts] for path in arguments.prompts}
    # Names without directories: the report is for others too.
    named = vars(arguments) | {
        "target_model_name_or_path": Path(arguments.target_model_name_or_path).name,
        "prompts": [Path(path).name for path in arguments.prompts],
    }
    del named["output_dir"]
    report = {"machine": machine(), "arguments": named, "sets": {}}
    settings = list(itertools.product(arguments.temperature, arguments.batch_size))
    for temperature, batch_size in settings:
        sampling = {"max_new_tokens": arguments.max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_k": 0}
        methods = ["plain", *(m for m in arguments.methods if m != "plain")]
        if batch_size > 1 and "lookup" in methods:
            console.print("prompt lookup takes one sequence at a time: left out of a batched run")
            methods.remove("lookup")
        for name, rows in prompts.items():
            inputs = batches(rows, tokenizer, batch_size, device, pad)
            runs = run_set(methods, target, drafter, inputs, sampling, pad, arguments.seed)
            title = name if len(settings) == 1 else f"{name}, batch {batch_size}, temperature {temperature:g}"
            report["sets"][title] = summarise(runs)
            print_table(
                console,
                f"{name}, {arguments.dtype}, batch {batch_size}, temperature {temperature:g}",
                report["sets"][title],
            )
    output = Path(arguments.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    (output / "benchmark.json").write_text(json.dumps(report, indent=2))
    console.print(f"{report['machine']}\nwritten to {output / 'benchmark.json'}")


if __name__ == "__main__":
    main()
