"""What a round of speculation is made of: proposals and their laws, acceptance, statistics.

Imports neither modeling nor training code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from .kernels_domino import argmax, draw


class DraftOutput:
    """Proposals of one round.

    Args:
        token_ids (int `[batch, n]`): the drafts.
        logits (float `[batch, n, V]`, optional): after processors; softmax gives exactly the q each token was drawn
            from. None where all rows were looked up. Greedy decoding never reads them, so a function of no arguments
            may stand for them, which is called when somebody does.
        lengths (int `[batch]`, optional): how many of each row's drafts count, from the left; None: all n.
        looked_up (bool `[batch]`, optional): rows whose drafts are certain, a point mass each, whatever `logits` says;
            None: no row.
        laws (callable, optional): `law` where it can be had without all of `logits`; and chosen (float `[batch, n]`):
            the drafts' own probabilities.
    """

    def __init__(
        self,
        token_ids: torch.LongTensor,
        logits: torch.Tensor | Callable[[], torch.Tensor] | None,
        lengths: torch.LongTensor | None = None,
        looked_up: torch.BoolTensor | None = None,
        laws: Callable[[torch.LongTensor], torch.Tensor] | None = None,
        chosen: torch.Tensor | None = None,
    ):
        self.token_ids, self.lengths, self.looked_up = token_ids, lengths, looked_up
        self._logits, self._laws, self._chosen = logits, laws, chosen

    @property
    def logits(self) -> torch.Tensor | None:
        if callable(self._logits):
            self._logits = self._logits()
        return self._logits

    def probabilities(self) -> torch.Tensor:
        """q of each draft, float `[batch, n]`; 1 where it is certain."""
        if self._chosen is not None:
            q = self._chosen
        elif self._logits is None:
            q = torch.ones_like(self.token_ids, dtype=torch.float)
        else:
            logits = self.logits.float()
            q = (logits.gather(2, self.token_ids[:, :, None])[..., 0] - logits.logsumexp(-1)).exp()
        return q if self.looked_up is None else q.masked_fill(self.looked_up[:, None], 1.0)

    def law(self, places: torch.LongTensor, vocab_size: int) -> torch.Tensor:
        """q of one draft a row, the `places[batch]`-th, as a whole: float `[batch, vocab_size]`."""
        rows = torch.arange(len(places), device=places.device)
        certain = self.token_ids[rows, places][:, None]
        if self._laws is not None:
            q = self._laws(places)
        elif self._logits is None:
            q = torch.zeros(len(places), vocab_size, device=places.device).scatter(1, certain, 1.0)
        else:
            q = self.logits[rows, places].float().softmax(-1)
        if self.looked_up is None:
            return q
        return torch.where(self.looked_up[:, None], torch.zeros_like(q).scatter(1, certain, 1.0), q)

    def to(self, device) -> DraftOutput:
        """The same on another device."""
        if self.token_ids.device == device:
            return self
        tokens, lengths, looked_up, chosen = (
            None if part is None else part.to(device)
            for part in (self.token_ids, self.lengths, self.looked_up, self._chosen)
        )
        logits = None if self._logits is None else lambda: self.logits.to(device)
        laws = None if self._laws is None else lambda places: self._laws(places.to(self.token_ids.device)).to(device)
        return DraftOutput(tokens, logits, lengths, looked_up, laws, chosen)

    def replace(self, token_ids, lengths, looked_up) -> DraftOutput:
        """Other tokens in the looked-up rows, the same laws in the others."""
        logits = None if self._logits is None else lambda: self.logits
        return DraftOutput(token_ids, logits, lengths, looked_up, self._laws, self._chosen)


def with_lookup(own: DraftOutput | None, lookup: list[list[int] | None], most: int, device) -> DraftOutput:
    """The drafter's proposals with some rows given over to their lookup continuation.

    Args:
        own: the drafter's; None where it did not run, and rows without a continuation propose nothing.
        lookup (list): of each row, its continuation or None; most (int): tokens that may be proposed.
    """
    rows = [None if tokens is None else tokens[:most] for tokens in lookup]
    width = max(len(tokens or ()) for tokens in rows)
    taken = torch.tensor([tokens is not None for tokens in rows], device=device)
    lengths = torch.tensor([len(tokens or ()) for tokens in rows], device=device)
    ids = torch.tensor([(tokens or []) + [0] * (width - len(tokens or ())) for tokens in rows], device=device)
    if own is None:
        return DraftOutput(ids.long(), None, lengths, taken)
    drafted = own.token_ids.shape[1]
    ids, lengths = ids[:, :drafted], lengths.clamp(max=drafted)
    ids = nn.functional.pad(ids.long(), (0, drafted - ids.shape[1]))
    theirs = torch.full_like(lengths, drafted) if own.lengths is None else own.lengths
    return own.replace(torch.where(taken[:, None], ids, own.token_ids), torch.where(taken, lengths, theirs), taken)


@dataclass
class SpeculationStats:
    """What one `generate` call drafted and kept.

    Args:
        acceptance_lengths (list[list[int]]): per row, tokens kept in each round, bonus included; the prefill's token
            belongs to no round.
        num_rounds (int): target forwards after the prefill; a plain step is a round of one token.
        num_plain_steps (int): rounds without drafts.
        num_drafted, num_accepted (int): drafts proposed, drafts kept.
        num_looked_up, num_lookup_accepted (int): those of them that were lookup continuations.
        prefill_seconds, draft_seconds, verify_seconds, total_seconds (float): wall clock; exact on an asynchronous
            device only with `synchronize_timers`. What the first three leave of the total is the loop's own.
        accepted_at (list[int]): over all rows, rounds in which draft i was kept.
        accepted_drafts (list[list[int]]): per row, drafts kept in each round; the rest of the round's tokens is the
            target's own.
    """

    acceptance_lengths: list[list[int]] = field(default_factory=list)
    num_rounds: int = 0
    num_plain_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_looked_up: int = 0
    num_lookup_accepted: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    accepted_at: list[int] = field(default_factory=list, repr=False)
    accepted_drafts: list[list[int]] = field(default_factory=list, repr=False)

    @property
    def mean_acceptance_length(self) -> float:
        """tau: kept tokens / rounds, over all rows; NaN before the first round."""
        rounds = sum(map(len, self.acceptance_lengths))
        return sum(map(sum, self.acceptance_lengths)) / rounds if rounds else float("nan")

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Share of all rounds (of all rows) in which draft i was accepted."""
        rounds = sum(map(len, self.acceptance_lengths))
        return [count / rounds for count in self.accepted_at]

    def record(self, row: int, drafted: int, accepted: int, kept: int, looked_up: bool = False) -> None:
        """Count one row's round."""
        if looked_up:
            self.num_looked_up += drafted
            self.num_lookup_accepted += accepted
        self.acceptance_lengths[row].append(kept)
        self.accepted_drafts[row].append(accepted)
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for i in range(accepted):
            self.accepted_at[i] += 1

    def __str__(self) -> str:
        share = self.num_accepted / self.num_drafted if self.num_drafted else 0.0
        return (
            f"tau {self.mean_acceptance_length:.2f} over {self.num_rounds} rounds ({self.num_plain_steps} plain), "
            f"{self.num_accepted} of {self.num_drafted} drafts accepted ({share:.0%}), "
            f"draft {self.draft_seconds:.2f} s + verify {self.verify_seconds:.2f} s of {self.total_seconds:.2f} s"
        )


