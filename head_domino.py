"""From backbone states to draft tokens: base logits, the correction head, and the two rollouts.

Takes drafter and target as arguments. Whatever does not depend on the drafted tokens is computed once per block: base
logits, candidate pools, the backbone's part of `W_down`, the pools' rows of `W_up`. A step is then one step of the
causal encoder, a product of rank r, and a choice among the pool.

Shapes in the comments: b rows, n drafts, H hidden size, S encoder state, r rank, V vocabulary of the target's head,
K size of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .kernels_domino import linear, topk
from .processors_domino import DraftProcessors
from .speculation_domino import DraftOutput, coupled

# Far enough below any logit that softmax gives exactly zero. Not -inf: a processor may forbid the whole pool.
OUT_OF_POOL = 1e4


@dataclass
class DraftRequest:
    """What a rollout works on.

    Args:
        embed (callable): ids to target embeddings, `[b, t]` -> `[b, t, H]`.
        anchor_ids (int `[b, 1]`): last committed tokens.
        states (float `[b, n, H]`), base_logits (float `[b, n, V]`): of the drafts.
        input_ids (int `[b, length]`): committed sequences, for processors.
        processors (DraftProcessors): what the target's scores go through too.
        noise (sequence, optional): `noise[i] [b, V]` of the step that draft i stands for; None: greedy.
    """

    embed: Callable[[torch.LongTensor], torch.Tensor]
    anchor_ids: torch.LongTensor
    states: torch.Tensor
    base_logits: torch.Tensor
    input_ids: torch.LongTensor
    processors: DraftProcessors
    noise: object | None = None

    @property
    def num_drafts(self) -> int:
        """n."""
        return self.base_logits.shape[1]


class BlockHead:
    """The candidates of one block and the correction head on them, for any prefix of drafts.

    Args:
        drafter: owns the head, and the size of the pool.
        states (float `[b, n, H]`): backbone states of the drafts.
        base (float `[b, n, V]`): their base logits.
        corrects (bool): False offers the candidates alone.

    Attributes:
        ids (int `[b, n, K]` or None): each draft's candidates, best base logit first; None where all ids are.
        base (float `[b, n, K]` or `[b, n, V]`): the candidates' base logits.
    """

    def __init__(self, drafter, states: torch.Tensor, base: torch.Tensor, corrects: bool = True):
        self.down, self.activation, self.up = drafter.correction_layers
        self.states, self.ids, self.rows = states, None, None
        pool, vocab = drafter.generation_config.candidate_pool_size, drafter.config.vocab_size
        self.padding = base.shape[-1] - vocab  # ids that only a padded head has; they stay uncorrected
        if 0 < pool < base.shape[-1]:
            values, ids = topk(base, pool)
            self.base, self.ids = values.float().to(states.device), ids.to(states.device)
            self.known = self.ids.clamp(max=vocab - 1) if self.padding > 0 else self.ids
            if corrects and type(self.up) is nn.Linear:
                self.rows = F.embedding(self.known, self.up.weight)  # [b, n, K, r]
        else:
            self.base = base.float().to(states.device)
        # With an adapter around it a layer applies more than its weight.
        self.split = corrects and type(self.down) is nn.Linear
        if self.split:
            of_states, self.of_prefix = self.down.weight.split((states.shape[-1], drafter.config.head_hidden_size), 1)
            self.from_states = linear(states, of_states)  # [b, n, r]

    def corrected(self, drafts: slice, encoded: torch.Tensor) -> torch.Tensor:
        """fp32 logits `[b, m, K]` (without a pool `[b, m, V]`) of m drafts, after encoder states `[b, m, S]`."""
        if self.split:
            hidden = self.from_states[:, drafts] + linear(encoded, self.of_prefix)
        else:
            hidden = self.down(torch.cat([self.states[:, drafts], encoded], dim=-1))
        hidden = self.activation(hidden)  # [b, m, r]
        if self.ids is None:
            return add_correction(self.base[:, drafts], self.up(hidden))
        known = self.known[:, drafts]
        if self.rows is not None:
            corrections = (self.rows[:, drafts] @ hidden[..., None])[..., 0]
        else:
            corrections = self.up(hidden).gather(-1, known)
        if self.padding > 0:
            corrections = corrections * (known == self.ids[:, drafts])
        return self.base[:, drafts] + corrections.float()


class Choice:
    """Which candidate a draft takes: the one that plain decoding would take from these logits.

    Args:
        request: processors and noise.
        head: the candidates.
    """

    def __init__(self, request: DraftRequest, head: BlockHead):
        self.request, self.head = request, head

    def __call__(self, i: int, logits: torch.Tensor, drafts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token `[b, 1]` of draft `i` and its margin `[b]` over the second best, given logits `[b, K]` or `[b, V]`.

        `drafts` are the tokens before it, `[b, 1]` each.
        """
        request = self.request
        ids = None if self.head.ids is None else self.head.ids[:, i]
        if request.processors:
            prefix = request.input_ids
            if not request.processors.values_only:
                if ids is not None:
                    full = request.base_logits[:, i].float().to(logits.device) - OUT_OF_POOL
                    logits, ids = full.scatter(1, ids, logits), None
                prefix = torch.cat([prefix, *(token.to(prefix.device) for token in drafts)], dim=1)
            logits = request.processors(prefix, logits)
        scores = coupled(logits, None if request.noise is None else request.noise[i], ids)
        best, index = scores.topk(2, dim=-1)  # [b, 2]
        token = index[:, :1] if ids is None else ids.gather(1, index[:, :1])
        return token, (best[:, 0] - best[:, 1]).nan_to_num(nan=0.0)


