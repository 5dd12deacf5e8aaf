"""How many drafts pay, and whose: the adaptive block length.

Each round has three ways to go: a plain step, a lookup continuation (no forward of the drafter), or the drafter's
block, in which single rows may take their lookup continuation instead. The most expected tokens per second win:

    rate(n) = mean over the slowest quarter of the rows of E[kept tokens | n drafts] / (T_draft(n) + T_verify(n))

E comes from decayed counts of acceptance by slot, T from this call's own clock. Exactness does not depend on any of
it: what is decided before a token is drawn looks at the text so far and never at the draw, and every draft is judged.

Never slower: a plain step is the default, speculation has to beat it by `MARGIN`. While it does not, the drafter is
tried again after ever longer pauses, and only while the time lost to it, less what it has won before, stays below
`LOSS_SHARE` of the total and a credit to begin with. A greedy call opens with a short block; a plain step is timed
when it may matter, which it does not where whole blocks are right and gain threefold.

Sampled calls repeat under a seed, so their decisions must not hang on the clock's noise: they open with a fixed
sequence of rounds, and from then on use cost ratios that the first such call in this process measured, in coarse
steps. Those ratios, facts about the machine and no text, are all that a call leaves behind; greedy ones leave nothing.
"""

from __future__ import annotations

import math
import statistics
import weakref
from dataclasses import dataclass, field

# Matched suffixes, longest first: three tokens are seldom wrong, two are found more often.
SUFFIX_SIZES = (3, 2)
# Acceptance: believed of the first slot; what a belief weighs in observations, of a slot and of one row of several;
# memory of about fifty rounds. A draft that is reached is likelier to be right than the one before it: easy stretches
# reach further.
PRIOR, PRIOR_WEIGHT, ROW_WEIGHT, DECAY, DEEPER = 0.7, 3.0, 2.0, 0.98, 0.1
# Seconds of n drafts in units of the least, where only one length was measured: what n more drafts add.
SLOPE = 0.1
SAMPLES = 7
RATIO_STEP = 1.25
MARGIN = 1.03
LOSS_SHARE = 0.025
# Plain steps that a call of one row may lose on top; of a batch, where a look costs more of them, so much less.
CREDIT = 2.0
# A batch goes by this part of its rows, the slowest.
PACE_SHARE = 1 / 4
# Plain steps before the drafter is tried again, at first and at most; drafts of such a trial.
FIRST_PAUSE, LONGEST_PAUSE, TRIAL_DRAFTS = 4, 256, 2
# Below this gain over plain steps a plain step is timed again now and then, in ever longer intervals. As long as none
# was, its time is extrapolated, which on CPUs seen here was wrong by less than the second.
SAFE_GAIN, SURE_GAIN, FIRST_RECHECK = 1.5, 3.0, 4


class NgramIndex:
    """Where each n-gram of one row was last followed by something; grows by what is committed, never rescans.

    Args:
        text (list[int]): the prompt, without padding.
    """

    def __init__(self, text: list[int]):
        self.text: list[int] = []
        self._followed_at: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in SUFFIX_SIZES}
        self.extend(text)

    def extend(self, tokens: list[int]) -> None:
        """Take in committed tokens."""
        for token in tokens:
            end = len(self.text)
            for size, places in self._followed_at.items():
                if end >= size:
                    places[tuple(self.text[end - size :])] = end
            self.text.append(token)

    def continuation(self, most: int) -> tuple[int, list[int]]:
        """What followed the longest suffix that occurred before: its size, 0 without any, and `most` tokens.

        A continuation that reaches the end of the text goes on with its own beginning, so a loop is proposed whole.
        """
        for size in SUFFIX_SIZES:
            place = self._followed_at[size].get(tuple(self.text[-size:])) if len(self.text) >= size else None
            if place is not None:
                period = len(self.text) - place
                return size, [self.text[place + i % period] for i in range(most)]
        return 0, []


@dataclass
class Plan:
    """What one round drafts.

    Args:
        drafts (int): most drafts of a row; 0 is a plain step.
        use_head (bool): the drafter runs.
        lookup (list): of each row, the continuation it takes instead of the drafter's tokens, or None.
    """

    drafts: int = 0
    use_head: bool = False
    lookup: list[list[int] | None] = field(default_factory=list)


