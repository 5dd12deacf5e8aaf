"""Where training starts: features of unit size, and draft layers copied from the target's."""

from __future__ import annotations

import torch
from domino_spec.modeling_domino import DominoForSpeculation
from domino_spec.target_domino import decoder_layers
from domino_spec.training.objective import target_states
from torch import nn


class FeatureScale:
    """Train `fc` on features of unit size, save it for raw ones.

    Tapped states have dimensions thirty times the median; Adam, which moves every weight alike, would let those alone
    decide. While `active`, a hook divides the features by their root mean square and `fc` holds the rescaled weights.
    """

    def __init__(self, fc: nn.Linear, scale: torch.Tensor):
        self.fc, self.scale = fc, scale
        self.handle = None

    @classmethod
    @torch.no_grad()
    def measure(cls, drafter, target, batches: list[dict]) -> FeatureScale:
        """Root mean square of every tapped dimension, the first position left out: its states are of another kind."""
        total, count = 0.0, 0
        for batch in batches:
            states = target_states(
                target, drafter.config.target_layer_ids, batch["input_ids"], batch["attention_mask"]
            )
            kept = states.tapped[:, 1:][batch["attention_mask"][:, 1:].bool()].float()
            total, count = total + kept.square().sum(0), count + kept.shape[0]
        return cls(drafter.fc, (total / count).sqrt().clamp(min=1e-3).to(drafter.device))

    @torch.no_grad()
    def attach(self) -> None:
        """Move from raw to unit-size features: same function, other weights."""
        self.fc.weight.mul_(self.scale)
        self.handle = self.fc.register_forward_pre_hook(lambda module, inputs: (inputs[0] / self.scale,))

    @torch.no_grad()
    def fold(self) -> None:
        """Move back, so that the weights work on raw features."""
        self.handle.remove()
        self.fc.weight.div_(self.scale)

    def raw(self, weight: torch.Tensor) -> torch.Tensor:
        """`fc`'s weight in training as the one that works on raw features."""
        return weight / self.scale.to(weight.device)


def check_source_layers(drafter: DominoForSpeculation, target, layer_ids: list[int]) -> None:
    """Raise one sentence when draft layers cannot start from these target layers; shapes alone, no weights.

    Raises:
        ValueError: not one id per draft layer, or layers of another shape.
    """
    layers = decoder_layers(target)
    if len(layer_ids) != len(drafter.layers) or not all(0 <= i < len(layers) for i in layer_ids):
        raise ValueError(
            f"init_layers_from_target is {layer_ids}; expected {len(drafter.layers)} layers "
            f"from 0 to {len(layers) - 1}."
        )
    for ours, i in zip(drafter.layers, layer_ids, strict=True):
        theirs = layers[i].state_dict()
        for name, parameter in ours.named_parameters():
            if name in theirs and theirs[name].shape != parameter.shape:
                raise ValueError(
                    f"target layer {i} has a {name} of {tuple(theirs[name].shape)}, the draft layer "
                    f"{tuple(parameter.shape)}; draft layers of other sizes start from noise: drop the option."
                )


@torch.no_grad()
def initialise_from_target(drafter: DominoForSpeculation, target, layer_ids: list[int]) -> None:
    """Start the draft layers from target layers of the same shape, which know what the tapped states mean.

    A target without QK-norm gets norm weights of the size its own queries and keys have.

    Raises:
        ValueError: not one id per draft layer, or layers of another shape.
    """
    check_source_layers(drafter, target, layer_ids)
    layers = decoder_layers(target)
    for ours, i in zip(drafter.layers, layer_ids, strict=True):
        theirs = layers[i].state_dict()
        for name, parameter in ours.named_parameters():
            if name in theirs:
                parameter.copy_(theirs[name])
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            if f"self_attn.{norm}.weight" not in theirs:
                # Inputs of a projection are normed: unit mean square, so rows' norms give the outputs' size.
                scale = layers[i].input_layernorm.weight.float()
                rows = (theirs[f"self_attn.{projection}.weight"].float() * scale).square().sum(-1)
                getattr(ours.self_attn, norm).weight.fill_(rows.mean().sqrt().item())
    # The deepest tap passes through `fc`; the draft layers read it as their originals read their own input.
    width = drafter.config.hidden_size
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, -width:] += torch.eye(width, device=drafter.fc.weight.device)
    norms = torch.stack([layers[i].input_layernorm.weight.float() for i in layer_ids])
    drafter.hidden_norm.weight.copy_(norms.mean(0))
    final_norm = getattr(target.get_decoder(), "norm", None)
    if final_norm is not None:
        drafter.norm.weight.copy_(final_norm.weight)
