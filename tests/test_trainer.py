"""The trainer: curriculum, exact steps however they are cut up, checkpoints, resume, several processes."""

from pathlib import Path

import pytest
import torch
from conftest import batch_of, make_drafter, make_target, one_row, prompt_ids
from datasets import Dataset
from domino_spec.data_domino import BlockCollator
from domino_spec.objective_domino import DominoObjective, FeatureScale
from domino_spec.train_peft import main as train_main
from domino_spec.trainer_domino import (
    Curriculum,
    DominoTrainer,
    DominoTrainingConfig,
)

ROOT = Path(__file__).parent.parent


def make_rows(count: int = 8, length: int = 24, ragged: bool = False) -> list[dict]:
    """Rows of random text; ragged ones have from 2 supervised tokens to all but 4."""
    rows = []
    for i in range(count):
        supervised = [0] * 4 + [1] * (length - 4)
        if ragged:
            supervised = [0] * (length - 2 - 2 * i) + [1] * (2 + 2 * i)
        rows.append({"input_ids": prompt_ids(length, seed=i)[0].tolist(), "supervised": supervised})
    return rows


def make_trainer(directory, rows, drafter=None, scale_rows=None, target=None, **options):
    """A trainer on a tiny drafter, CPU, quiet."""
    target = target or make_target("llama")
    drafter = drafter or make_drafter(target)
    options = {
        "output_dir": str(directory),
        "use_cpu": True,
        "disable_tqdm": True,
        "num_anchors": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_steps": 6,
    } | options
    args = DominoTrainingConfig(**options)
    scale = None
    if args.scale_features:
        scale = FeatureScale.measure(drafter, target, [batch_of(*(scale_rows or rows)[:4])])
        scale.attach()
    objective = DominoObjective(
        drafter, target, loss=args.draft_loss(), logits_chunk_size=args.logits_chunk_size, block_attention="dense"
    )
    return DominoTrainer(objective, args, scale, train_dataset=rows, data_collator=BlockCollator(62))


# Curriculum ---------------------------------------------------------------------------------------------------------


def test_lambda_schedule():
    paper = Curriculum(100, stage1_steps=0, lambda_decay_ratio=1.0, head_warmup_ratio=0.1)
    assert paper.lam(0) == 1.0 and paper.lam(50) == 0.5 and paper.lam(99) == pytest.approx(0.01)
    assert paper.head_factor(0) == pytest.approx(0.1) and paper.head_factor(9) == paper.head_factor(60) == 1.0
    staged = Curriculum(100, stage1_steps=40, lambda_decay_ratio=0.5, head_warmup_ratio=0.1)
    assert [staged.lam(step) for step in (0, 39, 40, 55, 70, 99)] == [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert [staged.head_factor(step) for step in (0, 39)] == [0.0, 0.0]
    assert staged.head_factor(40) == pytest.approx(1 / 6) and staged.head_factor(45) == 1.0
    abrupt = Curriculum(10, stage1_steps=5, lambda_decay_ratio=0.0, head_warmup_ratio=0.0)
    assert [abrupt.lam(step) for step in (4, 5)] == [1.0, 0.0] and abrupt.head_factor(5) == 1.0
    assert Curriculum(10, 10, 1.0, 0.1).lam(9) == 1.0


@pytest.mark.parametrize("changes", [{"stage1_ratio": 1.5}, {"lambda_decay_ratio": -1}, {"num_anchors": 0}])
def test_ratios_out_of_range(changes, tmp_path):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=f"{name} is"):
        DominoTrainingConfig(output_dir=str(tmp_path), use_cpu=True, **changes)


