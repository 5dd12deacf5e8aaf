"""All that is asked of a target: layers, taps, embedding, LM head, verification inputs, its cache.

Nothing here knows model types by name. What a target can do is found out by asking it.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .kernels_domino import linear

# Spare columns behind a cache layer's keys: this share of its length, and at least so many.
SLACK_SHARE = 16
LEAST_SLACK = 64

# Layers and taps ------------------------------------------------------------------------------------------------


def decoder_layers(target) -> nn.ModuleList:
    """The target's decoder layers, whatever its family calls them."""
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    # The decoder first: a vision tower may have as many layers.
    for module in target.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"no list of {count} decoder layers in {type(target).__name__}; Domino taps decoder layers, "
        "so the target must be a decoder-only transformer."
    )


def position_limit(target) -> int | None:
    """How many positions the target knows, where its config says so."""
    return getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)


class TappedStates:
    """Outputs of the tapped layers, collected by forward hooks; version-proof, and nothing else is kept.

    Only forwards of the thread that made it are collected: others may run the same target meanwhile.
    """

    def __init__(self, layer_ids: list[int]):
        self.layer_ids = layer_ids
        self._thread = threading.get_ident()
        self._captured: dict[int, list[torch.Tensor]] = {i: [] for i in layer_ids}

    def hook(self, layer_id: int):
        """Forward hook of one layer."""

        def keep(module, arguments, output):
            if threading.get_ident() != self._thread:
                return
            self._captured[layer_id].append(output[0] if isinstance(output, tuple) else output)

        return keep

    def clear(self) -> None:
        """Forget what forwards outside the loop left here."""
        for captured in self._captured.values():
            captured.clear()

    def take(self) -> torch.Tensor:
        """Everything since the last call, `[batch, positions, taps * H]`; several forwards are joined."""
        for i, captured in self._captured.items():
            if not captured or captured[0].dim() != 3:
                shape = tuple(captured[0].shape) if captured else "nothing"
                raise ValueError(
                    f"target layer {i} put out {shape}; Domino taps layers that put out [batch, positions, hidden]."
                )
        parts = (self._captured[i] for i in self.layer_ids)
        states = [part[0] if len(part) == 1 else torch.cat(part, dim=1) for part in parts]
        self.clear()
        return torch.cat([state.to(states[0].device) for state in states], dim=-1)


@contextmanager
def tapped_states(target, layer_ids: list[int]):
    """Hooks on the tapped layers for as long as the context lasts, removed also on an exception.

    Yields:
        TappedStates: its `take()` gives what the forwards since the last call produced.
    """
    layers = decoder_layers(target)
    if max(layer_ids) >= len(layers) or min(layer_ids) < 0 or len(set(layer_ids)) != len(layer_ids):
        raise ValueError(f"target_layer_ids is {layer_ids}; expected distinct layers from 0 to {len(layers) - 1}.")
    taps = TappedStates(layer_ids)
    handles = [layers[i].register_forward_hook(taps.hook(i)) for i in layer_ids]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


# Embedding and LM head -------------------------------------------------------------------------------------------


def _is_bare(layer: nn.Module) -> bool:
    """Whether calling the layer does nothing but multiply by its weight: no bias, adapter, hook or offloading."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return type(layer) is nn.Linear and layer.bias is None and not hooks


def home_of(target: PreTrainedModel, layer: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and floating dtype of what a layer is called with, also where its weights are offloaded or quantised."""
    weight = getattr(layer, "weight", None)
    weight = weight if torch.is_tensor(weight) else None
    device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    if device is None:
        device = target.device if weight is None else weight.device
    if isinstance(device, int) and torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, device)
    floating = weight is not None and weight.is_floating_point()
    return torch.device(device), weight.dtype if floating else target.dtype


def head_size(target: PreTrainedModel) -> int:
    """Rows of the target's LM head; more than the vocabulary where the head is padded."""
    head = target.get_output_embeddings()
    size = getattr(head, "out_features", None)
    if size is None and torch.is_tensor(getattr(head, "weight", None)):
        size = head.weight.shape[0]
    return size or target.config.get_text_config(decoder=True).vocab_size


