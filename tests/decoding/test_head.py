"""Rollouts against the naive way: the whole block corrected again for every draft."""

import pytest
import torch
from domino_spec.target_domino import embed_tokens, target_logits
from domino_spec.training.objective import target_states
from peft import LoraConfig, get_peft_model
from tiny import BLOCK, make_drafter, make_target, prompt_ids
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

WIDE = 512  # large enough for the fast top-k to be at work


def made(encoder: str, pool: int, adapter: bool = False, prefix: int = 1):
    target = make_target(vocab_size=WIDE)
    drafter = make_drafter(target, causal_encoder=encoder, pure_draft_prefix_len=prefix)
    drafter.generation_config.candidate_pool_size = pool
    if adapter:
        names = ["embed_proj.0", "embed_proj.2", "layers.0.self_attn.k_proj"]
        if encoder == "attention":
            names.append("prefix_attention.qkv_proj")
        get_peft_model(drafter, LoraConfig(target_modules=names, init_lora_weights=False)).eval()
    return target, drafter.requires_grad_(False)


def drafted(target, drafter, batch: int, **kwargs):
    """`draft` after a prompt, and the backbone states it started from."""
    ids = prompt_ids(9, batch=batch)
    tapped = target_states(target, drafter.config.target_layer_ids, ids, torch.ones_like(ids)).tapped[:, :-1]
    seen, norm = [], drafter.norm
    handle = norm.register_forward_hook(lambda module, arguments, output: seen.append(output))
    arguments = {"input_ids": ids, "max_drafts": BLOCK} | kwargs
    output = drafter.draft(target, ids[:, -1:], tapped, drafter.new_cache(batch), **arguments)
    handle.remove()
    states = seen[0][:, drafter.config.first_draft_slot :][:, : drafter.config.num_drafts]
    return ids, states, output


def naive_logits(target, drafter, ids, states, tokens):
    """Logits `[b, n, V]` of every draft after the drafts before it, with what stands outside a pool at -inf."""
    base = target_logits(target, states)
    prefix = torch.cat([ids[:, -1:], tokens[:, :-1]], dim=1)
    embeds = embed_tokens(target, prefix, dtype=torch.float32, device="cpu")
    corrected = drafter.correct_block(base, states, embeds)
    if pool := drafter.generation_config.candidate_pool_size:
        corrected = corrected.masked_fill(base < base.topk(pool).values[..., -1:], float("-inf"))
    return corrected


@torch.no_grad()
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("pool", [0, 5])
@pytest.mark.parametrize("encoder", ["gru", "attention"])
@pytest.mark.parametrize("rollout", ["sequential", "parallel"])
def test_greedy_rollouts_equal_corrected_blocks(rollout, encoder, pool, adapter):
    for prefix in range(3):
        target, drafter = made(encoder, pool, adapter, prefix)
        drafter.generation_config.rollout = rollout
        for batch in (1, 3):
            ids, states, output = drafted(target, drafter, batch)
            expected = naive_logits(target, drafter, ids, states, output.token_ids)
            best = expected.topk(2)
            assert output.token_ids.tolist() == best.indices[..., 0].tolist()
            margins = best.values[..., 0] - best.values[..., 1]
            confidences = drafter.generation_config.confidence(margins)
            torch.testing.assert_close(output.confidences, confidences, rtol=1e-4, atol=1e-5)
            assert output.lengths is None


@torch.no_grad()
@pytest.mark.parametrize("pool", [0, 5])
@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize("rollout", ["sequential", "parallel"])
@pytest.mark.parametrize("encoder", ["gru", "attention"])
def test_sampled_rollouts_take_the_noisy_argmax(encoder, rollout, suppress, pool):
    """Processors that treat all ids alike see the pool, others all ids; the choice is the same."""
    processors = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.9)]
    if suppress:
        processors.insert(0, SuppressTokensLogitsProcessor(list(range(0, WIDE, 3)), device="cpu"))
    processors = LogitsProcessorList(processors)
    target, drafter = made(encoder, pool)
    drafter.generation_config.rollout = rollout
    for batch in (1, 3):
        noise = torch.empty(batch, BLOCK, WIDE).exponential_(generator=torch.Generator().manual_seed(batch))
        for given in (noise, list(noise.unbind(1))):
            ids, states, output = drafted(target, drafter, batch, noise=given, logits_processor=processors)
            expected = naive_logits(target, drafter, ids, states, output.token_ids).clamp(min=-1e4)
            expected = torch.stack([processors(ids, expected[:, i]) for i in range(expected.shape[1])], dim=1)
            n = expected.shape[1]
            assert output.token_ids.tolist() == (expected.softmax(-1) / noise[:, :n]).argmax(-1).tolist()


