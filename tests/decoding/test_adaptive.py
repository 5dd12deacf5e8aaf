"""Adaptive length: what it chooses, that neither text nor law nor seed feels it, and that its counts are true."""

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
    RowLimits,
    as_inputs,
    assert_equal_text,
    assert_same_record,
    biased,
    both,
    eos_at,
    varied_prompt,
)
from domino_spec import generation_domino, length_domino, target_domino
from domino_spec.length_domino import Acceptance, AdaptiveLength, Costs, Plan
from scipy.stats import chi2_contingency, ks_2samp
from tiny import BLOCK, VOCAB, make_drafter, make_target, prompt_ids, ragged, scripted
from transformers import StoppingCriteriaList

# Choosing -----------------------------------------------------------------------------------------------------------


def simulate(chooser, rounds: int, draft_cost, verify_cost, rate, rows: int = 1, seed: int = 0):
    """Rounds with these costs and drafts right with probability `rate(round, row)`: seconds a token, plans."""
    chance, seconds, tokens, plans = random.Random(seed), 0.0, 0, []
    for number in range(rounds):
        found = [(0, [])] * rows
        plan = chooser.choose(found, chooser.head.slots)
        accepted = []
        for row in range(rows):
            right = 0
            while right < plan.drafts and chance.random() < rate(number, row):
                right += 1
            accepted.append(right)
        cost = (draft_cost(plan.drafts) * plan.use_head, verify_cost(plan.drafts))
        new = [[0] * (right + 1) for right in accepted]
        chooser.observe(plan, found, [plan.drafts] * rows, accepted, [False] * rows, new, cost)
        seconds, tokens = seconds + sum(cost), tokens + sum(map(len, new)) / rows
        plans.append(plan)
    return seconds / tokens, plans


def test_wrong_drafts_cost_little():
    """Seconds a token stay near a plain step's, whatever a round of drafts costs."""
    for slope in (0.1, 0.6):
        per_token, plans = simulate(
            AdaptiveLength(1, 8), 255, lambda n: 1.0, lambda n, s=slope: 1 + s * n, lambda i, row: 0
        )
        assert per_token < 1.05
        assert sum(plan.drafts > 0 for plan in plans) < 12
        trials = [i for i, plan in enumerate(plans) if plan.drafts and i > 2]
        assert trials and all(b - a >= 8 for a, b in zip(trials, trials[1:], strict=False))


def test_right_drafts_keep_full_blocks():
    chooser = AdaptiveLength(1, 8)
    per_token, plans = simulate(chooser, 30, lambda n: 0.3 + 0.03 * n, lambda n: 1 + 0.05 * n, lambda i, row: 1)
    assert [plan.drafts for plan in plans] == [4] + [8] * 29
    assert per_token < 1.02 * (0.3 + 0.24 + 1.4) / 9


def test_right_drafts_on_a_slow_machine_are_found_out():
    """Even right drafts lose here, which nobody knows before a plain step was timed: that is done in time."""
    plans = simulate(AdaptiveLength(1, 8), 100, lambda n: 1.0, lambda n: 1 + 1.2 * n, lambda i, row: 1)[1]
    assert plans.index(Plan()) <= 5 and sum(plan.drafts > 0 for plan in plans) <= 6


