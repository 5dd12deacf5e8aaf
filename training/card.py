"""What a training run leaves to look at: curves, acceptance per draft, and the model card."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path

import torch
from domino_spec.configuration_domino import public_name
from domino_spec.training.answers import read_jsonl
from huggingface_hub import ModelCard, ModelCardData

CURVE_PLOT = "training_curve.png"
ACCEPTANCE_PLOT = "acceptance.png"
# By this line a card is known to be ours, and may be written anew.
CARD_MARK = "<!-- written by train_peft.py -->"
CARD, CARD_BESIDE = "README.md", "TRAINING.md"
COLOURS = {"base": "tab:blue", "final": "tab:orange"}
# Options that say where a run was and not what it was, or that nobody else may read.
UNTOLD = {"output_dir", "logging_dir", "run_name", "hub_token", "push_to_hub_token", "resume_from_checkpoint"}
UNTOLD |= {"target_model_name_or_path", "model_name_or_path", "dataset_name", "prompts_file", "disable_tqdm"}
# Set by the library itself: on a CPU, and with an evaluation strategy.
UNTOLD |= {"dataloader_pin_memory", "do_eval"}
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets")


# Plots --------------------------------------------------------------------------------------------------------------


def new_figure(rows: int, height: float, columns: int = 1, width: float = 8, shared: bool = True):
    """A figure of stacked axes, over one x axis where it is shared, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), sharex=shared, squeeze=False, layout="constrained")


