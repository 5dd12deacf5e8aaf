"""All that the loop and the training ask of a target: layers, taps, embedding, LM head, its cache.

The cache is kept as the loop needs it: appending copies nothing, and rows may keep different numbers of tokens.

The library's layer joins old and new keys by `torch.cat`, which copies the whole context for every token. Here each
layer writes into spare room behind its keys, and `keys` and `values` are views of what is in use.

Memory is bounded by what was committed, L columns of the longest row:
- spare room is at most `slack(L)` columns when a layer has just grown, and a layer grows only when it is full;
- columns of rejected drafts are dropped at the end of their round where no row kept them. Where some row did, the
  other rows keep a masked hole there: nothing moves. When there are more than `slack(L)` holes, all rows are gathered
  to the right in one copy, so holes cost a copy once in a while and never more than `slack(L)` columns.
Together at most L + 2 * slack(L) columns plus the block in flight, about 1.13 L.

Sliding windows count columns, not tokens, so a cache with sliding layers keeps no holes: after a round in which rows
kept different numbers, rows are shifted right at once.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .kernels_domino import linear

SLACK_SHARE = 16
LEAST_SLACK = 8

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
    """Outputs of the tapped layers, collected by forward hooks; version-proof, and nothing else is kept."""

    def __init__(self, layer_ids: list[int]):
        self.layer_ids = layer_ids
        self._captured: dict[int, list[torch.Tensor]] = {i: [] for i in layer_ids}

    def hook(self, layer_id: int):
        """Forward hook of one layer."""

        def keep(module, arguments, output):
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


def cache_key(target, model_kwargs: dict) -> str:
    """Name under which this version of the library passes the cache to `forward`."""
    return "cache" if "cache" in model_kwargs else "past_key_values"


# Embedding and LM head ------------------------------------------------------------------------------------------


def _is_bare(layer: nn.Module) -> bool:
    """Whether calling the layer does nothing but multiply by its weight: no bias, adapter, hook or offloading."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return type(layer) is nn.Linear and layer.bias is None and not hooks


def embed_tokens(target: PreTrainedModel, token_ids: torch.Tensor, *, dtype, device) -> torch.Tensor:
    """Target embeddings `[..., H]` of ids, in the drafter's dtype."""
    table = target.get_input_embeddings()
    return table(token_ids.to(table.weight.device)).to(dtype=dtype, device=device)


def target_logits(
    target: PreTrainedModel,
    states: torch.Tensor,
    ids: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The target's LM head on states `[..., H]` -> `[..., V_target]`, scaled as the target does.

    With `ids` only their columns; `rows` are the head's weights of these ids, where the caller has them at hand.
    """
    head = target.get_output_embeddings()
    states = states.to(dtype=head.weight.dtype, device=head.weight.device)
    if ids is None:
        logits = linear(states, head.weight) if _is_bare(head) else head(states)
    else:
        bias = getattr(head, "bias", None)
        logits = linear(states, head.weight[ids] if rows is None else rows, None if bias is None else bias[ids])
    text = target.config.get_text_config(decoder=True)
    if divisor := getattr(text, "logits_scaling", None):
        logits = logits / divisor
    if factor := getattr(text, "logit_scale", None):
        logits = logits * factor
    if cap := getattr(text, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


# Cache ----------------------------------------------------------------------------------------------------------


def slack(length: int) -> int:
    """Columns of room that a cache of `length` columns may waste."""
    return max(LEAST_SLACK, length // SLACK_SHARE)


class SpareRoom:
    """Appending to a layer's `keys` and `values` in place, while there is room in the buffers they are views of."""

    # Not to be taken for the library's own layer of its kind where it looks layers up by kind.
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

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows; the buffers of all rows go at once, layer by layer."""
        super().batch_select_indices(indices)
        self._buffers.clear()


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


@contextmanager
def growing(cache: DynamicCache):
    """The cache's plain attention layers with spare room for as long as the context lasts, then as they came.

    Layers of other kinds, layers without states of their own and offloaded caches stay as they are.
    """
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    for i, layer in enumerate(cache.layers):
        if type(layer) in GROWING and layer.is_initialized and not getattr(cache, "offloading", False):
            cache.layers[i] = GROWING[type(layer)].adopt(layer)
    try:
        yield cache
    finally:
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, SpareRoom):
                cache.layers[i] = layer = layer.release()
            if hasattr(layer, "record_past"):
                layer.record_past = False  # a caller's cache goes on as it came


def _gather_layer(layer: DynamicLayer, index: torch.Tensor) -> None:
    """Keep columns `index` `[batch, length]` of each row."""
    for name in ("keys", "values"):
        states = getattr(layer, name)
        wide = index.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
        setattr(layer, name, states.gather(2, wide))
        getattr(layer, "_buffers", {}).pop(name, None)


def settle(cache: DynamicCache, mask: torch.Tensor | None, new: int, kept: list[int]) -> torch.Tensor | None:
    """Forget rejected drafts after a round.

    Args:
        cache: holds the round's `new` columns at its end.
        mask (bool `[batch, columns]`): columns that are a row's own, the `new` ones included; None for a single row
            that owns all.
        new (int): columns of the round, anchor and drafts.
        kept (list[int]): of each row, how many of them stay, from the left.
    Returns:
        bool `[batch, columns left]`: the mask of what the cache holds now.
    """
    longest, drop = max(kept), new - max(kept)
    sliding, ragged = any(cache.is_sliding), min(kept) < longest
    if sliding and ragged:
        # Before the crop: a row that moves right needs columns that the crop puts out of the window.
        mask = _shift(cache, mask, torch.tensor([longest - count for count in kept], device=mask.device))
    if drop or sliding:
        cache.crop(-drop)
    if mask is None:
        return None
    mask = mask[:, : mask.shape[1] - drop]
    if sliding or not ragged:
        return mask
    stays = torch.tensor(kept, device=mask.device)[:, None] > torch.arange(longest, device=mask.device)
    return torch.cat([mask[:, :-longest], mask[:, -longest:] & stays], dim=1)


def _shift(cache: DynamicCache, mask: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Move each row right by its shift, over rejected drafts; a layer may hold fewer columns than the mask."""
    for layer in cache.layers:
        if layer.is_initialized:
            # Column j of a row takes what stood `shift` to its left; what wraps around is masked padding.
            columns = torch.arange(layer.keys.shape[2], device=shifts.device)
            _gather_layer(layer, (columns[None] - shifts[:, None]) % columns.shape[0])
    source = torch.arange(mask.shape[1], device=mask.device)[None] - shifts[:, None]
    return mask.gather(1, source.clamp(min=0)) & (source >= 0)


def compact(cache: DynamicCache, mask: torch.Tensor, longest: int) -> torch.Tensor:
    """Gather rows to the right once holes and padding exceed the slack of `longest`, the longest row's columns.

    Returns the mask `[batch, columns left]`.
    """
    if mask.shape[1] - longest <= slack(longest) or any(cache.is_sliding):
        return mask
    # A stable sort of False before True: a row's own columns end up at the right, in their order.
    index = mask.to(torch.uint8).argsort(dim=1, stable=True)[:, -longest:]
    for layer in cache.layers:
        if layer.is_initialized:
            _gather_layer(layer, index)
    return mask.gather(1, index)
