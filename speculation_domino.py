"""What a round of speculation is made of: proposals of the drafter, sampling noise ahead of time, statistics, clock.

Imports neither modeling nor training code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class DraftOutput:
    """Proposals of one round; any ids are safe.

    Args:
        token_ids (int `[batch, n]`): the drafts.
        lengths (int `[batch]`, optional): how many of each row's drafts the drafter believes in; None: all n.
        confidences (float `[batch, n]`, optional): chance of each draft, given that those before it are right.
    """

    token_ids: torch.LongTensor
    lengths: torch.LongTensor | None = None
    confidences: torch.Tensor | None = None

    def check(self, batch_size: int, max_drafts: int, num_ids: int) -> None:
        """Raise one sentence for proposals of another shape or kind, or with ids that the target does not know."""
        ids = self.token_ids
        if ids.is_floating_point() or ids.dim() != 2 or ids.shape[0] != batch_size:
            raise ValueError(f"draft returned {ids.dtype} {list(ids.shape)}; expected ids of shape [{batch_size}, n].")
        if ids.shape[1] > max_drafts:
            raise ValueError(f"draft returned {ids.shape[1]} tokens, expected at most {max_drafts} (max_drafts).")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_ids:
            low, high = int(ids.min()), int(ids.max())
            raise ValueError(f"draft returned ids from {low} to {high}; expected 0 to {num_ids - 1}.")

    def to(self, device: torch.device) -> DraftOutput:
        """The same on another device."""
        parts = (self.token_ids, self.lengths, self.confidences)
        return DraftOutput(*(None if part is None else part.to(device) for part in parts))


class NoiseAhead:
    """The noise of plain decoding's next sampling steps, before it is drawn; the generator stays where it is.

    Plain decoding takes `torch.multinomial(probs, 1)`, which is `argmax(probs / e)` with `e ~ Exp(1)` of the shape of
    `probs`, drawn from the default generator. A drafter that takes the argmax of its own logits minus `log e` agrees
    with the target as often as two distributions that share their noise can.

    Args:
        device: of the scores that plain decoding draws from.
        shape (tuple): `(batch, V)` of these scores.

    Source: Gumbel coupling, Daliri, Musco, Suresh (arXiv 2408.07978).
    """

    def __init__(self, device: torch.device, shape: tuple[int, int]):
        self.device, self.shape = device, shape
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []  # generator state before, noise
        self._end: torch.Tensor | None = None  # state after the last of them

    def __getitem__(self, step: int) -> torch.Tensor:
        """Noise `[batch, V]` of the `step`-th draw from now."""
        now = self._state()
        while self._steps and not torch.equal(self._steps[0][0], now):
            del self._steps[0]  # drawn since, or overtaken by somebody else's draws
        if len(self._steps) <= step:
            try:
                self._set_state(self._end if self._steps else now)
                while len(self._steps) <= step:
                    before = self._state()
                    self._steps.append((before, torch.empty(self.shape, device=self.device).exponential_(1)))
                self._end = self._state()
            finally:
                self._set_state(now)
        return self._steps[step][1]

    def _state(self) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.get_rng_state()
        module = torch.get_device_module(self.device)
        return module.get_rng_state() if self.device.type == "mps" else module.get_rng_state(self.device)

    def _set_state(self, state: torch.Tensor) -> None:
        if self.device.type == "cpu":
            torch.set_rng_state(state)
        elif self.device.type == "mps":
            torch.get_device_module(self.device).set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)


def coupled(logits: torch.Tensor, noise: torch.Tensor | None, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Scores whose argmax is the token that plain decoding would take from `logits [batch, K]`.

    Args:
        noise (float `[batch, V]`, optional): of the step; None under greedy decoding.
        ids (int `[batch, K]`, optional): which ids the logits belong to; None: all.
    """
    if noise is None:
        return logits
    noise = noise.to(logits.device)
    return logits - (noise if ids is None else noise.gather(1, ids)).log()


def noise_columns(noise: torch.Tensor | NoiseAhead | None) -> Sequence | NoiseAhead | None:
    """Noise by step, of a tensor `[batch, n, V]` or of anything that already yields its columns."""
    return noise.unbind(1) if torch.is_tensor(noise) else noise


@dataclass
class SpeculationStats:
    """What one `generate` call drafted and kept.

    Rows of a batch stay in step, so a round keeps as many tokens in each row that is still being written.

    Args:
        acceptance_lengths (list[list[int]]): per row, tokens kept in each round, bonus included; the prefill's token
            belongs to no round.
        num_rounds (int): target forwards after the prefill; a plain step is a round of one token.
        num_plain_steps (int): rounds without proposals.
        num_drafted, num_accepted (int): proposals judged, proposals kept; a token that is proposed again because its
            row was ahead of the batch counts once.
        num_looked_up, num_lookup_accepted (int): those of them that were lookup continuations.
        prefill_seconds, draft_seconds, verify_seconds, total_seconds (float): wall clock; exact on an asynchronous
            device only with `synchronize_timers`. What the first three leave of the total is plain decoding's own.
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

    def record(self, row: int, drafted: int, accepted: int, kept: int, known: int, looked_up: bool) -> None:
        """Count one row's round; the first `known` of its proposals were counted in an earlier one."""
        fresh, fresh_accepted = max(0, drafted - known), max(0, accepted - known)
        if looked_up:
            self.num_looked_up += fresh
            self.num_lookup_accepted += fresh_accepted
        self.acceptance_lengths[row].append(kept)
        self.accepted_drafts[row].append(accepted)
        self.num_drafted += fresh
        self.num_accepted += fresh_accepted
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


class RoundTimer:
    """Wall clock of a call by section, and of the round at hand.

    Args:
        stats: gets the seconds of each section added to `NAME_seconds`.
        device: waited for at the end of a section, always with `synchronize`, else now and then: rounds as a whole
            need no waiting, since each ends with reading on the host what was accepted.
    """

    def __init__(self, stats: SpeculationStats, device: torch.device, synchronize: bool):
        self.stats, self.device, self.synchronize = stats, device, synchronize
        self.drafting: float | None = 0.0  # seconds of this round's drafts; None: not measured
        self._started = 0.0

    def start_round(self) -> None:
        """A round begins."""
        self._started, self.drafting = time.perf_counter(), 0.0

    def rest_of_round(self) -> float | None:
        """Seconds since the round began, drafting left out; None where drafting was not measured."""
        return None if self.drafting is None else time.perf_counter() - self._started - self.drafting

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time what runs inside as `name`: prefill, draft or verify."""
        started = time.perf_counter()
        yield
        asynchronous = self.device.type != "cpu"
        sometimes = name == "draft" and (self.stats.num_rounds < 8 or self.stats.num_rounds % 16 == 0)
        if asynchronous and (self.synchronize or sometimes):
            torch.accelerator.synchronize(self.device)
        seconds = time.perf_counter() - started
        setattr(self.stats, f"{name}_seconds", getattr(self.stats, f"{name}_seconds") + seconds)
        if name == "draft":
            self.drafting = seconds if self.synchronize or sometimes or not asynchronous else None
