"""`DominoTrainer`: the base-anchored curriculum, checkpoints that are drafter directories, tau while training.

It is a `transformers.Trainer` over `DominoObjective`, not TRL's `SFTTrainer`: that one calls its model with
`input_ids` and `labels` for a next-token loss, tokenises and packs rows of its own kind and wraps the model it is
given by PEFT, so all that would remain of it are methods to switch off. TRL's argument names, parser, model options
and LoRA options are used as they are.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field

import safetensors.torch
import torch
from peft import PeftModel
from transformers import Trainer, TrainerCallback, TrainingArguments

from .adapter_domino import load_adapter, save_adapter, settle_head_schedule
from .modeling_domino import DominoForSpeculation
from .objective_domino import DominoObjective, FeatureScale, simulated_tau

CURVE = "training_curve.jsonl"
TRAINER_EXTRAS = "domino_trainer.safetensors"


@dataclass
class DominoTrainingConfig(TrainingArguments):
    """Training options; the defaults are the paper's recipe.

    Raises:
        ValueError: a ratio out of range.
    """

    per_device_train_batch_size: int = 1
    learning_rate: float = 6e-4
    weight_decay: float = 0.0
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.04
    max_grad_norm: float = 1.0
    logging_steps: float = 10
    remove_unused_columns: bool = False
    report_to: str = "none"
    max_length: int = field(default=3072, metadata={"help": "Rows are cut at so many tokens."})
    num_anchors: int = field(default=256, metadata={"help": "Blocks per sequence and step."})
    stage1_ratio: float = field(default=0.0, metadata={"help": "Share of the steps with the head frozen."})
    lambda_decay_ratio: float = field(
        default=1.0, metadata={"help": "Share of the remaining steps over which lambda falls from 1 to 0."}
    )
    head_warmup_ratio: float = field(
        default=0.1, metadata={"help": "Share of stage 2 over which the head's learning rate rises."}
    )
    head_learning_rate: float | None = field(default=None, metadata={"help": "Default: learning_rate."})
    loss_gamma: float = field(default=7.0, metadata={"help": "Draft k weighs exp(-(k - 1) / gamma)."})
    distill_weight: float = field(
        default=0.0, metadata={"help": "Share of KL(target || draft) in the loss, the rest is cross-entropy."}
    )
    vocab_sample_size: int = field(
        default=0,
        metadata={
            "help": "Estimate the softmax with so many frequent ids, the labels and a random quarter more; 0: all."
        },
    )
    keep_states: bool = field(
        default=False, metadata={"help": "Compute the target's states once and keep them in memory (bf16)."}
    )
    scale_features: bool = field(default=True, metadata={"help": "Train on tapped states scaled to unit size."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("stage1_ratio", "lambda_decay_ratio", "head_warmup_ratio", "distill_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a share from 0 to 1.")
        for name in ("num_anchors", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.gradient_checkpointing:
            raise ValueError("gradient_checkpointing is on; the drafter has none: lower num_anchors instead.")
        if self.lr_scheduler_type == "reduce_lr_on_plateau":
            raise ValueError("lr_scheduler_type is reduce_lr_on_plateau; expected a schedule over steps, like cosine.")
        if self.resume_from_checkpoint in ("True", "true"):
            self.resume_from_checkpoint = True


@dataclass(frozen=True)
class Curriculum:
    """Base-anchored curriculum in optimizer steps.

    Stage 1 trains the backbone alone; in stage 2 lambda falls linearly from 1 to 0 and the head's learning rate rises.

    Source: Domino (arXiv 2605.29707), section 3.4.
    """

    total_steps: int
    stage1_ratio: float
    lambda_decay_ratio: float
    head_warmup_ratio: float

    @property
    def stage1_steps(self) -> int:
        return round(self.total_steps * self.stage1_ratio)

    def lam(self, step: int) -> float:
        """Weight of the base loss at an optimizer step (0-based)."""
        if step < self.stage1_steps:
            return 1.0
        decay = (self.total_steps - self.stage1_steps) * self.lambda_decay_ratio
        return max(0.0, 1 - (step - self.stage1_steps) / decay) if decay >= 1 else 0.0

    def head_factor(self, step: int) -> float:
        """Factor on the head's learning rate: 0 in stage 1, then a linear rise."""
        if step < self.stage1_steps:
            return 0.0
        warmup = (self.total_steps - self.stage1_steps) * self.head_warmup_ratio
        return min(1.0, (step - self.stage1_steps + 1) / warmup) if warmup >= 1 else 1.0


