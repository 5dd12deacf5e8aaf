"""What a run leaves: metrics of the simulated rounds, plots that show them, and a model card that tells the truth."""

import json
import os
import re

import pytest
import torch
from domino_spec import DominoForSpeculation
from domino_spec.train_peft import DominoScriptArguments
from domino_spec.train_peft import main as train_main
from domino_spec.training import card as card_module
from domino_spec.training.card import (
    CARD_MARK,
    RunFacts,
    answers_settings,
    card_data,
    changed_options,
    command_line,
    hardware,
    plot_acceptance,
    plot_curves,
    running_mean,
    write_card,
    write_plots,
)
from domino_spec.training.config import DominoTrainingConfig
from domino_spec.training.objective import DominoObjective
from domino_spec.training.tau import simulated_tau
from domino_spec.training.trainer import DominoTrainer
from huggingface_hub import ModelCard
from tiny import MASK_ID, make_drafter, make_target, prompt_ids, save_target

PNG = b"\x89PNG"


# Metrics ------------------------------------------------------------------------------------------------------------


def scripted_objective(lengths: dict[str, list[int]], drafts: int = 6) -> DominoObjective:
    """An objective whose blocks at anchors 2, 3, ... are accepted as told."""
    target = make_target()
    objective = DominoObjective(make_drafter(target, block_size=drafts), target)
    anchors = list(range(2, 2 + len(lengths["base"])))
    objective.accepted_lengths = lambda row: ({k: torch.tensor(v) for k, v in lengths.items()}, anchors)
    return objective


def test_acceptance_per_draft_and_the_heads_share():
    # Base: 2 -> 4 -> 5 -> 6 -> 7 -> 8 (2, 1, 1, 1, 1 kept); final: 2 -> 6 -> 8 (4, 2 kept).
    objective = scripted_objective({"base": [1, 5, 0, 0, 0, 0], "final": [3, 5, 5, 5, 6, 0]})
    metrics = simulated_tau(objective, [{"supervised": [0, 0] + [1] * 7}])
    assert metrics["tau_base"] == pytest.approx(6 / 5) and metrics["tau_final"] == pytest.approx(3)
    assert [metrics[f"acceptance_base_{i}"] for i in range(1, 7)] == pytest.approx([0.2, 0, 0, 0, 0, 0])
    assert [metrics[f"acceptance_final_{i}"] for i in range(1, 7)] == pytest.approx([1, 0.5, 0.5, 0, 0, 0])
    assert metrics["head_share"] == pytest.approx((3 - 1.2) / (3 - 1))
    assert metrics["anchor_mean_base"] == pytest.approx(2) and metrics["anchor_mean_final"] == pytest.approx(5)
    # tau is one bonus token and the drafts that were kept.
    for name in ("base", "final"):
        assert 1 + sum(metrics[f"acceptance_{name}_{i}"] for i in range(1, 7)) == pytest.approx(metrics[f"tau_{name}"])


@pytest.mark.parametrize(("base", "final", "share"), [([0, 0], [0, 0], 0.0), ([1, 0], [0, 0], 0.0)])
def test_head_share_without_a_gain(base, final, share):
    metrics = simulated_tau(scripted_objective({"base": base, "final": final}), [{"supervised": [0, 0, 1, 1, 1]}])
    assert metrics["tau_final"] == 1 and metrics["head_share"] == share


def test_a_head_that_harms_has_a_negative_share():
    objective = scripted_objective({"base": [3, 0, 0, 0], "final": [1, 0, 1, 0]})
    metrics = simulated_tau(objective, [{"supervised": [0, 0, 1, 1, 1, 1, 1]}])
    assert metrics["tau_base"] == 4 and metrics["tau_final"] == 2 and metrics["head_share"] == -2


# Plots --------------------------------------------------------------------------------------------------------------


