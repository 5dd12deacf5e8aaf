"""Lookup continuations: what the index proposes, and that neither text nor law change by it."""

import torch
from domino_spec import DraftOutput, generation_domino
from domino_spec.length_domino import NgramIndex
from domino_spec.speculation_domino import accept_sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from tiny import make_drafter, make_target, prompt_ids


def rescanned(text: list[int], most: int) -> tuple[int, list[int]]:
    """The index's answer by looking through the whole text."""
    for size in (3, 2):
        suffix = text[-size:]
        for place in range(len(text) - 1, size - 1, -1):
            if len(text) >= size and text[place - size : place] == suffix:
                longer = list(text)
                for i in range(most):
                    longer.append(longer[place + i])
                return size, longer[len(text) :]
    return 0, []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=8), st.integers(0, 7))
def test_index_equals_a_rescan(parts, most):
    index, text = NgramIndex(parts[0]), list(parts[0])
    assert index.continuation(most) == rescanned(text, most)
    for part in parts[1:]:
        index.extend(part)
        text += part
        assert index.continuation(most) == rescanned(text, most)


def looping_prompt(target) -> torch.Tensor:
    """A prompt that already holds its own greedy continuation, which loops: the text recurs and recurs."""
    for seed in range(40):
        ids = target.generate(prompt_ids(6, seed=seed), max_new_tokens=60, do_sample=False)
        tail = ids[0, -24:].tolist()
        if any(tail[period:] == tail[:-period] for period in range(1, 9)):
            return ids
    raise AssertionError("no prompt whose continuation loops")


class SteadyClock:
    """Every reading is a hundredth of a second after the last, so that no decision hangs on a busy machine."""

    now = 0.0

    def perf_counter(self):
        self.now += 0.01
        return self.now


def test_loops_are_free(monkeypatch):
    """The drafter is a random one: what is accepted is lookup, and the drafter hardly runs."""
    monkeypatch.setattr(generation_domino, "time", SteadyClock())
    target = make_target()
    ids = looping_prompt(target)
    drafter = make_drafter(target, schedule="adaptive")
    runs = []
    block = drafter._draft_block
    drafter._draft_block = lambda *args: runs.append(1) or block(*args)
    plain = target.generate(ids, max_new_tokens=60, do_sample=False)
    assert target.generate(ids, max_new_tokens=60, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()
    stats = drafter.last_speculation
    assert stats.num_lookup_accepted > 20
    assert len(runs) <= 4 < stats.num_rounds
    drafter.generation_config.lookup = False
    target.generate(ids, max_new_tokens=60, do_sample=False, assistant_model=drafter)
    assert drafter.last_speculation.num_looked_up == 0


def test_rows_mix_their_sources():
    """One round: a looked-up row beside drafted ones, each with its own length."""
    target = make_target()
    drafter = make_drafter(target)
    ids = prompt_ids(5, batch=3)
    context = torch.randn(3, 4, 2 * 32, generator=torch.Generator().manual_seed(0))

    def draft(lookup, use_head=True):
        cache = drafter.new_cache(3)
        cache.stage(torch.ones(3, 4, dtype=torch.bool), lookup, use_head)
        with torch.no_grad():
            return drafter.draft(target, ids[:, -1:], context, cache, input_ids=ids, max_drafts=4)

    own = draft(None)
    both = draft([None, [7, 8], None])
    assert both.token_ids[[0, 2]].tolist() == own.token_ids[[0, 2]].tolist()
    assert both.token_ids[1, :2].tolist() == [7, 8]
    assert both.lengths.tolist() == [4, 2, 4] and both.looked_up.tolist() == [False, True, False]
    free = draft([[1, 2, 3, 4, 5], None, [9]], use_head=False)
    assert free.logits is None and free.lengths.tolist() == [4, 0, 1]
    assert free.token_ids[0].tolist() == [1, 2, 3, 4] and free.token_ids[2, 0] == 9


def test_certain_drafts_leave_the_law_alone():
    """30,000 rows, looked-up, drafted and cut short: the first two tokens of each follow p."""
    rows, generator = 30_000, torch.Generator().manual_seed(1)
    p = torch.randn(3, 6, generator=generator) * 1.5
    q = torch.randn(2, 6, generator=generator) * 1.5
    torch.manual_seed(0)
    target_scores = p.expand(rows, 3, 6)
    drafted = torch.stack([torch.multinomial(law.softmax(-1), rows, replacement=True) for law in q], dim=1)
    looked_up = torch.arange(rows) % 3 == 0
    drafted[looked_up] = torch.tensor([2, 4])
    lengths = torch.where(torch.arange(rows) % 3 == 1, 1, 2)
    draft = DraftOutput(drafted, q.expand(rows, 2, 6), lengths, looked_up)
    alone = DraftOutput(drafted[looked_up], None, None, None)
    for proposal, scores in ((draft, target_scores), (alone, target_scores[looked_up])):
        accepted, tokens = accept_sampled(proposal, scores)
        assert 0 < int((accepted == 0).sum()) < len(tokens) and int(accepted.max()) == 2
        kinds = [looked_up, torch.arange(rows) % 3 == 1, torch.arange(rows) % 3 == 2]
        for kind in kinds if proposal is draft else [torch.ones(len(tokens), dtype=torch.bool)]:
            for place in (0, 1):
                reached = kind & (accepted >= place)
                counts = torch.bincount(tokens[reached, place], minlength=6).double()
                expected = p[place].double().softmax(-1) * counts.sum()
                assert chisquare(counts.numpy(), expected.numpy()).pvalue > 0.001


def test_switched_off_lookup_builds_no_index(monkeypatch):
    target = make_target()
    drafter = make_drafter(target, schedule="adaptive")
    drafter.generation_config.lookup = False
    monkeypatch.setattr(NgramIndex, "__init__", None)
    target.generate(prompt_ids(), max_new_tokens=6, do_sample=False, assistant_model=drafter)
    assert drafter.last_speculation.num_rounds > 0
