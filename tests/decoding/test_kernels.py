"""Fast ways of doing it give what torch's own functions give."""

import pytest
import torch
from domino_spec.kernels_domino import FEW_ROWS, FewRowsLinear, linear, topk
from torch.nn import functional as F


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (3, 4), (1, FEW_ROWS), (5, 20), (1, 0)])
def test_linear(dtype, shape):
    weight, bias = normal(96, 64, dtype=dtype), normal(96, dtype=dtype)
    inputs = normal(*shape, 128, dtype=dtype, seed=1)[..., ::2]
    with torch.no_grad():
        for part in (weight, weight.t().contiguous().t(), normal(96, 80, dtype=dtype)[:, :64]):
            got, expected = linear(inputs, part), F.linear(inputs, part)
            assert got.shape == expected.shape and got.dtype == dtype
            torch.testing.assert_close(got, expected, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=0.05)
        assert torch.equal(linear(inputs, weight, bias), F.linear(inputs, weight, bias))
        assert linear(inputs[0], weight).shape == (shape[1], 96)


def test_linear_has_gradients():
    for dtype in (torch.float32, torch.bfloat16):
        layer, plain = FewRowsLinear(8, 6, bias=False).to(dtype), torch.nn.Linear(8, 6, bias=False).to(dtype)
        plain.load_state_dict(layer.state_dict())
        for each in (layer, plain):
            each(normal(3, 8, dtype=dtype)).square().sum().backward()
        assert torch.equal(layer.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [64, 1000, 1024, 4096])
@pytest.mark.parametrize("k", [1, 5, 16])
def test_topk(dtype, vocab, k):
    logits = normal(2, 3, vocab, dtype=dtype)
    innermost = logits.flatten(0, 1).t().contiguous().t().unflatten(0, (2, 3))  # rows next to each other in memory
    for each in (logits, innermost, logits[:, ::2], logits.round()):
        values, ids = topk(each, k)
        assert torch.equal(values, each.topk(k).values)
        assert torch.equal(each.gather(-1, ids), values)
        assert all(len(set(row)) == k for row in ids.flatten(0, 1).tolist())
