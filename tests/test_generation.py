"""The decode loop: assisted text equals plain text, whatever is proposed and however `generate` is called."""

import functools
import itertools

import pytest
import torch
from conftest import (
    BLOCK,
    MASK_ID,
    VOCAB,
    Continuations,
    control,
    make_drafter,
    make_target,
    prompt_ids,
    ragged,
    scripted,
)
from domino_spec import DominoGenerationConfig, DraftOutput, install_dispatch, remove_dispatch
from domino_spec.generation_domino import decoder_layers
from scipy.stats import chi2_contingency, chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, GenerationMixin, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.streamers import BaseStreamer

KINDS = ("oracle", "wrong", "half")


def as_inputs(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def both(target, drafter, inputs, max_new_tokens: int = 20, **kwargs):
    """Plain and assisted output of the same call; keyword arguments that are functions are made afresh for each."""

    def call(**extra):
        fresh = {key: value() if key in ("stopping_criteria", "streamer") else value for key, value in kwargs.items()}
        return target.generate(**inputs, max_new_tokens=max_new_tokens, **{"do_sample": False} | fresh, **extra)

    return call(), call(assistant_model=drafter)


def assert_equal_text(target, drafter, inputs, max_new_tokens: int = 20, **kwargs) -> torch.Tensor:
    plain, assisted = both(target, drafter, inputs, max_new_tokens, **kwargs)
    assert assisted.tolist() == plain.tolist()
    return plain


def eos_at(target, inputs, position: int, rows=(0,), **kwargs) -> int:
    """The greedy token at new `position` of the first of `rows`, which must not come earlier there."""
    plain = target.generate(**inputs, max_new_tokens=position + 1, do_sample=False, **kwargs)
    return plain[rows[0], -1].item()


def varied_prompt(target, length: int = 7, distinct: int = 4) -> dict[str, torch.Tensor]:
    """A prompt whose first `distinct` greedy tokens differ, so that a stop at one of them is not met before it."""
    for seed in range(100):
        inputs = as_inputs(prompt_ids(length, seed=seed))
        new = target.generate(**inputs, max_new_tokens=distinct, do_sample=False)[0, length:].tolist()
        if len(set(new)) == distinct:
            return inputs
    raise AssertionError("no prompt with varied continuation")


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


class Recorder(BaseStreamer):
    """Everything a streamer was given, flat, and whether it was ended."""

    made: list = []

    def __init__(self):
        self.tokens, self.ended = [], 0
        Recorder.made.append(self)

    def put(self, value):
        self.tokens.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


def assert_same_record(plain, assisted, equal_scores: bool = True):
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = getattr(assisted, name), getattr(plain, name)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


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


class LastTokenIs(StoppingCriteria):
    """Reads the last token only: anything seen late is missed."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class LengthIs(StoppingCriteria):
    """Fires at one exact length and at no other."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] == self.length)


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


def biased(drafter, target, bias_scale: float = 0.3):
    """Draft from the target's law under a fixed bias: often accepted, often rejected, and always another law."""
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(11)) * bias_scale
    known = {}

    def law(row):
        if row not in known:
            with torch.no_grad():
                known[row] = target(torch.tensor([row])).logits[0, -1] + bias
        return known[row]

    def draft(target, anchor_ids, context, cache, *, input_ids, max_drafts, logits_processor=None, do_sample=False):
        assert do_sample
        rows, tokens, laws = list(input_ids), [], []
        for _ in range(max_drafts):
            logits = torch.stack([law(tuple(row.tolist())) for row in rows])
            if logits_processor is not None:
                logits = logits_processor(rows, logits)
            token = torch.multinomial(logits.softmax(-1), 1)
            rows = [torch.cat([row, token[i]]) for i, row in enumerate(rows)]
            tokens.append(token)
            laws.append(logits)
        if not tokens:
            return DraftOutput(anchor_ids[:, :0], target.lm_head.weight.new_zeros(len(rows), 0, VOCAB))
        return DraftOutput(torch.cat(tokens, 1), torch.stack(laws, 1))

    drafter.draft = draft
    return drafter


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


