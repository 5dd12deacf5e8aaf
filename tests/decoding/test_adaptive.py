"""Adaptive length: what it chooses, that the text does not feel it, and that its counts are true."""

import copy
import functools
import random

import pytest
import torch
from checks import (
    KINDS,
    LastTokenIs,
    LengthIs,
    Recorder,
    assert_equal_text,
    assert_same_record,
    both,
    eos_at,
    varied_prompt,
)
from domino_spec import DraftOutput, generation_domino, speculation_domino, target_domino
from domino_spec.length_domino import AdaptiveLength, Costs, Proposals
from tiny import BLOCK, make_drafter, make_target, prompt_ids, ragged, scripted
from transformers import StoppingCriteriaList

# Choosing -----------------------------------------------------------------------------------------------------------


def simulate(policy, rounds: int, draft_cost, verify_cost, rate, rows: int = 1, seed: int = 0, confident=None):
    """Rounds with these costs and drafts right with probability `rate(round, row)`: seconds a token, widths, drafts.

    `confident` is what the drafter says of each of its drafts; None: it says nothing.
    """
    chance, seconds, tokens, widths, asked = random.Random(seed), 0.0, 0, [], []
    for number in range(rounds):
        proposals = Proposals([[] for _ in range(rows)], [], [True] * rows, 64, 0)
        n = policy.drafts_to_ask_for(proposals)
        if n:
            confidences = None if confident is None else torch.full((rows, n), confident)
            proposals.drafted = DraftOutput(torch.ones(rows, n, dtype=torch.long), None, confidences)
        policy.choose(proposals)
        right = [0] * rows
        for row in range(rows):
            while right[row] < proposals.width and chance.random() < rate(number, row):
                right[row] += 1
        kept = min(right) + 1
        new = [[1] * min(r, kept) + [2] * (kept - min(r, kept)) for r in right]
        cost = draft_cost(n) if n else 0.0, verify_cost(proposals.width)
        policy.observe(proposals, new, *cost)
        seconds, tokens = seconds + sum(cost), tokens + kept
        widths.append(proposals.width)
        asked.append(n)
    return seconds / tokens, widths, asked


@pytest.mark.parametrize("slope", [0.1, 0.6])
def test_wrong_drafts_cost_little(slope):
    """Seconds a token stay near a plain step's, though drafting costs half of one."""
    policy = AdaptiveLength(8, False)
    per_token, widths, asked = simulate(policy, 255, lambda n: 0.5, lambda n: 1 + slope * n, lambda i, row: 0)
    assert per_token < 1.05
    trials = [i for i, n in enumerate(asked) if n and i > 2]
    assert trials and len(trials) < 12 and all(b - a >= 8 for a, b in zip(trials, trials[1:], strict=False))


def test_right_drafts_keep_full_blocks():
    policy = AdaptiveLength(8, False)
    per_token, widths, _ = simulate(policy, 30, lambda n: 0.3, lambda n: 1 + 0.05 * n, lambda i, row: 1, confident=0.9)
    assert widths[3:] == [8] * 27
    assert per_token < 1.1 * (0.3 + 1.4) / 9


def test_right_drafts_on_a_slow_machine_are_found_out():
    """Even right drafts lose here, which nobody knows before a plain step was timed: that is done in time."""
    policy = AdaptiveLength(8, False)
    _, widths, asked = simulate(policy, 200, lambda n: 1.0, lambda n: 1 + 1.2 * n, lambda i, row: 1)
    assert widths.index(0) <= 5 and sum(n > 0 for n in asked) <= 12


def test_length_fits_acceptance_and_cost():
    """A middling drafter on a machine where every verified token costs: short blocks beat none and whole ones."""
    costs = (lambda n: 0.2), (lambda n: 1 + 0.2 * n)
    best = min((costs[0](n) + costs[1](n)) / sum(0.75**i for i in range(n + 1)) for n in range(1, 9))
    runs = [
        simulate(AdaptiveLength(8, False), 250, *costs, lambda i, row: 0.75, seed=seed, confident=confident)
        for seed in range(4)
        for confident in (0.5, 0.75, 0.9)
    ]
    assert sum(per_token for per_token, _, _ in runs) / len(runs) < 1.15 * best < 0.9
    widths = sorted(width for _, widths, _ in runs for width in widths[50:])
    assert 1 <= widths[len(widths) // 2] <= 5


def test_confident_drafts_are_verified_further():
    widths = []
    for confident in (0.6, 0.97):
        policy = AdaptiveLength(8, False)
        rate = confident
        widths.append(
            simulate(policy, 60, lambda n: 0.2, lambda n: 1 + 0.1 * n, lambda i, row, r=rate: r, confident=confident)[
                1
            ]
        )
    assert sum(widths[0][5:]) < 0.7 * sum(widths[1][5:])


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8])
def test_a_batch_on_a_slow_machine_loses_little(rate):
    """Sixteen rows, 96 tokens, a machine on which every verified token costs nearly a plain step."""
    costs = (lambda n: 0.4), (lambda n: 1 + 0.5 * n)
    runs = [
        simulate(AdaptiveLength(8, False), 96, *costs, lambda i, row: rate, rows=16, seed=seed) for seed in range(4)
    ]
    assert sum(per_token for per_token, _, _ in runs) / 4 < 1.1


