"""tau without decoding: held-out answers are walked as decoding would walk them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from domino_spec.training.objective import DominoObjective


def simulated_rounds(accepted: torch.Tensor, anchors: list[int], end: int) -> list[int]:
    """Walk one answer as decoding would: each round keeps the accepted drafts and one bonus token.

    Args:
        accepted (int `[A]`): leading accepted drafts of a block at each anchor.
        anchors: their positions; end: position of the answer's last token.
    Returns:
        tokens kept in each round; their mean over many answers is tau. (The mean of `accepted + 1` over all anchors
        is not: it visits easy stretches as often as hard ones, while decoding jumps over them.)
    """
    at = dict(zip(anchors, accepted.tolist(), strict=True))
    place, kept = anchors[0], []
    while place < end:
        kept.append(min(at.get(place, 0) + 1, end - place))
        place += kept[-1]
    return kept


def answer_spans(supervised: list[int]) -> list[tuple[int, int]]:
    """First and last position of every run of supervised tokens: a chat's answers are decoded one by one."""
    spans, start = [], None
    for i, flag in enumerate([*supervised, 0]):
        if flag and start is None:
            start = i
        elif not flag and start is not None:
            spans.append((start, i - 1))
            start = None
    return spans


@dataclass
class Walk:
    """One held-out answer walked as decoding would walk it, by the base and by the final logits.

    Args:
        rounds: tokens kept in each simulated round. lengths: leading hits + 1 of every anchor.
    """

    rounds: dict[str, list[int]]
    lengths: dict[str, list[int]]


def walk(objective: DominoObjective, row: dict) -> Walk:
    """Simulated rounds over all answers of a row."""
    accepted, anchors = objective.accepted_lengths(row)
    result = Walk({name: [] for name in accepted}, {name: (x + 1).tolist() for name, x in accepted.items()})
    for first, end in answer_spans(row["supervised"]):
        inside = [i for i, anchor in enumerate(anchors) if first <= anchor < end]
        if inside:
            part = slice(inside[0], inside[-1] + 1)
            for name, lengths in accepted.items():
                result.rounds[name] += simulated_rounds(lengths[part], anchors[part], end)
    return result


def tau_of_walks(walks: list[Walk], num_drafts: int) -> dict[str, float]:
    """tau of base and final logits from simulated rounds, and what explains it.

    Returns:
        `tau_base`, `tau_final`; `acceptance_base_1..n`, `acceptance_final_1..n`: share of the rounds in which draft i
        was kept (the token that ends an answer counts as its round's own); `head_share`: the head's part of the gain
        over plain decoding, `(tau_final - tau_base) / (tau_final - 1)`, 0 without a gain; `anchor_mean_base`,
        `anchor_mean_final`: mean of leading hits + 1 over all anchors, which is not tau.
    """
    rounds = {name: [kept for one in walks for kept in one.rounds[name]] for name in ("base", "final")}
    lengths = {name: [length for one in walks for length in one.lengths[name]] for name in ("base", "final")}
    result = {f"tau_{name}": _mean(kept) for name, kept in rounds.items()}
    gain = result["tau_final"] - 1
    result["head_share"] = (result["tau_final"] - result["tau_base"]) / gain if gain > 0 else 0.0
    for name, kept in rounds.items():
        for i in range(1, num_drafts + 1):
            result[f"acceptance_{name}_{i}"] = _mean([tokens > i for tokens in kept])
    return result | {f"anchor_mean_{name}": _mean(values) for name, values in lengths.items()}


def simulated_tau(objective: DominoObjective, rows) -> dict[str, float]:
    """`tau_of_walks` over held-out rows."""
    return tau_of_walks([walk(objective, row) for row in rows], objective.config.num_drafts)


def _mean(values: list) -> float:
    """Mean, 0 of nothing."""
    return sum(values) / max(len(values), 1)