# F26: unusual calls -------------------------------------------------------------------------------------------------


def test_several_return_sequences(target):
    drafter = scripted(make_drafter(target), "half", target)
    inputs = ragged([7, 4])
    torch.manual_seed(0)
    output = target.generate(
        **inputs, max_new_tokens=10, do_sample=True, num_return_sequences=2, assistant_model=drafter
    )
    assert output.shape == (4, 17)
    assert output[:, :7].tolist() == inputs["input_ids"].repeat_interleave(2, 0).tolist()
    assert output[0].tolist() != output[1].tolist()
    assert len(drafter.last_speculation.acceptance_lengths) == 4


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"use_cache": False}, "use_cache"),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
)
def test_unsupported_calls_are_refused(kwargs, words):
    target = make_target()
    drafter = scripted(make_drafter(target), "oracle", target)
    with pytest.raises(ValueError, match=f"(?i){words}"):
        target.generate(prompt_ids(), max_new_tokens=8, do_sample=False, assistant_model=drafter, **kwargs)


def test_beams_run_without_drafts():
    """The library warns that the assistant is ignored; the text is beam search's."""
    target = make_target()
    drafter = scripted(make_drafter(target), "oracle", target)
    plain = target.generate(prompt_ids(), max_new_tokens=8, num_beams=3, do_sample=False)
    beams = target.generate(prompt_ids(), max_new_tokens=8, num_beams=3, do_sample=False, assistant_model=drafter)
    assert beams.tolist() == plain.tolist()
    assert drafter.last_speculation is None
    with pytest.raises(ValueError, match="streamer"):
        target.generate(prompt_ids(), num_beams=3, max_new_tokens=8, assistant_model=drafter, streamer=Recorder())


def test_unsupported_batches_are_refused():
    target = make_target()
    drafter = make_drafter(target)
    inputs = ragged([7, 4])
    with pytest.raises(ValueError, match="streamer"):
        target.generate(**inputs, max_new_tokens=8, assistant_model=drafter, streamer=Recorder())
    with pytest.raises(ValueError, match="one sequence at a time"):
        target.generate(
            **inputs,
            max_new_tokens=8,
            assistant_model=drafter,
            return_dict_in_generate=True,
            output_hidden_states=True,
        )


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family_name", ["qwen3", "llama", "mistral"])
def test_passed_cache_over_two_turns(family_name, kind):
    """The cache of the first call serves the second; both equal plain decoding with a cache of its own."""
    target = make_target(family_name, **({"sliding_window": 8} if family_name == "mistral" else {}))
    for assistant in (None, scripted(make_drafter(target), kind, target)):
        extra = {"do_sample": False} | ({} if assistant is None else {"assistant_model": assistant})
        first = target.generate(
            **as_inputs(prompt_ids()),
            past_key_values=DynamicCache(config=target.config),
            max_new_tokens=9,
            return_dict_in_generate=True,
            **extra,
        )
        assert first.past_key_values.get_seq_length() == 15
        second = as_inputs(torch.cat([first.sequences, prompt_ids(5, seed=8)], dim=1))
        out = target.generate(**second, past_key_values=first.past_key_values, max_new_tokens=15, **extra)
        assert out.tolist() == target.generate(**second, max_new_tokens=15, do_sample=False).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family_name", ["llama", "mistral"])
