"""How many proposals pay, and whose: a question of speed alone, free to use the clock and confidence.

Each round can take a plain step, a continuation looked up in the text (no forward of the drafter), or the drafter's
block. The most expected tokens per second win:

    rate(n) = E[kept tokens | n proposals] / (T_draft + T_verify(n))

E comes from a chance of each proposal: the drafter's own confidence, or the length of the text that a lookup matched,
both shifted by what this call has shown so far. T comes from running medians of this call's clock. The drafter runs if
its usual rate beats the best rate that costs no draft. Where it does not, it is tried again after pauses that double.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

import torch

from .speculation_domino import DraftOutput

# Matched suffixes that are looked up, longest first; a match is followed back as far as this.
SUFFIX_SIZES = (3, 2)
LONGEST_MATCH = 16
# Chance of a looked-up token behind a match of 2, in logits, and what each further matched token adds.
LOOKUP_LOGIT, LOOKUP_SLOPE = 0.0, 0.25
# Chance of a draft without a confidence, and of a token that the target has already chosen once, in logits.
DRAFT_LOGIT, KNOWN_LOGIT = 0.8, 5.0
# Cost of one more position in one forward, in units of the least, where only one number of them was timed.
SLOPE = 0.05
# How fast a call's own results shift the chances; memory of the drafter's usual yield, in rounds.
LEARNING_RATE, MEMORY = 0.1, 10.0
# Speculation must beat a plain step by this factor; above the second the plain step need not be timed.
MARGIN, SURE_GAIN = 1.03, 3.0
# Rounds before the drafter is tried again, at first and at most; drafts of such a trial.
FIRST_PAUSE, LONGEST_PAUSE, TRIAL_DRAFTS = 8, 256, 2


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
            for size, positions in self._followed_at.items():
                if end >= size:
                    positions[tuple(self.text[end - size :])] = end
            self.text.append(token)

    def continuation(self, max_tokens: int) -> tuple[int, list[int]]:
        """What followed the longest suffix that occurred before: the size of the match, 0 without any, and the tokens.

        A continuation that reaches the end of the text goes on with its own beginning, so a loop is proposed whole.
        """
        text = self.text
        for size in SUFFIX_SIZES:
            start = self._followed_at[size].get(tuple(text[-size:])) if len(text) >= size else None
            if start is not None:
                while size < min(LONGEST_MATCH, start) and text[start - size - 1] == text[-size - 1]:
                    size += 1
                period = len(text) - start
                return size, [text[start + i % period] for i in range(max_tokens)]
        return 0, []


@dataclass
class Proposals:
    """What may be proposed behind each row of a batch, and what was chosen.

    Args:
        known (list[list[int]]): tokens that the target chose in the last round beyond its end.
        lookups (list[tuple[int, list[int]]]): of each row, size of the match and continuation; empty: not looked up.
        alive (list[bool]): rows that are still being written; the others are fed `pad_token_id`.
        room (int): most proposals of a row.

    Attributes:
        drafted (DraftOutput or None): the drafter's, where it ran.
        rows (list[list[int]]): the chosen tokens of each row; shorter ones are filled up.
        width (int): proposals of each row that are verified.
        looked_up (list[bool]): rows whose choice is their lookup continuation.
    """

    known: list[list[int]]
    lookups: list[tuple[int, list[int]]]
    alive: list[bool]
    room: int
    pad_token_id: int
    drafted: DraftOutput | None = None
    rows: list[list[int]] = field(default_factory=list)
    width: int = 0
    looked_up: list[bool] = field(default_factory=list)

    def draft_rows(self) -> list[list[int]]:
        """The drafter's tokens of each row, behind what the row is known to go on with."""
        if self.drafted is None:
            return [[] for _ in self.alive]
        return [
            known + tokens[len(known) :]
            for known, tokens in zip(self.known, self.drafted.token_ids.tolist(), strict=True)
        ]

    def token_ids(self, device: torch.device) -> torch.LongTensor:
        """The chosen tokens, int `[batch, width]`."""
        if not self.width:
            return torch.zeros(len(self.alive), 0, dtype=torch.long, device=device)
        if not self.rows:  # the drafter's alone, which need not leave their device
            return self.drafted.token_ids[:, : self.width]
        filled = [
            (row[: self.width] if alive else [])
            + [0 if alive else self.pad_token_id] * (self.width - len(row) * alive)
            for row, alive in zip(self.rows, self.alive, strict=True)
        ]
        return torch.tensor(filled, dtype=torch.long, device=device).view(len(self.alive), self.width)


