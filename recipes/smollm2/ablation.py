"""What the curriculum, more data, another loss and more layers are worth: equal budgets, tau by simulated rounds.

    python recipes/smollm2/ablation.py --target_model_name_or_path TARGET --data DIRECTORY --output_dir runs/ablation

DIRECTORY holds train.jsonl and test.jsonl, answers of the target. Every run has the same steps, shapes, data order and
anchors for a seed; finished runs are skipped when the command is repeated. Writes ablation.json and ablation.png.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
CURRICULA = {
    "backbone only": ["--stage1_ratio", "1"],
    "no curriculum (lambda 0)": ["--stage1_ratio", "0", "--lambda_decay_ratio", "0"],
    "paper's schedule": ["--stage1_ratio", "0", "--lambda_decay_ratio", "1"],
    "two stages": ["--stage1_ratio", "0.25", "--lambda_decay_ratio", "0.6"],
    "adaptive switch": ["--stage_switch", "adaptive", "--stage1_ratio", "0.5", "--lambda_decay_ratio", "0.6"],
}
# Departures from "two stages", which learns by cross-entropy alone.
VARIANTS = {
    "half KL": ["--ce_weight", "0.5", "--kl_weight", "0.5"],
    "TV mixture": ["--ce_weight", "0.1", "--tv_weight", "0.9"],
    "dpace weights": ["--position_weights", "dpace"],
    "layers: 3": ["--num_hidden_layers", "3", "--init_layers_from_target", "27", "28", "29"],
}
# One draft layer and short blocks: what two cores can train ten times.
COMMON = """--num_hidden_layers 1 --block_size 4 --mask_token_id 3 --target_layer_ids 1 14 27
    --init_layers_from_target 29 --head_hidden_size 256 --head_rank 128 --num_anchors 16 --max_length 512
    --per_device_train_batch_size 4 --loss_gamma 4 --vocab_sample_size 4096 --learning_rate 1e-3 --logging_steps 20
    --stage_switch_window 20 --dataset_test_split test --eval_rows 48 --save_strategy no --dtype bfloat16 --bf16 True
    --use_cpu True""".split()


def run(name: str, arguments, data: Path, seed: int, options: list[str]) -> dict:
    """One training run, or its result where it is there already."""
    directory = Path(arguments.output_dir) / f"{name.split()[0].strip(':')}-{data.name}-{seed}"
    curve = directory / "training_curve.jsonl"
    if not curve.exists():
        command = [sys.executable, str(ROOT / "train_peft.py"), *COMMON, *options, "--seed", str(seed)]
        command += ["--target_model_name_or_path", arguments.target_model_name_or_path, "--dataset_name", str(data)]
        command += ["--max_steps", str(arguments.max_steps), "--output_dir", str(directory), *arguments.extra]
        subprocess.run(command, check=True)
    entries = [json.loads(line) for line in curve.read_text(encoding="utf-8").splitlines()]
    last = next(entry for entry in reversed(entries) if "eval_tau_final" in entry)
    switch = next((entry["step"] for entry in entries if entry.get("stage") == 2), None)
    return {"name": name, "data": data.name, "seed": seed, "switch": switch} | {
        key: last[f"eval_{key}"] for key in ("tau_base", "tau_final")
    }


def plot(curricula: list[dict], sizes: list[dict], variants: list[dict], path: Path) -> None:
    """Curricula, data sizes, other losses and layers, a panel each where run; a dot a seed, a bar their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    two = [row for row in curricula if row["name"] == "two stages" and row["seed"] == curricula[0]["seed"]]
    panels = [("curriculum", curricula, "name")] if len({row["name"] for row in curricula}) > 1 else []
    panels += [("answers in the training data", sizes, "rows")] if sizes else []
    panels += [("two stages with another loss, or more layers", two + variants, "name")] if variants else []
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(2 + 4.5 * len(panels), 4), sharey=True, squeeze=False)
    for axis, (title, rows, key) in zip(axes[0], panels, strict=True):
        axis.set_title(title)
        labels = list(dict.fromkeys(row[key] for row in rows))
        for i, label in enumerate(labels):
            for shift, kind, colour in ((-0.2, "tau_base", "tab:gray"), (0.2, "tau_final", "tab:blue")):
                values = [row[kind] for row in rows if row[key] == label]
                axis.bar(i + shift, mean(values) - 1, 0.38, bottom=1, color=colour, alpha=0.6)
                axis.plot([i + shift] * len(values), values, "k.")
        axis.set_xticks(range(len(labels)), [str(label).replace(" (", "\n(") for label in labels], fontsize=8)
    axes[0, 0].set_ylabel("held-out tau (gray: base logits, blue: final)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target_model_name_or_path", required=True)
    parser.add_argument("--data", required=True, type=Path, help="directory for the curricula")
    parser.add_argument("--curricula", nargs="+", default=list(CURRICULA), choices=CURRICULA, help="which to train")
    parser.add_argument("--sizes", nargs="*", type=Path, default=[], help="directories for the learning curve")
    parser.add_argument("--variants", action="store_true", help="also other losses and more layers, first seed")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--max_steps", type=int, default=600)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("extra", nargs="*", help="after --: more arguments for train_peft.py")
    arguments = parser.parse_args()
    os.makedirs(arguments.output_dir, exist_ok=True)
    curricula, sizes, variants = [], [], []
    for seed in arguments.seeds:
        for name in arguments.curricula:
            curricula.append(run(name, arguments, arguments.data, seed, CURRICULA[name]))
        if seed == arguments.seeds[0]:
            for data in arguments.sizes:
                rows = sum(1 for _ in open(data / "train.jsonl", encoding="utf-8"))
                sizes.append({"rows": rows} | run("two stages", arguments, data, seed, CURRICULA["two stages"]))
        if arguments.variants and seed == arguments.seeds[-1]:
            two = CURRICULA["two stages"]
            variants = [
                run(name, arguments, arguments.data, arguments.seeds[0], two + options)
                for name, options in VARIANTS.items()
            ]
        result = {"max_steps": arguments.max_steps, "curricula": curricula, "sizes": sizes, "variants": variants}
        Path(arguments.output_dir, "ablation.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        plot(curricula, sizes, variants, Path(arguments.output_dir, "ablation.png"))


if __name__ == "__main__":
    main()