def curve_of(steps: int = 40, held_out: bool = True) -> list[dict]:
    """Entries as the trainer logs them: losses every step, held-out values every tenth."""
    curve = []
    for step in range(1, steps + 1):
        entry = {"step": step, "lambda": 1 - step / steps, "base_loss": 5 / step, "final_loss": 4 / step}
        curve.append(entry)
        if held_out and step % 10 == 0:
            values = {"eval_tau_base": 1 + step / 50, "eval_tau_final": 1 + step / 40, "eval_head_share": 0.2}
            values |= {f"eval_acceptance_{name}_{i}": 0.5**i for name in ("base", "final") for i in range(1, 7)}
            curve.append({"step": step} | values)
    curve.append({"step": steps, "train_runtime": 120.0})
    return curve


@pytest.fixture
def figures(monkeypatch):
    """Figures at the moment they are saved."""
    seen, save = [], card_module.save_figure

    def keep(figure, path):
        seen.append(figure)
        save(figure, path)

    monkeypatch.setattr(card_module, "save_figure", keep)
    return seen


def lines_of(axis) -> dict[str, list]:
    return {line.get_label(): line.get_ydata() for line in axis.get_lines()}


def test_curves_show_losses_lambda_tau_and_the_switch(figures, tmp_path):
    plot_curves(curve_of(), str(tmp_path / "curve.png"), switch_step=12)
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    losses, tau, weight = figures[0].axes
    assert lines_of(losses)["base logits"] == pytest.approx(running_mean([5 / step for step in range(1, 41)]))
    assert weight.get_lines()[0].get_ydata() == pytest.approx([1 - step / 40 for step in range(1, 41)])
    drawn = lines_of(tau)
    assert drawn["base logits: 1.80 at the end"] == pytest.approx([1.2, 1.4, 1.6, 1.8])
    assert drawn["final logits: 2.00 at the end"] == pytest.approx([1.25, 1.5, 1.75, 2.0])
    for axis in (losses, tau):
        assert any(list(line.get_xdata()) == [12, 12] for line in axis.get_lines())


@pytest.mark.parametrize("switch_step", [None, 0])
def test_curves_without_held_out_rows_or_stages(figures, tmp_path, switch_step):
    write_plots(str(tmp_path), curve_of(held_out=False), switch_step)
    assert [path.name for path in tmp_path.iterdir()] == ["training_curve.png"]
    losses, _ = figures[0].axes
    assert len(losses.get_lines()) == 4


def test_running_mean():
    assert running_mean([1.0, 2.0, 3.0, 4.0], share=0.5) == [1.0, 1.5, 2.5, 3.5]
    assert running_mean([1.0, 2.0]) == [1.0, 2.0]


def test_acceptance_bars(figures, tmp_path):
    metrics = {"tau_base": 1.5, "tau_final": 2.0}
    metrics |= {
        f"acceptance_{name}_{i}": share**i for name, share in (("base", 0.5), ("final", 0.7)) for i in (1, 2, 3)
    }
    plot_acceptance(metrics, str(tmp_path / "bars.png"))
    base, final = figures[0].axes[0].containers
    assert base.get_label() == "base logits, tau 1.50" and final.get_label() == "final logits, tau 2.00"
    assert [bar.get_height() for bar in base] == pytest.approx([50, 25, 12.5])
    assert [bar.get_height() for bar in final] == pytest.approx([70, 49, 34.3])
    assert (tmp_path / "bars.png").read_bytes().startswith(PNG)


# Card ---------------------------------------------------------------------------------------------------------------


def facts_of(**changes) -> RunFacts:
    known = {"target": "org/target-7b", "dataset": "org/rows", "rows": 90, "tokens": 5000, "supervised": 3000}
    known |= {"held_out": 10, "command": "accelerate launch train_peft.py --learning_rate 0.001"}
    return RunFacts(**known | {"changed": {"learning_rate": 0.001}} | changes)