def test_trainer_freezes_the_head_in_stage_one(tmp_path):
    target = make_target().requires_grad_(False)
    drafter = make_drafter(target)
    rows = Dataset.from_list([one_row(target, 30), one_row(target, 25)])
    args = DominoTrainingConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        max_steps=8,
        per_device_train_batch_size=2,
        stage1_ratio=0.5,
        head_warmup_ratio=0.5,
        lr_scheduler_type="constant",
        warmup_steps=0,
        learning_rate=1e-3,
        num_anchors=8,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    scale = FeatureScale.measure(drafter, target, [batch_of(*rows)])
    scale.attach()
    trainer = DominoTrainer(
        DominoObjective(drafter, target), args, scale, train_dataset=rows, data_collator=BlockCollator(62)
    )
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    head = {name for name in before if name.startswith(("prefix_gru", "embed_proj"))}
    frozen = {name: p.detach().clone() for name, p in target.named_parameters()}
    seen = []
    compute = trainer.compute_loss

    def watching(model, inputs, **kwargs):
        moved = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
        known = {name for name, p in drafter.named_parameters() if p in trainer.optimizer.optimizer.state}
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        seen.append((moved, known, rates))
        return compute(model, inputs, **kwargs)

    trainer.compute_loss = watching
    trainer.train()
    assert len(seen) == 8
    for step, (moved, known, rates) in enumerate(seen):
        # The head is free from step 4 on; lambda is still 1 there, so its first gradient is step 5's.
        assert (not moved & head) == (step <= 5), step
        assert bool(moved - head) == (step > 0), step
        assert known == (set(before) if step > 4 else set(before) - head if step else set()), step
        assert rates[0] == pytest.approx(1e-3)
        assert rates[1] == pytest.approx(1e-3 * [0, 0, 0, 0, 0.5, 1, 1, 1][step])
    assert {name for name, p in drafter.named_parameters() if torch.equal(p, before[name])} == set()
    assert all(torch.equal(p, frozen[name]) for name, p in target.named_parameters())
    logged = [entry["lambda"] for entry in trainer.curve if "lambda" in entry]
    assert logged == [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert all(entry["base_loss"] > 0 for entry in trainer.curve if "lambda" in entry)
    trainer.save_model(str(tmp_path / "saved"))
    saved = type(drafter).from_pretrained(tmp_path / "saved")
    assert not torch.allclose(saved.fc.weight, drafter.fc.weight)
    scale.fold()
    torch.testing.assert_close(saved.fc.weight, drafter.fc.weight)
    assert (tmp_path / "saved" / "training_curve.jsonl").exists()


def test_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    """Weights on raw features, the optimizer's scale, the anchor stream and the curve all come back."""
    target = make_target("llama")
    rows = [{"input_ids": prompt_ids(24, seed=i)[0].tolist(), "supervised": [0] * 4 + [1] * 20} for i in range(8)]

    def run(directory, resume=None):
        drafter = make_drafter(target)
        # Measured on other rows when resumed: the checkpoint's scale has to win.
        scale = FeatureScale.measure(drafter, target, [batch_of(*(rows[:4] if resume is None else rows[4:]))])
        scale.attach()
        args = DominoTrainingConfig(
            output_dir=str(directory),
            max_steps=6,
            save_steps=3,
            logging_steps=1,
            num_anchors=4,
            use_cpu=True,
            learning_rate=1e-2,
            disable_tqdm=True,
        )
        trainer = DominoTrainer(
            DominoObjective(drafter, target), args, scale, train_dataset=rows, data_collator=BlockCollator(62)
        )
        trainer.train(resume_from_checkpoint=resume)
        weights = {name: p.clone() for name, p in trainer.raw_state_dict().items()}
        return weights, [entry["lambda"] for entry in trainer.curve if "lambda" in entry]

    whole, lambdas = run(tmp_path / "whole")
    again, lambdas_again = run(tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-3"))
    assert lambdas == lambdas_again and len(lambdas) == 6
    for name, weight in whole.items():
        torch.testing.assert_close(again[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_command_line_refuses_before_loading_the_target(tmp_path):
    """The target's config is enough to say what is wrong; its weights do not exist here."""
    make_target("llama").config.save_pretrained(tmp_path)
    call = ["--target_model_name_or_path", str(tmp_path), "--dataset_name", "rows.jsonl", "--use_cpu"]
    call += ["--output_dir", str(tmp_path / "out"), "--num_hidden_layers", "2", "--block_size", "6"]
    with pytest.raises(SystemExit, match="mask_token_id is missing"):
        train_main(call)
    with pytest.raises(SystemExit, match="causal_encoder is 'lstm'"):
        train_main([*call, "--mask_token_id", "3", "--causal_encoder", "lstm"])
    with pytest.raises(SystemExit, match="--block_size.*describe a new drafter"):
        train_main([*call, "--model_name_or_path", str(tmp_path)])
    assert not (tmp_path / "out").exists()