def save_figure(figure, path: str) -> None:
    """Write a figure as PNG and forget it."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_curves(curve: list[dict], path: str, switch_step: int | None = None) -> None:
    """Losses and lambda, and below them held-out tau where there is any, over optimizer steps; written as PNG.

    Args:
        curve: what the trainer logged, each entry with its `step`.
        switch_step (int, optional): optimizer steps of stage 1, marked where it is above zero.
    """
    steps = [entry for entry in curve if "base_loss" in entry]
    held_out = [entry for entry in curve if "eval_tau_base" in entry]
    figure, axes = new_figure(1 + bool(held_out), 4 if not held_out else 7)
    axes = axes[:, 0]
    draw_losses(axes[0], steps)
    if held_out:
        draw_tau(axes[1], held_out)
    for axis in axes:
        axis.grid(alpha=0.3)
        if switch_step:
            axis.axvline(switch_step, color="gray", linestyle="--", linewidth=1)
    if switch_step:
        # Written upwards from the foot of the losses, which are low there only late.
        place = {"xy": (switch_step, 0.02), "xycoords": ("data", "axes fraction"), "rotation": 90}
        axes[0].annotate(" stage 2", **place, ha="right", va="bottom", color="gray")
    axes[-1].set_xlabel("optimizer step")
    save_figure(figure, path)


def write_plots(directory: str, curve: list[dict], switch_step: int | None) -> None:
    """Curves, and acceptance per draft where something was held out, as PNG files in a directory."""
    plot_curves(curve, os.path.join(directory, CURVE_PLOT), switch_step)
    measured = [entry for entry in curve if "eval_tau_final" in entry]
    if measured:
        last = {name.removeprefix("eval_"): value for name, value in measured[-1].items()}
        plot_acceptance(last, os.path.join(directory, ACCEPTANCE_PLOT))


def draw_losses(axis, steps: list[dict]) -> None:
    """Base and final loss, faint as logged and clear as a running mean; lambda dotted on an axis of its own."""
    places = [entry["step"] for entry in steps]
    for name, colour in COLOURS.items():
        values = [entry[f"{name}_loss"] for entry in steps]
        # In stage 1 there is no final loss of its own: the base loss lies on top.
        layer = 3 if name == "base" else 2
        axis.plot(places, values, color=colour, alpha=0.25, linewidth=1)
        axis.plot(places, running_mean(values), color=colour, zorder=layer, label=f"{name} logits")
    weight = axis.twinx()
    weight.plot(places, [entry["lambda"] for entry in steps], "k:", linewidth=1)
    weight.set_ylim(-0.03, 1.03)
    weight.set_ylabel("lambda (dotted)")
    axis.set_ylabel("training loss")
    axis.legend(loc="lower left")


def draw_tau(axis, held_out: list[dict]) -> None:
    """Held-out tau of base and final logits, the last values written beside their points."""
    for name, colour in COLOURS.items():
        places, values = [e["step"] for e in held_out], [e[f"eval_tau_{name}"] for e in held_out]
        axis.plot(
            places, values, "o-", color=colour, markersize=4, label=f"{name} logits: {values[-1]:.2f} at the end"
        )
    axis.set_ylabel("held-out tau (simulated rounds)")
    axis.legend(loc="lower right")


def running_mean(values: list[float], share: float = 0.05) -> list[float]:
    """Mean over the last `share` of all values, at each of them."""
    width = max(1, round(share * len(values)))
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(width, i + 1) for i in range(len(values))]


def plot_acceptance(metrics: dict[str, float], path: str) -> None:
    """Bars: share of simulated rounds in which draft i was kept, base and final logits; written as PNG.

    Args:
        metrics: from `simulated_tau`.
    """
    drafts = range(1, 1 + sum(name.startswith("acceptance_base_") for name in metrics))
    figure, axes = new_figure(1, 4)
    axis = axes[0, 0]
    for offset, (name, colour) in zip((-0.2, 0.2), COLOURS.items(), strict=True):
        shares = [100 * metrics[f"acceptance_{name}_{i}"] for i in drafts]
        label = f"{name} logits, tau {metrics[f'tau_{name}']:.2f}"
        bars = axis.bar([i + offset for i in drafts], shares, 0.4, color=colour, label=label)
        axis.bar_label(bars, fmt="%.0f", fontsize=8 if len(drafts) <= 10 else 6)
    axis.set_xticks(list(drafts))
    axis.set_xlabel("draft")
    axis.set_ylabel("rounds in which it was kept, %")
    axis.set_ylim(0, 105)
    axis.legend(loc="upper right")
    save_figure(figure, path)


# Card ---------------------------------------------------------------------------------------------------------------


@dataclass
class RunFacts:
    """What the script knows of a run and the trainer does not.

    Args:
        target, dataset (str): names or paths as given; drafter (str, optional): the drafter the run went on from.
        rows, tokens, supervised, held_out (int): training rows, their tokens, tokens with a loss; rows for tau.
        settings (dict): how the target wrote the answers, where their file records it.
        command (str): the command line. changed (dict): options that differ from their defaults.
        adapter (bool): an adapter was trained, not a whole drafter.
    """

    target: str
    dataset: str
    rows: int
    tokens: int
    supervised: int
    held_out: int
    command: str
    drafter: str | None = None
    settings: dict = field(default_factory=dict)
    changed: dict = field(default_factory=dict)
    adapter: bool = False


def command_line(arguments: list[str], processes: int) -> str:
    """The command of this run, secrets left out."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    plain = ["torchrun", "--nproc_per_node", str(processes)] if processes > 1 else ["python"]
    words = ["accelerate", "launch"] if launched else plain
    if launched and os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true":
        words.append("--cpu")
    if launched and processes > 1:
        words += ["--num_processes", str(processes)]
    words.append("train_peft.py")
    for previous, word in zip(["", *arguments], arguments, strict=False):
        name, equals, _ = word.partition("=")
        if previous in ("--hub_token", "--push_to_hub_token"):
            word = "HIDDEN"
        elif equals and name in ("--hub_token", "--push_to_hub_token"):
            word = f"{name}=HIDDEN"
        words.append(word)
    return shlex.join(words)


