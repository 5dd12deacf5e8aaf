"""`DominoTrainingConfig`: the options of a training run; the defaults are the paper's recipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from domino_spec.training.losses import POSITION_WEIGHTS, DraftLoss
from domino_spec.training.objective import BLOCK_ATTENTION
from transformers import TrainingArguments

STAGE_SWITCHES = ("fixed", "adaptive")


@dataclass
class DominoTrainingConfig(TrainingArguments):
    """Training options; the defaults are the paper's recipe.

    Raises:
        ValueError: a value out of range, or an option that the drafter's training has no use for.
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
    stage_switch: str = field(
        default="fixed",
        metadata={
            "help": "fixed: stage 1 takes stage1_ratio of the steps. adaptive: it ends when the base logits' leading "
            "hits stop growing, at stage1_ratio of the steps (half of them where that is 0) at the latest.",
            "choices": STAGE_SWITCHES,
        },
    )
    stage_switch_window: int = field(
        default=50, metadata={"help": "Optimizer steps over which an adaptive switch averages."}
    )
    stage_switch_patience: int = field(
        default=3,
        metadata={"help": "Windows without one percent of growth after which an adaptive switch leaves stage 1."},
    )
    ce_weight: float = field(default=1.0, metadata={"help": "Weight of the cross-entropy with the target's token."})
    kl_weight: float = field(default=0.0, metadata={"help": "Weight of KL(target || draft)."})
    tv_weight: float = field(
        default=0.0, metadata={"help": "Weight of the total variation between target and draft (DSpark: 0.9, ce 0.1)."}
    )
    position_weights: str = field(
        default="exponential",
        metadata={
            "help": "exponential: draft k weighs exp(-(k - 1) / loss_gamma). dpace: what it adds to the expected "
            "acceptance length.",
            "choices": POSITION_WEIGHTS,
        },
    )
    loss_gamma: float = field(default=7.0, metadata={"help": "Reach of the exponential position weights, in drafts."})
    dpace_alpha: float = field(default=0.5, metadata={"help": "Smoothing of the dpace position weights, 0 to 1."})
    vocab_sample_size: int = field(
        default=0,
        metadata={
            "help": "Estimate the softmax with so many frequent ids, the labels and a random quarter more; 0: all."
        },
    )
    logits_chunk_size: int = field(
        default=256, metadata={"help": "Most draft tokens whose logits are in memory at one time."}
    )
    block_attention: str = field(
        default="auto",
        metadata={
            "help": "dense: a boolean mask. flex: FlexAttention. auto: flex on CUDA.",
            "choices": BLOCK_ATTENTION,
        },
    )
    keep_states: bool = field(
        default=False, metadata={"help": "Compute the target's states once, before training, and keep them in memory."}
    )
    states_cache_dir: str | None = field(
        default=None,
        metadata={"help": "Keep them in this directory instead, for later runs too; what it lacks is added."},
    )
    states_dtype: str = field(
        default="auto",
        metadata={"help": "auto keeps the target's dtype: the loss is the same; bfloat16 halves a float32 target's."},
    )
    scale_features: bool = field(default=True, metadata={"help": "Train on tapped states scaled to unit size."})
    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Check everything, print sizes, memory, steps and schedule from the target's config, and stop."
        },
    )
    dry_run_processes: int | None = field(
        default=None, metadata={"help": "Processes that --dry_run counts for (default: those of this launch)."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after so many evaluations without a better held-out tau."}
    )

    def __post_init__(self):
        # A plan for eight GPUs is made on a laptop: nothing that only a GPU has may be asked for.
        self.use_cpu = self.use_cpu or self.dry_run
        if (
            self.early_stopping_patience is not None or self.load_best_model_at_end
        ) and not self.metric_for_best_model:
            self.metric_for_best_model, self.greater_is_better = "tau_final", True
        super().__post_init__()
        for name in ("stage1_ratio", "lambda_decay_ratio", "head_warmup_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a share from 0 to 1.")
        for name in ("num_anchors", "max_length", "logits_chunk_size", "stage_switch_window", "stage_switch_patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        for name, known in (("stage_switch", STAGE_SWITCHES), ("block_attention", BLOCK_ATTENTION)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is '{getattr(self, name)}'; expected one of {', '.join(known)}.")
        self.draft_loss()
        if self.vocab_sample_size < 0:
            raise ValueError(f"vocab_sample_size is {self.vocab_sample_size}; expected 0 (all ids) or more.")
        if self.lr_scheduler_type == "reduce_lr_on_plateau":
            raise ValueError("lr_scheduler_type is reduce_lr_on_plateau; expected a schedule over steps, like cosine.")
        if self.fp16:
            raise ValueError("fp16 is on, but the loss has no scaling inside its chunks; use bf16 or neither.")
        if self.n_gpu > 1:
            raise ValueError(
                f"{self.n_gpu} GPUs in one process; start one process for each with `accelerate launch`, "
                "or show one with CUDA_VISIBLE_DEVICES."
            )
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise ValueError("early_stopping_patience needs evaluations; add --eval_strategy steps --eval_steps N.")
        if self.resume_from_checkpoint in ("True", "true"):
            self.resume_from_checkpoint = True

    def draft_loss(self) -> DraftLoss:
        """The loss these options describe."""
        return DraftLoss(
            cross_entropy=self.ce_weight,
            forward_kl=self.kl_weight,
            total_variation=self.tv_weight,
            position_weights=self.position_weights,
            gamma=self.loss_gamma,
            dpace_alpha=self.dpace_alpha,
        )