@torch.no_grad()
@pytest.mark.parametrize("rollout", ["sequential", "parallel"])
@pytest.mark.parametrize("pool", [0, 5])
def test_confidence_ends_rows(pool, rollout):
    target, drafter = made("gru", pool)
    drafter.generation_config.rollout = rollout
    _, _, whole = drafted(target, drafter, 3)
    running = torch.cat([torch.ones(3, 1), whole.confidences.cumprod(1)[:, :-1]], dim=1)
    threshold = float(running.flatten().sort().values[9])
    drafter.generation_config.assistant_confidence_threshold = threshold
    _, _, cut = drafted(target, drafter, 3)
    n = cut.token_ids.shape[1]
    assert torch.equal(cut.token_ids, whole.token_ids[:, :n])
    assert cut.lengths.tolist() == (running >= threshold).sum(1).tolist() and n >= int(cut.lengths.max())


@torch.no_grad()
def test_bf16_heads_of_the_target_multiply_alike():
    """The product with the few rows innermost is the one that calling the head makes; a hooked head is called."""
    target = make_target(vocab_size=WIDE).bfloat16()
    states = torch.randn(2, 5, 32).bfloat16()
    expected = target.lm_head(states)
    torch.testing.assert_close(target_logits(target, states), expected)
    calls = []
    target.lm_head.register_forward_hook(lambda *args: calls.append(1))
    assert torch.equal(target_logits(target, states), expected) and calls


class LargeResults(TorchDispatchMode):
    """Every operation whose result is new memory of at least `least` floats; ids and masks grow anyway."""

    def __init__(self, least: int):
        super().__init__()
        self.least, self.on, self.found = least, True, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if self.on:
            inputs = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
            given = {x.untyped_storage().data_ptr() for x in inputs}
            for result in tree_leaves(output):
                if torch.is_tensor(result) and result.is_floating_point() and result.numel() >= self.least:
                    if result.untyped_storage().data_ptr() not in given:
                        self.found.append((str(function), tuple(result.shape)))
        return output


@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
@pytest.mark.parametrize("encoder", ["gru", "attention"])
def test_rounds_allocate_nothing_of_the_contexts_length(encoder, schedule):
    """Loop and drafter, forwards of the target apart: after the first round nothing as long as the context is made."""
    length = 2000
    target = make_target(max_position_embeddings=4096)
    drafter = make_drafter(target, causal_encoder=encoder, schedule=schedule)
    watching, forward, draft, rounds = LargeResults(length), target.forward, drafter.draft, []

    def unwatched(*args, **kwargs):
        watching.on = False
        try:
            return forward(*args, **kwargs)
        finally:
            watching.on = True

    def counted(*args, **kwargs):
        output = draft(*args, **kwargs)
        rounds.append(len(watching.found))
        return output

    target.forward, drafter.draft = unwatched, counted
    with watching:
        target.generate(prompt_ids(length), max_new_tokens=30, do_sample=False, assistant_model=drafter)
    assert len(rounds) > 1 and drafter.last_speculation.num_rounds > 10
    # The end of the call puts the sequences together: those are no rounds.
    assert rounds[0] > 0 and rounds[-1] == rounds[0], watching.found[rounds[0] :]


@torch.no_grad()
def test_ragged_rounds_copy_no_context_either():
    """Nor of rows with padding: one number a column for the mask is the most that attention makes of it."""
    target = make_target(max_position_embeddings=4096)
    drafter = make_drafter(target)
    width = 2 * len(drafter.config.target_layer_ids) * 16
    cache, length = drafter.new_cache(2), 2000
    anchors, row = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)
    arguments = {"input_ids": row, "max_drafts": BLOCK}
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, :50] = False
    drafter.draft(target, anchors, torch.randn(2, length, width), cache, context_mask=valid, **arguments)
    with LargeResults(2 * 2 * length) as watching:
        for _ in range(5):
            valid = torch.tensor([[True, True], [True, False]])
            drafter.draft(target, anchors, torch.randn(2, 2, width), cache, context_mask=valid, **arguments)
    assert not watching.found
    mask = cache.block_mask(BLOCK)
    assert mask.shape == (2, 1, 1, length + 10 + BLOCK)
    assert mask[:, 0, 0, : length + 10].sum(-1).tolist() == [length + 10, length - 50 + 5]
