"""The drafter's cache: keys and values of context positions, kept from round to round."""

from __future__ import annotations

import torch


class DominoCache:
    """Keys and values that the draft layers made of context positions; block positions never enter it.

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
        self.mask = torch.zeros(batch_size, 0, dtype=torch.bool, device=device)  # [batch, length]
        self.next_position = torch.zeros(batch_size, dtype=torch.long, device=device) + first_position
        # Rows of the target's LM head that this generation drafts from, where it does not draft from all.
        self.head_rows: torch.Tensor | None = None
        self._staged: torch.Tensor | None = None
        self._lookup: list[list[int] | None] | None = None
        self._use_head = True

    def stage(self, valid: torch.Tensor, lookup: list[list[int] | None] | None = None, use_head: bool = True) -> None:
        """What the next call of `draft` has to know beside its arguments; forgotten after it.

        Args:
            valid (bool `[batch, new]`): which of the new context states are real; all are when nothing is staged.
            lookup (list, optional): of each row, the continuation to propose instead of drafting, or None.
            use_head (bool): False where no row needs the drafter itself.
        """
        self._staged, self._lookup, self._use_head = valid, lookup, use_head

    def take_staged(self, batch_size: int, new: int, device) -> tuple[torch.Tensor, list | None, bool]:
        """What was staged, once: validity of the context, lookup continuations, whether the drafter runs."""
        valid, lookup, use_head = self._staged, self._lookup, self._use_head
        self._staged, self._lookup, self._use_head = None, None, True
        if valid is None:
            valid = torch.ones(batch_size, new, dtype=torch.bool, device=device)
        return valid, lookup, use_head

    def extend(self, valid: torch.Tensor) -> torch.Tensor:
        """Open columns for new context states and return their absolute positions, `[batch, new]`."""
        positions = self.next_position[:, None] + valid.long().cumsum(-1) - 1
        self.next_position = self.next_position + valid.sum(-1)
        self.mask = torch.cat([self.mask, valid], dim=1)
        self.length += valid.shape[1]
        return positions.clamp_(min=0)

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's new keys and values, `[batch, kv_heads, new, head_dim]`; return all of the layer's."""
        if keys.shape[2]:
            self.keys[layer] = self._append(self.keys[layer], keys)
            self.values[layer] = self._append(self.values[layer], values)
        if self.keys[layer] is None:
            return keys, values
        return self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]

    def _append(self, buffer: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """Write into spare room; grow by half when there is none, so that a round copies nothing as a rule."""
        start = self.length - new.shape[2]
        if buffer is None or buffer.shape[2] < self.length:
            grown = new.new_empty(*new.shape[:2], self.length + max(64, self.length // 2), new.shape[3])
            if buffer is not None:
                grown[:, :, :start] = buffer[:, :, :start]
            buffer = grown
        buffer[:, :, start : self.length] = new
        return buffer

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows."""
        self.keys = [None if keys is None else keys[rows] for keys in self.keys]
        self.values = [None if values is None else values[rows] for values in self.values]
        self.mask, self.next_position = self.mask[rows], self.next_position[rows]
