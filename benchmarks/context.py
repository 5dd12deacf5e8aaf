"""Time and memory of a round as the context grows, on a tiny target with random weights built in place.

    python -m domino_spec.benchmarks.context --output_dir runs/context \\
        [--context 256 512 1024 2048 4096 8192] [--repeats 5]

A round should cost what its new tokens cost, plus attention over the context: nothing else may grow with the context,
and nothing of the context may be copied. Time is split into drafting, target forward and everything else (the loop);
attention of the draft layers is also timed by itself and taken off the draft. Memory is what a round newly allocates,
by the same parts, seen by a dispatch mode on every operation. The first round is left out: it takes in the prompt.
Both are medians over rounds, so the rare rounds in which a cache grows do not show; `largest` names the worst.

The target has as many key heads as query heads: with fewer, the library itself repeats keys and values in full for
every masked attention on a CPU, and that would hide everything else.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from domino_spec import DominoConfig, DominoForSpeculation
from domino_spec.benchmarks.report import table_of, wide_console
from domino_spec.benchmarks.timing import WHOLE_BLOCKS, drafting, forced_acceptance, machine, quartiles
from domino_spec.training.card import new_figure, save_figure
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

TARGET = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.1,
}
DRAFTER = {"num_hidden_layers": 3, "block_size": 8, "head_hidden_size": 64, "head_rank": 32}
PARTS = ("draft", "target", "loop")
WORDS = {"draft": "drafting", "target": "target forward", "loop": "everything else"}
# Drafts accepted in every round, and rounds of a call.
ACCEPTED, ROUNDS = 2, 12
NAME = "context"


def build(longest: int):
    """Random target and drafter for contexts up to `longest`."""
    torch.manual_seed(0)
    room = longest + (ROUNDS + 2) * (ACCEPTED + 1) + DRAFTER["block_size"]
    target = AutoModelForCausalLM.from_config(Qwen3Config(**TARGET, max_position_embeddings=room)).eval()
    target.generation_config.eos_token_id = None
    mask = TARGET["vocab_size"] - 1
    drafter = DominoForSpeculation(DominoConfig.from_target(target.config, mask_token_id=mask, **DRAFTER)).eval()
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=0.02)
    return target, drafter


# Watching rounds ----------------------------------------------------------------------------------------------------


@contextmanager
def stages(target, drafter, enter):
    """Calls `enter(part)` whenever a `generate` call with this drafter goes over to another of `PARTS`."""
    own = drafter.draft

    def draft(*args, **kwargs):
        enter("draft")
        output = own(*args, **kwargs)
        enter("loop")
        return output

    drafter.draft = draft
    handles = [
        target.register_forward_pre_hook(lambda module, inputs: enter("target")),
        target.register_forward_hook(lambda module, inputs, output: enter("loop")),
    ]
    try:
        yield
    finally:
        del drafter.draft
        for handle in handles:
            handle.remove()


class Allocations(TorchDispatchMode):
    """Storages that operations newly allocate, round by round.

    `rounds` holds one dict a round, from part to a list of (bytes, operation); a round begins with its draft, and what
    comes before the first, the prefill, is round 0.
    """

    def __init__(self):
        super().__init__()
        self.part, self.rounds = "loop", [self._round()]

    @staticmethod
    def _round() -> dict[str, list[tuple[int, str]]]:
        return {part: [] for part in PARTS}

    def enter(self, part: str) -> None:
        """Another part begins."""
        if part == "draft":
            self.rounds.append(self._round())
        self.part = part

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        known = {_storage(leaf).data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and _storage(leaf).data_ptr() not in known:
                self.rounds[-1][self.part].append((_storage(leaf).nbytes(), str(func)))
        return output


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def one_call(target, drafter, context: int, enter) -> None:
    """`ROUNDS` whole-block rounds behind a prompt of `context` random tokens."""
    ids = torch.randint(0, TARGET["vocab_size"] - 1, (1, context), generator=torch.Generator().manual_seed(1))
    with (
        drafting(drafter, **WHOLE_BLOCKS),
        forced_acceptance(target, [ACCEPTED]),
        stages(target, drafter, enter),
    ):
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1 + ROUNDS * (ACCEPTED + 1) + DRAFTER["block_size"],
            do_sample=False,
            pad_token_id=0,
            assistant_model=drafter,
        )


def allocated(target, drafter, context: int) -> list[dict[str, list[tuple[int, str]]]]:
    """What each full round allocates, the first, which takes in the prompt, left out."""
    log = Allocations()
    with log:
        one_call(target, drafter, context, log.enter)
    return log.rounds[2 : 1 + ROUNDS]


def timed(target, drafter, context: int) -> list[dict[str, float]]:
    """Seconds of each full round by part, the first left out."""
    stamps: list[tuple[str, float]] = []
    one_call(target, drafter, context, lambda part: stamps.append((part, time.perf_counter())))
    rounds: list[dict[str, float]] = []
    for (part, begun), (_, ended) in zip(stamps, stamps[1:], strict=False):
        if part == "draft":
            rounds.append(dict.fromkeys(PARTS, 0.0))
        if rounds:
            rounds[-1][part] += ended - begun
    return rounds[1:ROUNDS]


@torch.no_grad()
def attention_seconds(drafter, context: int) -> float:
    """Attention of all draft layers over the context, by itself."""
    config = drafter.config
    query = torch.randn(1, config.num_attention_heads, config.block_size, config.head_dim)
    shape = (1, config.num_key_value_heads, context + config.block_size, config.head_dim)
    # Each layer has its own: one that the last layer has just read would come from the processor's cache.
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_hidden_layers)]
    taken = []
    for _ in range(7):
        started = time.perf_counter()
        for keys, values in layers:
            torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


# Report -------------------------------------------------------------------------------------------------------------


def measure(contexts: list[int], repeats: int) -> dict:
    """All contexts in turn, `repeats` times; one entry a context."""
    target, drafter = build(max(contexts))
    seconds: dict[int, list[dict[str, float]]] = {context: [] for context in contexts}
    attention: dict[int, list[float]] = {context: [] for context in contexts}
    one_call(target, drafter, min(contexts), lambda part: None)
    for _ in tqdm(range(repeats), unit="repeat", leave=False):
        for context in contexts:
            seconds[context] += timed(target, drafter, context)
            attention[context].append(attention_seconds(drafter, context))
    entries = []
    for context in contexts:
        rounds = allocated(target, drafter, context)
        entry = {"context": context, "rounds": len(seconds[context])}
        entry["seconds"] = {part: quartiles(r[part] for r in seconds[context]) for part in PARTS}
        entry["draft_attention"] = statistics.median(attention[context])
        entry["bytes"] = {part: statistics.median(sum(n for n, _ in r[part]) for r in rounds) for part in PARTS}
        entry["largest"] = {part: max((x for r in rounds for x in r[part]), default=(0, "")) for part in PARTS}
        # Keys of one draft layer and of one target layer over the whole context: a copy of either would be this big.
        entry["keys_bytes"] = context * TARGET["num_key_value_heads"] * TARGET["head_dim"] * 4
        entries.append(entry)
    sizes = {"target": TARGET, "drafter": DRAFTER, "accepted": ACCEPTED, "dtype": "float32"}
    return {"machine": machine(), "sizes": sizes, "contexts": entries}


def table(report: dict):
    """One line a context."""
    columns = ["context", *(f"{WORDS[part]}, ms" for part in PARTS), "draft without attention, ms"]
    columns += [f"{WORDS[part]}, kB" for part in PARTS] + ["keys of a layer, kB"]
    rows = []
    for entry in report["contexts"]:
        medians = {part: 1000 * entry["seconds"][part][1] for part in PARTS}
        cells = [*medians.values(), medians["draft"] - 1000 * entry["draft_attention"]]
        cells += [entry["bytes"][part] / 1000 for part in PARTS] + [entry["keys_bytes"] / 1000]
        rows.append(
            [str(entry["context"]), *(f"{cell:.2f}" if i < 4 else f"{cell:.0f}" for i, cell in enumerate(cells))]
        )
    return table_of("a round of whole blocks, medians", columns, rows)


def plot(report: dict, path: Path) -> None:
    """Milliseconds and newly allocated bytes of a round over the context; written as PNG."""
    entries = report["contexts"]
    contexts = [entry["context"] for entry in entries]
    figure, axes = new_figure(2, 8)
    for i, part in enumerate(PARTS):
        low, middle, high = ([1000 * e["seconds"][part][k] for e in entries] for k in range(3))
        axes[0, 0].plot(contexts, middle, "o-", color=f"C{i}", label=WORDS[part], markersize=4)
        axes[0, 0].fill_between(contexts, low, high, color=f"C{i}", alpha=0.15)
        axes[1, 0].plot(
            contexts, [e["bytes"][part] for e in entries], "o-", color=f"C{i}", label=WORDS[part], markersize=4
        )
    flat = [1000 * (e["seconds"]["draft"][1] - e["draft_attention"]) for e in entries]
    axes[0, 0].plot(contexts, flat, "--", color="C0", label="drafting without attention")
    axes[1, 0].plot(contexts, [e["keys_bytes"] for e in entries], ":", color="gray", label="keys of one layer")
    axes[0, 0].set_ylabel("ms a round (median, quartiles)")
    axes[1, 0].set_ylabel("bytes newly allocated a round")
    axes[1, 0].set_xlabel("context, tokens")
    axes[1, 0].set_yscale("log")
    axes[1, 0].set_xscale("log", base=2)
    axes[0, 0].set_ylim(bottom=0)
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    save_figure(figure, str(path))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--context", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    if min(arguments.context) < 1 or arguments.repeats < 1:
        sys.exit("context: expected contexts and repeats of at least 1.")
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    directory = Path(arguments.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    report = measure(sorted(set(arguments.context)), arguments.repeats)
    (directory / f"{NAME}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    plot(report, directory / f"{NAME}.png")
    console = wide_console()
    console.print(table(report))
    console.print(f"{report['machine']}\nwritten to {directory / NAME}.json and .png")


if __name__ == "__main__":
    main()