def test_card_header():
    header = card_data(facts_of()).to_dict()
    assert header["library_name"] == "transformers" and header["base_model"] == "org/target-7b"
    assert header["pipeline_tag"] == "text-generation" and header["datasets"] == ["org/rows"]
    assert header["tags"] == ["speculative-decoding", "domino", "assistant-model"]
    assert "license" not in header
    named = card_data(facts_of(), license="mit", tags=["mine", "domino"]).to_dict()
    assert named["license"] == "mit" and named["tags"][-1] == "mine" and named["tags"].count("domino") == 1


def test_card_header_of_an_adapter():
    header = card_data(facts_of(adapter=True, drafter="me/drafter")).to_dict()
    assert header["library_name"] == "peft" and header["base_model"] == "me/drafter"
    assert header["base_model_relation"] == "adapter" and "lora" in header["tags"]


def test_card_names_no_local_directories_as_models(tmp_path):
    header = card_data(facts_of(target=str(tmp_path), dataset=str(tmp_path))).to_dict()
    assert "base_model" not in header and "datasets" not in header


def test_card_tells_results_data_and_training(tmp_path):
    facts = facts_of(settings={"max_new_tokens": 64, "do_sample": False})
    path = write_card(str(tmp_path), facts, curve_of(), "2 x Some GPU", "me/my-drafter", license="mit")
    assert path.name == "README.md"
    card = ModelCard.load(path)
    assert card.data.license == "mit"
    text = " ".join(card.text.split())
    for part in (
        "# me/my-drafter",
        'AutoModel.from_pretrained("me/my-drafter", trust_remote_code=True)',
        "| base (head off) | 1.80 | 50% | 25% |",
        "| final (head on) | 2.00 |",
        "gain over plain decoding is 20%. Measured at step 40 on 10 rows held out",
        "90 rows to train on with 5000 tokens, 3000 of them",
        '"max_new_tokens": 64',
        "accelerate launch train_peft.py --learning_rate 0.001",
        "| `learning_rate` | `0.001` |",
        "40 optimizer steps; 2.0 minutes",
        "on 2 x Some GPU",
        f"torch {torch.__version__}",
        "arXiv 2605.29707",
    ):
        assert part in text, part
    assert "PeftModel" not in text and "LoRA" not in text


def test_card_without_measurements_claims_none(tmp_path):
    curve = curve_of(held_out=False)
    text = write_card(str(tmp_path), facts_of(held_out=0), curve, "a CPU", "drafter").read_text()
    assert "nothing was measured" in text and "acceptance.png" not in text