def changed_options(given) -> dict:
    """Options of a dataclass instance that differ from their defaults, those of `UNTOLD` left out.

    The defaults are read off the fields: a fresh instance of training arguments would reset accelerate's state.
    """
    changed = {}
    for option in fields(given):
        value = getattr(given, option.name)
        default = option.default_factory() if option.default is MISSING else option.default
        plain = isinstance(value, (int, float, str, list, dict))
        # The library turns some options that were not given into empty lists or False.
        unset = not value and default in (None, False, "", "none")
        if plain and not unset and option.name not in UNTOLD and value != default:
            # Enumerations of the library print their class's name too.
            changed[option.name] = getattr(value, "value", value)
    return changed


def _given(entry) -> dict:
    """The fields of a mixture's dataset that were given."""
    return {name: value for name, value in asdict(entry).items() if value is not None}


def answers_settings(dataset: str) -> dict:
    """How the target wrote the answers of a local file, which its first line records; empty elsewhere."""
    if not dataset.endswith((".jsonl", ".jsonl.xz")) or not os.path.exists(dataset):
        return {}
    return next(read_jsonl(dataset), {}).get("settings", {})


def processor_name() -> str:
    """What the CPU calls itself."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return name


def hardware(device: torch.device, processes: int) -> str:
    """What the run ran on."""
    if device.type == "cuda":
        return f"{processes} x {torch.cuda.get_device_name(device)}"
    return f"{processor_name()}, {os.cpu_count()} cores, {processes} process{'es' if processes > 1 else ''}"


def library_versions() -> dict[str, str]:
    """Versions of the libraries that shape a run."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_card(directory: str, facts: RunFacts, curve: list[dict], machine: str, name: str, **metadata) -> Path:
    """Write the model card; a README that somebody else wrote stays, and the card goes beside it.

    Args:
        curve: what the trainer logged; machine: from `hardware`; name: of the repository or directory.
        **metadata: `license` and other entries for the card's header.
    Returns:
        Path: the file written.
    """
    path = Path(directory) / CARD
    if path.exists() and CARD_MARK not in path.read_text(encoding="utf-8"):
        path = Path(directory) / CARD_BESIDE
    content = f"---\n{card_data(facts, **metadata).to_yaml()}\n---\n\n{card_text(facts, curve, machine, name)}"
    ModelCard(content).save(path)
    return path


def card_data(facts: RunFacts, **metadata) -> ModelCardData:
    """The card's header; names of local directories are nobody else's models, so they are left out."""
    base = facts.drafter if facts.adapter else facts.target
    known = {
        "library_name": "peft" if facts.adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "domino", "assistant-model", *(["lora"] if facts.adapter else [])],
        "base_model": None if not base or os.path.exists(base) else base,
        "base_model_relation": "adapter" if facts.adapter else None,
        "datasets": None if os.path.exists(facts.dataset) else [facts.dataset],
    }
    given = {key: value for key, value in metadata.items() if value is not None}
    more = given.get("tags", [])
    given["tags"] = list(dict.fromkeys(known["tags"] + ([more] if isinstance(more, str) else more)))
    return ModelCardData(**{key: value for key, value in (known | given).items() if value is not None})


def card_text(facts: RunFacts, curve: list[dict], machine: str, name: str) -> str:
    """The card's body in Markdown."""
    target = public_name(facts.target)
    kind = "A LoRA adapter of a Domino drafter" if facts.adapter else "A Domino drafter"
    sections = [
        f"{CARD_MARK}\n# {name}\n\n{kind} for `{target}`: it proposes tokens, the target checks them in one forward, "
        "and the text stays exactly what the target alone would have written.",
        f"## Use\n\n{usage(facts, name)}",
        f"## Results\n\n{results(facts, curve)}",
        f"## Data\n\n{data_text(facts)}",
        f"## Training\n\n{training_text(facts, curve, machine)}",
        f"## Papers\n\n{papers(facts)}",
    ]
    return "\n\n".join(sections) + "\n"