# Acceptance -----------------------------------------------------------------------------------------------------


def sample_from_logits(logits: torch.Tensor, do_sample: bool) -> torch.LongTensor:
    """One token of each law `[..., V]` -> `[...]`: drawn, or the most likely."""
    return draw(logits.float().softmax(-1)) if do_sample else argmax(logits)


def accept_greedy(draft: DraftOutput, target_scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Leading drafts that equal the target's own choice.

    Args:
        draft: tokens `[batch, n]`; target_scores (float `[batch, n + 1, V]`): position i judges draft i.
    Returns:
        num_accepted int `[batch]`; the target's tokens int `[batch, n + 1]`, bonus of a row at its num_accepted.
    """
    choices = argmax(target_scores)
    matches = draft.token_ids == choices[:, :-1]
    if draft.lengths is not None:
        matches &= _counting(draft)
    return matches.long().cumprod(-1).sum(-1), choices


def accept_sampled(draft: DraftOutput, target_scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling: the kept tokens follow the target's law p exactly, whatever q was.

    Draft i is accepted with probability min(1, p/q); at the first rejection the bonus comes from norm(max(0, p - q)),
    after the last of a row's drafts from p. A looked-up draft x is certain: accepted with probability p(x), and after
    its rejection the bonus comes from p without x. Where a row's drafts end may hang on earlier drafts, never on the
    one that would come next, so a position follows p whether or not it was drafted.

    Args:
        draft: tokens and their laws; target_scores (float `[batch, n + 1, V]`): processed target logits.
    Returns:
        As `accept_greedy`: num_accepted, and tokens `[batch, n + 1]` with the bonus at num_accepted.
    Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318).
    """
    batch_size, n = draft.token_ids.shape
    rows = torch.arange(batch_size, device=target_scores.device)
    scores = target_scores.float()
    tokens = torch.cat([draft.token_ids, draft.token_ids.new_zeros(batch_size, 1)], dim=1)
    num_accepted = torch.zeros_like(rows)
    if n:
        # Only what is asked for is worked out: p and q of the drafts, then both laws at the first rejection.
        p_drafted = (scores[:, :n].gather(2, draft.token_ids[:, :, None])[..., 0] - scores[:, :n].logsumexp(-1)).exp()
        accepted = (torch.rand_like(p_drafted) * draft.probabilities() < p_drafted) & _counting(draft)
        num_accepted = accepted.long().cumprod(-1).sum(-1)
    law = scores[rows, num_accepted].softmax(-1)
    if n:
        last = num_accepted.clamp(max=n - 1)  # the rejected draft, where there is one
        rejected = _counting(draft)[rows, last] & (num_accepted < n)
        residual = (law - draft.law(last, law.shape[-1])).clamp(min=0)
        # p == q up to rounding leaves nothing over; a rejection is then a rounding accident, and p itself is right.
        rejected &= residual.sum(-1) > 0
        law = torch.where(rejected[:, None], residual, law)
    tokens[rows, num_accepted] = draw(law)
    return num_accepted, tokens


def _counting(draft: DraftOutput) -> torch.Tensor:
    """Which drafts count, bool `[batch, n]`."""
    slots = torch.arange(draft.token_ids.shape[1], device=draft.token_ids.device)[None]
    if draft.lengths is None:
        return torch.ones_like(slots, dtype=torch.bool).expand(len(draft.token_ids), -1)
    return slots < draft.lengths[:, None]
