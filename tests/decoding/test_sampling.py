"""Processors and sampling: the text is plain decoding's, the generator stands where plain decoding leaves it."""

import pytest
import torch
from checks import Calls, as_inputs, assert_equal_text, assert_same_draws, both
from domino_spec import DraftOutput
from domino_spec.speculation_domino import NoiseAhead
from tiny import ATTENTIONS, VOCAB, make_drafter, make_target, mixed, prompt_ids, ragged, scripted
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

TARGETS = {family: make_target(family, **extra) for family, extra in ATTENTIONS.items()}

# Processors ---------------------------------------------------------------------------------------------------------


def allowed(batch_id, ids):
    """Row 0 writes even ids, row 1 odd ones, others those that differ from their last token's parity."""
    parity = batch_id if batch_id < 2 else 1 - int(ids[-1]) % 2
    return list(range(parity, 58, 2))


def allowed_until_nine(batch_id, ids):
    """As grammars do: nothing is allowed once the end, 9, was written."""
    return [] if 9 in ids[7:].tolist() else [int(ids[-1]) % 8, 9]


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.8},
    "ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [7, 9], [1], [2], [3, 4]]},
    "allowed": {"prefix_allowed_tokens_fn": allowed},
    "grammar": {"prefix_allowed_tokens_fn": allowed_until_nine, "eos_token_id": 9},
    "suppress": {"suppress_tokens": [1, 2, 3, 4], "begin_suppress_tokens": [5, 6]},
    "forced_end": {"forced_eos_token_id": 8},
    "penalties": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "exponential_decay_length_penalty": (3, 1.4),
        "eos_token_id": 9,
    },
    "guidance": {"guidance_scale": 1.5},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "bias": {"sequence_bias": {(3,): -4.0, (5, 6): 3.0}},
}


