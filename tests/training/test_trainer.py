"""The trainer: curriculum, exact steps however they are cut up, checkpoints, resume, several processes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from datasets import Dataset
from domino_spec import DominoForSpeculation
from domino_spec.train_peft import main as train_main
from domino_spec.train_peft import train
from domino_spec.training import trainer as trainer_module
from domino_spec.training.config import DominoTrainingConfig
from domino_spec.training.data import BlockCollator, block_attention_mask, flex_block_mask
from domino_spec.training.losses import DraftLoss
from domino_spec.training.objective import DominoObjective
from domino_spec.training.start import FeatureScale
from domino_spec.training.trainer import COMPLETE, Curriculum, DominoTrainer, Plateau, last_complete_checkpoint
from tiny import (
    BLOCK,
    batch_of,
    drawn,
    make_drafter,
    make_target,
    one_row,
    prompt_ids,
    save_target,
)

ROOT = Path(__file__).parents[2]


def make_rows(count: int = 8, length: int = 24, ragged: bool = False) -> list[dict]:
    """Rows of random text; ragged ones have from 2 supervised tokens to all but 4."""
    rows = []
    for i in range(count):
        supervised = [0] * 4 + [1] * (length - 4)
        if ragged:
            supervised = [0] * (length - 2 - 2 * i) + [1] * (2 + 2 * i)
        rows.append({"input_ids": prompt_ids(length, seed=i)[0].tolist(), "supervised": supervised})
    return rows


def make_trainer(directory, rows, scale_rows=None, target=None, held_out=None, **options):
    """A trainer on a tiny drafter, CPU, quiet."""
    target = target or make_target("llama")
    drafter = make_drafter(target)
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
    return DominoTrainer(
        objective, args, scale, train_dataset=rows, eval_dataset=held_out, data_collator=BlockCollator(62)
    )


# Curriculum ----------------------------------------------------------------------------------------------------------


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


def test_training_leaves_no_mark_in_the_config(tmp_path):
    """The library switches `use_cache` off on what it trains; drafters have no such option, and would save it."""
    trainer = make_trainer(tmp_path, make_rows(2))
    assert trainer.objective.config.to_dict() == make_drafter(make_target("llama")).config.to_dict()


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
    rows = make_rows()

    def run(directory, resume=None):
        # Measured on other rows when resumed: the checkpoint's scale has to win.
        scale_rows = rows if resume is None else rows[4:]
        saving = {"save_strategy": "steps", "save_steps": 3}
        trainer = make_trainer(directory, rows, scale_rows=scale_rows, target=target, **saving)
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


# One step, however it is cut up --------------------------------------------------------------------------------------


def first_step(directory, batch_size: int, accumulation: int, **options):
    """Loss and weights after one optimizer step over all eight rows."""
    trainer = make_trainer(
        directory,
        make_rows(ragged=True),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        num_anchors=99,  # every anchor, so that all cuts see the same blocks
        warmup_steps=0,
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0.0,
        lambda_decay_ratio=0.0,
        **options,
    )
    result = trainer.train()
    return result.training_loss, {name: p.detach().clone() for name, p in trainer.raw_state_dict().items()}


@pytest.mark.parametrize("position_weights", ["exponential", "dpace"])
def test_accumulation_changes_neither_loss_nor_update(tmp_path, position_weights):
    """F21: rows with 2 to 16 supervised tokens."""
    loss, weights = first_step(tmp_path, 8, 1, position_weights=position_weights)
    before = {name: p for name, p in make_drafter(make_target("llama")).state_dict().items()}
    for batch_size, accumulation in ((4, 2), (1, 8)):
        again, others = first_step(tmp_path, batch_size, accumulation, position_weights=position_weights)
        assert again == pytest.approx(loss, rel=1e-4)
        for name, weight in weights.items():
            moved = (weight - before[name]).abs().max()
            assert moved > 0, name
            assert (others[name] - weight).abs().max() <= 1e-4 * moved + 1e-7, name


def test_chunks_and_checkpointing_change_neither_loss_nor_gradients(tmp_path):
    target = make_target("qwen3")
    batch = drawn(batch_of(*make_rows(3)), 6, torch.Generator().manual_seed(0))
    seen = []
    for chunk, checkpointing in ((10_000, False), (BLOCK, False), (2 * BLOCK + 1, True)):
        drafter = make_drafter(target).train()
        loss = DraftLoss(forward_kl=0.3, position_weights="dpace")
        objective = DominoObjective(drafter, target, loss=loss, logits_chunk_size=chunk)
        if checkpointing:
            objective.activation_checkpointing_enable()
            assert any(getattr(layer, "gradient_checkpointing", False) for layer in drafter.layers)
        result = objective(**batch, lam=0.4)
        result["loss"].backward()
        seen.append((result, {name: p.grad for name, p in drafter.named_parameters()}))
    for result, gradients in seen[1:]:
        for name, value in seen[0][0].items():
            torch.testing.assert_close(result[name], value, msg=name)
        for name, gradient in seen[0][1].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_no_tensor_holds_the_vocabulary_for_all_slots():
    """Every result of the forward and backward pass is watched."""
    vocab = 71  # nothing else is that wide
    target = make_target(vocab_size=vocab)
    objective = DominoObjective(make_drafter(target), target, logits_chunk_size=2 * BLOCK)
    batch = drawn(batch_of(*make_rows(4)), 10, torch.Generator().manual_seed(0))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            output = function(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor) and not function.is_view and output.shape[-1:] == (vocab,):
                largest = max(largest, output.numel() // vocab)
            return output

    with Watch():
        objective(**batch, lam=0.5)["loss"].backward()
    assert 0 < largest <= 2 * BLOCK
    assert int(batch["kept"].sum()) * BLOCK > 4 * largest


def test_flex_mask_equals_the_dense_one():
    anchors = torch.tensor([[2, 5, 9], [1, 4, 0]])
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 6:] = False
    dense = block_attention_mask(anchors, 4, real)
    mask = flex_block_mask(anchors, 4, real)
    rows, queries, keys = torch.arange(2)[:, None, None], torch.arange(12)[None, :, None], torch.arange(24)
    assert torch.equal(mask.mask_mod(rows, 0, queries, keys), dense[:, 0])


@pytest.mark.slow
def test_flex_attention_gives_the_same_loss():
    """Compiles a kernel for this CPU."""
    target = make_target("qwen3")
    batch = drawn(batch_of(*make_rows(2)), 4, torch.Generator().manual_seed(0))
    losses = []
    for kind in ("dense", "flex"):
        objective = DominoObjective(make_drafter(target), target, block_attention=kind)
        assert objective.flex == (kind == "flex")
        with torch.no_grad():  # on a CPU it has no backward pass
            losses.append(objective(**batch, lam=0.4)["loss"].item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


# Curriculum, continued -----------------------------------------------------------------------------------------------


def test_plateau():
    plateau = Plateau(patience=2)
    assert [plateau.reached(x) for x in (1.0, 1.5, 1.505, 1.6, 1.6, 1.61)] == [False] * 5 + [True]


def test_adaptive_switch_leaves_stage_one_when_the_base_stops_growing(tmp_path):
    """With a learning rate of zero nothing grows: three windows, then stage 2 with a full lambda schedule."""
    options = {"stage_switch": "adaptive", "stage_switch_window": 2, "stage_switch_patience": 2, "stage1_ratio": 0.8}
    options |= {"per_device_train_batch_size": 8, "num_anchors": 99}
    trainer = make_trainer(tmp_path, make_rows(), max_steps=20, learning_rate=0.0, **options)
    trainer.train()
    assert trainer.curriculum.stage1_steps == 6
    assert {"step": 6, "stage": 2} in trainer.curve
    logged = [entry["lambda"] for entry in trainer.curve if "lambda" in entry]
    assert logged[:7] == [1.0] * 7 and logged[7] == pytest.approx(1 - 1 / 14, abs=1e-4)
    learning = make_trainer(tmp_path, [one_row(make_target("llama"))], max_steps=20, learning_rate=3e-3, **options)
    learning.train()
    assert 6 < learning.curriculum.stage1_steps <= 16


def test_adaptive_switch_is_exact_across_resume(tmp_path):
    """Saved in the middle of a window."""
    options = {"stage_switch": "adaptive", "stage_switch_window": 4, "stage_switch_patience": 1, "num_anchors": 99}
    options |= {"max_steps": 12, "learning_rate": 1e-6, "save_strategy": "steps", "save_steps": 6, "stage1_ratio": 0.9}
    whole = make_trainer(tmp_path / "whole", make_rows(), **options)
    whole.train()
    assert whole.curriculum.stage1_steps == 8
    again = make_trainer(tmp_path / "again", make_rows(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert again.curriculum.stage1_steps == 8
    for name, weight in whole.raw_state_dict().items():
        torch.testing.assert_close(again.raw_state_dict()[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_anchors": 2},
        {"stage1_ratio": 0.5},
        {"lambda_decay_ratio": 0.3},
        {"head_warmup_ratio": 0.9},
        {"head_learning_rate": 1e-3},
        {"ce_weight": 0.5, "kl_weight": 0.5},
        {"tv_weight": 0.9},
        {"position_weights": "dpace"},
        {"position_weights": "dpace", "dpace_alpha": 0.0},
        {"loss_gamma": 1.0},
        {"vocab_sample_size": 8},
        {"scale_features": False},
        {"stage_switch": "adaptive", "stage_switch_window": 1, "stage_switch_patience": 1, "stage1_ratio": 0.9},
        {"weight_decay": 0.5},
        {"seed": 7},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_option_has_an_effect(tmp_path, changes):
    """Other weights than without it after six steps."""
    usual = {"lambda_decay_ratio": 0.6}
    if "dpace_alpha" in changes:
        usual["position_weights"] = "dpace"
    seen = []
    for options in (usual, usual | changes):
        trainer = make_trainer(tmp_path, make_rows(), **options)
        if options.get("vocab_sample_size"):
            trainer.objective.frequent_ids, trainer.objective.num_negatives = torch.arange(8), 4
        trainer.train()
        seen.append(trainer.raw_state_dict())
    assert any(not torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stage_switch": "never"}, "stage_switch is 'never'; expected one of fixed, adaptive"),
        ({"position_weights": "flat"}, "position_weights is 'flat'"),
        ({"ce_weight": 0.0}, "at least one above"),
        ({"tv_weight": -1.0}, "expected none below 0"),
        ({"loss_gamma": 0.0}, "loss_gamma is 0.0"),
        ({"dpace_alpha": 1.5}, "dpace_alpha is 1.5"),
        ({"logits_chunk_size": 0}, "logits_chunk_size is 0"),
        ({"vocab_sample_size": -1}, "vocab_sample_size is -1"),
        ({"block_attention": "sparse"}, "block_attention is 'sparse'"),
        ({"early_stopping_patience": 2}, "needs evaluations"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "schedule over steps"),
    ],
)
def test_options_out_of_range(changes, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        DominoTrainingConfig(output_dir=str(tmp_path), use_cpu=True, **changes)


def test_training_stops_on_held_out_tau_and_keeps_the_best(tmp_path):
    rows = make_rows()
    trainer = make_trainer(
        tmp_path,
        rows,
        held_out=rows[:2],
        max_steps=40,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        early_stopping_patience=2,
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    trainer.train()
    assert trainer.args.metric_for_best_model == "tau_final" and trainer.args.greater_is_better
    assert trainer.state.global_step == 6  # the first evaluation, and two that are no better
    assert trainer.state.best_global_step == 2 and trainer.state.best_metric >= 1
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_only_whole_checkpoints_are_resumed_from(tmp_path):
    assert last_complete_checkpoint(str(tmp_path / "nowhere")) is None
    trainer = make_trainer(tmp_path, make_rows(), save_strategy="steps", save_steps=2, save_total_limit=2)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    (tmp_path / "checkpoint-6" / COMPLETE).unlink()
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert last_complete_checkpoint(str(tmp_path)).endswith("checkpoint-4")
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        make_trainer(tmp_path, make_rows()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def killed_run(directory, fatal: int | None) -> int:
    """Train in a forked process that kills itself with SIGKILL at its `fatal`-th event; returns the exit code.

    Events are the ends of steps and the beginnings of every part of a checkpoint, and of dropping old ones.
    """
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    count = 0

    def event():
        nonlocal count
        count += 1
        if count == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function):
        def call(*args, **kwargs):
            event()
            return function(*args, **kwargs)

        return call

    status = 1
    try:
        options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 12}
        trainer = make_trainer(directory, make_rows(), per_device_train_batch_size=2, stage1_ratio=0.4, **options)
        trainer_module.rotate_checkpoints = counted(trainer_module.rotate_checkpoints)
        for name in ("_save", "_save_optimizer_and_scheduler", "_save_rng_state", "write_curve", "watch_stage1"):
            setattr(trainer, name, counted(getattr(trainer, name)))
        safetensors.torch.save_file = counted(safetensors.torch.save_file)
        trainer.train(resume_from_checkpoint=True)
        torch.save(trainer.raw_state_dict(), directory / "final.pt")
        status = 0
    finally:
        os._exit(status)


def test_killed_ten_times_and_resumed_equals_the_uninterrupted_run(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert killed_run(tmp_path / "whole", fatal=None) == 0
    chance, kills = random.Random(0), 0
    while kills < 10:
        code = killed_run(tmp_path / "killed", fatal=chance.randint(1, 16))
        assert code in (0, signal.SIGKILL)
        if code == 0:
            # It reached the end between two kills: again from the start.
            shutil.rmtree(tmp_path / "killed")
            (tmp_path / "killed").mkdir()
        kills += code == signal.SIGKILL
    assert killed_run(tmp_path / "killed", fatal=None) == 0
    whole, resumed = torch.load(tmp_path / "whole" / "final.pt"), torch.load(tmp_path / "killed" / "final.pt")
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=1e-6, msg=name)


# Several processes ---------------------------------------------------------------------------------------------------


def launch(tmp_path, command: list[str], arguments: list[str]) -> str:
    """Run a launcher with caches of its own; returns what it printed."""
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def command_line(tmp_path, rows, output: str) -> list[str]:
    """Arguments of train_peft.py for a tiny target and rows of token ids."""
    if not (tmp_path / "target").exists():
        save_target(tmp_path / "target")
        with open(tmp_path / "rows.jsonl", "w") as file:
            file.writelines(
                json.dumps({"input_ids": r["input_ids"], "completion_mask": r["supervised"]}) + "\n" for r in rows
            )
    arguments = f"""--target_model_name_or_path {tmp_path}/target --dataset_name {tmp_path}/rows.jsonl
        --output_dir {tmp_path}/{output} --num_hidden_layers 2 --block_size 6 --mask_token_id 60 --head_hidden_size 16
        --head_rank 8 --num_anchors 99 --max_length 32 --eval_rows 2 --max_steps 4 --logging_steps 1 --save_steps 2
        --stage1_ratio 0.5 --learning_rate 1e-2 --disable_tqdm True --dtype float32 --lr_scheduler_type constant"""
    return arguments.split()


def test_two_processes_agree_with_each_other_and_with_one(tmp_path):
    """F13, F38, F44: one process gets rows with hardly a label; stage 1 leaves the head unused; empty caches."""
    rows = make_rows(10)
    for row in rows[::2]:
        row["supervised"] = [0] * 22 + [1] * 2
    one = train([*command_line(tmp_path, rows, "one"), "--use_cpu", "True", "--per_device_train_batch_size", "4"])
    script = [str(Path(__file__).parent / "two_processes.py"), str(tmp_path)]
    printed = launch(
        tmp_path,
        ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", *script],
        [*command_line(tmp_path, rows, "two"), "--per_device_train_batch_size", "2", "--use_cpu", "True"],
    )
    assert printed.count("drafter saved to") == 1
    ranks = [torch.load(tmp_path / f"rank{i}.pt") for i in range(2)]
    for name, weight in one.objective.drafter.state_dict().items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], weight, rtol=1e-3, atol=1e-5, msg=name)
    losses = []
    for name in ("one", "two"):
        lines = (tmp_path / name / "training_curve.jsonl").read_text().splitlines()
        losses.append([entry["loss"] for entry in map(json.loads, lines) if "loss" in entry])
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], abs=2e-4)
    saved = DominoForSpeculation.from_pretrained(tmp_path / "two")
    assert saved.dtype == torch.bfloat16 and (tmp_path / "two" / "modeling_domino.py").exists()
    assert last_complete_checkpoint(str(tmp_path / "two")).endswith("checkpoint-4")


def test_the_readme_command_trains_in_one_process(tmp_path):
    """F38, and the drafter it leaves drafts."""
    command = ["accelerate.commands.launch", "--cpu", str(ROOT / "train_peft.py")]
    printed = launch(tmp_path, command, command_line(tmp_path, make_rows(10), "out"))
    assert "drafter saved to" in printed
    drafter, target = DominoForSpeculation.from_pretrained(tmp_path / "out"), make_target()
    target.generate(prompt_ids(), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert drafter.last_speculation.num_drafted > 0
