"""What a drafter is trained on: block losses of the base and the corrected logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from domino_spec.head_domino import add_correction
from domino_spec.modeling_domino import DominoForSpeculation
from domino_spec.target_domino import embed_tokens, scaled_logits, tapped_states, target_logits
from domino_spec.training.data import block_attention_mask, first_anchors, flex_block_mask
from domino_spec.training.losses import DraftLoss, chunked_sum
from torch import nn
from torch.nn import functional as F

BLOCK_ATTENTION = ("auto", "dense", "flex")
# A CPU's matrix library compiles a kernel for every new number of rows or ids, so these come in few sizes: ids in
# multiples of this, rows in quarters of a chunk.
ID_STEP = 256


def linear_at(layer: nn.Module, inputs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`layer(inputs)[..., ids]`; of a bare linear layer without bias only those outputs are worked out."""
    if type(layer) is nn.Linear:
        return F.linear(inputs, layer.weight[ids])
    return layer(inputs)[..., ids]


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


class DominoObjective(nn.Module):
    """Drafter and frozen target as one module whose forward gives the training loss.

    Args:
        drafter, target: the target is not a submodule: it is neither trained nor saved.
        loss (DraftLoss): what a draft token costs.
        frequent_ids (int `[F]`, optional): ids always in the softmax; together with the batch's labels and
            `num_negatives` random other ids, weighted for what they stand for, they estimate the whole softmax.
            None takes all ids. From `ID_STEP` negatives on, as many more as make the sum a multiple of it.
        logits_chunk_size (int): most draft tokens whose logits exist at one time.
        block_attention (str): "dense" for a boolean mask, "flex" for FlexAttention's block mask, which skips what is
            hidden; "auto" takes flex on CUDA.
        store (`states.StatesStore`, optional): states computed before; their rows need no target forward.

    Source: Domino (arXiv 2605.29707), section 3.4; estimated softmax: Bengio and Senecal 2008, adaptive importance
        sampling.
    """

    def __init__(
        self,
        drafter: DominoForSpeculation,
        target,
        *,
        loss: DraftLoss | None = None,
        frequent_ids: torch.Tensor | None = None,
        num_negatives: int = 1024,
        logits_chunk_size: int = 256,
        block_attention: str = "auto",
        store=None,
    ):
        super().__init__()
        if block_attention not in BLOCK_ATTENTION:
            raise ValueError(f"block_attention is '{block_attention}'; expected one of {', '.join(BLOCK_ATTENTION)}.")
        self.drafter = drafter
        self._target = [target]
        self.loss = loss or DraftLoss()
        self.frequent_ids, self.num_negatives = frequent_ids, num_negatives
        self.store = store
        self.config = drafter.config
        self.logits_chunk_size = logits_chunk_size
        on_cuda = drafter.device.type == "cuda"
        self.flex = block_attention == "flex" or (block_attention == "auto" and on_cuda)
        if self.flex:
            drafter.set_attn_implementation("flex_attention")

    @property
    def target(self):
        return self._target[0]

    def gradient_checkpointing_enable(self, **options) -> None:
        """Recompute the draft layers in the backward pass: less memory, a third more time in them."""
        self.drafter.gradient_checkpointing_enable(**options)

    def activation_checkpointing_enable(self, **options) -> None:
        """The same by the name it has in newer versions of transformers."""
        self.drafter.activation_checkpointing_enable(**options)

    def states_of(self, input_ids, attention_mask, supervised) -> TargetStates:
        """The target's states of a batch: from the store where it knows all rows, computed otherwise."""
        stored = self.store.batch(input_ids, attention_mask, supervised) if self.store is not None else None
        if stored is not None:
            return stored
        return target_states(self.target, self.config.target_layer_ids, input_ids, attention_mask)

    def draft_states(self, input_ids, attention_mask, anchors, tapped):
        """Backbone states `[batch, M, n, H]` of the blocks at `anchors [batch, M]`."""
        config, drafter = self.config, self.drafter
        batch_size, num_blocks = anchors.shape
        make_mask = flex_block_mask if self.flex else block_attention_mask
        slots = torch.arange(config.block_size, device=input_ids.device)
        block_ids = anchors.new_full((batch_size, num_blocks, config.block_size), config.mask_token_id)
        block_ids[:, :, 0] = input_ids.gather(1, anchors)
        states = drafter(
            embed_tokens(self.target, block_ids.flatten(1), dtype=drafter.dtype, device=drafter.device),
            tapped.to(dtype=drafter.dtype),
            (anchors[:, :, None] + slots).flatten(1),
            torch.arange(input_ids.shape[1], device=input_ids.device).expand(batch_size, -1),
            make_mask(anchors, config.block_size, attention_mask.bool()),
        )
        states = states.unflatten(1, (num_blocks, config.block_size))
        return states[:, :, config.first_draft_slot :]

    def prefix_embeds(self, input_ids, anchors):
        """Target embeddings `[batch * M, n, H]`: draft i is preceded by the true [anchor, d1, ..., d_(i-1)]."""
        drafter = self.drafter
        steps = torch.arange(self.config.num_drafts, device=input_ids.device)
        places = (anchors[:, :, None] + steps).clamp(max=input_ids.shape[1] - 1)  # [b, M, n]
        prefix = input_ids.gather(1, places.flatten(1)).view_as(places).flatten(0, 1)
        return embed_tokens(self.target, prefix, dtype=drafter.dtype, device=drafter.device)

    def encode_prefixes(self, input_ids, anchors):
        """Causal encoder states of these prefixes, `[batch, M, n, S]`."""
        return self.drafter.causal_encoder(self.prefix_embeds(input_ids, anchors))[0].unflatten(0, anchors.shape)

    def labels(self, input_ids, supervised, anchors, kept):
        """Positions `[batch, M, n]` of the drafts' labels, and which count: up to the first unsupervised one."""
        steps = torch.arange(1, self.config.num_drafts + 1, device=input_ids.device)
        places = anchors[:, :, None] + steps
        inside = places < input_ids.shape[1]
        places = places.clamp(max=input_ids.shape[1] - 1)
        valid = inside & supervised.bool().gather(1, places.flatten(1)).view_as(places) & kept[:, :, None]
        return places, valid.long().cumprod(-1).bool()

    def softmax_ids(self, labels: torch.Tensor, seed: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Ids of the estimated softmax and the log weights `[ids]` of what each stands for; None for all ids."""
        if self.frequent_ids is None:
            return None, None
        certain = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        certain[self.frequent_ids] = True
        certain[labels.cpu()] = True
        others = (~certain).nonzero()[:, 0]
        wanted = self.num_negatives
        if wanted >= ID_STEP:
            wanted += -(len(certain) - len(others) + wanted) % ID_STEP
        chosen = (min(wanted, len(others)),)
        negatives = others[torch.randint(max(len(others), 1), chosen, generator=torch.Generator().manual_seed(seed))]
        ids = torch.cat([certain.nonzero()[:, 0], negatives])
        log_weights = torch.zeros(len(ids))
        if len(negatives):
            log_weights[-len(negatives) :] = torch.log(torch.tensor(len(others) / len(negatives)))
        return ids.to(labels.device), log_weights.to(labels.device)

    def corrections(self, states, encoded, ids, rows=None):
        """Correction head on `[N, H]` and `[N, S]`, all ids or some; `rows` are W_up's of these ids, if at hand."""
        if ids is None:
            return self.drafter.correction(states, encoded)
        down, activation, up = self.drafter.correction_layers
        hidden = activation(down(torch.cat([states, encoded], dim=-1)))
        return (linear_at(up, hidden, ids) if rows is None else F.linear(hidden, rows)).float()

    def up_rows(self, ids) -> torch.Tensor | None:
        """Rows of W_up for these ids; None where all ids count, or an adapter takes part in them.

        Taken once a batch: the gradient of taking them is as large as W_up.
        """
        up = self.drafter.correction_layers[2]
        return up.weight[ids] if ids is not None and type(up) is nn.Linear else None

    def label_weight(self, input_ids, supervised, anchors, kept) -> torch.Tensor:
        """Sum of the places' weights over all labels of these blocks: what a step's loss is divided by."""
        _, valid = self.labels(input_ids, supervised, anchors, kept)
        return self.loss.fixed_weights(valid).sum()

    def forward(
        self,
        input_ids,
        attention_mask,
        supervised,
        anchors,
        kept=None,
        lam: float = 1.0,
        normalizer: torch.Tensor | None = None,
        seed: int = 0,
    ):
        """Loss of one batch.

        Args:
            input_ids, attention_mask, supervised (int `[batch, L]`): right-padded rows.
            anchors (int `[batch, M]`), kept (bool `[batch, M]`, default all): from `sample_anchors`.
            lam (float): weight of the base loss; the head runs only below 1.
            normalizer (float, scalar): `label_weight` of all batches of the step (default: of this one).
            seed (int): of the random ids of the estimated softmax.
        Returns:
            dict: `loss`; `base_loss` and `final_loss`, weighted sums without gradient, and `weight`, that of their
            weights; `base_hits`, `final_hits`, `counts` `[n]`: top-1 hits among the ids of the softmax, and labels,
            per draft; `base_leading`, `final_leading`: leading hits summed over blocks, and `blocks`.
        """
        kept = torch.ones_like(anchors, dtype=torch.bool) if kept is None else kept
        states = self.states_of(input_ids, attention_mask, supervised)
        places, valid = self.labels(input_ids, supervised, anchors, kept)
        z = self.draft_states(input_ids, attention_mask, anchors, states.tapped)
        head = self.drafter.head_parameters()
        encoded = self.encode_prefixes(input_ids, anchors).flatten(0, 1) if lam < 1 else None
        labels = input_ids.gather(1, places.flatten(1)).view_as(places)
        ids, log_weights = self.softmax_ids(labels[valid], seed)
        blocks = _Blocks(self, lam, ids, log_weights, labels.flatten(0, 1), valid.flatten(0, 1))
        if self.loss.needs_teacher:
            blocks.teach(states.final, places)
        chunk = max(1, self.logits_chunk_size // self.config.num_drafts)
        learned = []
        if lam < 1:
            blocks.up_rows = self.up_rows(ids)
            learned = head
            if blocks.up_rows is not None:
                learned = [p for p in head if p is not self.drafter.correction_layers[2].weight] + [blocks.up_rows]
        total = chunked_sum(blocks.run, chunk, z.flatten(0, 1), encoded, learned)
        sums = blocks.sums | {"weight": self.loss.fixed_weights(valid).sum()}
        loss = total / (sums["weight"] if normalizer is None else normalizer).clamp(min=1e-9)
        if lam >= 1:
            # Several processes wait for a gradient of every parameter, also of those that have no part in the loss.
            loss = loss + sum(0.0 * p.sum() for p in head if p.requires_grad)
        return {"loss": loss} | sums

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
        states = self.states_of(input_ids, attention_mask, supervised)
        every = first_anchors(supervised)[0].nonzero()[:, 0]
        lengths = {"base": [], "final": []}
        for part in every.split(chunk):
            anchors = part[None]
            places, valid = self.labels(input_ids, supervised, anchors, torch.ones_like(anchors, dtype=torch.bool))
            z = self.draft_states(input_ids, attention_mask, anchors, states.tapped)[0]  # [M, n, H]
            labels = input_ids[0][places[0]]
            base = target_logits(self.target, z)
            final = self.drafter.correct_block(base, z, self.prefix_embeds(input_ids, anchors))
            for name, logits in (("base", base), ("final", final)):
                hits = (logits.argmax(-1) == labels) & valid[0]
                lengths[name].append(hits.long().cumprod(-1).sum(-1))
        return {name: torch.cat(parts) for name, parts in lengths.items()}, every.tolist()


class _Blocks:
    """The blocks of one batch on their way through the vocabulary, some at a time.

    Args:
        labels (int), valid (bool) `[blocks, n]`; ids, log_weights: from `softmax_ids`.
    """

    def __init__(self, objective: DominoObjective, lam: float, ids, log_weights, labels, valid):
        self.objective, self.lam, self.ids, self.valid = objective, lam, ids, valid
        self.log_weights = log_weights
        self.labels = labels
        if ids is not None:
            lookup = labels.new_zeros(objective.config.vocab_size)
            lookup[ids] = torch.arange(len(ids), device=ids.device)
            self.labels = lookup[labels]
        self.final = self.up_rows = None
        # The LM head's rows of these ids, once a batch.
        self.head_rows = None if ids is None else objective.target.get_output_embeddings().weight[ids]
        per_draft = labels.new_zeros(labels.shape[1])
        self.sums = {name: per_draft.clone() for name in ("base_hits", "final_hits", "counts")}
        self.sums |= {name: torch.zeros((), device=labels.device) for name in ("base_loss", "final_loss")}
        self.sums |= {name: labels.new_zeros(()) for name in ("base_leading", "final_leading", "blocks")}

    def teach(self, final: torch.Tensor, places: torch.Tensor) -> None:
        """Take the target's last states `[batch, L, H]`; the one before a label gives the law of the label."""
        self.final = final
        rows = torch.arange(final.shape[0], device=final.device)[:, None, None].expand_as(places)
        self.sources = rows.flatten(0, 1), places.flatten(0, 1) - 1

    def run(self, part: slice, z: torch.Tensor, encoded: torch.Tensor | None) -> torch.Tensor | None:
        """Weighted loss of some blocks, `z [K, n, H]` and `encoded [K, n, S]`; None where they have no label."""
        objective, valid, labels = self.objective, self.valid[part], self.labels[part]
        if not valid.any():
            return None
        states = z[valid]
        base_logits = self._logits(states)
        teacher = self._teacher(part, valid)
        base = self._weigh("base", base_logits, labels, valid, teacher)
        self.sums["counts"] += valid.sum(0)
        self.sums["blocks"] += valid[:, 0].sum()
        if self.lam >= 1:
            for kind in ("loss", "hits", "leading"):
                self.sums[f"final_{kind}"] = self.sums[f"base_{kind}"]
            return base
        late = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)[valid]
        rows = (late >= objective.config.pure_draft_prefix_len).nonzero()[:, 0]
        inputs = self._padded(states[rows]), self._padded(encoded[valid][rows])
        correction = objective.corrections(*inputs, self.ids, self.up_rows)[: len(rows)]
        final_logits = base_logits.index_copy(0, rows, add_correction(base_logits[rows], correction))
        final = self._weigh("final", final_logits, labels, valid, teacher)
        return self.lam * base + (1 - self.lam) * final

    @torch.no_grad()
    def _teacher(self, part: slice, valid: torch.Tensor) -> torch.Tensor | None:
        """The target's log law of every label, `[N, ids]`."""
        if self.final is None:
            return None
        row, place = (source[part][valid] for source in self.sources)
        return self._logits(self.final[row, place]).log_softmax(-1)

    def _padded(self, states: torch.Tensor) -> torch.Tensor:
        """`[N, H]` with rows of zeros behind, so that N takes few values."""
        step = max(1, self.objective.logits_chunk_size // 4)
        return F.pad(states, (0, 0, 0, -len(states) % step))

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's logits `[N, ids]` of states `[N, H]`, raised by what each id stands for."""
        padded = self._padded(states)
        target = self.objective.target
        if self.ids is None:
            logits = target_logits(target, padded)
        else:
            bias = getattr(target.get_output_embeddings(), "bias", None)
            rows = self.head_rows
            logits = F.linear(padded.to(rows), rows, None if bias is None else bias[self.ids])
            logits = scaled_logits(target, logits)
        logits = logits[: len(states)].float()
        return logits if self.log_weights is None else logits + self.log_weights

    def _weigh(self, name: str, logits, labels, valid, teacher) -> torch.Tensor:
        """Weighted sum of the tokens' losses; counts hits on the way."""
        loss = self.objective.loss
        where = labels[valid]
        tokens, label_log_q = loss.tokens(logits, where, teacher)
        weights = loss.weights(_spread(label_log_q.detach(), valid), valid)[valid]
        hits = _spread(logits.detach().argmax(-1) == where, valid)
        self.sums[f"{name}_hits"] = self.sums[f"{name}_hits"] + hits.sum(0)
        self.sums[f"{name}_leading"] = self.sums[f"{name}_leading"] + hits.long().cumprod(-1).sum()
        total = (tokens * weights).sum()
        self.sums[f"{name}_loss"] = self.sums[f"{name}_loss"] + total.detach()
        return total


def _spread(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """`[N]` to the places `[blocks, n]` they were taken from, zero elsewhere."""
    return values.new_zeros(valid.shape).masked_scatter(valid, values)