def test_hidden_states_and_attentions(family_name, kind):
    target = make_target(family_name)
    target.set_attn_implementation("eager")
    drafter = scripted(make_drafter(target), kind, target)
    inputs = varied_prompt(target)
    plain, assisted = both(
        target,
        drafter,
        inputs,
        9,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_attentions=True,
        eos_token_id=eos_at(target, inputs, 3),
    )
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(assisted, name), getattr(plain, name)
        assert len(ours) == len(theirs) == 4
        for step, reference in zip(ours, theirs, strict=True):
            for a, b in zip(step, reference, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def count_hooks(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_are_removed():
    target = make_target()
    drafter = make_drafter(target)
    before = count_hooks(target)
    target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)
    assert count_hooks(target) == before

    def fail(*args, **kwargs):
        raise RuntimeError("no drafts today")

    drafter.draft = fail
    with pytest.raises(RuntimeError, match="no drafts today"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)
    assert count_hooks(target) == before


def test_too_many_drafts_are_refused():
    target = make_target()
    drafter = make_drafter(target)
    drafter.draft = lambda *args, **kwargs: DraftOutput(
        torch.zeros(1, 40, dtype=torch.long), torch.zeros(1, 40, VOCAB)
    )
    with pytest.raises(ValueError, match="max_drafts"):
        target.generate(prompt_ids(), max_new_tokens=8, assistant_model=drafter)


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
    assert stats.num_rounds == len(proposed) == len(calls) - 1
    width = max(lengths)
    expected = [[] for _ in lengths]
    drafted = accepted_total = 0
    positions = [0] * BLOCK
    for rows, drafts in proposed:
        for row, tokens in zip(rows, drafts, strict=True):
            number = next(i for i, text in enumerate(output.tolist()) if text[: len(row)] == row)
            coming = output[number, len(row) :].tolist()
            hits = 0
            while hits < min(len(tokens), len(coming)) and tokens[hits] == coming[hits]:
                positions[hits] += 1
                hits += 1
            drafted += len(tokens)
            accepted_total += hits
            expected[number].append(min(hits + 1, len(coming)))
    assert stats.acceptance_lengths == expected
    assert [sum(row) for row in expected] == [16] * len(lengths)
    assert stats.num_drafted == drafted
    assert stats.num_accepted == accepted_total
    rounds = sum(map(len, expected))
    assert stats.mean_acceptance_length == pytest.approx(16 * len(lengths) / rounds)
    longest = len(stats.acceptance_rate_per_position)
    assert stats.acceptance_rate_per_position == pytest.approx([count / rounds for count in positions[:longest]])
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


# The way in ---------------------------------------------------------------------------------------------------------


def test_other_assistants_are_untouched():
    target = make_target()
    assistant = make_target("llama", seed=4)
    plain = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False)
    assisted = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False, assistant_model=assistant)
    assert assisted.tolist() == plain.tolist()
    lookup = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    assert lookup.tolist() == plain.tolist()
    with pytest.raises(ValueError, match="num_return_sequences"):
        target.generate(
            prompt_ids(), max_new_tokens=4, do_sample=True, num_return_sequences=2, assistant_model=assistant
        )


def test_dispatch_is_idempotent_and_can_be_removed():
    target = make_target()
    drafter = scripted(make_drafter(target), "oracle", target)
    installed = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode
    install_dispatch()
    assert (GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode) == installed
    try:
        remove_dispatch()
        assert GenerationMixin._assisted_decoding is installed[0].__wrapped__
        assert GenerationMixin._validate_generation_mode is installed[1].__wrapped__
        drafter.last_speculation = None
        with pytest.raises(Exception):  # noqa: B017 - whatever the library says to an assistant that cannot generate
            target.generate(prompt_ids(), max_new_tokens=4, do_sample=False, assistant_model=drafter)
        assert drafter.last_speculation is None
    finally:
        install_dispatch()
    assert_equal_text(target, drafter, as_inputs(prompt_ids()))
    assert drafter.last_speculation.mean_acceptance_length > 1


def test_prepared_config_is_not_read_for_knobs():
    """`generate` carries library defaults for assistants (20 drafts, threshold 0.4); the drafter's own knobs count."""
    target = make_target()
    target.generation_config.num_assistant_tokens = 1
    target.generation_config.assistant_confidence_threshold = 1.0
    drafter = make_drafter(target)
    assert_equal_text(target, drafter, as_inputs(prompt_ids()))
    assert len(drafter.last_speculation.acceptance_rate_per_position) == BLOCK


