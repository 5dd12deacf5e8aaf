"""Watch a target answer twice, alone and with a Domino drafter: same text, fewer target passes.

    python -m domino_spec.examples.demo [--target_model_name_or_path TARGET] [--draft_model_name_or_path DRAFTER] \\
        [--prompt TEXT]
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

PROMPT = (
    "A baker makes 12 trays of rolls with 15 rolls on each tray. She sells three quarters of the rolls in the morning "
    "for $2 each and the rest in the afternoon for $1 each. How much money does she make in the whole day?"
)


def generate(target, inputs, max_new_tokens: int, assistant_model=None) -> tuple[torch.Tensor, float]:
    """Greedy ids of one prompt, and the seconds they took."""
    started = time.perf_counter()
    output = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, assistant_model=assistant_model)
    return output[0, inputs["input_ids"].shape[1] :], time.perf_counter() - started


def coloured(tokenizer, ids: torch.Tensor, stats) -> Text:
    """The answer with accepted drafts in green and the target's own tokens in plain white."""
    text, place = Text(), 1
    text.append(tokenizer.decode(ids[:1]), "bold")
    for kept, accepted in zip(stats.acceptance_lengths[0], stats.accepted_drafts[0], strict=True):
        text.append(tokenizer.decode(ids[place : place + accepted]), "green")
        text.append(tokenizer.decode(ids[place + accepted : place + kept]), "bold")
        place += kept
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target_model_name_or_path", help="default: SmolLM2-135M-Instruct from its PyPI package")
    parser.add_argument("--draft_model_name_or_path", default=str(Path(__file__).resolve().parents[1]))
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    arguments = parser.parse_args()
    console = Console()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if arguments.target_model_name_or_path is None:
        from domino_spec.examples.smollm2_target import smollm2_path

        arguments.target_model_name_or_path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target_model_name_or_path)
    messages = [{"role": "user", "content": arguments.prompt}]
    table = Table(title="greedy, batch 1, one run on this machine")
    for column in ("", "seconds", "tokens/s", "target passes", "tau", "wall clock vs plain"):
        table.add_column(column, justify="right")
    same = True
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        target = AutoModelForCausalLM.from_pretrained(arguments.target_model_name_or_path, dtype=dtype).eval()
        drafter = AutoModel.from_pretrained(
            arguments.draft_model_name_or_path, trust_remote_code=True, dtype=dtype
        ).eval()
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        generate(target, inputs, 4)
        plain, plain_seconds = generate(target, inputs, arguments.max_new_tokens)
        table.add_row(f"{name} plain", f"{plain_seconds:.1f}", f"{len(plain) / plain_seconds:.1f}", str(len(plain)))
        for schedule, label in (("constant", "whole blocks"), ("adaptive", "adaptive")):
            drafter.generation_config.num_assistant_tokens_schedule = schedule
            generate(target, inputs, 4, drafter)
            drafted, seconds = generate(target, inputs, arguments.max_new_tokens, drafter)
            stats = drafter.last_speculation
            if dtype == torch.float32:
                same = same and torch.equal(plain, drafted)
                if schedule == "constant":
                    console.print(Panel(arguments.prompt, title="prompt"))
                    answer = coloured(tokenizer, drafted, stats)
                    console.print(Panel(answer, title="answer: [green]drafted[/] and target's own"))
            table.add_row(
                f"{name} Domino, {label}",
                f"{seconds:.1f}",
                f"{len(drafted) / seconds:.1f}",
                str(stats.num_rounds + 1),
                f"{stats.mean_acceptance_length:.2f}",
                f"{plain_seconds / seconds:.2f}x",
            )
    console.print(table)
    console.print(
        "tau: tokens kept per verification forward (plain decoding has 1). Adaptive, the default, drafts as many as "
        "pay on this machine, which may be none. All texts were compared in float32, where they must be equal; "
        "bfloat16 rounds one-token and many-token forwards apart."
    )
    if not same:
        console.print("[bold red]float32 texts DIFFER: this is a bug, please report it.[/]")
        sys.exit(1)
    console.print("[bold green]float32 texts are identical, token by token.[/]")


if __name__ == "__main__":
    main()