def embedding_size(target: PreTrainedModel) -> int:
    """Ids that the target's embedding has rows for."""
    return target.get_input_embeddings().weight.shape[0]


def embed_tokens(
    target: PreTrainedModel, token_ids: torch.Tensor, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Target embeddings `[..., H]` of ids, in the drafter's dtype."""
    table = target.get_input_embeddings()
    return table(token_ids.to(home_of(target, table)[0])).to(dtype=dtype, device=device)


def target_logits(target: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    """The target's LM head on states `[..., H]` -> `[..., V_target]`, scaled as the target does."""
    head = target.get_output_embeddings()
    device, dtype = home_of(target, head)
    states = states.to(device=device, dtype=dtype)
    return scaled_logits(target, linear(states, head.weight) if _is_bare(head) else head(states))


def scaled_logits(target: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """What the target makes of its LM head's products: division, factor, soft cap."""
    text = target.config.get_text_config(decoder=True)
    if divisor := getattr(text, "logits_scaling", None):
        logits = logits / divisor
    if factor := getattr(text, "logit_scale", None):
        logits = logits * factor
    if cap := getattr(text, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


# Verification ---------------------------------------------------------------------------------------------------


def cache_of(outputs: Any) -> Any:
    """The cache in a forward's outputs or keyword arguments, under the name that this version of the library uses."""
    return outputs.get("cache", outputs.get("past_key_values"))


def verification_inputs(
    target: PreTrainedModel, input_ids: torch.LongTensor, drafts: torch.LongTensor, last_outputs: Any, kwargs: dict
) -> dict[str, Any]:
    """Arguments of one forward over [anchor, d1..dn], as the library's own plain steps would prepare them.

    Args:
        input_ids (int `[batch, length]`): committed sequences, the anchor last.
        drafts (int `[batch, n]`): proposals.
        last_outputs: of the last step, which the library's bookkeeping between two steps may read.
        kwargs: what plain decoding hands to `prepare_inputs_for_generation` at this step.
    """
    n = drafts.shape[1]
    kwargs = {name: value for name, value in kwargs.items() if name != "next_sequence_length"}
    for _ in range(n):  # the bookkeeping of n plain steps: masks, positions, token types grow by one each
        kwargs = target._update_model_kwargs_for_generation(last_outputs, kwargs)
    ids = torch.cat([input_ids, drafts], dim=1) if n else input_ids
    inputs = target.prepare_inputs_for_generation(ids, next_sequence_length=n + 1, **kwargs)
    if n and "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = n + 1
    return inputs


class LengthBorders:
    """Text lengths at which a target's rotary embedding changes its factors, for all tokens of a forward.

    A block across such a length would rotate its first tokens otherwise than plain decoding does.

    Attributes:
        switches (list[int]): lengths after which other factors hold (long-RoPE).
        fixed_until (int or None): from this length on every length has factors of its own (dynamic RoPE).
    """

    def __init__(self, target: PreTrainedModel):
        self.switches: list[int] = []
        self.fixed_until: int | None = None
        for module in target.modules():
            kinds = getattr(module, "rope_type", None)
            kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
            if any(isinstance(kind, str) and "dynamic" in kind for kind in kinds):
                known = [int(module.original_max_seq_len), self.fixed_until]
                self.fixed_until = min(length for length in known if length is not None)
            if "longrope" in kinds:
                self.switches += _original_lengths(module.config)

    def __bool__(self) -> bool:
        return bool(self.switches) or self.fixed_until is not None

    def room(self, length: int, drafts: int) -> int:
        """How many of `drafts` may stand behind `length` committed tokens, the anchor included."""
        for border in self.switches:
            if length - 1 <= border < length + drafts:
                drafts = max(0, border - length)
        if self.fixed_until is not None:
            drafts = max(0, min(drafts, self.fixed_until - length))
        return drafts


def _original_lengths(config: Any) -> list[int]:
    """Every `original_max_position_embeddings` that a config names, for the text or for one kind of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    places = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    found = {place.get("original_max_position_embeddings") for place in places}
    found.add(getattr(config, "original_max_position_embeddings", None))
    return sorted(int(length) for length in found if length)


# Cache ----------------------------------------------------------------------------------------------------------


def slack(length: int) -> int:
    """Spare columns of a cache layer that has just grown to `length` columns."""
    return max(LEAST_SLACK, length // SLACK_SHARE)


class SpareRoom:
    """Appending to a layer's `keys` and `values` in place, while there is room in the buffers they are views of.

    The library's layer joins old and new keys by `torch.cat`, which copies the whole context for every forward.
    """

    # Opt out of the library's registry of layers by kind.
    _layer_type = None

    @classmethod
    def adopt(cls, layer: DynamicLayer):
        """A layer of this class with everything that `layer` holds; its tensors are never written to."""
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__, _buffers={})
        return made

    def release(self) -> DynamicLayer:
        """The library's own layer with everything that this one holds."""
        kind = type(self).__mro__[2]
        layer = kind.__new__(kind)
        layer.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_buffers"})
        return layer

    def append(self, name: str, new: torch.Tensor) -> torch.Tensor:
        """`keys` or `values` `[batch, heads, length, dim]` with `new` behind them."""
        live, buffer = getattr(self, name), self._buffers.get(name)
        length = live.shape[2] + new.shape[2]
        start = None
        if buffer is not None and _is_view(live, buffer):
            start = live.storage_offset() // live.stride(2)
        if start is None or start + length > buffer.shape[2]:
            start = 0
            buffer = new.new_empty(*new.shape[:2], length + slack(length), new.shape[3])
            buffer[:, :, : live.shape[2]] = live
            self._buffers[name] = buffer
        buffer.narrow(2, start + live.shape[2], new.shape[2]).copy_(new)
        return buffer.narrow(2, start, length)


def _is_view(live: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether `live` is a run of columns of `buffer`; what the library selects or reorders is not."""
    same = live._base is buffer or live.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    return same and live.stride() == buffer.stride() and live.shape[:2] == buffer.shape[:2]


class GrowingLayer(SpareRoom, DynamicLayer):
    """Full attention."""

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys, self.values = self.append("keys", key_states), self.append("values", value_states)
        return self.keys, self.values


class GrowingSlidingLayer(SpareRoom, DynamicSlidingWindowLayer):
    """Sliding window; keeps the past until `crop`, as the library's layer does while it records."""

    def update(self, key_states, value_states, *args, **kwargs):
        self.cumulative_length += key_states.shape[-2]
        self.keys, self.values = self.append("keys", key_states), self.append("values", value_states)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return self.keys[:, :, -visible:], self.values[:, :, -visible:]


GROWING = {DynamicLayer: GrowingLayer, DynamicSlidingWindowLayer: GrowingSlidingLayer}


def can_roll_back(target: PreTrainedModel, cache: Any) -> bool:
    """Whether a cache can forget its last columns; asked after the prefill, when its layers know what they hold."""
    layers = getattr(cache, "layers", None)
    if not layers or not hasattr(cache, "crop"):
        return False
    if hasattr(cache, "is_croppable"):
        return bool(cache.is_croppable)
    return not getattr(target, "_is_stateful", False) and all(hasattr(layer, "keys") for layer in layers)


def prepare_rollback(cache: Any) -> None:
    """After the prefill: let the cache forget rejected drafts, and let attention layers append without copying.

    Layers of other kinds, layers without states of their own and offloaded caches stay as they are.
    """
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    for i, layer in enumerate(cache.layers):
        if type(layer) in GROWING and layer.is_initialized and not getattr(cache, "offloading", False):
            cache.layers[i] = GROWING[type(layer)].adopt(layer)


def end_rollback(cache: Any) -> None:
    """Give the cache back as it came: the library's own layers, which record nothing."""
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, SpareRoom):
            cache.layers[i] = layer = layer.release()
        if hasattr(layer, "record_past"):
            layer.record_past = False
