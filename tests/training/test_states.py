"""States computed before training: the same loss as online, sized first, resumable, refused where they do not fit."""

import os
import shutil
from collections import namedtuple

import psutil
import pytest
import torch
from domino_spec.training import states as states_module
from domino_spec.training.losses import DraftLoss
from domino_spec.training.objective import DominoObjective, target_states
from domino_spec.training.states import (
    DiskStates,
    MemoryStates,
    StatesFormat,
    fill,
    row_key,
    supervised_span,
)
from domino_spec.training.tau import simulated_tau
from safetensors.torch import load_file
from tiny import batch_of, drawn, make_drafter, make_target, prompt_ids

# Rows of different lengths: one answer, two turns with a user's turn behind them, plain text, a bare minimum.
MASKS = (
    [0] * 5 + [1] * 12,
    [0] * 3 + [1] * 4 + [0] * 3 + [1] * 5 + [0] * 2,
    [1] * 9,
    [0, 0, 1, 1],
)
ROWS = [{"input_ids": prompt_ids(len(mask), seed=i)[0].tolist(), "supervised": mask} for i, mask in enumerate(MASKS)]


def make_store(place, target, layer_ids=(1, 2), dtype="auto"):
    format = StatesFormat.of(target, list(layer_ids), dtype)
    return MemoryStates(format) if place is None else DiskStates(place, format)


LOSS = DraftLoss(cross_entropy=0.5, forward_kl=0.5)


def loss_of(objective, rows=ROWS):
    """Loss of all rows as one batch; anchors are drawn from the same stream each time."""
    return objective(**drawn(batch_of(*rows), 4, torch.Generator().manual_seed(0)), lam=0.4)["loss"]


@pytest.mark.parametrize("place", [None, "states"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_equals_the_online_one_without_the_targets_decoder(tmp_path, monkeypatch, place, dtype):
    target = make_target("qwen3").to(dtype)
    drafter = make_drafter(target)
    online = DominoObjective(drafter, target, loss=LOSS)
    loss = loss_of(online)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    tau = simulated_tau(online, ROWS)
    store = make_store(place and tmp_path / place, target, drafter.config.target_layer_ids)
    fill(store, target, ROWS)
    monkeypatch.setattr(target, "get_decoder", lambda: pytest.fail("the target's decoder was run"))
    drafter.zero_grad()
    kept = DominoObjective(drafter, target, loss=LOSS, store=store)
    kept_loss = loss_of(kept)
    kept_loss.backward()
    assert kept_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5, msg=name)
    kept_tau = simulated_tau(kept, ROWS)
    if dtype == torch.float32:  # bfloat16 rounds differently in batches of another shape
        assert kept_tau == tau


def test_what_bfloat16_costs_a_float32_target(tmp_path):
    """About three digits: the loss moves, by less than a hundredth."""
    target = make_target("llama")
    drafter = make_drafter(target)
    store = make_store(tmp_path, target, drafter.config.target_layer_ids, "bfloat16")
    fill(store, target, ROWS)
    online, kept = (loss_of(DominoObjective(drafter, target, store=x)).item() for x in (None, store))
    assert 1e-6 < abs(kept - online) / online < 1e-2


def test_states_lie_where_the_target_had_them(tmp_path):
    target = make_target("llama")
    store = make_store(tmp_path, target)
    fill(store, target, ROWS)
    batch = batch_of(*ROWS)
    kept = store.batch(**batch)
    exact = target_states(target, [1, 2], batch["input_ids"], batch["attention_mask"])
    for i, mask in enumerate(MASKS):
        first, last = supervised_span(mask)
        torch.testing.assert_close(kept.tapped[i, :last], exact.tapped[i, :last])
        torch.testing.assert_close(kept.final[i, first - 1 : last], exact.final[i, first - 1 : last])
        assert not kept.tapped[i, last:].any() and not kept.final[i, : first - 1].any()
    assert kept.final.shape == exact.final.shape and kept.tapped.shape == exact.tapped.shape
    # Other supervision needs other laws: the same tokens are another row then.
    assert store.batch(batch["input_ids"], batch["attention_mask"], torch.ones_like(batch["input_ids"])) is None


def test_spans():
    assert supervised_span([0, 0, 1, 1, 0, 1, 0]) == (2, 5)
    assert supervised_span([1, 1, 1]) == (1, 2)
    assert supervised_span([1, 0, 0]) == supervised_span([0, 0, 0]) == (1, 1)


# On disk ------------------------------------------------------------------------------------------------------------


def count_rows(target, monkeypatch) -> list[int]:
    """Rows of every run of the target's decoder from now on."""
    decoder, runs = target.get_decoder(), []
    forward = decoder.forward

    def counting(*args, **kwargs):
        runs.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(decoder, "forward", counting)
    return runs


@pytest.mark.parametrize("victim", [".safetensors", "index.json"])
def test_an_interrupted_cache_is_gone_on_with(tmp_path, monkeypatch, victim):
    """Stopped between writing a file and naming it: what is named is whole, what is not is never read."""
    target = make_target("llama")
    whole = make_store(None, target)
    fill(whole, target, ROWS)
    monkeypatch.setattr(states_module, "SHARD_BYTES", 1)
    replace, done = os.replace, []

    def failing(source, destination):
        if str(destination).endswith(victim):
            done.append(destination)
            if len(done) == 3:
                raise KeyboardInterrupt
        replace(source, destination)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        fill(make_store(tmp_path, target), target, ROWS, batch_tokens=1)
    monkeypatch.setattr(os, "replace", replace)
    assert list(tmp_path.glob("*.partial"))

    store = make_store(tmp_path, target)
    assert len(store.places) == 2
    runs = count_rows(target, monkeypatch)
    fill(store, target, ROWS, batch_tokens=1)
    assert sum(runs) == 2
    again = make_store(tmp_path, target)
    assert again.places.keys() == whole.rows.keys()
    for key, states in whole.rows.items():
        torch.testing.assert_close(again.read(key).tapped, states.tapped, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again.read(key).final, states.final, rtol=1e-4, atol=1e-4)
    fill(again, target, ROWS)
    assert sum(runs) == 2


def test_size_is_told_before_and_right(tmp_path, capsys):
    target = make_target("llama")
    store = make_store(tmp_path / "states", target, dtype="bfloat16")
    fill(store, target, [*ROWS, ROWS[0]])
    needed = sum(store.format.row_bytes(row["supervised"]) for row in ROWS)
    assert "states of 4 rows take 0.00 GiB (bfloat16); the disk of" in capsys.readouterr().out
    tensors = load_file(tmp_path / "states" / "states-00000.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == needed


@pytest.mark.parametrize("place", [None, "states"])
def test_refused_where_it_does_not_fit(tmp_path, monkeypatch, place):
    target = make_target("llama")
    store = make_store(place and tmp_path / place, target)
    runs = count_rows(target, monkeypatch)
    needed = sum(store.format.row_bytes(row["supervised"]) for row in ROWS)
    usage = namedtuple("usage", "free available")
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(free, free))
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: usage(free, free))
        if free < needed:
            with pytest.raises(ValueError, match="4 rows take .* GiB free; make room.*--states_dtype bfloat16"):
                fill(store, target, ROWS)
        else:
            store.require_room(needed, 4)
    assert not runs and not list(tmp_path.iterdir())