class DominoTrainer(Trainer):
    """`transformers.Trainer` whose model is a `DominoObjective`; checkpoints are drafter or adapter directories.

    Args:
        scale: attached feature scale, if any.
        adapter: PEFT's model around the objective's drafter, if only that is to be trained and saved.
    """

    def __init__(
        self,
        objective: DominoObjective,
        args: DominoTrainingConfig,
        scale: FeatureScale | None,
        adapter: PeftModel | None = None,
        **kwargs,
    ):
        super().__init__(model=objective, args=args, **kwargs)
        self.objective, self.scale, self.adapter = objective, scale, adapter
        drafter = objective.drafter
        head = {id(p) for module in drafter.head_modules() for p in module.parameters()}
        trained = [p for p in drafter.parameters() if adapter is None or p.requires_grad]
        self.head = [p for p in trained if id(p) in head]
        self.backbone = [p for p in trained if id(p) not in head]
        if not self.backbone:
            settle_head_schedule(args)
        self.curriculum: Curriculum | None = None
        self.sums: Counter = Counter()
        self.anchor_generator = torch.Generator().manual_seed(args.seed)
        self.curve: list[dict] = []
        self.add_callback(_StageSwitch(self))

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """AdamW with a group for the backbone and one for the head, which has a learning rate of its own."""
        if self.optimizer is None:
            args = self.args
            rate = args.learning_rate if args.head_learning_rate is None else args.head_learning_rate
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(args, self.objective)
            groups = [{"params": self.backbone, "lr": args.learning_rate}, {"params": self.head, "lr": rate}]
            self.optimizer = optimizer_class(groups, weight_decay=args.weight_decay, **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """The library's schedule, times the head's warm-up within stage 2 for the head's group."""
        fresh = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if fresh:
            args = self.args
            self.curriculum = Curriculum(
                num_training_steps, args.stage1_ratio, args.lambda_decay_ratio, args.head_warmup_ratio
            )
            schedule, factor = scheduler.lr_lambdas[1], self.curriculum.head_factor
            scheduler.lr_lambdas[1] = lambda step: schedule(step) * factor(step)
            # The scheduler has set the rates of step 0 already; set the head's again with its factor.
            scheduler.optimizer.param_groups[1]["lr"] = scheduler.base_lrs[1] * scheduler.lr_lambdas[1](0)
            self.set_stage(0)
        return scheduler

    def set_stage(self, step: int) -> None:
        """Freeze the head in stage 1, free it in stage 2."""
        for parameter in self.head:
            parameter.requires_grad_(step >= self.curriculum.stage1_steps)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Loss of one batch, and sums for the log."""
        lam = self.curriculum.lam(self.state.global_step)
        result = model(**inputs, lam=lam, num_anchors=self.args.num_anchors, generator=self.anchor_generator)
        self.sums["batches"] += 1
        for name in ("base_loss", "final_loss"):
            self.sums[name] += result[name].item()
        self.sums["lambda"] += lam
        for name in ("base_hits", "final_hits", "counts"):
            for i, value in enumerate(result[name].tolist()):
                self.sums[name, i] += value
        return (result["loss"], result) if return_outputs else result["loss"]

    def log(self, logs: dict, *args, **kwargs) -> None:
        """Add lambda, losses and accuracy per draft to what the Trainer reports."""
        if "loss" in logs and self.sums["batches"]:
            batches = self.sums["batches"]
            logs |= {name: round(self.sums[name] / batches, 4) for name in ("lambda", "base_loss", "final_loss")}
            for i in range(self.objective.config.num_drafts):
                count = max(self.sums["counts", i], 1)
                logs[f"base_accuracy_{i + 1}"] = round(self.sums["base_hits", i] / count, 4)
                logs[f"final_accuracy_{i + 1}"] = round(self.sums["final_hits", i] / count, 4)
            self.sums = Counter()
        self.curve.append({"step": self.state.global_step} | logs)
        super().log(logs, *args, **kwargs)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """tau from simulated rounds on the held-out rows."""
        self.objective.eval()
        rows = eval_dataset if eval_dataset is not None else self.eval_dataset
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in simulated_tau(self.objective, rows).items()}
        self.objective.train()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """A drafter directory that loads anywhere, beside the Trainer's own state."""
        output_dir = output_dir or self.args.output_dir
        with self.raw_features():
            if self.adapter is None:
                self.objective.drafter.save_pretrained(output_dir)
            else:
                save_adapter(self.adapter, output_dir)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(output_dir)
        self.write_curve(output_dir)
        state = {"anchors": self.anchor_generator.get_state()}
        if self.scale is not None:
            state["feature_scale"] = self.scale.scale.cpu()
        safetensors.torch.save_file(state, os.path.join(output_dir, TRAINER_EXTRAS))

    def write_curve(self, output_dir: str) -> None:
        """Everything that was logged, a line each."""
        with open(os.path.join(output_dir, CURVE), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in self.curve)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Weights, feature scale, anchor stream and curve of a checkpoint."""
        state = safetensors.torch.load_file(os.path.join(resume_from_checkpoint, TRAINER_EXTRAS))
        self.anchor_generator.set_state(state["anchors"])
        with open(os.path.join(resume_from_checkpoint, CURVE), encoding="utf-8") as file:
            self.curve = [json.loads(line) for line in file]
        self._load_drafter(resume_from_checkpoint)
        if self.scale is not None:
            # The optimizer's moments belong to the scale they were gathered under.
            with self.scale.folded():
                self.scale.scale = state["feature_scale"].to(self.scale.scale.device)

    def _load_best_model(self) -> None:
        self._load_drafter(self.state.best_model_checkpoint)

    def _load_drafter(self, checkpoint: str) -> None:
        """Saved weights, which work on raw features, into the drafter in training."""
        if self.adapter is not None:
            with self.raw_features():
                load_adapter(self.adapter, checkpoint)
            return
        saved = DominoForSpeculation.from_pretrained(checkpoint, dtype=self.objective.drafter.dtype)
        with self.raw_features():
            self.objective.drafter.load_state_dict(saved.state_dict())

    def raw_features(self):
        """For as long as the context lasts the drafter's weights work on raw features, as saved ones do."""
        return nullcontext() if self.scale is None else self.scale.folded()


class _StageSwitch(TrainerCallback):
    """Moves the trainer from stage to stage."""

    def __init__(self, trainer: DominoTrainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.set_stage(state.global_step)
