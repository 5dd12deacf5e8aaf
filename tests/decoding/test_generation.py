"""The decode loop: assisted text equals plain text, whatever is proposed and wherever it ends; and its counts."""

import itertools

import pytest
import torch
from checks import (
    KINDS,
    LastTokenIs,
    LengthIs,
    Recorder,
    as_inputs,
    assert_equal_text,
    assert_same_record,
    both,
    eos_at,
    varied_prompt,
)
from tiny import (
    BLOCK,
    VOCAB,
    Continuations,
    control,
    make_drafter,
    make_target,
    prompt_ids,
    ragged,
    scripted,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

# Base property ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_scripted_drafters_keep_the_text(target, kind, shift_label):
    drafter = scripted(make_drafter(target, shift_label=shift_label), kind, target)
    assert_equal_text(target, drafter, as_inputs(prompt_ids()))
    stats = drafter.last_speculation
    expected = {"wrong": 1.0, "half": 3.0}
    if kind == "oracle":
        assert stats.mean_acceptance_length > 3
        assert stats.num_accepted == stats.num_drafted > 0
    else:
        # Nineteen tokens after the prefill's: the last round may be cut short.
        assert stats.mean_acceptance_length == pytest.approx(expected[kind], abs=0.3)
        assert stats.acceptance_lengths[0][0] == expected[kind]


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("rollout", ["sequential", "parallel"])
@pytest.mark.parametrize("encoder", ["gru", "attention"])
def test_untouched_drafters_keep_the_text(target, encoder, rollout, shift_label):
    drafter = make_drafter(target, causal_encoder=encoder, shift_label=shift_label)
    drafter.generation_config.rollout = rollout
    assert_equal_text(target, drafter, as_inputs(prompt_ids()))
    drafts = BLOCK if shift_label else BLOCK - 1
    assert drafter.last_speculation.num_drafted > 0
    assert len(drafter.last_speculation.acceptance_rate_per_position) == drafts
    assert_equal_text(target, drafter, ragged([4, 7]), 12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(7, 4), (3, 9, 1, 6, 9)])
def test_ragged_batches(target, kind, lengths):
    drafter = scripted(make_drafter(target), kind, target)
    assert_equal_text(target, drafter, ragged(lengths))
    assert len(drafter.last_speculation.acceptance_lengths) == len(lengths)


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
@pytest.mark.parametrize("family_name", ["qwen3", "mistral", "gemma3_text"])
def test_ragged_ends_and_sliding_windows(family_name, kind):
    """Rows keep different numbers of tokens a round and end at different ones, over windows shorter than the text."""
    extra = {}
    if family_name == "mistral":
        extra = {"sliding_window": 8}
    if family_name == "gemma3_text":
        layers = ["sliding_attention", "full_attention"] * 2
        extra = {"sliding_window": 8, "layer_types": layers, "query_pre_attn_scalar": 8}
    target = make_target(family_name, **extra)
    inputs = ragged([12, 3, 9, 1, 12])
    free = target.generate(**inputs, max_new_tokens=30, do_sample=False)[:, 12:].tolist()
    # The ids that end the rows at the most different places.
    pairs = itertools.combinations(range(VOCAB), 2)
    ends = max(pairs, key=lambda pair: len({next((i for i, t in enumerate(row) if t in pair), 30) for row in free}))
    assert len({next((i for i, t in enumerate(row) if t in ends), 30) for row in free}) >= 3
    drafter = make_drafter(target)
    if kind == "mixed":
        right = Continuations(target)

        def propose(row, n):
            keep = int(row.sum()) % (n + 1)
            return [token if i < keep else (token + 1) % 58 for i, token in enumerate(right(row, n))]

        control(drafter, propose)
    else:
        scripted(drafter, kind, target)
    plain = assert_equal_text(target, drafter, inputs, 30, eos_token_id=list(ends))
    assert plain.shape[1] > 12
    assert_equal_text(target, drafter, inputs, 30)
    if kind == "oracle":
        assert drafter.last_speculation.mean_acceptance_length > 2
    assert_equal_text(target, drafter, as_inputs(prompt_ids(12)), 30)


