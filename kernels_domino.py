"""Products and top-k over few rows, in the order of work that a CPU does fastest.

Decoding multiplies large matrices by one to a few dozen rows and then reads a row of the vocabulary for its best ids.
Each function gives what the plain torch call of its name gives, which it makes itself wherever the fast way is not
known to be faster: on other devices, with gradients, for other sizes.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

# Above so many rows `F.linear` has amortised rearranging the weight.
FEW_ROWS = 64
# Size of the pieces whose maxima are looked at first.
TOPK_PIECE = 32


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`, `[..., in]` -> `[..., out]`; the result may lie in memory with the rows innermost.

    In bf16 oneDNN rearranges whatever stands at the weight's place for every product. Swapping the factors makes it
    rearrange the few rows instead of the matrix.
    """
    rows = inputs.numel() // inputs.shape[-1]
    swap = weight.device.type == "cpu" and weight.dtype == inputs.dtype == torch.bfloat16
    swap = swap and type(weight) in (torch.Tensor, nn.Parameter)  # subclasses, such as quantised ones, know F.linear
    if not swap or bias is not None or not 0 < rows <= FEW_ROWS or torch.is_grad_enabled():
        return F.linear(inputs, weight, bias)
    flat = inputs.reshape(rows, -1)
    outputs = torch.mv(weight, flat[0])[None] if rows == 1 else (weight @ flat.t()).t()
    return outputs.unflatten(0, inputs.shape[:-1])


class FewRowsLinear(nn.Linear):
    """`nn.Linear` whose forward is `linear`."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs, self.weight, self.bias)


def topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.LongTensor]:
    """`logits.topk(k)` over the last dimension, largest first; which of equals at the edge are in is not said.

    The k best stand in the k pieces with the largest maxima. A piece takes every (V / 32)-th id, so that neighbours in
    memory are compared, whichever dimension is innermost.
    """
    vocab, (*batch, _) = logits.shape[-1], logits.shape
    width = vocab // TOPK_PIECE
    if logits.device.type != "cpu" or vocab % TOPK_PIECE or width < 2 * k:
        return logits.topk(k, dim=-1)
    rows = logits.flatten(0, -2)  # [R, V]
    if rows.stride(-1) == 1:
        maxima = rows.unflatten(1, (TOPK_PIECE, width)).amax(1)  # [R, V / 32]
    else:
        maxima = rows.t().unflatten(0, (TOPK_PIECE, width)).amax(0).t()
    pieces = maxima.topk(k, dim=-1, sorted=False).indices  # [R, k]
    ids = (pieces[:, None] + torch.arange(0, vocab, width)[:, None]).flatten(1)  # [R, 32 * k]
    values, best = rows.gather(1, ids).topk(k, dim=-1)
    return values.unflatten(0, batch), ids.gather(1, best).unflatten(0, batch)