def test_length_fits_acceptance_and_cost():
    """A middling drafter on a machine where every verified token costs: short blocks beat none and whole ones."""
    costs = (lambda n: 0.1 + 0.02 * n), (lambda n: 1 + 0.2 * n)
    best = min((costs[0](n) + costs[1](n)) / sum(0.75**i for i in range(n + 1)) for n in range(1, 9))
    runs = [simulate(AdaptiveLength(1, 8), 250, *costs, lambda i, row: 0.75, seed=seed) for seed in range(4)]
    assert sum(per_token for per_token, _ in runs) / 4 < 1.15 * best < 0.8
    chosen = sorted(plan.drafts for _, plans in runs for plan in plans[50:])
    assert 1 <= chosen[len(chosen) // 2] <= 5


def test_a_timed_plain_step_is_one():
    """Where speculation gains little, a plain step is timed again now and then: one, not a pause of them."""
    plans = simulate(AdaptiveLength(1, 8), 120, lambda n: 0.1, lambda n: 1 + 0.2 * n, lambda i, row: 0.6, seed=1)[1]
    plain = [i for i, plan in enumerate(plans) if plan.drafts == 0]
    assert 2 <= len(plain) <= 8 and all(b - a > 1 for a, b in zip(plain, plain[1:], strict=False))


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8])
def test_a_batch_on_a_slow_machine_loses_little(rate):
    """Sixteen rows, 96 tokens, a machine on which every verified token costs nearly a plain step."""
    costs = (lambda n: 0.3 + 0.1 * n), (lambda n: 1 + 0.5 * n)
    runs = [simulate(AdaptiveLength(16, 8), 96, *costs, lambda i, row: rate, rows=16, seed=seed) for seed in range(4)]
    assert sum(per_token for per_token, _ in runs) / 4 < 1.04


def test_a_cold_first_block_hides_nothing():
    """The first forward of each length pays for warming up, ten times over; the drafter is right, then no more."""
    seen = set()

    def verify(n):
        cold = n not in seen
        seen.add(n)
        return (1 + 0.05 * n) * (10 if cold else 1)

    plans = simulate(AdaptiveLength(1, 8), 200, lambda n: 0.5, verify, lambda i, row: i < 20)[1]
    assert Plan() in plans and sum(plan.drafts > 0 for plan in plans[60:]) < 60


def test_a_batch_is_not_tried_again_for_its_fast_rows():
    """Twelve rows whose drafts are right, four whose are wrong, and a round that costs more than those gain."""
    costs = (lambda n: 0.2), (lambda n: 1 + 0.2 * n)
    plans = simulate(AdaptiveLength(16, 8), 150, *costs, lambda i, row: row < 12, rows=16)[1]
    assert sum(plan.drafts > 0 for plan in plans) < 20


def test_early_losses_are_counted_by_later_costs():
    """The first block was paid for before a plain step was timed: how much it lost is known once one was."""
    chooser = AdaptiveLength(1, 8)
    found = [(0, [])]
    assert chooser.choose(found, 8).drafts == 4
    chooser.observe(Plan(4, True), found, [4], [0], [False], [[1]], (1.0, 5.0))
    assert chooser.choose(found, 8) == Plan()
    chooser.observe(Plan(), found, [0], [0], [False], [[3]], (0.0, 1.0))
    spent, lost = chooser._balance()
    assert (spent, lost) == pytest.approx((7, 5))


def test_drafting_resumes_when_it_pays_again():
    chooser = AdaptiveLength(1, 8)
    plans = simulate(chooser, 600, lambda n: 0.2, lambda n: 1 + 0.05 * n, lambda i, row: 0.95 * (i > 200))[1]
    assert sum(plan.drafts > 0 for plan in plans[50:200]) < 8
    assert sum(plan.drafts for plan in plans[400:]) > 1000


def test_hopeless_machines_are_not_tried_again():
    """Where even right drafts lose, one look is enough."""
    plans = simulate(AdaptiveLength(4, 6), 300, lambda n: 3.0, lambda n: 1 + 2.0 * n, lambda i, row: 0.9, rows=4)[1]
    assert sum(plan.drafts > 0 for plan in plans) <= 2


def test_rows_choose_their_own_source():
    chooser = AdaptiveLength(3, 4)
    found = [(3, [1, 2, 3, 4]), (0, []), (2, [5, 6, 7, 8])]
    for _ in range(6):
        chooser.observe(Plan(), found, [0] * 3, [0] * 3, [False] * 3, [[1, 2, 3, 4], [0], [9]], (0.0, 1.0))
        chooser.observe(Plan(4, True), found, [4] * 3, [3] * 3, [False] * 3, [[1, 2, 3, 4], [0], [9]], (0.2, 1.1))
    chooser.opening.clear()
    plan = chooser.choose(found, 4)
    assert plan.use_head and plan.lookup == [[1, 2, 3, 4], None, None]