def test_a_cold_first_block_hides_nothing():
    """The first forward of each length pays for warming up, ten times over; the drafter is right, then no more."""
    seen = set()

    def verify(n):
        cold = n not in seen
        seen.add(n)
        return (1 + 0.05 * n) * (10 if cold else 1)

    _, widths, asked = simulate(AdaptiveLength(8, False), 200, lambda n: 0.5, verify, lambda i, row: i < 20)
    assert max(widths[:20]) > 0 and 0 in widths and sum(n > 0 for n in asked[60:]) < 60


def test_drafting_resumes_when_it_pays_again():
    policy = AdaptiveLength(8, False)
    _, widths, asked = simulate(policy, 900, lambda n: 0.2, lambda n: 1 + 0.05 * n, lambda i, row: 0.95 * (i > 200))
    assert sum(n > 0 for n in asked[50:200]) < 8
    assert sum(widths[600:]) > 1000


def test_costs_are_medians_and_a_line_between_them():
    costs = Costs()
    for seconds in (9.0, 1.0, 1.0, 7.0, 1.0):
        costs.add(0, seconds)
    costs.add(4, 5.0)  # may have been cold
    assert costs.at(4) == pytest.approx(1.2)
    costs.add(4, 1.4)
    assert [costs.at(n) for n in range(7)] == pytest.approx([1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6])


# Text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_ends_inside_a_block(kind):
    """F1 and F5 under adaptive length: EOS, length limits, custom criteria, records and streams."""
    target = make_target()
    inputs = varied_prompt(target)
    drafter = scripted(make_drafter(target, schedule="adaptive"), kind, target)
    for place in (1, 3):
        token = eos_at(target, inputs, place)
        Recorder.made.clear()
        record = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        plain, assisted = both(target, drafter, inputs, eos_token_id=[63, token], streamer=Recorder, **record)
        assert plain.sequences.shape[1] == 7 + place + 1
        assert_same_record(plain, assisted)
        theirs, ours = Recorder.made
        assert ours.tokens == theirs.tokens and ours.ended == theirs.ended == 1
        for make in (lambda token=token: LastTokenIs(token), lambda place=place: LengthIs(7 + place + 1)):
            stops = {"stopping_criteria": lambda make=make: StoppingCriteriaList([make()])}
            assert assert_equal_text(target, drafter, inputs, **stops).shape[1] == 7 + place + 1
    for limit in (1, 2, 3, 5):
        assert assert_equal_text(target, drafter, inputs, limit).shape[1] == 7 + limit


def test_processors_and_parallel_rollout():
    target = make_target("qwen3")
    drafter = make_drafter(target, schedule="adaptive")
    drafter.generation_config.rollout = "parallel"
    assert_equal_text(target, drafter, ragged([7, 3, 7]), 20)
    assert_equal_text(target, drafter, ragged([7, 3, 7]), 20, repetition_penalty=1.5, no_repeat_ngram_size=3)


class Timings:
    """A clock that jumps: every reading is a random while after the last."""

    def __init__(self, seed):
        self.chance, self.now = random.Random(seed), 0.0

    def perf_counter(self):
        self.now += self.chance.choice([0.001, 0.01, 0.1, 1.0])
        return self.now


@pytest.mark.parametrize("kind", ["oracle", "half", "untouched"])
def test_any_clock_gives_the_same_text(kind, monkeypatch):
    target = make_target()
    inputs = ragged([7, 4, 6])
    drafter = make_drafter(target, schedule="adaptive")
    if kind != "untouched":
        scripted(drafter, kind, target)
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    rounds = set()
    for seed in range(4):
        monkeypatch.setattr(speculation_domino, "time", Timings(seed))
        output = target.generate(**inputs, max_new_tokens=24, do_sample=False, assistant_model=drafter)
        assert output.tolist() == plain.tolist()
        rounds.add(drafter.last_speculation.num_rounds)
    assert len(rounds) > 1 or kind == "untouched"