def sequential_rollout(drafter, request: DraftRequest) -> DraftOutput:
    """One token after another, each corrected from the tokens chosen before it."""
    knobs, n = drafter.generation_config, request.num_drafts
    start = drafter.config.pure_draft_prefix_len if knobs.use_head else n
    head = BlockHead(drafter, request.states, request.base_logits, start < n)
    choose = Choice(request, head)
    token, state, tokens, margins = request.anchor_ids, None, [], []
    reached = torch.ones(len(token), device=request.states.device)
    lengths = torch.zeros(len(token), dtype=torch.long, device=request.states.device)
    for i in range(n):
        if start < n:
            encoded, state = drafter.encode_step(request.embed(token), state)
        logits = head.corrected(slice(i, i + 1), encoded)[:, 0] if i >= start else head.base[:, i]
        token, margin = choose(i, logits, tokens)
        tokens.append(token)
        margins.append(margin)
        if knobs.assistant_confidence_threshold:
            # The draft that falls below is still proposed: it costs next to nothing by now.
            lengths += reached >= knobs.assistant_confidence_threshold
            reached = reached * knobs.confidence(margin)
            if bool((reached < knobs.assistant_confidence_threshold).all()):
                break
    confidences = knobs.confidence(torch.stack(margins, dim=1))
    ended = bool(knobs.assistant_confidence_threshold)
    return DraftOutput(torch.cat(tokens, dim=1), lengths if ended else None, confidences)


def parallel_rollout(drafter, request: DraftRequest) -> DraftOutput:
    """Correct all drafts from the current guess of the block until nothing changes: draft i is exact after i passes.

    Processors that need a prefix go by `sequential_rollout`.
    """
    knobs, n, start = drafter.generation_config, request.num_drafts, drafter.config.pure_draft_prefix_len
    head = BlockHead(drafter, request.states, request.base_logits)
    choose = Choice(request, head)

    def choose_all(first: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = [choose(first + i, logits[:, i], []) for i in range(logits.shape[1])]
        return torch.cat([token for token, _ in chosen], dim=1), torch.stack([margin for _, margin in chosen], dim=1)

    guess, margins = choose_all(0, head.base)  # [b, n]
    late = slice(start, n)
    for _ in range(0 if start >= n else knobs.refinement_steps or n):
        prefix = torch.cat([request.anchor_ids, guess[:, :-1].to(request.anchor_ids.device)], dim=1)
        encoded, _ = drafter.causal_encoder(request.embed(prefix))
        best, own = choose_all(start, head.corrected(late, encoded[:, late]))
        previous, guess = guess, torch.cat([guess[:, :start], best], dim=1)
        margins = torch.cat([margins[:, :start], own], dim=1)
        if torch.equal(previous, guess):
            break
    confidences = knobs.confidence(margins)
    lengths = None
    if cut := knobs.assistant_confidence_threshold:
        before = F.pad(confidences.cumprod(-1)[:, :-1], (1, 0), value=1.0)
        lengths = (before >= cut).sum(-1)
    return DraftOutput(guess, lengths, confidences)


# Weights as their layers apply them -----------------------------------------------------------------------------


def gru_weights(encoder: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and recurrent weights `[3S, H]` and `[3S, S]` of a GRU as its forward applies them.

    PEFT wraps a layer around the GRU for each adapted parameter; the bare parameters leave out an unmerged adapter.
    """
    wrappers = []
    while hasattr(encoder, "parameter_name"):
        wrappers.append(encoder)
        encoder = encoder.base_layer
    weights = {"weight_ih_l0": encoder.weight_ih_l0, "weight_hh_l0": encoder.weight_hh_l0}
    for wrapper in wrappers:
        # +1 where an adapter is wanted and not merged in, -1 where one is merged in and switched off.
        sign = int(not wrapper.disable_adapters) - int(wrapper.merged)
        for name in wrapper.merged_adapters if wrapper.merged else wrapper.active_adapters:
            if sign and name in wrapper.lora_A:
                weights[wrapper.parameter_name] = weights[wrapper.parameter_name] + sign * wrapper.get_delta_weight(
                    name
                )
    return weights["weight_ih_l0"], weights["weight_hh_l0"]


def add_correction(logits: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
    """`logits [..., V_target] + correction [..., V]`; ids that only the target's padded head has stay uncorrected."""
    extra = logits.shape[-1] - correction.shape[-1]
    correction = correction.to(device=logits.device, dtype=logits.dtype)
    return logits + (F.pad(correction, (0, extra)) if extra else correction)