def test_acceptance_follows_the_text():
    acceptance = Acceptance(2, 4)
    for _ in range(30):
        acceptance.observe([4, 4], [4, 0])
    kept = acceptance.expected()
    assert kept[0][0] == kept[1][0] == 1 and kept[0][4] > 3.5 and kept[1][4] < 1.6
    acceptance.observe([0, 0], [0, 0])
    assert acceptance.expected() == kept


def test_costs_forget_the_first_and_outliers():
    costs = Costs()
    for seconds in (9.0, 1.0, 1.0, 7.0, 1.0):
        costs.record("verify", 0, seconds)
    costs.record("verify", 4, 1.4)
    assert costs.curves(6)[1] == pytest.approx([1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    costs.new_batch_size()
    costs.record("verify", 0, 0.5)
    assert costs.curves(4)[1] == pytest.approx([0.5, 0.55, 0.6, 0.65, 0.7])


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
        monkeypatch.setattr(generation_domino, "time", Timings(seed))
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
    monkeypatch.setattr(AdaptiveLength, "choose", lambda self, found, most: Plan(n := min(next(script), most), n > 0))
    proposals, backlogs = [], []
    block, call = drafter._draft_block, drafter.draft

    def recorded(*args):
        output = block(*args)
        proposals.append((args[5][0].tolist(), output.token_ids[0].tolist()))
        return output

    def measured(*args, **kwargs):
        backlogs.append(args[2].shape[1])
        return call(*args, **kwargs)

    drafter._draft_block, drafter.draft = recorded, measured
    ids = prompt_ids()
    text = target.generate(ids, max_new_tokens=190, do_sample=False, assistant_model=drafter)
    assert len(proposals) > 5 and max(backlogs) <= generation_domino.MOST_BACKLOG + BLOCK + 1
    del drafter._draft_block, drafter.draft
    with target_domino.tapped_states(target, drafter.config.target_layer_ids) as taps, torch.no_grad():
        target(text)
        states = taps.take()
        for row, drafts in proposals:
            length = len(row)
            output = drafter.draft(
                target,
                torch.tensor([row[-1:]]),
                states[:, : length - 1],
                drafter.new_cache(1),
                input_ids=torch.tensor([row]),
                max_drafts=len(drafts),
            )
            assert output.token_ids[0].tolist() == drafts


# Law and seed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{}, {"assistant_confidence_threshold": 0.6}, {"rollout": "parallel"}])
def test_sampling_follows_the_targets_law(knobs):
    """Plain and assisted samples of the same size: pairs of neighbours, and sums and repeats over longer stretches."""
    target = make_target(initializer_range=0.2)
    drafter = make_drafter(target, schedule="adaptive")
    for name, value in knobs.items():
        setattr(drafter.generation_config, name, value)
    if not knobs:
        biased(drafter, target)
    inputs = as_inputs(prompt_ids(4))
    length, rows = 8, 1500

    def draws(**extra):
        parts = []
        for seed in range(2):
            torch.manual_seed(seed)
            kwargs = {"do_sample": True, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "max_new_tokens": length}
            parts.append(target.generate(**inputs, **kwargs, num_return_sequences=rows, **extra)[:, 4:])
        return torch.cat(parts)

    plain, assisted = draws(), draws(assistant_model=drafter)
    stats = drafter.last_speculation
    assert stats.num_accepted > 0 and stats.num_rounds > stats.num_plain_steps > 0
    for first in (0, 1, 3, 6):
        counts = [
            torch.bincount(sample[:, first] * VOCAB + sample[:, first + 1], minlength=VOCAB**2)
            for sample in (plain, assisted)
        ]
        table = torch.stack(counts)
        common = table.sum(0) >= 20
        table = torch.cat([table[:, common], table[:, ~common].sum(1, keepdim=True)], dim=1)
        table = table[:, table.sum(0) > 0]
        assert table.shape[1] > 3 and chi2_contingency(table.numpy()).pvalue > 0.001
    for statistic in (
        lambda x: x.double().mean(1),
        lambda x: torch.tensor([len(set(row)) for row in x.tolist()]).double(),
        lambda x: (x[:, 1:] * 3 + x[:, :-1]).double().amax(1),
    ):
        assert ks_2samp(statistic(plain).numpy(), statistic(assisted).numpy()).pvalue > 0.001


def test_seeded_runs_repeat_under_any_clock(monkeypatch):
    """The first sampled call measures the machine; the same seed gives its text again whatever the clock says."""
    target = make_target()
    drafter = make_drafter(target, schedule="adaptive")
    inputs = ragged([7, 4, 5])
    # Rows end at different times, the first while the machine is still being measured.
    limits = {"stopping_criteria": StoppingCriteriaList([RowLimits([7 + 3, 7 + 40, 7 + 25])])}
    texts, plans = [], []
    choose = AdaptiveLength.choose

    def remembered(self, found, most):
        plan = choose(self, found, most)
        plans[-1].append((plan.drafts, plan.use_head))
        return plan

    monkeypatch.setattr(AdaptiveLength, "choose", remembered)
    for number, seed in enumerate((1, 1, 1, 2)):
        monkeypatch.setattr(generation_domino, "time", Timings(number))
        torch.manual_seed(seed)
        plans.append([])
        warm = {"do_sample": True, "temperature": 1.2, "top_k": 0, "max_new_tokens": 40}
        texts.append(target.generate(**inputs, **warm, **limits, assistant_model=drafter).tolist())
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert plans[0] == plans[1] == plans[2]
    assert len({drafts for drafts, _ in plans[0][4:]}) > 1


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
    assert stats.num_accepted == sum(map(sum, stats.accepted_drafts)) == sum(stats.accepted_at)
    if kind == "wrong":
        assert stats.num_accepted == stats.num_lookup_accepted
    assert stats.total_seconds >= stats.draft_seconds + stats.verify_seconds > 0


def test_calls_leave_nothing_behind():
    """Greedy calls change no state of the drafter but its statistics, and nothing in the process."""
    target = make_target()
    drafter = make_drafter(target, schedule="adaptive")
    length_domino._RATIOS.clear()

    def state():
        own = {name: value for name, value in vars(drafter).items() if name not in ("last_speculation", "_modules")}
        return copy.deepcopy(own | {"generation_config": drafter.generation_config.to_dict()})

    before = state()
    target.generate(prompt_ids(), max_new_tokens=30, do_sample=False, assistant_model=drafter)
    assert state() == before and len(length_domino._RATIOS) == 0
    torch.manual_seed(0)
    target.generate(prompt_ids(), max_new_tokens=30, do_sample=True, assistant_model=drafter)
    ratios = length_domino._RATIOS[drafter][target]
    assert all(type(value) is float for costs in ratios.values() for kind in costs.values() for value in kind.values())


def test_reduced_vocabulary_bounds_proposals_only():
    target = make_target()
    drafter = make_drafter(target)
    few = list(range(5, 25))
    proposed = []
    draft = drafter.draft

    def recorded(*args, **kwargs):
        output = draft(*args, **kwargs)
        proposed.extend(output.token_ids.flatten().tolist())
        return output

    drafter.draft = recorded
    for pool in (0, 8):
        drafter.generation_config.candidate_pool_size = pool
        drafter.generation_config.draft_token_ids = few
        plain = assert_equal_text(target, drafter, ragged([7, 4]), 12)
        assert set(proposed) <= set(few) and not set(plain.flatten().tolist()) <= set(few)
    drafter.generation_config.draft_token_ids = [VOCAB]
    with pytest.raises(ValueError, match="draft_token_ids has 64; expected ids below 64"):
        target.generate(prompt_ids(), max_new_tokens=8, assistant_model=drafter)
    drafter.generation_config.draft_token_ids = [3, 3]
    with pytest.raises(ValueError, match="list of distinct token ids"):
        target.generate(prompt_ids(), max_new_tokens=8, assistant_model=drafter)