def test_late_drafts_equal_early_ones(monkeypatch):
    """Plain steps leave the drafter's context behind; when drafting resumes it has all of it."""
    target = make_target()
    drafter = make_drafter(target, schedule="adaptive")
    drafter.generation_config.lookup = False
    script = iter([0] * 3 + [4] + [0] * 150 + [5, 2] + [6] * 100)
    monkeypatch.setattr(AdaptiveLength, "drafts_to_ask_for", lambda self, proposals: min(next(script), proposals.room))
    drafted, backlogs, call = [], [], drafter.draft

    def recorded(*args, **kwargs):
        output = call(*args, **kwargs)
        backlogs.append(args[2].shape[1])
        if output.token_ids.shape[1]:
            drafted.append((kwargs["input_ids"][0].tolist(), output.token_ids[0].tolist()))
        return output

    drafter.draft = recorded
    text = target.generate(prompt_ids(), max_new_tokens=190, do_sample=False, assistant_model=drafter)
    assert len(drafted) > 5 and max(backlogs) <= generation_domino.MAX_BACKLOG + BLOCK + 1
    with target_domino.tapped_states(target, drafter.config.target_layer_ids) as taps, torch.no_grad():
        target(text)
        states = taps.take()
        for row, drafts in drafted:
            output = call(
                target,
                torch.tensor([row[-1:]]),
                states[:, : len(row) - 1],
                drafter.new_cache(1),
                input_ids=torch.tensor([row]),
                max_drafts=len(drafts),
            )
            assert output.token_ids[0].tolist() == drafts


# Counts and traces --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "untouched"])
@pytest.mark.parametrize("lengths", [(7,), (7, 4, 5)])
def test_statistics_equal_a_count_of_forwards(kind, lengths):
    """Widths of the target's forwards, seen from outside, against the statistics; plain steps are rounds of one."""
    target = make_target()
    drafter = make_drafter(target, schedule="adaptive")
    if kind != "untouched":
        scripted(drafter, kind, target)
    inputs = ragged(lengths)
    # All that the drafter's script needs is known after this, so its own forwards of the target come not in between.
    plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    forward, shapes, quiet = target.forward, [], []
    draft = drafter.draft

    @functools.wraps(forward)  # the library looks at its signature
    def counted(*args, **kwargs):
        if not quiet:
            shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    def apart(*args, **kwargs):
        quiet.append(1)
        output = draft(*args, **kwargs)
        quiet.clear()
        return output

    target.forward, drafter.draft = counted, apart
    output = target.generate(**inputs, max_new_tokens=30, do_sample=False, assistant_model=drafter)
    del target.forward
    assert output.tolist() == plain.tolist()
    stats = drafter.last_speculation
    assert shapes[0] == (len(lengths), max(lengths))
    assert stats.num_rounds == len(shapes) - 1
    assert stats.num_plain_steps == sum(width == 1 for _, width in shapes[1:])
    assert sum(map(len, stats.acceptance_lengths)) == sum(rows for rows, _ in shapes[1:])
    assert [sum(row) for row in stats.acceptance_lengths] == [29] * len(lengths)
    assert stats.num_drafted <= sum(rows * (width - 1) for rows, width in shapes[1:])
    assert sum(map(sum, stats.accepted_drafts)) == sum(stats.accepted_at) >= stats.num_accepted
    if len(lengths) == 1:  # in a batch a token that is proposed again counts once
        assert stats.num_accepted == sum(stats.accepted_at)
    if kind == "wrong":
        assert stats.num_accepted == stats.num_lookup_accepted
    assert stats.total_seconds >= stats.draft_seconds + stats.verify_seconds > 0


def test_calls_leave_nothing_behind():
    """Calls change no state of the drafter but its statistics, sampled ones included."""
    target = make_target()
    drafter = make_drafter(target, schedule="adaptive")

    def state():
        own = {name: value for name, value in vars(drafter).items() if name not in ("last_speculation", "_modules")}
        return copy.deepcopy(own | {"generation_config": drafter.generation_config.to_dict()})

    before = state()
    for do_sample in (False, True):
        target.generate(prompt_ids(), max_new_tokens=30, do_sample=do_sample, assistant_model=drafter)
        assert state() == before