def test_card_leaves_a_readme_of_somebody_else(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("# Mine")
    path = write_card(str(tmp_path), facts_of(), curve_of(), "a CPU", "drafter")
    assert readme.read_text() == "# Mine" and path.name == "TRAINING.md" and CARD_MARK in path.read_text()
    readme.unlink()
    write_card(str(tmp_path), facts_of(rows=1), curve_of(), "a CPU", "drafter")
    write_card(str(tmp_path), facts_of(rows=77), curve_of(), "a CPU", "drafter")
    assert "77 rows to train on" in readme.read_text()


def test_the_library_writes_our_card_before_it_pushes(tmp_path):
    """`Trainer.push_to_hub` calls `create_model_card` with arguments of its own kind."""
    target = make_target()
    args = DominoTrainingConfig(output_dir=str(tmp_path / "runs" / "drafter"), use_cpu=True)
    trainer = DominoTrainer(DominoObjective(make_drafter(target), target), args, None)
    trainer.create_model_card(model_name="x")
    assert not os.listdir(args.output_dir)
    trainer.facts, trainer.curve = facts_of(), curve_of()
    trainer.create_model_card(license="mit", finetuned_from="y", dataset_tags="z", tags="one")
    card = ModelCard.load(os.path.join(args.output_dir, "README.md"))
    assert "# drafter" in card.text and card.data.license == "mit" and "one" in card.data.tags


def test_command_line_hides_secrets(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    words = ["--output_dir", "a b", "--hub_token", "hf_secret", "--hub_token=hf_other", "--max_steps", "3"]
    line = command_line(words, 1)
    assert line == "python train_peft.py --output_dir 'a b' --hub_token HIDDEN --hub_token=HIDDEN --max_steps 3"
    assert command_line([], 2) == "torchrun --nproc_per_node 2 train_peft.py"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert command_line([], 2) == "accelerate launch --cpu --num_processes 2 train_peft.py"


def test_changed_options():
    given = DominoTrainingConfig(
        output_dir="b", use_cpu=True, num_anchors=8, lr_scheduler_type="linear", hub_token="hf_secret"
    )
    assert changed_options(given) == {"use_cpu": True, "num_anchors": 8, "lr_scheduler_type": "linear"}
    script = DominoScriptArguments(dataset_name="rows.jsonl", target_layer_ids=[1, 2], mask_token_id=3)
    assert changed_options(script) == {"target_layer_ids": [1, 2], "mask_token_id": 3}


def test_answers_settings(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"settings": {"do_sample": false}}\n{"prompt_ids": [1], "completion_ids": [2]}\n')
    assert answers_settings(str(path)) == {"do_sample": False}
    path.write_text('{"text": "a"}\n')
    assert answers_settings(str(path)) == {} and answers_settings("org/rows") == {}


def test_hardware_names_the_processor():
    assert re.fullmatch(r"\S.*, \d+ cores, 1 process", hardware(torch.device("cpu"), 1))
    assert hardware(torch.device("cpu"), 2).endswith("2 processes")


def test_a_finished_run_leaves_plots_and_a_card_whose_code_runs(tmp_path, capsys):
    save_target(tmp_path / "tiny-target")
    target = make_target()
    rows = tmp_path / "answers.jsonl"
    ids = [target.generate(prompt_ids(5, seed=i), max_new_tokens=20, do_sample=False)[0].tolist() for i in range(6)]
    lines = [{"settings": {"max_new_tokens": 20, "do_sample": False}}]
    lines += [{"key": str(i), "prompt_ids": row[:5], "completion_ids": row[5:]} for i, row in enumerate(ids)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "drafter"
    arguments = ["--target_model_name_or_path", str(tmp_path / "tiny-target"), "--dataset_name", str(rows)]
    arguments += ["--output_dir", str(output), "--eval_rows", "2", "--num_hidden_layers", "2", "--block_size", "6"]
    arguments += [
        "--mask_token_id",
        str(MASK_ID),
        "--head_hidden_size",
        "16",
        "--head_rank",
        "8",
        "--num_anchors",
        "8",
    ]
    arguments += [
        "--max_steps",
        "3",
        "--stage1_ratio",
        "0.34",
        "--logging_steps",
        "1",
        "--use_cpu",
        "--disable_tqdm",
        "1",
    ]
    train_main(arguments)
    for name in ("training_curve.png", "acceptance.png"):
        assert (output / name).read_bytes().startswith(PNG)
    card = ModelCard.load(output / "README.md")
    text = " ".join(card.text.split())
    assert "4 rows to train on with 100 tokens, 80 of them" in text and '"max_new_tokens": 20' in text
    assert "3 optimizer steps" in text and "| `num_anchors` | `8` |" in text and "on 2 rows held out" in text
    assert "base_model" not in card.data.to_dict()
    code = re.search(r"```python\n(.*?)```", card.text, re.S)[1]
    names = {}
    exec(
        code.replace('"tiny-target"', repr(str(tmp_path / "tiny-target"))).replace('"drafter"', repr(str(output))),
        names,
    )
    assert names["drafter"].last_speculation.num_rounds > 0
    assert isinstance(DominoForSpeculation.from_pretrained(output), DominoForSpeculation)