def usage(facts: RunFacts, name: str) -> str:
    """Code that loads the result and decodes with it."""
    if facts.adapter:
        load = (
            "from peft import PeftModel\n\n"
            f'base = AutoModel.from_pretrained("{public_name(facts.drafter)}", trust_remote_code=True)\n'
            f'drafter = PeftModel.from_pretrained(base, "{name}")'
        )
    else:
        load = f'drafter = AutoModel.from_pretrained("{name}", trust_remote_code=True)'
    return f"""```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{public_name(facts.target)}")
tokenizer = AutoTokenizer.from_pretrained("{public_name(facts.target)}")
{load}

inputs = tokenizer("Speculative decoding is", return_tensors="pt")
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```"""


def results(facts: RunFacts, curve: list[dict]) -> str:
    """Held-out tau and what it means."""
    measured = [entry for entry in curve if "eval_tau_final" in entry]
    if not measured:
        return "No rows were held out, so nothing was measured."
    last, drafts = measured[-1], sum(name.startswith("eval_acceptance_base_") for name in measured[-1])
    lines = [f"| logits | tau | {' | '.join(f'draft {i}' for i in range(1, drafts + 1))} |"]
    lines.append("|---" * (drafts + 2) + "|")
    for kind, words in (("base", "base (head off)"), ("final", "final (head on)")):
        shares = [f"{last[f'eval_acceptance_{kind}_{i}']:.0%}" for i in range(1, drafts + 1)]
        lines.append(f"| {words} | {last[f'eval_tau_{kind}']:.2f} | {' | '.join(shares)} |")
    return "\n".join(lines) + (
        f"\n\nThe head's share of the gain over plain decoding is {last['eval_head_share']:.0%}. Measured at step "
        f"{last['step']} on {facts.held_out} rows held out of the training data: each of their answers is walked as "
        "greedy decoding would walk it, in rounds that keep the accepted drafts and one token of the target's; tau "
        "is kept tokens per round. The columns give the share of rounds in which draft i was kept. Other prompts, "
        "sampling and lower precision give other numbers, and tau is no speed: what a round costs decides that.\n\n"
        f"![training curve]({CURVE_PLOT})\n\n![acceptance per draft]({ACCEPTANCE_PLOT})"
    )


def data_text(facts: RunFacts) -> str:
    """Where the rows came from and how many there were."""
    text = (
        f"`{public_name(facts.dataset)}`: {facts.rows} rows to train on with {facts.tokens} tokens, "
        f"{facts.supervised} of them written by the assistant and trained on; {facts.held_out} rows held out."
    )
    if facts.settings:
        text += f" The answers are the target's own, made with `{json.dumps(facts.settings)}`."
    return text


def training_text(facts: RunFacts, curve: list[dict], machine: str) -> str:
    """Command, options, time, hardware and versions."""
    options = [f"| `{name}` | `{json.dumps(value, default=_given)}` |" for name, value in facts.changed.items()]
    table = "\n".join(["| option | value |", "|---|---|", *options]) if options else "All options at their defaults."
    seconds = [entry["train_runtime"] for entry in curve if "train_runtime" in entry]
    time = f"{seconds[-1] / 60:.1f} minutes (a resumed run counts from its last start)" if seconds else "Time unknown"
    start = f" It went on from the drafter `{public_name(facts.drafter)}`." if facts.drafter else ""
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    step = max((entry["step"] for entry in curve), default=0)
    return (
        f"```sh\n{facts.command}\n```\n\nOptions that differ from the defaults:\n\n{table}\n\n"
        f"{step} optimizer steps; {time} on {machine}.{start} {versions}."
    )


def papers(facts: RunFacts) -> str:
    """Whose ideas these are."""
    credited = [
        "Domino: backbone, correction head and base-anchored curriculum (arXiv 2605.29707)",
        "DFlash: parallel drafting from the target's hidden states (arXiv 2602.06036)",
        "Speculative sampling: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318)",
    ]
    if facts.adapter:
        credited.append("LoRA: Hu et al. 2021 (arXiv 2106.09685)")
    return "\n".join(f"- {paper}" for paper in credited)
