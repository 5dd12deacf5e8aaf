"""`DominoTrainer`: the base-anchored curriculum, checkpoints that are drafter directories, tau while training.

It is a `transformers.Trainer` over `DominoObjective`, not TRL's `SFTTrainer`: that one calls its model with
`input_ids` and `labels` for a next-token loss, tokenises and packs rows of its own kind and wraps the model it is
given by PEFT, so all that would remain of it are methods to switch off. TRL's argument names, parser, model options
and LoRA options are used as they are.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass

import safetensors.torch
import torch
from accelerate.utils import gather_object
from domino_spec.modeling_domino import DominoForSpeculation
from domino_spec.training.adapter import load_adapter, save_adapter, settle_schedule
from domino_spec.training.card import RunFacts, hardware, write_card
from domino_spec.training.config import DominoTrainingConfig
from domino_spec.training.data import first_anchors, sample_anchors
from domino_spec.training.objective import DominoObjective
from domino_spec.training.start import FeatureScale
from domino_spec.training.tau import tau_of_walks, walk
from peft import PeftModel
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

CURVE = "training_curve.jsonl"
TRAINER_EXTRAS = "domino_trainer.safetensors"
COMPLETE = "checkpoint_complete"


@dataclass
class Curriculum:
    """Base-anchored curriculum in optimizer steps.

    Stage 1 trains the backbone alone; in stage 2 lambda falls linearly from 1 to 0 and the head's learning rate rises.

    Source: Domino (arXiv 2605.29707), section 3.4.
    """

    total_steps: int
    stage1_steps: int
    lambda_decay_ratio: float
    head_warmup_ratio: float

    @classmethod
    def planned(cls, args: DominoTrainingConfig, total_steps: int) -> Curriculum:
        """The curriculum before training; an adaptive switch may still end stage 1 sooner."""
        ratio = args.stage1_ratio or (0.5 if args.stage_switch == "adaptive" else 0.0)
        return cls(total_steps, round(total_steps * ratio), args.lambda_decay_ratio, args.head_warmup_ratio)

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


@dataclass
class Plateau:
    """Says when a length has stopped growing by a hundredth for `patience` observations."""

    patience: int
    best: float = 0.0
    stale: int = 0

    def reached(self, length: float) -> bool:
        """Take one more observation."""
        if length > 1.01 * self.best:
            self.best, self.stale = length, 0
        else:
            self.stale += 1
        return self.stale >= self.patience


def last_complete_checkpoint(output_dir: str) -> str | None:
    """The newest checkpoint whose writing was finished; a run killed while writing one leaves it unmarked."""
    if not os.path.isdir(output_dir):
        return None
    steps = [name.rpartition("-")[2] for name in os.listdir(output_dir) if name.startswith(PREFIX_CHECKPOINT_DIR)]
    for step in sorted((int(step) for step in steps if step.isdigit()), reverse=True):
        directory = os.path.join(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        if os.path.exists(os.path.join(directory, COMPLETE)):
            return directory
    return None


class DominoTrainer(Trainer):
    """`transformers.Trainer` whose model is a `DominoObjective`; checkpoints are drafter or adapter directories.

    Anchors are a function of seed, optimizer step, process and micro-batch, so a resumed run draws the same ones.

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
        vars(objective.config).pop("use_cache", None)  # the library's mark on models it trains; saved, it would stay
        # `compute_loss` divides by the weight of all labels of the step itself.
        self.model_accepts_loss_kwargs = True
        self.objective, self.scale, self.adapter = objective, scale, adapter
        settle_schedule(objective.drafter, args)
        self.curriculum: Curriculum | None = None
        self.plateau = Plateau(args.stage_switch_patience) if args.stage_switch == "adaptive" else None
        self.sums: Counter = Counter()
        self.window = torch.zeros(2, dtype=torch.float64)  # leading hits of the base logits, blocks
        self.step_window = torch.zeros(2, device=args.device)
        self.curve: list[dict] = []
        self.facts: RunFacts | None = None
        self.add_callback(_Stages(self))
        if args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(args.early_stopping_patience))

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """AdamW with a group for the backbone and one for the head, which has a learning rate of its own."""
        if self.optimizer is None:
            args, drafter = self.args, self.objective.drafter
            rate = args.learning_rate if args.head_learning_rate is None else args.head_learning_rate
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(args, self.objective)
            groups = [
                {"params": [p for p in part if p.requires_grad], "lr": part_rate}
                for part, part_rate in (
                    (drafter.backbone_parameters(), args.learning_rate),
                    (drafter.head_parameters(), rate),
                )
            ]
            self.optimizer = optimizer_class(groups, weight_decay=args.weight_decay, **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """The library's schedule, times the head's warm-up within stage 2 for the head's group."""
        fresh = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if fresh:
            self.curriculum = Curriculum.planned(self.args, num_training_steps)
            schedule = scheduler.lr_lambdas[1]
            scheduler.lr_lambdas[1] = lambda step: schedule(step) * self.curriculum.head_factor(step)
            self._set_head_rate(scheduler, 0)
        return scheduler

    @staticmethod
    def _set_head_rate(scheduler, step: int) -> None:
        """Set the head's learning rate of a step that the scheduler has passed already."""
        rate = scheduler.base_lrs[1] * scheduler.lr_lambdas[1](step)
        scheduler.optimizer.param_groups[1]["lr"] = rate

    def end_stage1(self, step: int) -> None:
        """Begin stage 2 at an optimizer step, sooner than planned."""
        self.curriculum.stage1_steps = step
        self.curve.append({"step": step, "stage": 2})
        self._set_head_rate(self.lr_scheduler, step)

    def freeze_head(self) -> None:
        """Forget the head's gradients, so that in stage 1 the optimizer passes it by.

        It stays trainable for autograd: processes that share gradients agree on the set of parameters only once.
        """
        for parameter in self.objective.drafter.head_parameters():
            parameter.grad = None

    def get_batch_samples(self, epoch_iterator, num_batches: int, device):
        """The batches of one optimizer step with their anchors, and the weight of all their labels everywhere."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        weight = torch.zeros((), device=device)
        for i, batch in enumerate(batches):
            place = (self.args.seed, self.state.global_step, self.args.process_index, i)
            batch["seed"] = random.Random(repr(place)).getrandbits(63)
            generator = torch.Generator().manual_seed(batch["seed"])
            batch["anchors"], batch["kept"] = sample_anchors(
                first_anchors(batch["supervised"]), self.args.num_anchors, generator
            )
            weight += self.objective.label_weight(
                batch["input_ids"], batch["supervised"], batch["anchors"], batch["kept"]
            ).to(device)
        return batches, self.accelerator.reduce(weight, "sum")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Share of one batch in the step's loss, and sums for the log."""
        lam = self.curriculum.lam(self.state.global_step)
        result = model(**inputs, lam=lam, normalizer=num_items_in_batch)
        for name, value in result.items():
            if name != "loss":
                self.sums[name] += value.detach()
        if self.plateau is not None:
            self.step_window += torch.stack([result["base_leading"], result["blocks"]])
        # Processes average their gradients; the loss is a sum over all of them.
        loss = result["loss"] * self.args.world_size
        return (loss, result) if return_outputs else loss

    def reduced(self, sums: Counter) -> dict[str, torch.Tensor]:
        """Sums over all processes."""
        return {name: self.accelerator.reduce(value.float(), "sum") for name, value in sorted(sums.items())}

    def watch_stage1(self) -> None:
        """Leave stage 1 where the base logits' leading hits have stopped growing; called after each step."""
        step = self.state.global_step
        if self.plateau is None or step >= self.curriculum.stage1_steps:
            return
        self.window += self.accelerator.reduce(self.step_window, "sum").cpu()
        self.step_window = torch.zeros_like(self.step_window)
        if step % self.args.stage_switch_window == 0:
            leading, blocks = self.window.tolist()
            self.window.zero_()
            if self.plateau.reached(1 + leading / max(blocks, 1)):
                self.end_stage1(step)

    def log(self, logs: dict, *args, **kwargs) -> None:
        """Add lambda, losses, leading hits and accuracy per draft to what the Trainer reports.

        `*_anchor_mean` is the mean of leading hits + 1 over this step's anchors with the true tokens before each
        draft; it is not tau (see `simulated_rounds`).
        """
        if "loss" in logs and self.sums:
            sums, self.sums = self.reduced(self.sums), Counter()
            logs["lambda"] = round(self.curriculum.lam(max(self.state.global_step - 1, 0)), 4)
            for name in ("base", "final"):
                logs[f"{name}_loss"] = round(float(sums[f"{name}_loss"] / sums["weight"].clamp(min=1e-9)), 4)
                leading = sums[f"{name}_leading"] / sums["blocks"].clamp(min=1)
                logs[f"{name}_anchor_mean"] = round(1 + float(leading), 4)
                for i, share in enumerate((sums[f"{name}_hits"] / sums["counts"].clamp(min=1)).tolist()):
                    logs[f"{name}_accuracy_{i + 1}"] = round(share, 4)
        self.curve.append({"step": self.state.global_step} | logs)
        super().log(logs, *args, **kwargs)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """tau from simulated rounds on the held-out rows, which the processes share among them."""
        self.objective.eval()
        walks = self.walk_held_out(eval_dataset if eval_dataset is not None else self.eval_dataset)
        metrics = tau_of_walks(walks, self.objective.config.num_drafts)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.objective.train()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def walk_held_out(self, rows) -> list:
        """Walks of all rows, each by one process; a drafter in shards is walked by all processes in step."""
        if self.accelerator.is_fsdp2:
            # Shards come together only for calls they know of.
            register_fsdp_forward_method(self.objective, "accepted_lengths")
            return [walk(self.objective, row) for row in rows]
        mine = range(self.args.process_index, len(rows), self.args.world_size)
        return gather_object([walk(self.objective, rows[i]) for i in mine])

    # Checkpoints ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """As the library's; True goes on from the last checkpoint that is whole, or starts where there is none.

        Raises:
            ValueError: a checkpoint whose writing was cut off, or a run in shards that is to be resumed.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None and self.is_world_process_zero():
                print(f"no whole checkpoint in '{self.args.output_dir}': starting from the first step")
        elif resume_from_checkpoint and not os.path.exists(os.path.join(resume_from_checkpoint, COMPLETE)):
            raise ValueError(
                f"'{resume_from_checkpoint}' is not a whole checkpoint of this trainer; "
                "use --resume_from_checkpoint True for the last whole one."
            )
        if resume_from_checkpoint and self.is_fsdp_enabled:
            raise ValueError(
                f"resuming '{resume_from_checkpoint}' in shards (FSDP) is not supported; "
                "resume it under recipes/accelerate/ddp.yaml."
            )
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        """Mark a checkpoint when all of it is written, and only then drop older ones."""
        directory = os.path.join(
            self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        )
        if self.args.should_save:
            shutil.rmtree(directory, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        super()._save_checkpoint(model, trial)
        self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with open(os.path.join(directory, COMPLETE), "w", encoding="utf-8"):
                pass
            rotate_checkpoints(
                output_dir=os.path.dirname(directory),
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=False,
            )

    def raw_state_dict(self, state_dict: dict | None = None) -> dict[str, torch.Tensor]:
        """The drafter's weights, and an adapter's if it has one; what reads features made for raw ones."""
        state = self.objective.state_dict() if state_dict is None else state_dict
        state = {name.removeprefix("drafter."): tensor for name, tensor in state.items()}
        if self.scale is not None:
            state[self.scaled_name] = self.scale.raw(state[self.scaled_name])
        return state

    @property
    def scaled_name(self) -> str:
        """The drafter's name of the weight that is held for scaled features."""
        weight = self.scale.fc.weight
        return next(name for name, p in self.objective.drafter.named_parameters() if p is weight)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """A drafter directory that loads anywhere, beside the Trainer's own state."""
        output_dir = output_dir or self.args.output_dir
        # Of a sharded run the library gives the whole weights.
        trained = self.objective.state_dict() if state_dict is None else state_dict
        raw = self.raw_state_dict(trained)
        if self.adapter is None:
            self.objective.drafter.save_pretrained(output_dir, state_dict=raw)
        else:
            save_adapter(self.adapter, output_dir, raw)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(output_dir)
        self.write_curve(output_dir)
        state = {}
        if self.curriculum is not None:
            state["stage1_steps"] = torch.tensor(self.curriculum.stage1_steps)
        if self.plateau is not None:
            state["plateau"] = torch.tensor([self.plateau.best, self.plateau.stale], dtype=torch.float64)
            state["window"] = self.window
        if self.scale is not None:
            # Folding rounds: a resumed run goes on from the very weights that were trained.
            state["feature_scale"] = self.scale.scale.cpu()
            state["scaled_fc"] = trained[f"drafter.{self.scaled_name}"].detach().cpu()
        safetensors.torch.save_file(state, os.path.join(output_dir, TRAINER_EXTRAS))

    def write_curve(self, output_dir: str) -> None:
        """Everything that was logged, a line each."""
        with open(os.path.join(output_dir, CURVE), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in self.curve)

    def create_model_card(self, model_name: str | None = None, **metadata) -> None:
        """Write the drafter's card into the output directory; the library calls this before it pushes.

        Args:
            model_name (str, optional): of the repository (default: the output directory's name).
            **metadata: `license`, `language` and `tags` of the card's header; what else the library says is ignored.
        """
        if self.facts is None or not self.is_world_process_zero():
            return
        args = self.args
        name = args.hub_model_id or model_name or os.path.basename(os.path.normpath(args.output_dir))
        header = {key: metadata[key] for key in ("license", "language", "tags") if key in metadata}
        write_card(args.output_dir, self.facts, self.curve, hardware(args.device, args.world_size), name, **header)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Weights, feature scale and curve of a checkpoint."""
        self._load_drafter(resume_from_checkpoint)
        with open(os.path.join(resume_from_checkpoint, CURVE), encoding="utf-8") as file:
            self.curve = [json.loads(line) for line in file]
        if self.scale is not None:
            # The optimizer's moments belong to the scale they were gathered under.
            extras = self._extras(resume_from_checkpoint)
            self.scale.scale = extras["feature_scale"].to(self.scale.scale.device)
            self.scale.fc.weight.data.copy_(extras["scaled_fc"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """With them the place in the curriculum, which the schedule reads."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        extras = self._extras(checkpoint)
        self.curriculum.stage1_steps = int(extras["stage1_steps"])
        if self.plateau is not None:
            self.window = extras["window"]
            self.plateau.best, self.plateau.stale = extras["plateau"][0].item(), int(extras["plateau"][1])

    @staticmethod
    def _extras(checkpoint: str) -> dict[str, torch.Tensor]:
        return safetensors.torch.load_file(os.path.join(checkpoint, TRAINER_EXTRAS))

    def _load_best_model(self) -> None:
        self._load_drafter(self.state.best_model_checkpoint)

    def _load_drafter(self, checkpoint: str) -> None:
        """Saved weights, which work on raw features, into the drafter in training."""
        if self.adapter is not None:
            load_adapter(self.adapter, checkpoint)
            if self.scale is not None:
                self.scale.fc.weight.data.mul_(self.scale.scale)
            return
        saved = DominoForSpeculation.from_pretrained(checkpoint, dtype=self.objective.drafter.dtype)
        state = saved.to(self.objective.drafter.device).state_dict()
        if self.scale is not None:
            state["fc.weight"] = state["fc.weight"] * self.scale.scale
        self.objective.drafter.load_state_dict(state)


class _Stages(TrainerCallback):
    """Keeps the head out of the optimizer's reach in stage 1, and looks out for the end of that stage."""

    def __init__(self, trainer: DominoTrainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step < self.trainer.curriculum.stage1_steps:
            self.trainer.freeze_head()

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.watch_stage1()
