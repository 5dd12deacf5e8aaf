"""Losses of draft tokens, some blocks at a time: no tensor ever holds the vocabulary for all slots of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

POSITION_WEIGHTS = ("exponential", "dpace")


@dataclass(frozen=True)
class DraftLoss:
    """What one draft token costs, and what its place in the block weighs.

    Args:
        cross_entropy, forward_kl, total_variation (float, >= 0): weights of `-log q(label)`, `KL(p || q)` and
            `1/2 sum |p - q|`, p being the target's law and q the draft's.
        position_weights (str): "exponential" weighs the k-th draft `exp(-(k - 1) / gamma)`; "dpace" by what it adds to
            the expected acceptance length: the sum over m >= k of the product of the first m probabilities of labels,
            each smoothed to `(1 - dpace_alpha) * q + dpace_alpha`.
        gamma (float): in drafts.
        dpace_alpha (float, 0 to 1): 0 trusts the drafter's probabilities wholly, 1 weighs a draft by how many follow.
    Raises:
        ValueError: a weight out of range, or all zero.

    Source: cross-entropy and exponential weights: DFlash and Domino (arXiv 2605.29707), section 3.4; total variation,
        which is the share of rejected samples: DSpark (arXiv 2607.05147); D-PACE: arXiv 2605.18810.
    """

    cross_entropy: float = 1.0
    forward_kl: float = 0.0
    total_variation: float = 0.0
    position_weights: str = "exponential"
    gamma: float = 7.0
    dpace_alpha: float = 0.5

    def __post_init__(self):
        weights = {name: getattr(self, name) for name in ("cross_entropy", "forward_kl", "total_variation")}
        if min(weights.values()) < 0 or not any(weights.values()):
            raise ValueError(f"the loss weights are {weights}; expected none below 0 and at least one above.")
        if self.position_weights not in POSITION_WEIGHTS:
            raise ValueError(
                f"position_weights is '{self.position_weights}'; expected one of {', '.join(POSITION_WEIGHTS)}."
            )
        if self.gamma <= 0:
            raise ValueError(f"loss_gamma is {self.gamma}; expected more than 0 drafts.")
        if not 0 <= self.dpace_alpha <= 1:
            raise ValueError(f"dpace_alpha is {self.dpace_alpha}; expected a share from 0 to 1.")

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's whole law is asked for, not only its token."""
        return bool(self.forward_kl or self.total_variation)

    def tokens(self, logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | None):
        """Losses and log probabilities of the labels, both `[N]`.

        Args:
            logits (float `[N, ids]`); labels (int `[N]`): places among the ids; teacher (float `[N, ids]`): log p.
        """
        log_q = logits.log_softmax(-1)
        label_log_q = log_q.gather(1, labels[:, None])[:, 0]
        loss = -self.cross_entropy * label_log_q
        if self.forward_kl:
            loss = loss + self.forward_kl * (teacher.exp() * (teacher - log_q)).sum(-1)
        if self.total_variation:
            loss = loss + self.total_variation * 0.5 * (teacher.exp() - log_q.exp()).abs().sum(-1)
        return loss, label_log_q

    def fixed_weights(self, valid: torch.Tensor) -> torch.Tensor:
        """Weights `[blocks, n]` that depend on places alone; their sum over a step is what the loss is divided by."""
        if self.position_weights == "dpace":
            return valid.float()
        places = torch.arange(valid.shape[-1], device=valid.device, dtype=torch.float)
        return torch.exp(-places / self.gamma) * valid

    def weights(self, label_log_q: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Weights `[blocks, n]`, without gradient; `label_log_q [blocks, n]` is read where `valid`."""
        if self.position_weights != "dpace":
            return self.fixed_weights(valid)
        smooth = (1 - self.dpace_alpha) * label_log_q.detach().exp() + self.dpace_alpha
        reached = smooth.masked_fill(~valid, 0.0).cumprod(-1)  # probability that the first k drafts are accepted
        return reached.flip(-1).cumsum(-1).flip(-1)


def chunked_sum(run: Callable, chunk: int, states: torch.Tensor, encoded: torch.Tensor | None, parameters):
    """Sum over chunks of blocks of `run(part, states[part], encoded[part])`, never holding two chunks' graphs.

    The gradients are made chunk by chunk in the forward already, so nothing is computed twice, as checkpointing would.

    Args:
        run: gives the scalar of some blocks, or None where they add nothing; `part` is a slice of blocks.
        chunk (int): blocks at a time.
        states (float `[blocks, n, H]`), encoded (float `[blocks, n, S]` or None): what gradients flow to.
        parameters: whatever else `run` uses and gradients flow to.
    Returns:
        float, a scalar.
    """
    return _ChunkedSum.apply(run, chunk, states, encoded, *[p for p in parameters if p.requires_grad])


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, chunk, states, encoded, *parameters):
        total = states.new_zeros((), dtype=torch.float32)
        wanted = [states if ctx.needs_input_grad[2] else None, encoded if ctx.needs_input_grad[3] else None]
        sums = [None if x is None else torch.zeros_like(x) for x in (*wanted, *parameters)]
        for start in range(0, states.shape[0], chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(any(x is not None for x in sums)):
                inputs = [None if x is None else x[part].detach() for x in (states, encoded)]
                for x, kept in zip(inputs, wanted, strict=True):
                    if kept is not None:
                        x.requires_grad_()
                value = run(part, *inputs)
            if value is None:
                continue
            total += value.detach()
            leaves = [x if kept is not None else None for x, kept in zip(inputs, wanted, strict=True)]
            _add_gradients(value, [*leaves, *parameters], sums, part)
        ctx.gradients = sums
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return None, None, *(None if x is None else x.mul_(gradient) for x in ctx.gradients)


def _add_gradients(value, leaves, sums, part) -> None:
    """Add the gradients of one chunk: to its blocks for the first two leaves, to the whole for the others."""
    places = [i for i, leaf in enumerate(leaves) if leaf is not None]
    if not places:
        return
    for i, gradient in zip(
        places, torch.autograd.grad(value, [leaves[i] for i in places], allow_unused=True), strict=True
    ):
        if gradient is not None:
            (sums[i][part] if i < 2 else sums[i]).add_(gradient)
