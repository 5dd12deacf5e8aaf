"""The drafter's cache: keys and values of context positions, kept from round to round."""

from __future__ import annotations

import torch
from torch import nn


class DominoCache:
    """Keys and values that the draft layers made of context positions; block positions never enter it.

    A round copies nothing that is as long as the context. Keys and values lie in buffers with spare room; those of the
    block are written behind the context, where the next round's context goes, so that attention reads one stretch of
    memory. The mask lies in such a buffer too, and while all columns are every row's own there is none.

    Rows may hold different numbers of positions: columns that a row does not use are masked. Keys carry absolute
    positions by RoPE, so the place of a column does not matter.

    Args:
        num_layers (int): draft layers.
        batch_size (int): rows.
        first_position (int or tensor `[batch]`): absolute position of the first context state that will arrive; above
            zero when the target's cache held positions whose states nobody tapped.
    """

    def __init__(self, num_layers: int, batch_size: int, first_position: int | torch.Tensor = 0, device=None):
        self.keys: list[torch.Tensor | None] = [None] * num_layers  # [batch, kv_heads, capacity, head_dim]
        self.values: list[torch.Tensor | None] = [None] * num_layers
        self.length = 0
        self.next_position = torch.zeros(batch_size, dtype=torch.long, device=device) + first_position
        self._mask: torch.Tensor | None = None  # [batch, capacity], True behind `length`; None: all True

    def extend(self, new: int, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Open columns for `new` context states and return their absolute positions, `[batch, new]`.

        `valid [batch, new]` says which are real; None: all.
        """
        start, self.length = self.length, self.length + new
        if valid is None:
            positions = self.next_position[:, None] + torch.arange(new, device=self.next_position.device)
            self.next_position = self.next_position + new
            return positions
        if self._mask is None:
            self._mask = valid.new_ones(len(valid), 0)
        self._make_room(self.length)
        self._mask[:, start : self.length] = valid
        positions = self.next_position[:, None] + valid.long().cumsum(-1) - 1
        self.next_position = self.next_position + valid.sum(-1)
        return positions.clamp_(min=0)

    def block_mask(self, slots: int) -> torch.Tensor | None:
        """What all slots of a block may look at, bool `[batch, 1, 1, length + slots]`; None: everything."""
        if self._mask is None:
            return None
        self._make_room(self.length + slots)
        return self._mask[:, None, None, : self.length + slots]

    def _make_room(self, width: int) -> None:
        if self._mask.shape[1] < width:
            self._mask = nn.functional.pad(self._mask, (0, _roomy(width) - self._mask.shape[1]), value=True)

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, block: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's new keys and values, `[batch, kv_heads, new + block, head_dim]`; return all that it has.

        The last `block` of them are the block's own: returned behind the context, and overwritten by the next round.
        """
        if keys.shape[2]:
            self.keys[layer] = self._append(self.keys[layer], keys, block)
            self.values[layer] = self._append(self.values[layer], values, block)
        if self.keys[layer] is None:
            return keys, values
        width = self.length + block
        return self.keys[layer].narrow(2, 0, width), self.values[layer].narrow(2, 0, width)

    def _append(self, buffer: torch.Tensor | None, new: torch.Tensor, block: int) -> torch.Tensor:
        """Write into spare room; grow by half when there is none, so that a round copies nothing as a rule."""
        end = self.length + block
        start = end - new.shape[2]
        if buffer is None or buffer.shape[2] < end:
            grown = new.new_empty(*new.shape[:2], _roomy(end), new.shape[3])
            if buffer is not None:
                grown[:, :, :start] = buffer[:, :, :start]
            buffer = grown
        buffer.narrow(2, start, end - start).copy_(new)
        return buffer


def _roomy(length: int) -> int:
    """Columns to allocate when `length` are needed."""
    return length + max(64, length // 2)
