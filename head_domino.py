"""From backbone states to draft tokens: base logits, the correction head, and the two rollouts.

Takes drafter and target as arguments. What does not hang on the tokens being drafted is worked out for the whole block
at once: base logits, candidate pools, the backbone's part of `W_down`, the pools' rows of `W_up`. A step is then one
step of the causal encoder, a product of rank r, and a choice among the pool; full rows of the vocabulary are written
only where somebody reads them.

Shapes in the comments: b rows, n drafts, H hidden size, S encoder state, r rank, V vocabulary of the target's head,
K size of the pool.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .kernels_domino import argmax, draw, linear, topk
from .processors_domino import process_logits, reads_values_only
from .speculation_domino import DraftOutput
from .target_domino import target_logits

# Far enough below any logit that softmax gives exactly zero.
OUT_OF_POOL = 1e4


class BlockHead:
    """The correction head on one block, for any prefix of drafts.

    Args:
        drafter: owns the head, and the size of the pool.
        states (float `[b, n, H]`): backbone states of the drafts.
        base (float `[b, n, V]`): their base logits.

    Attributes:
        ids (int `[b, n, K]` or None): each draft's candidates, best base logit first; None where all ids are.
    """

    def __init__(self, drafter, states: torch.Tensor, base: torch.Tensor):
        self.down, self.activation, self.up = drafter.correction_layers
        self.states, self.base, self.ids, self.rows = states, base, None, None
        # With an adapter around it a layer applies more than its weight.
        self.split = type(self.down) is nn.Linear
        if self.split:
            of_states, self.of_prefix = self.down.weight.split((states.shape[-1], drafter.config.head_hidden_size), 1)
            self.from_states = linear(states, of_states)  # [b, n, r]
        pool, vocab = drafter.generation_config.candidate_pool_size, drafter.config.vocab_size
        if 0 < pool < base.shape[-1]:
            values, self.ids = topk(base, pool)
            self.base = values.float()
            self.known = self.ids if vocab == base.shape[-1] else self.ids.clamp(max=vocab - 1)
            if type(self.up) is nn.Linear:
                self.rows = F.embedding(self.known, self.up.weight)  # [b, n, K, r]

    def corrected(self, drafts: slice, encoded: torch.Tensor) -> torch.Tensor:
        """fp32 logits `[b, m, K]` (without a pool `[b, m, V]`) of m drafts, after encoder states `[b, m, S]`."""
        if self.split:
            hidden = self.from_states[:, drafts] + linear(encoded, self.of_prefix)
        else:
            hidden = self.down(torch.cat([self.states[:, drafts], encoded], dim=-1))
        hidden = self.activation(hidden)  # [b, m, r]
        if self.ids is None:
            return add_correction(self.base[:, drafts].float(), self.up(hidden))
        known = self.known[:, drafts]
        if self.rows is not None:
            corrections = (self.rows[:, drafts] @ hidden[..., None])[..., 0]
        else:
            corrections = self.up(hidden).gather(-1, known)
        if self.known is not self.ids:
            corrections = corrections * (known == self.ids[:, drafts])  # ids that only a padded head has
        return self.base[:, drafts] + corrections.to(self.base)


def out_of_pool(base: torch.Tensor, ids: torch.LongTensor, values: torch.Tensor) -> torch.Tensor:
    """fp32 logits `[..., V]`: `values` at `ids [..., K]`, the base logits far out of reach elsewhere.

    Not at -inf: a processor may forbid the whole pool.
    """
    return (base.float() - OUT_OF_POOL).scatter(-1, ids, values)


def sequential_rollout(
    drafter, embed, anchor_ids, states, base_logits, input_ids, logits_processor, do_sample: bool
) -> DraftOutput:
    """One token after another, each corrected from the tokens drawn before it.

    Args:
        drafter: owns head, encoder and knobs.
        embed (callable): ids to target embeddings.
        anchor_ids (int `[b, 1]`), states (float `[b, n, H]`), base_logits (float `[b, n, V]`): of the block.
        input_ids: committed sequences, for processors; logits_processor, do_sample: as for `draft`.
    """
    knobs = drafter.generation_config
    n = base_logits.shape[1]
    start = drafter.config.pure_draft_prefix_len if knobs.use_head else n
    head = BlockHead(drafter, states, base_logits) if start < n else None
    pooled = head is not None and head.ids is not None
    threshold = knobs.assistant_confidence_threshold or 0.0
    plain = not do_sample and not logits_processor and not threshold
    # A processor that looks at ids or prefixes has to see the whole vocabulary.
    whole = bool(logits_processor) and not reads_values_only(logits_processor)
    if not (pooled and plain) and base_logits.stride(-1) != 1:
        base_logits = base_logits.contiguous()
    rows = [input_ids[i].to(anchor_ids.device) for i in range(len(input_ids))] if logits_processor else None
    token, state, tokens, laws, chosen = anchor_ids, None, [], [], []
    confidence = torch.ones(anchor_ids.shape[0], device=base_logits.device)
    lengths = torch.zeros_like(anchor_ids[:, 0])
    for i in range(n):
        if head is not None:
            encoded, state = drafter._encode_step(embed(token), state)
        ids = logits = None
        if i >= start:
            logits = head.corrected(slice(i, i + 1), encoded)[:, 0]  # [b, K] or [b, V]
            ids = head.ids[:, i] if pooled else None
            if whole and pooled:
                logits, ids = out_of_pool(base_logits[:, i], ids, logits), None
        elif not (pooled and plain):
            logits = base_logits[:, i].float()
        if logits is None:
            token = head.ids[:, i, :1]  # the best of the base logits
        else:
            if logits_processor:
                logits = process_logits(logits_processor, rows, logits)
            q = logits.softmax(-1) if do_sample or threshold else None
            choice = (draw(q) if do_sample else argmax(logits))[:, None]
            if q is not None:
                chosen.append(q.gather(1, choice)[:, 0])
            token = choice if ids is None else ids.gather(1, choice)
        tokens.append(token)
        laws.append((logits, ids))
        if whole:
            rows = [torch.cat([row, token[j].to(row.device)]) for j, row in enumerate(rows)]
        if threshold:
            # The token that falls below is still judged: whether there is a next draft hangs on this one alone.
            lengths += confidence >= threshold
            confidence = confidence * chosen[-1]
            if bool((confidence < threshold).all()):
                break

    def all_logits() -> torch.Tensor:
        steps = []
        for i, (logits, ids) in enumerate(laws):
            if logits is None:
                logits = base_logits[:, i].float()
            elif ids is not None and logits_processor:
                lowest = torch.finfo(logits.dtype).min
                logits = logits.new_full(base_logits[:, i].shape, lowest).scatter(1, ids, logits)
            elif ids is not None:
                logits = out_of_pool(base_logits[:, i], ids, logits)
            steps.append(logits)
        return torch.stack(steps, dim=1)

    def law(places: torch.LongTensor) -> torch.Tensor:
        found = base_logits.new_zeros(base_logits.shape[0], base_logits.shape[2], dtype=torch.float)
        for row, place in enumerate(places.tolist()):
            logits, ids = laws[place]
            probabilities = logits[row].float().softmax(-1)
            found[row] = probabilities if ids is None else found[row].scatter(0, ids[row], probabilities)
        return found

    return DraftOutput(
        torch.cat(tokens, dim=1),
        all_logits,
        lengths if threshold else None,
        laws=law if do_sample else None,
        chosen=torch.stack(chosen, dim=1) if do_sample else None,
    )


def parallel_rollout(drafter, embed, anchor_ids, states, base_logits) -> DraftOutput:
    """Correct all drafts from the current guess of the block until nothing changes: draft i is exact after i passes.

    Greedy, without processors; arguments as for `sequential_rollout`.
    """
    n, start = base_logits.shape[1], drafter.config.pure_draft_prefix_len
    head = BlockHead(drafter, states, base_logits)
    ids = head.ids
    guess = argmax(base_logits) if ids is None else ids[..., 0]  # [b, n]
    late = slice(start, n)
    values = None
    steps = drafter.generation_config.refinement_steps
    for _ in range(n if steps is None else steps):
        if start >= n:
            break
        prefix = torch.cat([anchor_ids, guess[:, :-1].to(anchor_ids.device)], dim=1)
        encoded, _ = drafter.causal_encoder(embed(prefix))
        values = head.corrected(late, encoded[:, late])  # [b, n - start, K] or [b, n - start, V]
        best = argmax(values)
        if ids is not None:
            best = ids[:, late].gather(2, best[..., None])[..., 0]
        previous, guess = guess, torch.cat([guess[:, :start], best], dim=1)
        if torch.equal(previous, guess):
            break

    def all_logits() -> torch.Tensor:
        if values is None:
            return base_logits.float()
        corrected = values if ids is None else out_of_pool(base_logits[:, late], ids[:, late], values)
        return torch.cat([base_logits[:, :start].float(), corrected], dim=1)

    return DraftOutput(guess, all_logits)


def base_logits_of(drafter, target, states: torch.Tensor, cache) -> torch.Tensor:
    """Base logits `[b, n, V]` of states `[b, n, H]`; of all ids or, out of reach elsewhere, of `draft_token_ids`."""
    ids = drafter.generation_config.draft_token_ids
    if ids is None:
        return target_logits(target, states)
    weight = target.get_output_embeddings().weight
    if max(ids) >= weight.shape[0]:
        raise ValueError(f"draft_token_ids has {max(ids)}; expected ids below {weight.shape[0]}, the target's head.")
    index = torch.tensor(ids, device=weight.device)
    if cache.head_rows is None:
        cache.head_rows = weight[index]
    few = target_logits(target, states, index, cache.head_rows)
    logits = few.new_full((*few.shape[:-1], weight.shape[0]), -OUT_OF_POOL)
    return logits.index_copy_(-1, index, few)


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


def linear_at(layer: nn.Module, inputs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`layer(inputs)[..., ids]`; of a bare linear layer without bias only those outputs are worked out."""
    if type(layer) is nn.Linear:
        return F.linear(inputs, layer.weight[ids])
    return layer(inputs)[..., ids]


def add_correction(logits: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
    """`logits [..., V_target] + correction [..., V]`; ids that only the target's padded head has stay uncorrected."""
    extra = logits.shape[-1] - correction.shape[-1]
    correction = correction.to(device=logits.device, dtype=logits.dtype)
    return logits + (F.pad(correction, (0, extra)) if extra else correction)