class Acceptance:
    """How often draft i was right where those before it were: decayed counts by row and slot.

    Plain lists: a round's few numbers take a tensor library longer to dispatch than Python to work out.
    """

    def __init__(self, rows: int, slots: int):
        self.slots = slots
        self.right = [[0.0] * slots for _ in range(rows)]
        self.tried = [[0.0] * slots for _ in range(rows)]
        self._expected: list[list[float]] | None = None

    def observe(self, drafted: list[int], accepted: list[int]) -> None:
        """One round: drafts of each row, and how many of them were right; a row with 0 drafts shows nothing."""
        for right, tried, count, hits in zip(self.right, self.tried, drafted, accepted, strict=True):
            for i in range(min(hits + 1, count)):
                right[i] = DECAY * right[i] + (i < hits)
                tried[i] = DECAY * tried[i] + 1
        self._expected = None

    def expected(self) -> list[list[float]]:
        """Tokens a round keeps, bonus included, of each row `slots + 1` numbers for 0 to `slots` drafts."""
        if self._expected is None:
            level, shared = PRIOR, []
            for right, tried in zip(zip(*self.right, strict=True), zip(*self.tried, strict=True), strict=True):
                # A slot that was seldom reached is believed to be a little better than the one before it.
                level = (sum(right) + PRIOR_WEIGHT * level) / (sum(tried) + PRIOR_WEIGHT)
                shared.append(level)
                level += DEEPER * (1 - level)
            self._expected = []
            for right, tried in zip(self.right, self.tried, strict=True):
                reached, kept = 1.0, [1.0]
                for hits, count, level in zip(right, tried, shared, strict=True):
                    reached *= level if len(self.right) == 1 else (hits + ROW_WEIGHT * level) / (count + ROW_WEIGHT)
                    kept.append(kept[-1] + reached)
                self._expected.append(kept)
        return self._expected

    def select(self, rows: list[int]) -> None:
        """Keep these rows."""
        self.right, self.tried = [self.right[i] for i in rows], [self.tried[i] for i in rows]
        self._expected = None