class ConstantLength:
    """`num_assistant_tokens_schedule="constant"`: the drafter's whole block, every round.

    Args:
        max_drafts (int): drafts a round.
    """

    uses_lookup = False

    def __init__(self, max_drafts: int):
        self.max_drafts = max_drafts

    def drafts_to_ask_for(self, proposals: Proposals) -> int:
        """As many as there may be."""
        return min(self.max_drafts, proposals.room)

    def choose(self, proposals: Proposals) -> None:
        """All that the drafter believes in."""
        drafted = proposals.drafted
        if drafted is None:
            return
        proposals.width = drafted.token_ids.shape[1]
        if drafted.lengths is not None and proposals.width:
            proposals.width = min(proposals.width, int(drafted.lengths.max()))
        if len(proposals.alive) > 1:
            proposals.rows = proposals.draft_rows()

    def observe(self, *args, **kwargs) -> None:
        """Nothing is learned."""


class Costs:
    """Seconds by number of proposals: running medians, between and beyond them the line `a + b n` through them."""

    def __init__(self) -> None:
        self.samples: dict[int, deque[float]] = {}
        self._fit: tuple[dict[int, float], float, float] | None = None  # medians, slope and base of their line

    def add(self, proposals: int, seconds: float) -> None:
        """One measurement; of two the lower counts, since whatever disturbs a clock makes it read more."""
        self.samples.setdefault(proposals, deque(maxlen=5)).append(seconds)
        self._fit = None

    def at(self, proposals: int) -> float:
        """Seconds of so many proposals; without any measurement in units of a plain step."""
        if self._fit is None:  # once a measurement: a round asks for many numbers of proposals
            self._fit = self._line()
        points, slope, base = self._fit
        if proposals in points:
            return points[proposals]
        if len(points) < 2:
            (n, seconds), *_ = points.items() or [(0, 1.0)]
            return seconds * (1 + SLOPE * proposals) / (1 + SLOPE * n)
        if slope <= 0:  # more work never takes less time: what reads more was disturbed
            return min(points.values())
        return max(base + slope * proposals, 0.5 * min(points.values()))

    def _line(self) -> tuple[dict[int, float], float, float]:
        """Medians by number of proposals, slope and base of the line through two or more of them."""
        # What was timed once may have been cold: it counts while there is nothing better.
        trusted = {n: s for n, s in self.samples.items() if len(s) > 1} or self.samples
        points = {n: statistics.median_low(s) for n, s in trusted.items()}
        if len(points) < 2:
            return points, 0.0, 0.0
        return points, *statistics.linear_regression(list(points), list(points.values()))


def chance(logit: float) -> float:
    """Logistic function."""
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, logit))))


def expected_tokens(chances: list[float], max_proposals: int) -> list[float]:
    """Tokens that a row keeps, bonus included, of 0 to `max_proposals` proposals with these chances."""
    kept, reached = [1.0], 1.0
    for i in range(max_proposals):
        reached *= chances[i] if i < len(chances) else 0.0
        kept.append(kept[-1] + reached)
    return kept


