"""Products, argmax and top-k over few rows, in the order of work that a CPU does fastest.

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
# Sizes of the pieces whose maxima are looked at first.
ARGMAX_PIECE, TOPK_PIECE = 128, 32


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


def argmax(logits: torch.Tensor) -> torch.LongTensor:
    """`logits.argmax(-1)`, the first of equals included: `[..., V]` -> `[...]`.

    Maxima are vectorised on a CPU, their places are not: the best piece is found by its maximum, and only it is
    searched for the place.
    """
    if logits.device.type != "cpu" or logits.shape[-1] % ARGMAX_PIECE or logits.stride(-1) != 1:
        return logits.argmax(-1)
    pieces = logits.unflatten(-1, (-1, ARGMAX_PIECE))
    best = pieces.amax(-1).argmax(-1, keepdim=True)  # [..., 1]
    index = best[..., None].expand(*best.shape, ARGMAX_PIECE)
    return best[..., 0] * ARGMAX_PIECE + pieces.gather(-2, index)[..., 0, :].argmax(-1)


def draw(weights: torch.Tensor) -> torch.LongTensor:
    """One index of each row, drawn in proportion to its weights, as `torch.multinomial`: `[..., V]` -> `[...]`.

    One random number a row, looked up in the running sum, instead of one for every id.

    Raises:
        RuntimeError: weights that are no law: negative, infinite or NaN, or all zero.
    """
    if weights.device.type != "cpu":
        return torch.multinomial(weights.flatten(0, -2), 1).view(weights.shape[:-1])
    sums = weights.double().cumsum(-1)
    total = sums[..., -1:]
    if not bool(((total > 0) & (total < torch.inf) & (weights.amin(-1, keepdim=True) >= 0)).all()):
        raise RuntimeError("cannot draw a token: its probabilities are NaN, infinite, negative or all zero.")
    place = (torch.rand_like(total) * total).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, place, right=True)[..., 0]


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