class Costs:
    """Seconds of drafting and of verifying by number of drafts, as measured or fixed."""

    def __init__(self, fixed: dict[str, dict[int, float]] | None = None):
        self.fixed = fixed
        self._samples: dict[str, dict[int, list[float]]] = {"draft": {}, "verify": {}}
        self._counts: dict[tuple[str, int], int] = {}
        self._least: dict[str, dict[int, float]] = {"draft": {}, "verify": {}}
        # Measured with another number of rows: right in proportion to each other, not in size.
        self._stale: dict[str, dict[int, float]] = {"draft": {}, "verify": {}}

    def record(self, kind: str, drafts: int, seconds: float) -> None:
        """One measurement; the first of its kind and length pays for warming up and gives way to the second."""
        samples = self._samples[kind].setdefault(drafts, [])
        self._least[kind][drafts] = min(seconds, self._least[kind].get(drafts, seconds))
        count = self._counts.get((kind, drafts), 0)
        self._counts[kind, drafts] = count + 1
        if count == 1:
            samples.clear()
        samples.append(seconds)
        del samples[:-SAMPLES]
        if self._stale[kind]:
            factor = statistics.median(samples) / _interpolated(self._stale[kind], drafts, 0.0)
            for points in self._stale.values():
                for length in points:
                    points[length] *= factor

    def new_batch_size(self) -> None:
        """Other rows from now on: what was measured holds as a proportion until it is measured again."""
        if self.fixed is None:
            self._stale = {kind: self.points(kind) for kind in self._samples}
            self._samples = {"draft": {}, "verify": {}}
            self._counts = {}

    @property
    def plain_timed(self) -> bool:
        """Whether a plain step's cost is known, and not extrapolated."""
        return self.fixed is not None or 0 in self._least["verify"]

    def points(self, kind: str) -> dict[int, float]:
        """Best known seconds by number of drafts."""
        if self.fixed is not None:
            return self.fixed[kind]
        known = {n: statistics.median(s) for n, s in self._samples[kind].items()}
        warm = {**self._stale[kind], **{n: s for n, s in known.items() if self._counts[kind, n] > 1}}
        for n, seconds in known.items():
            # A first measurement may have paid for warming up: others bound it, longer ones in any case.
            bounds = [s for m, s in warm.items() if m >= n]
            if n not in warm and len(warm) > (kind == "verify"):
                bounds.append(_interpolated(warm, n, SLOPE))
            known[n] = min([seconds, *bounds])
        return {**warm, **known}

    def curves(self, most: int) -> tuple[list[float], list[float]]:
        """Seconds of drafting and of verifying 0 to `most` drafts, `most + 1` each; drafting none costs none."""
        draft, verify = self.points("draft"), self.points("verify")
        plain = _interpolated(verify, 0, SLOPE)
        if not draft:
            draft = {1: 0.3 * plain}
        elif self.fixed is None and not any(self._counts.get(("draft", n), 2) > 1 for n in draft):
            draft = {n: min(seconds, plain) for n, seconds in draft.items()}  # the drafter's first run was a cold one
        drafting = [0.0] + [_interpolated(draft, n, SLOPE) for n in range(1, most + 1)]
        verifying = [_interpolated(verify, n, SLOPE) for n in range(most + 1)]
        return drafting, verifying

    def ratios(self) -> dict[str, dict[int, float]]:
        """All costs in units of a plain step, rounded to powers of `RATIO_STEP`, so that noise leaves no trace.

        From few measurements the least is the one to believe: whatever disturbs a clock makes it read more.
        """
        unit = _interpolated(self._least["verify"], 0, SLOPE)

        def coarse(seconds: float) -> float:
            return RATIO_STEP ** round(math.log(max(seconds, 1e-9) / unit, RATIO_STEP))

        return {kind: {n: coarse(s) for n, s in points.items()} for kind, points in self._least.items()}


def _interpolated(points: dict[int, float], drafts: int, slope: float) -> float:
    """Value at `drafts`: on the line between measured neighbours, or by `slope` from the nearest."""
    if not points:
        return 1.0 + slope * drafts
    if drafts in points:
        return points[drafts]
    lengths = sorted(points)
    below = [n for n in lengths if n < drafts]
    above = [n for n in lengths if n > drafts]
    if below and above:
        low, high = below[-1], above[0]
        return points[low] + (points[high] - points[low]) * (drafts - low) / (high - low)
    if len(below) > 1:
        low, high = below[-2:]
        return points[high] + max(0.0, points[high] - points[low]) * (drafts - high) / (high - low)
    near = below[-1] if below else above[0]
    sloped = points[near] * (1 + slope * drafts) / (1 + slope * near)
    if below or len(above) == 1:
        return sloped
    # Down from two lengths: by their line where it is the lower, but a token less saves no more than its share.
    low, high = above[:2]
    line = points[low] - (points[high] - points[low]) * (low - drafts) / (high - low)
    return min(sloped, max(line, points[low] * (drafts + 1) / (low + 1)))


def _pace(kept: list[float]) -> float:
    """Tokens a round of a batch, by its slowest rows: it ends with its last row, and fewer rows are hardly cheaper."""
    slowest = sorted(kept)[: math.ceil(len(kept) * PACE_SHARE)]
    return sum(slowest) / len(slowest)


# Of a drafter and a target, cost ratios by what else decides them. Weak: a model that is gone takes its ratios along.
_RATIOS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class ConstantLength:
    """`num_assistant_tokens_schedule="constant"`: as many drafts as there may be, every round."""

    def choose(self, found, most: int) -> Plan:
        return Plan(most, True)

    def observe(self, *args, **kwargs) -> None:
        pass

    def select(self, rows: list[int]) -> None:
        pass