def test_refused_for_anything_else(tmp_path):
    target = make_target("llama")
    fill(make_store(tmp_path, target), target, ROWS)
    make_store(tmp_path, target)
    with pytest.raises(ValueError, match=r"made for {'layer_ids': \[1, 2\]}, expected {'layer_ids': \[0, 2\]}"):
        make_store(tmp_path, target, (0, 2))
    with pytest.raises(ValueError, match="{'dtype': 'float32'}, expected {'dtype': 'bfloat16'}; name another"):
        make_store(tmp_path, target, dtype="bfloat16")
    with pytest.raises(ValueError, match="'target_dtype': 'float32'"):
        make_store(tmp_path, make_target("llama").bfloat16(), dtype="float32")
    with torch.no_grad():
        target.model.layers[3].mlp.down_proj.weight[0, 0] += 0.1
    with pytest.raises(ValueError, match="fingerprint"):
        make_store(tmp_path, target)
    with pytest.raises(ValueError, match="states_dtype is 'int8'"):
        make_store(tmp_path, target, dtype="int8")


def test_a_lost_shard_is_named(tmp_path):
    target = make_target("llama")
    fill(make_store(tmp_path, target), target, ROWS)
    (tmp_path / "states-00000.safetensors").unlink()
    with pytest.raises(ValueError, match="lists the shard 'states-00000.safetensors' and does not hold it"):
        make_store(tmp_path, target)


def test_only_what_is_read_is_opened(tmp_path, monkeypatch):
    """A cache may be larger than memory, and have more shards than a process may open."""
    target = make_target("llama")
    monkeypatch.setattr(states_module, "SHARD_BYTES", 1)
    monkeypatch.setattr(states_module, "OPEN_SHARDS", 2)
    fill(make_store(tmp_path, target), target, ROWS, batch_tokens=1)
    store = make_store(tmp_path, target)
    keys = [row_key(row["input_ids"], row["supervised"]) for row in ROWS]
    assert len(set(store.places[key] for key in keys)) == 4
    for opened, key in zip((1, 2, 2, 2), keys, strict=True):
        assert store.read(key).tapped.shape[0] > 0
        assert store.opened.cache_info().currsize == opened


def test_processes_share_the_work(tmp_path, monkeypatch):
    target = make_target("llama")
    rows = [{"input_ids": prompt_ids(9, seed=i)[0].tolist(), "supervised": [0] * 4 + [1] * 5} for i in range(40)]
    runs = count_rows(target, monkeypatch)
    stores = [make_store(tmp_path, target) for _ in range(3)]
    for rank, store in enumerate(stores):
        fill(store, target, rows, rank=rank, world=3)
    assert sum(runs) == 40 and min(runs) > 4
    # A process that did not see the others' shards has not written over them.
    assert len(make_store(tmp_path, target).places) == 40
