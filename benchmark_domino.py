"""Compare Domino with what a user would pick instead: same prompts, one process, methods interleaved per prompt.

    python benchmark_domino.py --target_model_name_or_path T --draft_model_name_or_path D --prompts FILE.jsonl ... \\
        --output_dir O [--max_prompts 20] [--max_new_tokens 128] [--dtype bfloat16] [--temperature 0]

Methods: plain `generate`, the library's prompt lookup, the drafter with its head off (parallel only), and Domino.
tau is (new tokens - 1) / (target forwards - 1), counted by a hook on the target for every method alike. Means are
kept tokens over rounds summed over a set's prompts; medians are over prompts. Wall clock is a ratio of sums taken in
this run. Greedy outputs are compared with plain ones and the number of equal texts is reported.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from domino_spec import DominoForSpeculation
from domino_spec.answer_prompts import read_jsonl, tokenize_prompt
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

METHODS = ("plain", "lookup", "head off", "domino")


@contextmanager
def counted_forwards(target):
    """Yields a list whose length is the number of target forwards so far."""
    calls: list[int] = []
    handle = target.register_forward_hook(lambda module, inputs, output: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


def run(method: str, target, drafter, input_ids: torch.Tensor, sampling: dict) -> dict:
    """One generation: new ids, seconds, target forwards, seconds drafting and verifying."""
    extra = {}
    if method == "lookup":
        extra = {"prompt_lookup_num_tokens": drafter.config.num_drafts, "max_matching_ngram_size": 2}
    elif method != "plain":
        drafter.generation_config.use_head = method == "domino"
        extra = {"assistant_model": drafter}
    with counted_forwards(target) as calls:
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        output = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **sampling, **extra)
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    result = {"ids": output[0, input_ids.shape[1] :].tolist(), "seconds": seconds, "forwards": len(calls)}
    if "assistant_model" in extra:
        stats = drafter.last_speculation
        result |= {"draft_seconds": stats.draft_seconds, "verify_seconds": stats.verify_seconds}
        result |= {"acceptance_rate_per_position": stats.acceptance_rate_per_position}
    return result


def tau_of(results: list[dict]) -> tuple[float, float]:
    """Mean over a set (summed tokens / summed rounds) and median over its prompts."""
    pairs = [(len(r["ids"]) - 1, r["forwards"] - 1) for r in results if r["forwards"] > 1]
    tokens, rounds = map(sum, zip(*pairs, strict=True))
    return tokens / rounds, statistics.median(t / n for t, n in pairs)


def summarise(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """Per method: tau, wall clock against plain (ratio of sums, median of ratios), equal texts."""
    plain = runs["plain"]
    summary = {}
    for method, results in runs.items():
        mean, median = tau_of(results)
        ratios = [p["seconds"] / r["seconds"] for p, r in zip(plain, results, strict=True)]
        summary[method] = {
            "tau_mean": mean,
            "tau_median": median,
            "speedup": sum(p["seconds"] for p in plain) / sum(r["seconds"] for r in results),
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
    name = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
        flags = next((line for line in lines if line.startswith("flags")), "")
        name += ", avx512_bf16" if "avx512_bf16" in flags else ", no avx512_bf16"
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
    for column in ("method", "tau mean", "tau median", "wall clock", "median", "texts equal", "draft s", "verify s"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, row in summary.items():
        table.add_row(
            method,
            f"{row['tau_mean']:.2f}",
            f"{row['tau_median']:.2f}",
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
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    arguments = parser.parse_args()
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
    sampling = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if arguments.temperature > 0:
        sampling |= {"temperature": arguments.temperature, "top_k": 0}
    methods = ["plain", *(m for m in arguments.methods if m != "plain")]

    prompts = {Path(path).stem: list(read_jsonl(path))[: arguments.max_prompts] for path in arguments.prompts}
    report = {"machine": machine(), "arguments": vars(arguments), "sets": {}}
    with tqdm(total=sum(map(len, prompts.values())) * len(methods)) as bar:
        for name, rows in prompts.items():
            runs: dict[str, list[dict]] = {method: [] for method in methods}
            for number, row in enumerate(rows):
                input_ids = torch.tensor([tokenize_prompt(row, tokenizer)], device=device)
                if number == 0:
                    for method in methods:
                        run(method, target, drafter, input_ids, sampling | {"max_new_tokens": 8})
                # Another order for every prompt, so that no method always runs after the same one.
                shift = number % len(methods)
                for method in methods[shift:] + methods[:shift]:
                    torch.manual_seed(arguments.seed + number)
                    runs[method].append(run(method, target, drafter, input_ids, sampling))
                    bar.update(1)
            report["sets"][name] = summarise(runs)
            print_table(
                console, f"{name}, {arguments.dtype}, temperature {arguments.temperature:g}", report["sets"][name]
            )
    output = Path(arguments.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    (output / "benchmark.json").write_text(json.dumps(report, indent=2))
    console.print(f"{report['machine']}\nwritten to {output / 'benchmark.json'}")


if __name__ == "__main__":
    main()