@pytest.mark.parametrize("knob", [{"num_assistant_tokens": 2}, {"assistant_confidence_threshold": 0.9}])
def test_fewer_drafts(knob):
    target = make_target()
    drafter = make_drafter(target)
    for name, value in knob.items():
        setattr(drafter.generation_config, name, value)
    inputs = ragged([5, 7])
    assert_equal_text(target, drafter, inputs)
    stats = drafter.last_speculation
    assert stats.num_drafted < BLOCK * sum(map(len, stats.acceptance_lengths))
    if "num_assistant_tokens" in knob:
        assert len(stats.acceptance_rate_per_position) == 2


def test_head_off():
    target = make_target()
    drafter = make_drafter(target)
    drafter.generation_config.use_head = False
    assert_equal_text(target, drafter, as_inputs(prompt_ids()))


# F1: ends inside a block --------------------------------------------------------------------------------------------


RECORD = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_list", [False, True])
def test_eos_inside_a_block(target, kind, as_list):
    inputs = varied_prompt(target)
    eos = eos_at(target, inputs, 2)
    drafter = scripted(make_drafter(target), kind, target)
    Recorder.made.clear()
    plain, assisted = both(
        target, drafter, inputs, eos_token_id=[63, eos] if as_list else eos, streamer=Recorder, **RECORD
    )
    assert plain.sequences.shape[1] == 7 + 3
    assert_same_record(plain, assisted)
    theirs, ours = Recorder.made
    assert ours.tokens == theirs.tokens and ours.ended == theirs.ended == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_max_new_tokens_inside_a_block(target, kind, limit):
    drafter = scripted(make_drafter(target), kind, target)
    Recorder.made.clear()
    plain, assisted = both(target, drafter, as_inputs(prompt_ids()), limit, streamer=Recorder, **RECORD)
    assert plain.sequences.shape[1] == 7 + limit
    assert_same_record(plain, assisted)
    theirs, ours = Recorder.made
    assert ours.tokens == theirs.tokens and ours.ended == theirs.ended == 1


