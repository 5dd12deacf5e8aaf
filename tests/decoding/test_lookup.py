"""Lookup continuations: what the index proposes, and how rows mix their sources."""

import functools

import torch
from domino_spec import DraftOutput, speculation_domino
from domino_spec.length_domino import LONGEST_MATCH, AdaptiveLength, NgramIndex, Proposals
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import BLOCK, make_drafter, make_target, prompt_ids


def rescanned(text: list[int], most: int) -> tuple[int, list[int]]:
    """The index's answer by looking through the whole text."""
    for size in (3, 2):
        suffix = text[-size:]
        for place in range(len(text) - 1, size - 1, -1):
            if len(text) >= size and text[place - size : place] == suffix:
                longer = list(text)
                for i in range(most):
                    longer.append(longer[place + i])
                while size < min(LONGEST_MATCH, place) and text[place - size - 1] == text[-size - 1]:
                    size += 1
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
    monkeypatch.setattr(speculation_domino, "time", SteadyClock())
    target = make_target()
    ids = looping_prompt(target)
    drafter = make_drafter(target, schedule="adaptive")
    runs = []
    block = drafter._block_states
    drafter._block_states = lambda *args: runs.append(1) or block(*args)
    plain = target.generate(ids, max_new_tokens=60, do_sample=False)
    assert target.generate(ids, max_new_tokens=60, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()
    stats = drafter.last_speculation
    assert stats.num_lookup_accepted > 20
    assert len(runs) <= 4 < stats.num_rounds
    drafter.generation_config.lookup = False
    target.generate(ids, max_new_tokens=60, do_sample=False, assistant_model=drafter)
    assert drafter.last_speculation.num_looked_up == 0


def test_rows_mix_their_sources():
    """A batch in which one row repeats itself and another does not: looked-up and drafted tokens in one round."""
    policy = AdaptiveLength(4, True)
    for proposed, seconds in ((0, 1.0), (4, 1.1), (0, 1.0), (4, 1.1)):
        policy.verifying.add(proposed, seconds)
    proposals = Proposals([[], [], []], [(3, [7, 8, 9, 10, 11]), (0, []), (2, [5])], [True] * 3, 8, 0)
    proposals.drafted = DraftOutput(
        torch.tensor([[1, 2, 3, 4]] * 3), None, torch.tensor([[0.3] * 4] + [[0.95] * 4] * 2)
    )
    policy.choose(proposals)
    assert proposals.looked_up == [True, False, False]
    assert proposals.rows == [[7, 8, 9, 10, 11], [1, 2, 3, 4], [1, 2, 3, 4]]
    ids = proposals.token_ids(torch.device("cpu"))
    assert ids.shape == (3, proposals.width) and ids[1].tolist()[:4] == [1, 2, 3, 4][: proposals.width]


def test_continuations_may_be_longer_than_a_block():
    """A loop is proposed whole, as far as verifying it pays."""
    target = make_target()
    ids = looping_prompt(target)
    drafter = make_drafter(target, schedule="adaptive")
    widths, forward = [], target.forward
    target.forward = functools.wraps(forward)(
        lambda *args, **kwargs: widths.append(kwargs["input_ids"].shape[1]) or forward(*args, **kwargs)
    )
    target.generate(ids, max_new_tokens=80, do_sample=False, assistant_model=drafter)
    assert max(widths[1:]) > BLOCK + 1


def test_switched_off_lookup_builds_no_index(monkeypatch):
    target = make_target()
    drafter = make_drafter(target, schedule="adaptive")
    drafter.generation_config.lookup = False
    monkeypatch.setattr(NgramIndex, "__init__", None)
    target.generate(prompt_ids(), max_new_tokens=6, do_sample=False, assistant_model=drafter)
    assert drafter.last_speculation.num_rounds > 0
