"""Batches: every row's text is that of the row alone, whatever the others do; the target's cache stays small."""

import pytest
import torch
from domino_spec.target_domino import GrowingLayer, SpareRoom, end_rollback, prepare_rollback
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import ATTENTIONS, VOCAB, make_drafter, make_target, mixed, prompt_ids, ragged, scripted
from transformers import DynamicCache


def alone(target, inputs, most: int) -> list[list[int]]:
    """New tokens of every row decoded by itself, plainly."""
    texts = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        own = ids[mask.bool()][None]
        texts.append(target.generate(own, do_sample=False, max_new_tokens=most)[0, own.shape[1] :].tolist())
    return texts


def ends_of(texts) -> list[int]:
    """Two ids that end the rows at different places."""
    return [texts[0][len(texts[0]) // 2], texts[-1][len(texts[-1]) // 3]]


@pytest.mark.parametrize(
    ("batch_size", "schedule"), [(1, "adaptive"), (2, "adaptive"), (5, "constant"), (5, "adaptive"), (17, "adaptive")]
)
@pytest.mark.parametrize("family", ATTENTIONS)
def test_rows_equal_rows_alone(family, batch_size, schedule):
    target = make_target(family, **ATTENTIONS[family])
    inputs = ragged([(7 * i + 3) % 11 + 1 for i in range(batch_size)])
    free = alone(target, inputs, 14)
    texts = torch.cat([inputs["input_ids"], torch.tensor(free)], dim=1)
    drafter = mixed(make_drafter(target, schedule=schedule), texts)
    ends = ends_of(free)
    output = target.generate(**inputs, max_new_tokens=14, do_sample=False, assistant_model=drafter, eos_token_id=ends)
    width = inputs["input_ids"].shape[1]
    lengths = set()
    for row, text in zip(output[:, width:].tolist(), free, strict=True):
        stop = next((i + 1 for i, token in enumerate(text) if token in ends), len(text))
        assert row == text[:stop] + [62] * (len(row) - stop)
        lengths.add(stop)
    if batch_size > 2:
        assert len(lengths) > 1
    if schedule == "constant":
        assert drafter.last_speculation.mean_acceptance_length > 1


TARGETS = {family: make_target(family, **extra) for family, extra in ATTENTIONS.items()}


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(list(ATTENTIONS)),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    most=st.integers(1, 14),
    block=st.integers(2, 7),
    shift_label=st.booleans(),
    pattern=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    ends=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    schedule=st.sampled_from(["constant", "adaptive"]),
    seed=st.integers(0, 50),
)
def test_any_interleaving(family, lengths, most, block, shift_label, pattern, ends, schedule, seed):
    target, inputs = TARGETS[family], ragged(lengths, seed)
    drafter = make_drafter(target, block_size=block, shift_label=shift_label, schedule=schedule)
    kwargs = {"max_new_tokens": most, "do_sample": False}
    mixed(drafter, target.generate(**inputs, **kwargs), pattern)
    kwargs["eos_token_id"] = ends or None
    plain = target.generate(**inputs, **kwargs)
    assert target.generate(**inputs, **kwargs, assistant_model=drafter).tolist() == plain.tolist()


# The target's cache -------------------------------------------------------------------------------------------------


def stored_bytes(cache) -> int:
    """Bytes of the storages that a cache's layers hold, each once, spare room included."""
    storages = {}
    for layer in cache.layers:
        buffers = getattr(layer, "_buffers", {}).values()
        for states in (layer.keys, layer.values, *buffers):
            storages[states.untyped_storage().data_ptr()] = states.untyped_storage().nbytes()
    return sum(storages.values())


def peak_bytes(target, **kwargs) -> tuple[int, torch.Tensor]:
    """Most bytes that the cache held at the end of any forward of a generation, and its texts."""
    peaks = [0]

    def look(module, arguments, keywords, output):
        peaks[0] = max(peaks[0], stored_bytes(output.past_key_values))

    handle = target.model.register_forward_hook(look, with_kwargs=True)
    try:
        texts = target.generate(do_sample=False, max_new_tokens=160, **kwargs)
    finally:
        handle.remove()
    return peaks[0], texts


@pytest.mark.parametrize("pattern", [(3, 0, 5, 1, 6, 2), (0,), (6, 0)])
def test_peak_memory_of_a_batch_of_eight(pattern):
    target = make_target()
    inputs = ragged([40, 9, 33, 25, 40, 17, 38, 12])
    plain, texts = peak_bytes(target, **inputs)
    drafter = mixed(make_drafter(target), texts, pattern)
    assisted, same = peak_bytes(target, assistant_model=drafter, **inputs)
    assert torch.equal(texts, same)
    assert 0.9 * plain < assisted < 1.25 * plain


def test_appending_copies_nothing_and_writes_nowhere_else():
    config = make_target().config
    cache = DynamicCache(config=config)
    filled = torch.randn(2, 2, 30, 8)
    for i in range(4):
        cache.update(filled, filled + 1, i)
    prepare_rollback(cache)
    layer = cache.layers[0]
    assert type(layer) is GrowingLayer
    reference = filled
    for step in range(40):
        new = torch.randn(2, 2, 3, 8)
        place = layer.keys.untyped_storage().data_ptr()
        room = layer._buffers.get("keys", filled).shape[2] - layer.keys.shape[2]
        keys, values = cache.update(new, new + 1, 0)
        assert (keys.untyped_storage().data_ptr() == place) == (step > 0 and room >= 3)
        reference = torch.cat([reference, new], dim=2)[:, :, : 31 + step]
        cache.layers[0].crop(-2)
        assert torch.equal(layer.keys, reference) and torch.equal(layer.values, reference + 1)
    end_rollback(cache)
    assert torch.equal(filled, cache.layers[1].keys), "a caller's tensor was written to"
    assert not any(isinstance(layer, SpareRoom) for layer in cache.layers)


def test_returned_cache_is_the_librarys():
    target = make_target()
    drafter = scripted(make_drafter(target), "half", target)
    first = target.generate(
        prompt_ids(), max_new_tokens=9, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
    )
    cache = first.past_key_values
    assert {type(layer).__module__ for layer in cache.layers} == {"transformers.cache_utils"}
    assert cache.get_seq_length() == 15
    longer = torch.cat([first.sequences, prompt_ids(3, seed=8)], dim=1)
    plain = target.generate(longer, max_new_tokens=8, do_sample=False)
    assert target.generate(longer, past_key_values=cache, max_new_tokens=8, do_sample=False).tolist() == plain.tolist()