@pytest.mark.parametrize("kind", ["oracle", "half", "untouched", "adaptive"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name, kind):
    target, kwargs = TARGETS["qwen3"], PROCESSORS[name]
    for inputs in (ragged([7, 3, 7]), as_inputs(prompt_ids())):
        if name == "grammar" and len(inputs["input_ids"]) > 1:
            continue  # the library itself raises once one row of several has ended
        drafter = make_drafter(target, schedule="adaptive" if kind == "adaptive" else "constant")
        if kind in ("oracle", "half"):
            texts = target.generate(**inputs, max_new_tokens=14, do_sample=False, **kwargs)
            mixed(drafter, texts, (6,) if kind == "oracle" else (2,))
        assert_equal_text(target, drafter, inputs, 14, **kwargs)


@pytest.mark.parametrize("kind", ["oracle", "half", "untouched", "adaptive"])
@pytest.mark.parametrize("lengths", [(7,), (7, 3, 5)])
def test_processors_see_exactly_plain_decodings_calls(kind, lengths):
    """Also those with a memory, and in batches: the same prefixes and scores, each once and in the same order."""
    target, inputs = TARGETS["llama"], ragged(lengths)
    plain, ours = Calls(), Calls()
    kwargs = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": [11, 23] if len(lengths) > 1 else None}
    texts = target.generate(**inputs, **kwargs, logits_processor=[plain])
    drafter = make_drafter(target, schedule="adaptive" if kind == "adaptive" else "constant")
    if kind in ("oracle", "half"):
        mixed(drafter, texts, (6,) if kind == "oracle" else (2,))
    again = target.generate(**inputs, **kwargs, logits_processor=[ours], assistant_model=drafter)
    assert again.tolist() == texts.tolist()
    assert ours.seen == plain.seen
    if kind == "oracle":
        assert drafter.last_speculation.mean_acceptance_length > 2


@pytest.mark.parametrize("kind", ["oracle", "half", "untouched"])
def test_processor_with_values_of_its_own_per_row(kind):
    """A caller's processor may hold one bias per row of the batch."""
    target, inputs = TARGETS["llama"], ragged([7, 3, 7])
    bias = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    drafter = make_drafter(target)
    if kind != "untouched":
        scripted(drafter, kind, target)
    assert_equal_text(target, drafter, inputs, 14, logits_processor=[lambda ids, scores: scores + bias])


@pytest.mark.parametrize("name", ["repetition", "ngram", "bad_words", "suppress", "penalties", "bias"])
def test_drafts_go_through_the_processors(name):
    """The drafter is given the library's processors of the call."""
    target = TARGETS["llama"]
    drafter = make_drafter(target)
    drafted = []

    def record(*args, logits_processor=None, **kwargs):
        drafted.append(logits_processor)
        return type(drafter).draft(drafter, *args, logits_processor=logits_processor, **kwargs)

    drafter.draft = record
    assert_equal_text(target, drafter, as_inputs(prompt_ids()), 12, **PROCESSORS[name])
    assert all(processors and len(processors.processors) for processors in drafted)


# Sampling -----------------------------------------------------------------------------------------------------------

SAMPLED = {
    "cold": {"temperature": 0.2, "top_k": 0},
    "warm": {"temperature": 0.7, "top_k": 0},
    "own": {"temperature": 1.0, "top_k": 0},
    "hot": {"temperature": 1.5, "top_k": 0},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_p": {"temperature": 0.9, "top_k": 0, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "top_k": 0, "min_p": 0.1},
    "typical": {"temperature": 1.0, "top_k": 0, "typical_p": 0.8},
    "penalty": {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3},
    "ends": {"temperature": 1.5, "top_k": 0, "eos_token_id": [5, 9, 17, 23, 42]},
    "returns": {"temperature": 1.0, "top_k": 0, "num_return_sequences": 3},
}


def drafter_of(kind: str, target, texts):
    drafter = make_drafter(target, schedule="adaptive" if kind.startswith("adaptive") else "constant")
    if kind == "parallel":
        drafter.generation_config.rollout = "parallel"
    if kind == "pool":
        drafter.generation_config.candidate_pool_size = 5
    if kind == "adaptive drafter":
        drafter.generation_config.lookup = False
    patterns = {"oracle": (6,), "half": (2,), "wrong": (0,), "mixed": (3, 0, 5, 1, 6, 2), "adaptive mixed": (6, 0, 3)}
    return mixed(drafter, texts, patterns[kind]) if kind in patterns else drafter


@pytest.mark.parametrize("lengths", [(7,), (7, 3, 9)])
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("family", ATTENTIONS)
def test_sampled_text_is_plain_samplings(family, name, lengths):
    target, inputs, kwargs = TARGETS[family], ragged(lengths), SAMPLED[name]
    torch.manual_seed(0)
    texts = target.generate(**inputs, max_new_tokens=16, do_sample=True, **kwargs)
    kinds = ["oracle", "half", "wrong", "mixed", "adaptive mixed", "adaptive", "adaptive drafter", "own", "parallel"]
    for kind in [*kinds, "pool"]:
        drafter = drafter_of(kind, target, texts)
        plain = assert_same_draws(target, drafter, inputs, **kwargs)
        if kind == "oracle" and name not in ("ends", "returns"):
            assert drafter.last_speculation.mean_acceptance_length > 2
        assert len(drafter.last_speculation.acceptance_lengths) == len(plain)


def test_synthid_watermarks():
    """A processor with a state for every row, which plain decoding moves on at every token."""
    config = SynthIDTextWatermarkingConfig(keys=[3, 7, 11], ngram_len=3, context_history_size=16)
    target = TARGETS["llama"]
    for inputs in (as_inputs(prompt_ids()), ragged([7, 4])):
        for drafter in (make_drafter(target), make_drafter(target, schedule="adaptive")):
            assert_same_draws(target, drafter, inputs, temperature=0.7, top_k=0, watermarking_config=config)


def test_noise_ahead_is_the_noise_of_the_next_draws():
    """`torch.multinomial` takes `argmax(probs / noise)`; looking ahead leaves the generator where it was."""
    torch.manual_seed(4)
    noise, before = NoiseAhead(torch.device("cpu"), (3, VOCAB)), torch.get_rng_state()
    columns = [noise[i] for i in (2, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    for _ in range(2):  # overtaken by draws, the columns move up
        for i in (1, 2, 0):
            probs = torch.full((3, VOCAB), 1 / VOCAB)
            expected = (probs / columns[i]).argmax(-1)
            assert torch.equal(noise[0], columns[i])
            assert torch.equal(torch.multinomial(probs, 1)[:, 0], expected)
        columns = [noise[i] for i in (2, 0, 1)]


def test_a_foreign_draw_in_between_is_noticed():
    """A criterion that draws from the default generator moves the noise; the text stays plain sampling's."""
    target = TARGETS["llama"]

    def draws(ids, scores):
        torch.rand(1)
        return scores

    for inputs in (as_inputs(prompt_ids()), ragged([7, 4])):
        drafter = make_drafter(target)
        assert_same_draws(target, drafter, inputs, temperature=0.7, top_k=0, logits_processor=[draws])


def test_the_drafter_shares_the_noise():
    """A drafter with the target's own logits agrees with every draw: nothing of its own is random."""
    target = TARGETS["llama"]
    drafter = make_drafter(target)

    def draft(target, anchor_ids, context, cache, *, input_ids, max_drafts, noise, logits_processor, **kwargs):
        ids = input_ids
        for i in range(max_drafts):
            with torch.no_grad():
                logits = logits_processor(ids, target(ids).logits[:, -1])
            ids = torch.cat([ids, (logits - noise[i].log()).argmax(-1, keepdim=True)], dim=1)
        return DraftOutput(ids[:, input_ids.shape[1] :])

    drafter.draft = draft
    for inputs in (as_inputs(prompt_ids()), {"input_ids": prompt_ids(7, batch=3)}):
        assert_same_draws(target, drafter, inputs, temperature=0.8, top_k=0)
        stats = drafter.last_speculation
        assert stats.num_accepted == stats.num_drafted > 0


def test_scores_of_sampled_calls(target):
    drafter = make_drafter(target)
    records = []
    for extra in ({}, {"assistant_model": drafter}):
        torch.manual_seed(2)
        record = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        records.append(target.generate(**ragged([7, 4]), max_new_tokens=9, do_sample=True, top_k=7, **record, **extra))
    assert records[0].sequences.tolist() == records[1].sequences.tolist()
    for ours, theirs in zip(records[1].scores, records[0].scores, strict=True):
        assert torch.equal(ours.isinf(), theirs.isinf())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_cold_sampling_is_greedy_and_seeds_repeat(target):
    inputs, drafter = ragged([7, 5]), make_drafter(target)
    greedy, _ = both(target, drafter, inputs, 16)
    cold = assert_same_draws(target, drafter, inputs, temperature=1e-6, top_k=0)
    assert cold.tolist() == greedy.tolist()
    warm = [assert_same_draws(target, drafter, inputs, seed=seed, temperature=1.5, top_k=0) for seed in (1, 2)]
    assert warm[0].tolist() != warm[1].tolist()
