"""The drafter's cache by itself: what it takes it gives back, and rows count their own positions."""

import torch
from domino_spec import DominoCache


def test_cache_grows_and_gives_back_what_it_took():
    cache = DominoCache(1, 2)
    generator = torch.Generator().manual_seed(0)
    pieces = []
    for new in (3, 1, 70, 5, 0, 130, 2):
        keys = torch.randn(2, 2, new, 4, generator=generator)
        pieces.append(keys)
        cache.extend(new)
        got, values = cache.update(0, keys, -keys)
        assert torch.equal(got, torch.cat(pieces, 2)) and torch.equal(values, -got)
    assert cache.length == 211 and cache.block_mask(3) is None
    got, _ = cache.update(0, torch.zeros(2, 2, 0, 4), torch.zeros(2, 2, 0, 4))
    assert torch.equal(got, torch.cat(pieces, 2))


def test_cache_counts_positions_row_by_row():
    cache = DominoCache(1, 2, first_position=torch.tensor([0, 10]))
    valid = torch.tensor([[False, True, True], [True, True, True]])
    assert cache.extend(valid.shape[1], valid)[valid].tolist() == [0, 1, 10, 11, 12]
    assert cache.next_position.tolist() == [2, 13]
    valid = torch.tensor([[True, True], [True, False]])
    assert cache.extend(valid.shape[1], valid)[valid].tolist() == [2, 3, 13]
    assert cache.next_position.tolist() == [4, 14]
    expected = [[False, True, True, True, True], [True, True, True, True, False]]
    assert cache.block_mask(2)[:, 0, 0].tolist() == [row + [True, True] for row in expected]
