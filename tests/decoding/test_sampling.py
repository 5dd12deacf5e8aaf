"""Logits processors and sampling: each row with its own prefix, and exactly the target's law."""

import pytest
import torch
from checks import as_inputs, assert_equal_text, biased
from scipy.stats import chi2_contingency, chisquare
from tiny import (
    VOCAB,
    make_drafter,
    make_target,
    prompt_ids,
    ragged,
    scripted,
)
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

# Processors ---------------------------------------------------------------------------------------------------------


def allowed(batch_id, ids):
    """Row 0 writes even ids, row 1 odd ones, others those that differ from their last token's parity."""
    parity = batch_id if batch_id < 2 else 1 - int(ids[-1]) % 2
    return list(range(parity, 58, 2))


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.8},
    "ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [7, 9], [1], [2], [3, 4]]},
    "allowed": {"prefix_allowed_tokens_fn": allowed},
    "suppress": {"suppress_tokens": [1, 2, 3, 4], "begin_suppress_tokens": [5, 6]},
    "forced_end": {"forced_eos_token_id": 8},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "exponential_decay_length_penalty": (3, 1.4)},
}


@pytest.mark.parametrize("kind", ["oracle", "half", "untouched"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name, kind):
    target = make_target("qwen3")
    kwargs = dict(PROCESSORS[name])
    if name == "penalties":
        kwargs["eos_token_id"] = 9
    for inputs in (ragged([7, 3, 7]), as_inputs(prompt_ids())):
        drafter = make_drafter(target)
        if kind != "untouched":
            single = {key: value for key, value in kwargs.items() if key == "bad_words_ids"}
            scripted(drafter, kind, target, **single)
        assert_equal_text(target, drafter, inputs, 14, **kwargs)


def test_processors_see_only_their_own_prefix():
    """Every call gets prefixes that are really prefixes of the text or of text and drafts, never of other rows."""
    target = make_target()
    inputs = ragged([7, 4])
    drafter = scripted(make_drafter(target), "half", target)
    starts = {tuple(row.tolist()) for row in inputs["input_ids"]}

    def check(ids, scores):
        assert all(tuple(row[:7].tolist()) in starts for row in ids)
        assert scores.shape[0] == ids.shape[0]
        return scores

    assert_equal_text(target, drafter, inputs, logits_processor=[check])


@pytest.mark.parametrize("kind", ["oracle", "half", "untouched"])
def test_processor_with_values_of_its_own_per_row(kind):
    """A caller's processor may hold one bias per row of the batch."""
    target = make_target()
    inputs = ragged([7, 3, 7])
    bias = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    drafter = make_drafter(target)
    if kind != "untouched":
        scripted(drafter, kind, target)
    assert_equal_text(target, drafter, inputs, 14, logits_processor=[lambda ids, scores: scores + bias])


def test_processor_with_a_memory():
    """Classifier-free guidance runs the target itself and counts its calls: it sees each committed prefix once."""
    target = make_target()
    inputs = as_inputs(prompt_ids())
    drafter = scripted(make_drafter(target), "half", target)
    assert_equal_text(target, drafter, inputs, 10, guidance_scale=1.5)


# F9: sampling -------------------------------------------------------------------------------------------------------

WARPED = {"do_sample": True, "temperature": 0.7, "top_k": 3, "top_p": 0.9}


def test_sampling_follows_the_targets_law():
    """20,000 draws: the two tokens after the prefill's are drafted, and distributed as plain sampling's."""
    target = make_target(initializer_range=0.2)
    drafter = biased(make_drafter(target), target)
    inputs = as_inputs(prompt_ids(4))

    def draws(**extra):
        parts = []
        for seed in range(10):
            torch.manual_seed(seed)
            kwargs = WARPED | {"max_new_tokens": 4, "num_return_sequences": 2000}
            parts.append(target.generate(**inputs, **kwargs, **extra)[:, 4:])
        return torch.cat(parts)

    plain, assisted = draws(), draws(assistant_model=drafter)
    stats = drafter.last_speculation
    assert 0.2 < stats.num_accepted / stats.num_drafted < 0.9
    for first, last in ((0, 2), (1, 3), (2, 4)):
        counts = []
        for sample in (plain, assisted):
            pairs = sample[:, first] * VOCAB + (sample[:, last - 1] if last - first > 1 else 0)
            counts.append(torch.bincount(pairs, minlength=VOCAB * VOCAB))
        table = torch.stack(counts)
        common = table.sum(0) >= 20
        rest = table[:, ~common].sum(1, keepdim=True)
        table = torch.cat([table[:, common], rest], 1) if rest.sum() >= 20 else table[:, common]
        assert table.shape[1] > 3
        assert chi2_contingency(table.numpy()).pvalue > 0.001


@pytest.mark.parametrize("rollout", ["sequential", "parallel"])
@pytest.mark.parametrize("encoder", ["gru", "attention"])
def test_reported_law_is_the_law_drawn_from(encoder, rollout):
    """Drafts of 6,000 equal rows: the first by its reported law, the second by its law after each first."""
    target = make_target("qwen3")
    drafter = make_drafter(target, causal_encoder=encoder, pure_draft_prefix_len=0)
    drafter.generation_config.rollout = rollout
    rows = 6000
    torch.manual_seed(0)
    context = torch.randn(1, 5, 2 * 32).expand(rows, -1, -1)
    anchor = torch.full((rows, 1), 9)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)])
    output = drafter.draft(
        target,
        anchor,
        context,
        drafter.new_cache(rows),
        input_ids=anchor.expand(-1, 6),
        max_drafts=2,
        logits_processor=processors,
        do_sample=True,
    )
    laws = output.logits.detach().softmax(-1)
    groups = [(output.token_ids[:, 0], laws[:, 0])]
    for token in output.token_ids[:, 0].unique():
        chosen = output.token_ids[:, 0] == token
        groups.append((output.token_ids[chosen, 1], laws[chosen, 1]))
    for tokens, law in groups:
        torch.testing.assert_close(law, law[:1].expand_as(law))
        counts = torch.bincount(tokens, minlength=VOCAB)
        support = law[0] > 0
        assert counts[~support].sum() == 0 and support.sum() == 3
        expected = law[0][support].double() / law[0][support].double().sum() * len(tokens)
        assert chisquare(counts[support].numpy(), expected.numpy()).pvalue > 0.001


@pytest.mark.parametrize("kind", ["half", "untouched"])
def test_cold_sampling_is_greedy_and_seeds_repeat(target, kind):
    inputs = ragged([7, 5])
    drafter = make_drafter(target)
    if kind != "untouched":
        scripted(drafter, kind, target)
    greedy = target.generate(**inputs, max_new_tokens=16, do_sample=False)
    torch.manual_seed(0)
    cold = target.generate(
        **inputs, max_new_tokens=16, do_sample=True, temperature=1e-6, top_k=0, assistant_model=drafter
    )
    assert cold.tolist() == greedy.tolist()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        warm = {"do_sample": True, "temperature": 1.5, "top_k": 0}
        runs.append(target.generate(**inputs, max_new_tokens=16, **warm, assistant_model=drafter).tolist())
    assert runs[0] == runs[1] != runs[2]