class AdaptiveLength:
    """Chooses each round's proposals; made for one call and forgotten with it.

    Args:
        max_drafts (int): most drafts a round.
        uses_lookup (bool): whether continuations are looked up.
    """

    def __init__(self, max_drafts: int, uses_lookup: bool):
        self.max_drafts, self.uses_lookup = max_drafts, uses_lookup
        self.verifying, self.drafting = Costs(), Costs()
        self.shift = {"draft": 0.0, "lookup": 0.0}
        # Drafts that all rows had right, and drafts judged, decayed; as if two of three had been right before.
        self.right, self.judged = 2.0, 3.0
        self.rested, self.pause, self.trial, self.timing = 0, FIRST_PAUSE, True, False
        self.next_trial = (max_drafts + 1) // 2
        self.logits: list[list[float]] = []  # of the rows chosen, for learning
        self.ran_drafter = False

    # Before the drafter -----------------------------------------------------------------------------------------

    def drafts_to_ask_for(self, proposals: Proposals) -> int:
        """Drafts that the drafter should make now; 0: it does not run."""
        most = min(self.max_drafts, proposals.room)
        self.timing = False
        if most == 0:
            return 0
        if self.next_trial:  # the first round
            self.trial = True
            # A batch ends with its slowest rows, so long drafts of all rows seldom are right together.
            drafts, self.next_trial = self.next_trial if len(proposals.alive) == 1 else TRIAL_DRAFTS, 0
            return min(drafts, most)
        drafter = self.drafter_rate()
        plain = 1 / self.verifying.at(0)
        # Twice: the first may be cold, and of two the lower counts.
        if len(self.verifying.samples.get(0, ())) < 2 and drafter < SURE_GAIN * plain:
            self.timing = True
            return 0
        self._take_free(proposals)
        free = self._best(proposals, self.logits)[1]
        if drafter > max(free, MARGIN * plain):
            self.rested, self.pause, self.trial = 0, FIRST_PAUSE, False
            return most
        self.rested += 1
        if self.rested < self.pause:
            return 0
        self.rested, self.pause, self.trial = 0, min(2 * self.pause, LONGEST_PAUSE), True
        return min(TRIAL_DRAFTS, most)

    def drafter_rate(self) -> float:
        """Tokens a second of a round of the drafter's, cut where that is best, if its drafts do as they did so far."""
        drafting = self.drafting.at(self.max_drafts) if self.drafting.samples else 0.3 * self.verifying.at(0)
        kept = expected_tokens([self.right / self.judged] * self.max_drafts, self.max_drafts)
        return max(tokens / (drafting + self.verifying.at(n)) for n, tokens in enumerate(kept))

    # After it ---------------------------------------------------------------------------------------------------

    def choose(self, proposals: Proposals) -> None:
        """Of each row the better source, and how many proposals are verified."""
        self.ran_drafter = proposals.drafted is not None and proposals.drafted.token_ids.shape[1] > 0
        if self.timing:
            proposals.rows, proposals.width = [[] for _ in proposals.alive], 0
            return
        self._take_free(proposals)
        if self.ran_drafter:
            self._take_drafts(proposals)
        proposals.width = self._best(proposals, self.logits)[0]

    def _take_free(self, proposals: Proposals) -> None:
        """What costs no draft: tokens known from the last round, then the lookup continuation."""
        rows, logits, looked_up = [], [], []
        for i, known in enumerate(proposals.known):
            size, tokens = proposals.lookups[i] if proposals.lookups else (0, [])
            use = size > 0 and tokens[: len(known)] == known[: len(tokens)] and len(tokens) > len(known)
            rows.append(tokens if use else known)
            steps = range(size - 2, size - 2 + len(tokens)) if use else ()
            found = [LOOKUP_LOGIT + LOOKUP_SLOPE * step + self.shift["lookup"] for step in steps]
            logits.append([KNOWN_LOGIT] * len(known) + found[len(known) :])
            looked_up.append(use)
        proposals.rows, proposals.looked_up, self.logits = rows, looked_up, logits

    def _take_drafts(self, proposals: Proposals) -> None:
        """The drafter's tokens where more of them are expected to be kept than of the row's free ones."""
        drafted = proposals.drafted
        confidences = None if drafted.confidences is None else drafted.confidences.tolist()
        for i, tokens in enumerate(proposals.draft_rows()):
            known = len(proposals.known[i])
            if confidences is None:
                own = [DRAFT_LOGIT] * len(tokens)
            else:
                own = [math.log(max(p, 1e-6) / max(1 - p, 1e-6)) for p in confidences[i]]
            own = [KNOWN_LOGIT] * known + [logit + self.shift["draft"] for logit in own[known:]]
            theirs = self.logits[i]
            if sum(expected_tokens([*map(chance, own)], len(own))[-1:]) >= sum(
                expected_tokens([*map(chance, theirs)], len(theirs))[-1:]
            ):
                proposals.rows[i], proposals.looked_up[i], self.logits[i] = tokens, False, own

    def _best(self, proposals: Proposals, logits: list[list[float]]) -> tuple[int, float]:
        """Number of proposals with the most expected tokens per second of verification, and that rate."""
        alive = [[*map(chance, row)] for row, alive in zip(logits, proposals.alive, strict=True) if alive]
        most = min(proposals.room, max(map(len, alive), default=0))
        kept = [expected_tokens(row, most) for row in alive]
        best, best_rate = 0, 1 / self.verifying.at(0)
        plain = best_rate
        for n in range(1, most + 1):
            # A batch ends with its slowest rows; a row that is ahead waits for the others.
            slowest = sorted(row[n] for row in kept)[: (len(kept) + 1) // 2]
            rate = sum(slowest) / len(slowest) / self.verifying.at(n)
            if rate > max(best_rate, MARGIN * plain):
                best, best_rate = n, rate
        return best, best_rate

    # After verification -----------------------------------------------------------------------------------------

    def observe(self, proposals: Proposals, new: list[list[int]], drafting: float | None, rest: float | None) -> None:
        """Learn from a round.

        Args:
            new (list[list[int]]): tokens that each row got.
            drafting, rest (float, optional): seconds of the drafter and of everything else; None: not measured.
        """
        if rest is not None:
            self.verifying.add(proposals.width, rest)
        # A trial makes fewer drafts: its time counts while there is no other.
        if drafting is not None and self.ran_drafter and not (self.trial and self.drafting.samples):
            self.drafting.add(self.max_drafts, drafting)
        alive = [i for i, tokens in enumerate(new) if tokens]
        if self.ran_drafter and alive:
            keep = 1 - 1 / MEMORY
            kept = min(len(new[i]) for i in alive)
            right = min(kept - 1, proposals.width)
            self.right = keep * self.right + right
            self.judged = keep * self.judged + right + (right < proposals.width)
        for i in alive:
            self._learn(proposals, i, new[i])
        self.ran_drafter = False

    def _learn(self, proposals: Proposals, i: int, new: list[int]) -> None:
        """Shift a source's chances towards what a row's tokens say of its proposals."""
        source = "lookup" if proposals.looked_up and proposals.looked_up[i] else "draft"
        logits = self.logits[i] if i < len(self.logits) else []
        row = proposals.rows[i] if proposals.rows else []
        for j, (token, theirs, logit) in enumerate(zip(row, new, logits, strict=False)):
            if j >= len(proposals.known[i]):
                self.shift[source] += LEARNING_RATE * ((token == theirs) - chance(logit))
            if token != theirs:
                return


def length_policy(knobs, block_drafts: int) -> ConstantLength | AdaptiveLength:
    """The policy that a drafter's generation config asks for.

    Args:
        knobs (DominoGenerationConfig): of the drafter.
        block_drafts (int): drafts in one block.
    """
    most = block_drafts if knobs.num_assistant_tokens is None else min(knobs.num_assistant_tokens, block_drafts)
    if knobs.num_assistant_tokens_schedule == "constant":
        return ConstantLength(most)
    return AdaptiveLength(most, knobs.lookup)