def test_knobs_are_checked_at_the_call():
    target = make_target()
    drafter = make_drafter(target)
    drafter.generation_config = DominoGenerationConfig()
    drafter.generation_config.rollout = "sideways"
    with pytest.raises(ValueError, match="rollout is 'sideways'"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


def test_mask_token_in_the_prompt():
    """The mask id is an ordinary token for the target."""
    target = make_target()
    ids = prompt_ids()
    ids[0, 3] = MASK_ID
    assert_equal_text(target, scripted(make_drafter(target), "half", target), as_inputs(ids))


@pytest.mark.parametrize("kind", ["oracle", "half"])
def test_prompt_given_as_embeddings(kind):
    target = make_target("llama")
    ids = prompt_ids()
    embeds = target.get_input_embeddings()(ids)
    plain = target.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False)
    right = plain[0].tolist()

    def propose(row, n):
        tokens = (right[len(row) :] + [0] * n)[:n]
        return [token if kind == "oracle" or i < 2 else (token + 1) % 58 for i, token in enumerate(tokens)]

    drafter = control(make_drafter(target), propose)
    drafted = target.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert torch.equal(plain, drafted)
    assert drafter.last_speculation.mean_acceptance_length > 1


def test_positions_of_the_caller():
    target = make_target("llama")
    drafter = scripted(make_drafter(target), "wrong", target)
    ids = prompt_ids()
    kwargs = {"max_new_tokens": 12, "do_sample": False, "position_ids": torch.arange(7)[None] * 3 + 11}
    plain = target.generate(ids, **kwargs)
    assert not torch.equal(plain, target.generate(ids, max_new_tokens=12, do_sample=False))
    assert torch.equal(plain, target.generate(ids, assistant_model=drafter, **kwargs))


class RowLimits(StoppingCriteria):
    """Another length limit for every row of the batch."""

    def __init__(self, limits):
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.limits


@pytest.mark.parametrize("kind", ["oracle", "half"])
def test_criterion_with_values_of_its_own_per_row(kind):
    target = make_target("llama")
    drafter = scripted(make_drafter(target), kind, target)
    plain = assert_equal_text(
        target,
        drafter,
        ragged([7, 4]),
        eos_token_id=63,
        stopping_criteria=lambda: StoppingCriteriaList([RowLimits([10, 14])]),
    )
    assert plain.shape[1] == 14


def test_guidance_is_for_one_sequence():
    target = make_target("llama")
    drafter = make_drafter(target)
    assert_equal_text(target, drafter, as_inputs(prompt_ids()), guidance_scale=1.5)
    with pytest.raises(ValueError, match="one sequence at a time"):
        target.generate(**ragged([7, 4]), max_new_tokens=4, guidance_scale=1.5, assistant_model=drafter)


def test_vision_layers_are_not_tapped():
    class Both(torch.nn.Module):
        def __init__(self, target):
            super().__init__()
            self.vision = torch.nn.ModuleList(torch.nn.Identity() for _ in range(4))
            self.text, self.config = target, target.config

        def get_decoder(self):
            return self.text.get_decoder()

    target = make_target("llama")
    assert decoder_layers(Both(target)) is target.model.layers


def test_pictures_are_refused():
    target = make_target("llama")
    with pytest.raises(ValueError, match="reads text only, got pixel_values"):
        make_drafter(target).speculative_decode(
            target, prompt_ids(), generation_config=target.generation_config, pixel_values=torch.zeros(1, 3, 4, 4)
        )


def test_a_wrapper_of_somebody_else_stays():
    ours = GenerationMixin._assisted_decoding

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    try:
        GenerationMixin._assisted_decoding = theirs
        remove_dispatch()
        assert GenerationMixin._assisted_decoding is theirs
    finally:
        GenerationMixin._assisted_decoding = ours
        install_dispatch()


def test_a_callers_cache_stops_recording():
    target = make_target("mistral", sliding_window=8)
    drafter = scripted(make_drafter(target), "half", target)
    cache = DynamicCache(config=target.config)
    target.generate(prompt_ids(), max_new_tokens=20, do_sample=False, assistant_model=drafter, past_key_values=cache)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