def test_max_length_and_min_new_tokens(target):
    inputs = varied_prompt(target)
    eos = eos_at(target, inputs, 2)
    drafter = scripted(make_drafter(target), "oracle", target)
    plain = assert_equal_text(target, drafter, inputs, 16, eos_token_id=eos, min_new_tokens=9)
    assert plain.shape[1] > 7 + 8
    plain = target.generate(**inputs, max_length=10, do_sample=False)
    assert (
        target.generate(**inputs, max_length=10, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()
    )


def test_records_of_a_batch(target):
    """Rows that ended keep zeros in the record; everything before equals plain decoding."""
    inputs = ragged([7, 4])
    drafter = scripted(make_drafter(target), "half", target)
    plain, assisted = both(target, drafter, inputs, 12, **RECORD)
    assert_same_record(plain, assisted)


# F5: criteria -------------------------------------------------------------------------------------------------------


class Calls(StoppingCriteria):
    """Counts how often it was asked."""

    def __init__(self, most):
        self.most, self.calls = most, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((input_ids.shape[0],), self.calls >= self.most)


class ScoresAre(StoppingCriteria):
    """Reads as many scores as tokens were generated."""

    def __init__(self, start, most):
        self.start, self.most = start, most

    def __call__(self, input_ids, scores, **kwargs):
        assert len(scores) == input_ids.shape[1] - self.start
        return torch.full((input_ids.shape[0],), len(scores) >= self.most)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_custom_criteria_inside_a_block(target, kind, place):
    inputs = varied_prompt(target)
    token = eos_at(target, inputs, place)
    drafter = scripted(make_drafter(target), kind, target)
    made = (lambda: LastTokenIs(token), lambda: LengthIs(7 + place + 1), lambda: Calls(place + 1))
    for make in made:
        plain = assert_equal_text(
            target, drafter, inputs, stopping_criteria=lambda make=make: StoppingCriteriaList([make()])
        )
        assert plain.shape[1] == 7 + place + 1
    plain, assisted = both(
        target,
        drafter,
        inputs,
        stopping_criteria=lambda: StoppingCriteriaList([ScoresAre(7, place + 1)]),
        **RECORD,
    )
    assert plain.sequences.shape[1] == 7 + place + 1
    assert_same_record(plain, assisted)


@pytest.mark.parametrize("kind", ["oracle", "half"])
def test_custom_criterion_in_a_batch(target, kind):
    inputs = ragged([7, 4, 6])
    token = eos_at(target, inputs, 3)
    drafter = scripted(make_drafter(target), kind, target)
    plain = assert_equal_text(
        target,
        drafter,
        inputs,
        eos_token_id=63,
        stopping_criteria=lambda: StoppingCriteriaList([LastTokenIs(token)]),
    )
    assert 62 in plain[0, 7:].tolist()


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """One visible character per id."""
    vocabulary = {chr(48 + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(48)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=chr(48 + 62))


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_inside_a_block(target, kind):
    tokenizer = letters_tokenizer()
    inputs = varied_prompt(target)
    new = target.generate(**inputs, max_new_tokens=4, do_sample=False)[0, 7:].tolist()
    drafter = scripted(make_drafter(target), kind, target)
    stop = tokenizer.decode(new[1:3])
    assert len(stop) == 2
    plain = assert_equal_text(target, drafter, inputs, stop_strings=[stop], tokenizer=tokenizer)
    assert plain.shape[1] == 7 + 3


# Statistics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "untouched"])
@pytest.mark.parametrize("lengths", [(7,), (7, 4, 5)])
def test_statistics_equal_an_independent_count(kind, lengths):
    target = make_target()
    drafter = make_drafter(target)
    if kind != "untouched":
        scripted(drafter, kind, target)
    inputs = ragged(lengths)
    proposed = []  # per round: committed length of each row, drafts
    draft, forward, blocks = drafter.draft, target.forward, []

    def recording_draft(*args, input_ids, **kwargs):
        output = draft(*args, input_ids=input_ids, **kwargs)
        proposed.append(([row.tolist() for row in input_ids], output.token_ids.tolist()))
        blocks.clear()  # forwards of an oracle inside `draft` are not verification
        return output

    calls = []

    def counting_forward(*args, **kwargs):
        blocks.append(kwargs["input_ids"].shape)
        return forward(*args, **kwargs)

    def counting_draft(*args, **kwargs):
        calls.extend(blocks)
        return recording_draft(*args, **kwargs)

    drafter.draft, target.forward = counting_draft, counting_forward
    output = target.generate(**inputs, max_new_tokens=17, do_sample=False, assistant_model=drafter)
    calls.extend(blocks)
    del target.forward
    stats = drafter.last_speculation
    # The last token of all needs no drafts: nothing is asked for where there is no room.
    assert stats.num_rounds == len(proposed) + stats.num_plain_steps == len(calls) - 1
    width = max(lengths)
    expected = [[] for _ in lengths]
    drafted = accepted_total = 0
    positions = [0] * BLOCK
    for rows, drafts in proposed:
        coming = [text[len(row) :] for text, row in zip(output.tolist(), rows, strict=True)]
        hits = []
        for tokens, right in zip(drafts, coming, strict=True):
            pairs = zip(tokens, right, strict=False)
            hits.append(next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(tokens)))
        # Rows stay in step: the round ends at the first token that is not its row's draft.
        kept = min(min(hits) + 1, len(coming[0]))
        for number, tokens in enumerate(drafts):
            accepted = min(hits[number], kept)
            drafted += len(tokens)
            accepted_total += accepted
            for i in range(accepted):
                positions[i] += 1
            expected[number].append(kept)
    for row in expected:
        row += [1] * stats.num_plain_steps
    rounds = sum(map(len, expected))
    assert stats.acceptance_lengths == expected
    assert [sum(row) for row in expected] == [16] * len(lengths)
    if len(lengths) == 1:  # in a batch a token that is proposed again counts once
        assert stats.num_drafted == drafted
        assert stats.num_accepted == accepted_total
        longest = len(stats.acceptance_rate_per_position)
        assert stats.acceptance_rate_per_position == pytest.approx([count / rounds for count in positions[:longest]])
    assert stats.mean_acceptance_length == pytest.approx(16 * len(lengths) / rounds)
    assert output.shape == (len(lengths), width + 17)
    assert "\n" not in str(stats) and f"{stats.num_rounds} rounds" in str(stats)
    assert stats.total_seconds >= stats.draft_seconds + stats.verify_seconds > 0


def test_statistics_without_a_round():
    target = make_target()
    drafter = make_drafter(target)
    target.generate(prompt_ids(), max_new_tokens=1, assistant_model=drafter)
    stats = drafter.last_speculation
    assert stats.num_rounds == 0 and stats.mean_acceptance_length != stats.mean_acceptance_length
    assert "0 rounds" in str(stats)
