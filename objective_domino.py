"""What a drafter is trained on: block losses of the base and the corrected logits, and tau from simulated rounds."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .data_domino import block_attention_mask, first_anchors, sample_anchors
from .generation_domino import decoder_layers, tapped_states
from .modeling_domino import DominoForSpeculation, add_correction, embed_tokens, linear_at, target_logits


@dataclass
class TargetStates:
    """One target forward: what the drafter reads, and what tells the target's law.

    Args:
        tapped (float `[batch, L, T * H]`): outputs of the tapped layers.
        final (float `[batch, L, H]`): normed last states; the LM head on position j gives the law of token j + 1.
    """

    tapped: torch.Tensor
    final: torch.Tensor


@torch.no_grad()
def target_states(target, layer_ids: list[int], input_ids, attention_mask) -> TargetStates:
    """Run the frozen target over whole sequences, without its LM head."""
    with tapped_states(target, layer_ids) as taps:
        output = target.get_decoder()(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return TargetStates(taps.take(), output.last_hidden_state)


class FeatureScale:
    """Train `fc` on features of unit size, save it for raw ones.

    Tapped states have dimensions thirty times the median; Adam, which moves every weight alike, would let those alone
    decide. While `active`, a hook divides the features by their root mean square and `fc` holds the rescaled weights.
    """

    def __init__(self, fc: nn.Linear, scale: torch.Tensor):
        self.fc, self.scale = fc, scale
        self.handle = None

    @classmethod
    @torch.no_grad()
    def measure(cls, drafter, target, batches: list[dict]) -> FeatureScale:
        """Root mean square of every tapped dimension, the first position left out: its states are of another kind."""
        total, count = 0.0, 0
        for batch in batches:
            states = target_states(
                target, drafter.config.target_layer_ids, batch["input_ids"], batch["attention_mask"]
            )
            kept = states.tapped[:, 1:][batch["attention_mask"][:, 1:].bool()].float()
            total, count = total + kept.square().sum(0), count + kept.shape[0]
        return cls(drafter.fc, (total / count).sqrt().clamp(min=1e-3).to(drafter.device))

    @torch.no_grad()
    def attach(self) -> None:
        """Move from raw to unit-size features: same function, other weights."""
        self.fc.weight.mul_(self.scale)
        self.handle = self.fc.register_forward_pre_hook(lambda module, inputs: (inputs[0] / self.scale,))

    @torch.no_grad()
    def fold(self) -> None:
        """Move back, so that the weights work on raw features."""
        self.handle.remove()
        self.fc.weight.div_(self.scale)

    @contextmanager
    def folded(self):
        """Raw-feature weights for as long as the context lasts: for saving."""
        self.fold()
        try:
            yield
        finally:
            self.attach()


class DominoObjective(nn.Module):
    """Drafter and frozen target as one module whose forward gives the training loss.

    Args:
        drafter, target: the target is not a submodule: it is neither trained nor saved.
        gamma (float): the k-th draft weighs `exp(-(k - 1) / gamma)`.
        distill_weight (float, 0 to 1): share of the KL divergence to the target's law; the rest is cross-entropy.
        frequent_ids (int `[F]`, optional): ids always in the softmax; together with the batch's labels and
            `num_negatives` random other ids, weighted for what they stand for, they estimate the whole softmax.
            None takes all ids.

    Source: Domino (arXiv 2605.29707), section 3.4; position weights as in DFlash; estimated softmax: Bengio and
        Senecal 2008, adaptive importance sampling.
    """

    def __init__(
        self,
        drafter: DominoForSpeculation,
        target,
        *,
        gamma: float = 7.0,
        distill_weight: float = 0.0,
        frequent_ids: torch.Tensor | None = None,
        num_negatives: int = 1024,
    ):
        super().__init__()
        self.kept_states: dict[tuple[int, ...], TargetStates] = {}
        self.drafter = drafter
        self._target = [target]
        self.gamma, self.distill_weight = gamma, distill_weight
        self.frequent_ids, self.num_negatives = frequent_ids, num_negatives
        self.config = drafter.config

    @property
    def target(self):
        return self._target[0]

    def remember(self, rows, progress=None) -> None:
        """Compute and keep the target's states of these rows, one at a time, for all epochs to come."""
        self.kept_states = {}
        for row in rows if progress is None else progress(rows):
            ids = torch.tensor([row["input_ids"]], device=self.drafter.device)
            states = target_states(self.target, self.config.target_layer_ids, ids, torch.ones_like(ids))
            self.kept_states[tuple(row["input_ids"])] = TargetStates(
                states.tapped[0].bfloat16().cpu(), states.final[0].bfloat16().cpu()
            )

    def states_of(self, input_ids, attention_mask) -> TargetStates:
        """The target's states of a batch: remembered where all its rows are, computed otherwise."""
        rows = [tuple(ids[: int(mask.sum())]) for ids, mask in zip(input_ids.tolist(), attention_mask, strict=True)]
        if any(row not in self.kept_states for row in rows):
            return target_states(self.target, self.config.target_layer_ids, input_ids, attention_mask)
        kept = [self.kept_states[row] for row in rows]
        pad, device = nn.utils.rnn.pad_sequence, input_ids.device
        return TargetStates(
            pad([states.tapped for states in kept], batch_first=True).to(device),
            pad([states.final for states in kept], batch_first=True).to(device),
        )

    def draft_states(self, input_ids, attention_mask, anchors, tapped):
        """Backbone states `[batch, M, n, H]` of the blocks at `anchors [batch, M]`."""
        config, drafter = self.config, self.drafter
        batch_size, num_blocks = anchors.shape
        slots = torch.arange(config.block_size, device=input_ids.device)
        block_ids = anchors.new_full((batch_size, num_blocks, config.block_size), config.mask_token_id)
        block_ids[:, :, 0] = input_ids.gather(1, anchors)
        states = drafter(
            embed_tokens(self.target, block_ids.flatten(1), dtype=drafter.dtype, device=drafter.device),
            tapped.to(dtype=drafter.dtype),
            (anchors[:, :, None] + slots).flatten(1),
            torch.arange(input_ids.shape[1], device=input_ids.device).expand(batch_size, -1),
            block_attention_mask(anchors, config.block_size, attention_mask.bool()),
        )
        states = states.unflatten(1, (num_blocks, config.block_size))
        return states[:, :, config.first_draft_slot :]

    def encode_prefixes(self, input_ids, anchors):
        """Causal encoder states `[batch, M, n, S]`: draft i is preceded by the true [anchor, d1, ..., d_(i-1)]."""
        drafter = self.drafter
        steps = torch.arange(self.config.num_drafts, device=input_ids.device)
        places = (anchors[:, :, None] + steps).clamp(max=input_ids.shape[1] - 1)  # [b, M, n]
        prefix = input_ids.gather(1, places.flatten(1)).view_as(places).flatten(0, 1)
        embeds = embed_tokens(self.target, prefix, dtype=drafter.dtype, device=drafter.device)
        return drafter.causal_encoder(embeds)[0].unflatten(0, anchors.shape)

    def labels(self, input_ids, supervised, anchors, kept):
        """Positions `[batch, M, n]` of the drafts' labels, and which count: up to the first unsupervised one."""
        steps = torch.arange(1, self.config.num_drafts + 1, device=input_ids.device)
        places = anchors[:, :, None] + steps
        inside = places < input_ids.shape[1]
        places = places.clamp(max=input_ids.shape[1] - 1)
        valid = inside & supervised.bool().gather(1, places.flatten(1)).view_as(places) & kept[:, :, None]
        return places, valid.long().cumprod(-1).bool()

    def softmax_ids(self, labels: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Ids of the estimated softmax and the log weights `[ids]` of what each stands for; None for all ids."""
        if self.frequent_ids is None:
            return None, None
        vocab = self.config.vocab_size
        certain = torch.zeros(vocab, dtype=torch.bool)
        certain[self.frequent_ids] = True
        certain[labels.cpu()] = True
        others = (~certain).nonzero()[:, 0]
        negatives = others[torch.randint(max(len(others), 1), (min(self.num_negatives, len(others)),))]
        ids = torch.cat([certain.nonzero()[:, 0], negatives])
        log_weights = torch.zeros(len(ids))
        if len(negatives):
            log_weights[-len(negatives) :] = torch.log(torch.tensor(len(others) / len(negatives)))
        return ids.to(labels.device), log_weights.to(labels.device)

    def corrections(self, states, encoded, ids):
        """Correction head on `[N, H]` and `[N, S]`, all ids or some."""
        if ids is None:
            return self.drafter.correction(states, encoded)
        down, activation, up = self.drafter.embed_proj
        hidden = activation(down(torch.cat([states, encoded], dim=-1)))
        return linear_at(up, hidden, ids).float()

    def forward(
        self,
        input_ids,
        attention_mask,
        supervised,
        lam: float = 1.0,
        num_anchors: int = 256,
        generator=None,
        anchors=None,
    ):
        """Loss of one batch.

        Args:
            input_ids, attention_mask, supervised (int `[batch, L]`): right-padded rows.
            lam (float): weight of the base loss; the head runs only below 1.
            anchors (int `[batch, M]`, optional): fixed anchors instead of sampled ones.
        Returns:
            dict: `loss`, detached `base_loss` and `final_loss`, and per draft `base_hits`, `final_hits`, `counts`
            `[n]` (top-1 hits among the ids of the softmax).
        """
        states = self.states_of(input_ids, attention_mask)
        if anchors is None:
            anchors, kept = sample_anchors(first_anchors(supervised), num_anchors, generator)
        else:
            kept = torch.ones_like(anchors, dtype=torch.bool)
        places, valid = self.labels(input_ids, supervised, anchors, kept)
        z = self.draft_states(input_ids, attention_mask, anchors, states.tapped)
        n = self.config.num_drafts
        order = torch.arange(n, device=input_ids.device).expand_as(valid)[valid]  # draft index of every kept label
        labels = input_ids.gather(1, places.flatten(1)).view_as(places)[valid]  # [N]
        ids, log_weights = self.softmax_ids(labels)
        where = labels
        if ids is not None:
            lookup = torch.zeros(self.config.vocab_size, dtype=torch.long, device=ids.device)
            lookup[ids] = torch.arange(len(ids), device=ids.device)
            where = lookup[labels]
        weights = torch.exp(-order.float() / self.gamma)
        z = z[valid]  # [N, H]
        offset = 0.0 if log_weights is None else log_weights
        base_logits = target_logits(self.target, z, ids).float() + offset
        teacher = None
        if self.distill_weight:
            rows = torch.arange(input_ids.shape[0], device=input_ids.device)[:, None, None].expand_as(places)[valid]
            with torch.no_grad():
                teacher = (
                    target_logits(self.target, states.final[rows, places[valid] - 1], ids).float() + offset
                ).log_softmax(-1)
        losses = {"base": self._loss(base_logits, where, teacher)}
        hits = {"base": base_logits.argmax(-1) == where}
        if lam < 1:
            late = order >= self.config.pure_draft_prefix_len
            encoded = self.encode_prefixes(input_ids, anchors)[valid]
            correction = self.corrections(z[late], encoded[late], ids)
            rows = late.nonzero()[:, 0]
            final_logits = base_logits.index_copy(0, rows, add_correction(base_logits[rows], correction))
            losses["final"] = self._loss(final_logits, where, teacher)
            hits["final"] = final_logits.argmax(-1) == where
        total = weights.sum().clamp(min=1e-9)
        base = (losses["base"] * weights).sum() / total
        final = (losses["final"] * weights).sum() / total if "final" in losses else base
        loss = lam * base + (1 - lam) * final if lam < 1 else base
        counts = torch.bincount(order, minlength=n)
        result = {"loss": loss, "base_loss": base.detach(), "final_loss": final.detach(), "counts": counts}
        for name in ("base", "final"):
            hit = hits.get(name, hits["base"])
            result[f"{name}_hits"] = torch.bincount(order[hit], minlength=n)
        return result

    def _loss(self, logits, where, teacher):
        """Cross-entropy and KL(p || q), mixed; `[N]`."""
        log_q = logits.log_softmax(-1)
        loss = -log_q.gather(1, where[:, None])[:, 0]
        if teacher is not None:
            divergence = (teacher.exp() * (teacher - log_q)).sum(-1)
            loss = (1 - self.distill_weight) * loss + self.distill_weight * divergence
        return loss

    @torch.no_grad()
    def accepted_lengths(self, row: dict, chunk: int = 32) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Leading greedy drafts that equal the row's own text, for a block at every anchor.

        A corrected draft is judged with the true tokens before it, which is what the sequential rollout would have
        drafted as long as it was right; so leading hits are exactly what decoding would have accepted.

        Returns:
            `{"base": [A], "final": [A]}` counts, and the anchors.
        """
        device = self.drafter.device
        input_ids = torch.tensor([row["input_ids"]], device=device)
        supervised = torch.tensor([row["supervised"]], device=device)
        attention_mask = torch.ones_like(input_ids)
        states = target_states(self.target, self.config.target_layer_ids, input_ids, attention_mask)
        every = first_anchors(supervised)[0].nonzero()[:, 0]
        lengths = {"base": [], "final": []}
        for part in every.split(chunk):
            anchors = part[None]
            places, valid = self.labels(input_ids, supervised, anchors, torch.ones_like(anchors, dtype=torch.bool))
            z = self.draft_states(input_ids, attention_mask, anchors, states.tapped)[0]  # [M, n, H]
            labels = input_ids[0][places[0]]
            base = target_logits(self.target, z)
            start = self.config.pure_draft_prefix_len
            final = base
            if start < base.shape[1]:
                encoded = self.encode_prefixes(input_ids, anchors)[0]
                late = add_correction(base[:, start:], self.drafter.correction(z[:, start:], encoded[:, start:]))
                final = torch.cat([base[:, :start], late], dim=1)
            for name, logits in (("base", base), ("final", final)):
                hits = (logits.argmax(-1) == labels) & valid[0]
                lengths[name].append(hits.long().cumprod(-1).sum(-1))
        return {name: torch.cat(parts) for name, parts in lengths.items()}, every.tolist()


def simulated_rounds(accepted: torch.Tensor, anchors: list[int], end: int) -> tuple[int, int]:
    """Walk one answer as decoding would: each round keeps the accepted drafts and one bonus token.

    Args:
        accepted (int `[A]`): leading accepted drafts of a block at each anchor.
        anchors: their positions; end: position of the answer's last token.
    Returns:
        kept tokens and rounds; their quotient over many answers is tau. (The mean of `accepted + 1` over all anchors
        is not: it visits easy stretches as often as hard ones, while decoding jumps over them.)
    """
    at = dict(zip(anchors, accepted.tolist(), strict=True))
    place, rounds, kept = anchors[0], 0, 0
    while place < end:
        step = min(at.get(place, 0) + 1, end - place)
        place, kept, rounds = place + step, kept + step, rounds + 1
    return kept, rounds


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


def simulated_tau(objective: DominoObjective, rows) -> dict[str, float]:
    """tau of base and final logits over held-out rows, and the per-anchor means beside them."""
    kept, rounds = {"base": 0, "final": 0}, {"base": 0, "final": 0}
    means: dict[str, list[float]] = {"base": [], "final": []}
    for row in rows:
        lengths, anchors = objective.accepted_lengths(row)
        for name, accepted in lengths.items():
            means[name] += (accepted + 1).tolist()
            for first, end in answer_spans(row["supervised"]):
                inside = [i for i, anchor in enumerate(anchors) if first <= anchor < end]
                if inside:
                    part = slice(inside[0], inside[-1] + 1)
                    tokens, steps = simulated_rounds(accepted[part], anchors[part], end)
                    kept[name] += tokens
                    rounds[name] += steps
    result = {f"tau_{name}": kept[name] / max(rounds[name], 1) for name in kept}
    return result | {f"anchor_mean_{name}": sum(x) / max(len(x), 1) for name, x in means.items()}


@torch.no_grad()
def initialise_from_target(drafter: DominoForSpeculation, target, layer_ids: list[int]) -> None:
    """Start the draft layers from target layers of the same shape, which know what the tapped states mean.

    A target without QK-norm gets norm weights of the size its own queries and keys have.

    Raises:
        ValueError: not one id per draft layer, or layers of another shape.
    """
    layers = decoder_layers(target)
    if len(layer_ids) != len(drafter.layers) or not all(0 <= i < len(layers) for i in layer_ids):
        raise ValueError(
            f"init_layers_from_target is {layer_ids}; expected {len(drafter.layers)} layers "
            f"from 0 to {len(layers) - 1}."
        )
    for ours, i in zip(drafter.layers, layer_ids, strict=True):
        theirs = layers[i].state_dict()
        for name, parameter in ours.named_parameters():
            if name not in theirs:
                continue
            if theirs[name].shape != parameter.shape:
                raise ValueError(
                    f"target layer {i} has a {name} of {tuple(theirs[name].shape)}, the draft layer "
                    f"{tuple(parameter.shape)}; draft layers of other sizes start from noise: drop the option."
                )
            parameter.copy_(theirs[name])
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            if f"self_attn.{norm}.weight" not in theirs:
                # Inputs of a projection are normed: unit mean square, so rows' norms give the outputs' size.
                scale = layers[i].input_layernorm.weight.float()
                rows = (theirs[f"self_attn.{projection}.weight"].float() * scale).square().sum(-1)
                getattr(ours.self_attn, norm).weight.fill_(rows.mean().sqrt().item())
    # The deepest tap passes through `fc`; the draft layers read it as their originals read their own input.
    width = drafter.config.hidden_size
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, -width:] += torch.eye(width, device=drafter.fc.weight.device)
    norms = torch.stack([layers[i].input_layernorm.weight.float() for i in layer_ids])
    drafter.hidden_norm.weight.copy_(norms.mean(0))
    final_norm = getattr(target.get_decoder(), "norm", None)
    if final_norm is not None:
        drafter.norm.weight.copy_(final_norm.weight)