class AdaptiveLength:
    """Chooses each round's plan; made for one call and forgotten with it.

    Args:
        rows (int): rows of the batch.
        limit (int): most drafts a round.
        sampled (tuple, optional): drafter, target and what else the machine's cost ratios depend on; given where the
            text must repeat under a seed.
    """

    def __init__(self, rows: int, limit: int, sampled: tuple | None = None):
        self.head = Acceptance(rows, limit)
        self.lookups = {size: Acceptance(rows, limit) for size in SUFFIX_SIZES}
        half = (limit + 1) // 2
        if sampled is None:
            self.opening = [half if rows == 1 else min(TRIAL_DRAFTS, limit)]
        else:
            self.opening = [0, half, 0, half]
        self._second_look = limit if sampled is None and rows == 1 else 0
        self.costs = Costs()
        self._memo, self._key = None, None
        if sampled is not None:
            drafter, target, *key = sampled
            self._memo = _RATIOS.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
            self._key = tuple(key)
        self.pause, self.plain_run = FIRST_PAUSE, 0
        self.recheck, self.since_plain = FIRST_RECHECK, 0
        self.credit = CREDIT / rows
        # Rounds and kept tokens by use of the drafter and width, so that costs learned late count for early rounds.
        self._rounds: dict[tuple[bool, int], list[float]] = {}
        self._before = 0.0, 0.0  # balance of the rounds with more rows
        self._trial = self._timing = False

    def choose(self, found: list[tuple[int, list[int]]], most: int) -> Plan:
        """The round's plan.

        Args:
            found: of each row, the size of the matched suffix and its continuation.
            most (int): most drafts that have room.
        """
        self._trial = self._timing = False
        if most == 0:
            return Plan()
        if self.opening:
            drafts = min(self.opening.pop(0), most)
            return Plan(drafts, drafts > 0)
        if self._memo is not None and self.costs.fixed is None:
            self._fix_costs()
        looked_up = any(size for size, _ in found)
        if 0 < self.plain_run < self.pause and not looked_up:
            return Plan()  # nothing changed that could change the last answer
        return self._best(found, most, looked_up)

    def _fix_costs(self) -> None:
        """End of a sampled call's opening: the clock gives way to fixed ratios."""
        self.costs = Costs(self._memo.setdefault(self._key, self.costs.ratios()))

    def _best(self, found, most: int, looked_up: bool) -> Plan:
        draft, verify = self.costs.curves(most)
        head = self.head.expected()  # of each row, kept tokens by number of drafts
        plain = 1 / verify[0]
        lookup = self._lookup_expected(found, most)
        counts = range(most + 1)
        by_lookup = [looked_up * _pace([kept[n] for kept in lookup]) / verify[n] for n in counts]
        better = [[max(pair) for pair in zip(*both, strict=False)] for both in zip(head, lookup, strict=True)]
        by_head = [_pace([kept[n] for kept in better]) / (draft[n] + verify[n]) for n in counts]
        by_head[0] = 0.0
        use_head = max(by_head) >= max(by_lookup)
        rates = by_head if use_head else by_lookup
        rate = max(rates)
        drafts = rates.index(rate)
        gain, due = rate / plain, self.since_plain >= self.recheck
        if not self.costs.plain_timed:
            if gain < SAFE_GAIN or (due and gain < SURE_GAIN):
                self._timing = True
                return Plan()
        elif gain < MARGIN:  # no drafts gain 1
            return self._rest(head, draft, verify)
        elif self.costs.fixed is None and gain < SAFE_GAIN and due:
            self.recheck *= 2
            self._timing = True
            return Plan()
        taken = [
            tokens if size and (not use_head or row[drafts] > own[drafts]) else None
            for (size, tokens), row, own in zip(found, lookup, head, strict=True)
        ]
        return Plan(drafts, use_head, taken)

    def _rest(self, head, draft, verify) -> Plan:
        """A plain step, or a trial of the drafter when one is due, could pay at all, and can be afforded."""
        if self.plain_run < self.pause:
            return Plan()
        drafts = min(TRIAL_DRAFTS, len(verify) - 1)
        hopeless = all((n + 1) * verify[0] < draft[n] + verify[n] for n in range(1, len(verify)))
        kept = _pace([row[drafts] for row in head])
        cost = draft[drafts] + verify[drafts] - kept * verify[0]
        spent, lost = self._balance()
        if hopeless or lost + cost / verify[0] > LOSS_SHARE * spent + self.credit:
            self.plain_run = max(1, self.pause - FIRST_PAUSE)  # ask again in a while
            return Plan()
        self._trial = True
        return Plan(drafts, True)

    def _lookup_expected(self, found, most: int) -> list[list[float]]:
        """Of each row, tokens kept by number of looked-up drafts; one without a continuation."""
        nothing = [1.0] * (most + 1)
        return [self.lookups[size].expected()[i][: most + 1] if size else nothing for i, (size, _) in enumerate(found)]

    def observe(self, plan: Plan, found, drafted, accepted, looked_up, new: list[list[int]], seconds) -> None:
        """What a round showed.

        Args:
            plan: the round's plan; drafted, accepted, looked_up (list): of each row, drafts, those kept, and whether
                they were its lookup continuation.
            found: as for `choose`; new: committed tokens of each row.
            seconds (tuple or None): of drafting and of everything else; None where the clock was not read.
        """
        if plan.use_head:
            own = [0 if given else count for count, given in zip(drafted, looked_up, strict=True)]
            self.head.observe(own, accepted)
        self._observe_lookups(found, new)
        width = max(drafted)
        if seconds is not None and self.costs.fixed is None:
            if plan.use_head and width:
                self.costs.record("draft", width, seconds[0])
            self.costs.record("verify", width, seconds[1])
        kept = sum(map(len, new)) / len(new) * self._pace_share(width)
        of_its_kind = self._rounds.setdefault((plan.use_head, width), [0, 0.0])
        of_its_kind[0] += 1
        of_its_kind[1] += kept
        self.since_plain = self.since_plain + 1 if plan.drafts else 0
        if plan.drafts == 0:
            self.plain_run += not self._timing
        elif plan.use_head:
            self.plain_run = 0
        if plan.drafts and self._second_look:
            # The drafter's first run says little about its cost: one that was right is run again before it is judged.
            if accepted == drafted:
                self.opening.append(self._second_look)
            self._second_look = 0
        if self._trial:
            paid = kept * self._cost(False, 0) > self._cost(True, width)
            self.pause = 1 if paid else min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * self.pause))

    def _pace_share(self, width: int) -> float:
        """What the slowest rows keep of so many drafts, in units of what a row keeps on average."""
        kept = [row[width] for row in self.head.expected()]
        return _pace(kept) * len(kept) / sum(kept)

    def _cost(self, use_head: bool, width: int) -> float:
        """Seconds of a round."""
        draft, verify = self.costs.curves(width)
        return draft[-1] * use_head + verify[-1]

    def _balance(self) -> tuple[float, float]:
        """Time spent, and of it lost against plain steps for as many tokens, in plain steps, by the costs known now.

        Below zero the second is what speculation has won, and may risk.
        """
        plain = self._cost(False, 0)
        spent, lost = self._before
        for (use_head, width), (count, kept) in self._rounds.items():
            steps = count * self._cost(use_head, width) / plain
            spent += steps
            lost += (steps - kept) * (width > 0)
        return spent, lost

    def _observe_lookups(self, found, new) -> None:
        """The text shows for nothing whether a continuation would have been right, proposed or not."""
        if not any(size for size, _ in found):
            return
        for size, acceptance in self.lookups.items():
            judged, right = [0] * len(found), [0] * len(found)
            for i, (matched, tokens) in enumerate(found):
                if matched == size:
                    pairs = list(zip(tokens, new[i], strict=False))
                    judged[i] = len(pairs)
                    right[i] = next((j for j, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
            if any(judged):
                acceptance.observe(judged, right)

    def select(self, rows: list[int]) -> None:
        """Keep these rows."""
        self.head.select(rows)
        for acceptance in self.lookups.values():
            acceptance.select(rows)
        if self._memo is None:
            self._before, self._rounds = self._balance(), {}
        self.costs.new_batch_size()
        self.pause, self.plain_run = FIRST_PAUSE, 0  # fewer rows may pay where more did not
