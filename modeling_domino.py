"""The Domino drafter: parallel backbone, causal encoder, low-rank correction head, and how it drafts.

Shapes in the comments: B slots of a block, n drafts, C context positions, H hidden size, V vocabulary, S encoder
state, T number of tapped layers.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_domino import DominoConfig, public_name
from .draftcache_domino import DominoCache
from .generation_domino import install_dispatch, speculative_decode
from .speculation_domino import (
    DominoGenerationConfig,
    DraftOutput,
    SpeculationStats,
    process_logits,
    sample_from_logits,
    with_lookup,
)

# Far enough below any logit that softmax gives exactly zero.
OUT_OF_POOL = 1e4


class DominoAttention(nn.Module):
    """Queries from the block; keys and values from [context, block]; QK-norm as in Qwen3; no causal mask."""

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, block, context, block_rope, context_rope, attention_mask, cache):
        query = self._heads(block, self.q_proj, self.q_norm, block_rope)  # [b, heads, q, d]
        block_keys = self._heads(block, self.k_proj, self.k_norm, block_rope)
        block_values = self._heads(block, self.v_proj)
        keys, values = self.take_in(context, context_rope, cache)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, _ = attend(
            self,
            query,
            torch.cat([keys, block_keys], dim=2),
            torch.cat([values, block_values], dim=2),
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=False,
        )
        return self.o_proj(output.reshape(*block.shape[:2], -1))

    def take_in(self, context, context_rope, cache):
        """Keys and values `[b, kv_heads, C, d]` of new context, behind what the cache holds."""
        keys = self._heads(context, self.k_proj, self.k_norm, context_rope)
        values = self._heads(context, self.v_proj)
        return (keys, values) if cache is None else cache.update(self.layer_idx, keys, values)

    def _heads(self, states, projection, norm=None, rope=None):
        """[b, t, H] -> [b, heads, t, d], normed and rotated where asked."""
        heads = projection(states).unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            heads = norm(heads)
        heads = heads.transpose(1, 2)
        if rope is not None:
            cos, sin = rope
            heads = heads * cos[:, None] + rotate_half(heads) * sin[:, None]
        return heads


class DominoDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm attention and SwiGLU. The context is not normed again: `hidden_norm` did that for all layers."""

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DominoAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, block, context, block_rope, context_rope, attention_mask, cache):
        block = block + self.self_attn(
            self.input_layernorm(block), context, block_rope, context_rope, attention_mask, cache
        )
        return block + self.mlp(self.post_attention_layernorm(block))


class PrefixAttention(nn.Module):
    """Causal encoder by unidirectional attention over the draft prefix; called like `nn.GRU(batch_first=True)`.

    Distance enters as a learned bias per head, so the encoder knows the order without positions of its own.

    Args:
        input_size (int): width of the token embeddings, H.
        hidden_size (int): width of the state, S.
        max_length (int): longest prefix, the block's slots.
    """

    def __init__(self, input_size: int, hidden_size: int, max_length: int, eps: float):
        super().__init__()
        self.num_heads = next(heads for heads in (8, 4, 2, 1) if hidden_size % heads == 0)
        self.in_proj = nn.Linear(input_size, hidden_size, bias=False)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm = Qwen3RMSNorm(hidden_size, eps=eps)
        self.distance_bias = nn.Parameter(torch.zeros(self.num_heads, max_length))

    def forward(self, embeds: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`[batch, t, H]` after the prefix in `state` -> states `[batch, t, S]` and the longer prefix."""
        inputs = self.in_proj(embeds)
        seen = inputs if state is None else torch.cat([state, inputs], dim=1)  # [b, L, S]
        length, new = seen.shape[1], inputs.shape[1]
        query, _, _ = self.qkv_proj(self.norm(inputs)).chunk(3, dim=-1)
        _, key, value = self.qkv_proj(self.norm(seen)).chunk(3, dim=-1)
        query, key, value = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (query, key, value))
        rows = torch.arange(length - new, length, device=embeds.device)[:, None]
        distance = rows - torch.arange(length, device=embeds.device)[None]  # [t, L], negative ahead
        bias = self.distance_bias[:, distance.clamp(min=0)].masked_fill(distance < 0, float("-inf"))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None].to(query.dtype))
        return inputs + self.o_proj(mixed.transpose(1, 2).flatten(2)), seen


class DominoPreTrainedModel(PreTrainedModel):
    config_class = DominoConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    _no_split_modules = ["DominoDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True
    supports_gradient_checkpointing = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        # nn.GRU and the bias table are unknown to the library: left alone they would come up as raw memory.
        if isinstance(module, nn.GRU):
            for name, weight in module.named_parameters():
                bound = module.hidden_size**-0.5
                nn.init.uniform_(weight, -bound, bound) if "weight" in name else nn.init.zeros_(weight)
        elif isinstance(module, PrefixAttention):
            nn.init.zeros_(module.distance_bias)
        elif getattr(module, "starts_at_zero", False):
            nn.init.zeros_(module.weight)


class DominoForSpeculation(DominoPreTrainedModel):
    """Drafter of a block of tokens for `target.generate(..., assistant_model=drafter)`.

    Embedding and LM head are the target's, borrowed at call time and never stored.

    Args:
        config (DominoConfig): sizes and conventions.

    Attributes:
        generation_config (DominoGenerationConfig): drafting knobs.
        last_speculation (SpeculationStats or None): statistics of the last `generate`.

    Source: Domino (arXiv 2605.29707), sections 3.1 (backbone) and 3.2 (causal encoder and correction).
    """

    # What the dispatch looks for: a class check would miss other copies of this remote code.
    is_domino_drafter = True

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        config.check()
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DominoDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if config.causal_encoder == "gru":
            self.prefix_gru = nn.GRU(config.hidden_size, config.head_hidden_size, bias=False, batch_first=True)
        else:
            self.prefix_attention = PrefixAttention(
                config.hidden_size, config.head_hidden_size, config.block_size, config.rms_norm_eps
            )
        # W_down, SiLU, W_up; the names are the checkpoint contract's.
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + config.head_hidden_size, config.head_rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.head_rank, config.vocab_size, bias=False),
        )
        # A new head changes nothing until it has learned something. The mark is on the module that owns the weight: of
        # a class outside the library, modules without weights of their own never reach `_init_weights`.
        self.embed_proj[2].starts_at_zero = True
        self.generation_config = DominoGenerationConfig()
        self.last_speculation: SpeculationStats | None = None
        self._warned_targets: set[str] = set()
        self.post_init()

    @property
    def causal_encoder(self) -> nn.Module:
        """The encoder of the draft prefix: `(embeds [b, t, H], state) -> (states [b, t, S], state)`."""
        return self.prefix_gru if self.config.causal_encoder == "gru" else self.prefix_attention

    def head_modules(self) -> list[nn.Module]:
        """Causal encoder and correction: what "the head" means in training and reports."""
        return [self.causal_encoder, self.embed_proj]

    def head_parameters(self) -> list[nn.Parameter]:
        """Parameters of the head, an adapter's on it included."""
        return [p for module in self.head_modules() for p in module.parameters()]

    def backbone_parameters(self) -> list[nn.Parameter]:
        """All others."""
        head = {id(p) for p in self.head_parameters()}
        return [p for p in self.parameters() if id(p) not in head]

    def new_cache(self, batch_size: int, first_position: int | torch.Tensor = 0) -> DominoCache:
        """An empty context cache."""
        return DominoCache(self.config.num_hidden_layers, batch_size, first_position, self.device)

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        block_position_ids: torch.Tensor,
        context_position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: DominoCache | None = None,
    ) -> torch.Tensor:
        """Backbone: one pass over block slots.

        Args:
            noise_embeds (float `[batch, slots, H]`): target embeddings of [anchor, mask, ...]; several blocks may lie
                side by side where the mask keeps them apart.
            context_hidden_states (float `[batch, new, T * H]`): tapped target states not yet in the cache.
            block_position_ids (int `[batch, slots]`), context_position_ids (int `[batch, new]`): absolute positions.
            attention_mask (bool or float, broadcastable to `[batch, 1, slots, context + slots]`): True or 0 where a
                slot may look.
            cache (DominoCache, optional): takes the new context, gives all of it.
        Returns:
            float `[batch, slots, H]`: normed backbone states z.
        """
        eager = self.config._attn_implementation == "eager"
        if eager and attention_mask is not None and attention_mask.dtype == torch.bool:
            # Eager attention adds its mask to the scores, so True and False would be taken for 1 and 0.
            hidden = torch.finfo(noise_embeds.dtype).min
            additive = attention_mask.new_zeros(attention_mask.shape, dtype=noise_embeds.dtype)
            attention_mask = additive.masked_fill(~attention_mask, hidden)
        context = self.hidden_norm(self.fc(context_hidden_states))  # [b, C_new, H]
        block_rope = self.rotary_emb(noise_embeds, block_position_ids)
        context_rope = self.rotary_emb(noise_embeds, context_position_ids)
        states = noise_embeds
        for layer in self.layers:
            states = layer(states, context, block_rope, context_rope, attention_mask, cache)
        return self.norm(states)

    def take_in(self, context_hidden_states, context_position_ids, cache: DominoCache) -> None:
        """Put tapped states `[batch, new, T * H]` into the cache; no block runs."""
        context = self.hidden_norm(self.fc(context_hidden_states))
        rope = self.rotary_emb(context, context_position_ids)
        for layer in self.layers:
            layer.self_attn.take_in(context, rope, cache)

    def correction(self, states: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        """`W_up SiLU(W_down [z; s])`: `[..., H]` and `[..., S]` -> `[..., V]`. Source: Domino, eq. of section 3.2."""
        return self.embed_proj(torch.cat([states, encoded], dim=-1))

    def correct_block(self, base_logits: torch.Tensor, states: torch.Tensor, prefix_embeds: torch.Tensor):
        """Draft logits of whole blocks whose prefix is known: training, and the parallel rollout.

        Args:
            base_logits (float `[batch, n, V_target]`): of the n drafts.
            states (float `[batch, n, H]`): backbone states of the same drafts.
            prefix_embeds (float `[batch, n, H]`): target embeddings of [anchor, d1, ..., d_(n-1)].
        Returns:
            float `[batch, n, V_target]`: base logits, corrected from draft `pure_draft_prefix_len` on.
        """
        start = self.config.pure_draft_prefix_len
        if start >= base_logits.shape[1]:
            return base_logits
        encoded, _ = self.causal_encoder(prefix_embeds)
        corrections = self.correction(states[:, start:], encoded[:, start:])
        corrected = add_correction(base_logits[:, start:], corrections)
        return torch.cat([base_logits[:, :start], corrected], dim=1)

    # Drafting ---------------------------------------------------------------------------------------------------

    def draft(
        self,
        target: PreTrainedModel,
        anchor_ids: torch.LongTensor,
        context_hidden_states: torch.Tensor,
        cache: DominoCache,
        *,
        input_ids: list[torch.Tensor] | torch.LongTensor,
        max_drafts: int,
        logits_processor=None,
        do_sample: bool = False,
    ) -> DraftOutput:
        """Propose up to `max_drafts` tokens for each row; the only place where draft tokens come from.

        Args:
            target: lends its embedding and LM head.
            anchor_ids (int `[batch, 1]`): last committed token of each row.
            context_hidden_states (float `[batch, new, T * H]`): tapped states committed since the last call; where
                rows got different numbers, `cache.stage` said which are real. It also says which rows propose a lookup
                continuation instead of drafts, and whether the drafter has to run at all.
            cache (DominoCache): this generation's context cache, extended here.
            input_ids (int `[batch, length]`, or one `[length]` a row): committed sequences with the anchor at the end.
            max_drafts (int): upper bound, 0 allowed (the context is still taken in).
            logits_processor (callable, optional): `generate`'s processors, applied to each row's own prefix.
            do_sample (bool): draw each token from its law, otherwise take the most likely.
        Returns:
            DraftOutput: `token_ids [batch, n]`; `logits [batch, n, V_target]` fp32 after the processors, the law that
            each token was drawn from; None where every row was looked up.
        Source: Domino, section 3.3.
        """
        batch_size, device = anchor_ids.shape[0], self.device
        n = min(max_drafts, self.config.num_drafts)
        context = context_hidden_states.to(device=device, dtype=self.dtype)
        valid, lookup, use_head = cache.take_staged(batch_size, context.shape[1], device)
        positions = cache.extend(valid)
        if n == 0 or not use_head:
            self.take_in(context, positions, cache)
        if n == 0:
            vocab = target.get_output_embeddings().weight.shape[0]
            empty = torch.zeros(batch_size, 0, vocab, dtype=self.dtype, device=device)
            return DraftOutput(anchor_ids.new_zeros(batch_size, 0), empty)
        own = None
        if use_head:
            own = self._draft_block(
                target, anchor_ids.to(device), context, positions, cache, input_ids, n, logits_processor, do_sample
            )
        return own if lookup is None else with_lookup(own, lookup, max_drafts, device)

    def _draft_block(
        self, target, anchor_ids, context, positions, cache, input_ids, n: int, logits_processor, do_sample: bool
    ) -> DraftOutput:
        """The drafter's own proposals: one pass over the block, then the rollout."""
        config, knobs = self.config, self.generation_config
        batch_size, device = anchor_ids.shape[0], self.device
        embed = functools.partial(embed_tokens, target, dtype=self.dtype, device=device)
        block_ids = anchor_ids.new_full((batch_size, config.block_size), config.mask_token_id)
        block_ids[:, :1] = anchor_ids
        slots = torch.arange(config.block_size, device=device)
        block_positions = cache.next_position[:, None] + slots  # the anchor stands right after the context
        mask = None
        if not bool(cache.mask.all()):
            block_mask = cache.mask.new_ones(batch_size, config.block_size)
            mask = torch.cat([cache.mask, block_mask], dim=1)[:, None, None].expand(-1, 1, config.block_size, -1)
        states = self(embed(block_ids), context, block_positions, positions, mask, cache)
        first = config.first_draft_slot
        states = states[:, first : first + n]  # z of the drafts
        base_logits = self._base_logits(target, states, cache)  # [b, n, V_target]
        plain_greedy = not do_sample and not logits_processor
        if knobs.rollout == "parallel" and plain_greedy and knobs.use_head:
            return self._parallel_rollout(embed, anchor_ids, states, base_logits)
        return self._sequential_rollout(embed, anchor_ids, states, base_logits, input_ids, logits_processor, do_sample)

    def _base_logits(self, target, states, cache) -> torch.Tensor:
        """Base logits `[b, n, V_target]`; of all ids or, out of reach elsewhere, of `draft_token_ids`."""
        ids = self.generation_config.draft_token_ids
        if ids is None:
            return target_logits(target, states)
        weight = target.get_output_embeddings().weight
        if max(ids) >= weight.shape[0]:
            raise ValueError(
                f"draft_token_ids has {max(ids)}; expected ids below {weight.shape[0]}, the target's head."
            )
        index = torch.tensor(ids, device=weight.device)
        if cache.head_rows is None:
            cache.head_rows = weight[index]
        few = target_logits(target, states, index, cache.head_rows)
        logits = few.new_full((*few.shape[:-1], weight.shape[0]), -OUT_OF_POOL)
        return logits.index_copy_(-1, index, few)

    def _sequential_rollout(self, embed, anchor_ids, states, base_logits, input_ids, logits_processor, do_sample):
        """One token after another, each corrected from the tokens drawn before it."""
        knobs, start = self.generation_config, self.config.pure_draft_prefix_len
        pool = knobs.candidate_pool_size
        rows = [input_ids[i].to(anchor_ids.device) for i in range(len(input_ids))] if logits_processor else None
        token, state, tokens, laws = anchor_ids, None, [], []
        threshold = knobs.assistant_confidence_threshold or 0.0
        confidence = torch.ones(anchor_ids.shape[0], device=base_logits.device)
        lengths = torch.zeros_like(anchor_ids[:, 0])
        n = base_logits.shape[1]
        for i in range(n):
            logits = base_logits[:, i].float()  # [b, V]
            if knobs.use_head and start < n:
                encoded, state = self._encode_step(embed(token), state)
                if i >= start:
                    logits = self._corrected(logits, states[:, i], encoded[:, 0], pool)
            if logits_processor:
                logits = process_logits(logits_processor, rows, logits)
            token = sample_from_logits(logits, do_sample)[:, None]
            tokens.append(token)
            laws.append(logits)
            if rows is not None:
                rows = [torch.cat([row, token[j].to(row.device)]) for j, row in enumerate(rows)]
            if threshold:
                # The token that falls below is still judged: whether there is a next draft hangs on this one alone.
                lengths += confidence >= threshold
                confidence = confidence * logits.softmax(-1).gather(1, token)[:, 0]
                if bool((confidence < threshold).all()):
                    break
        return DraftOutput(torch.cat(tokens, 1), torch.stack(laws, 1), lengths if threshold else None)

    def _parallel_rollout(self, embed, anchor_ids, states, base_logits):
        """Correct all drafts from the current guess of the block until nothing changes: draft i is exact after i."""
        guess = base_logits.argmax(-1)  # [b, n]
        logits = base_logits
        steps = self.generation_config.refinement_steps
        for _ in range(base_logits.shape[1] if steps is None else steps):
            prefix = torch.cat([anchor_ids, guess[:, :-1].to(anchor_ids.device)], dim=1)
            logits = self.correct_block(base_logits, states, embed(prefix))
            previous, guess = guess, logits.argmax(-1)
            if torch.equal(previous, guess):
                break
        return DraftOutput(guess, logits.float())

    def _encode_step(self, embeds, state):
        """One step of the causal encoder, `[b, 1, H]` -> `[b, 1, S]`; the GRU by its cell, which packs nothing."""
        encoder = self.causal_encoder
        if self.config.causal_encoder != "gru":
            return encoder(embeds, state)
        if state is None:
            weights = gru_weights(encoder)
            state = (embeds.new_zeros(embeds.shape[0], weights[1].shape[1]), *weights)
        hidden = torch.gru_cell(embeds[:, 0], *state)  # [b, S]
        return hidden[:, None], (hidden, *state[1:])

    def _corrected(self, logits, state, encoded, pool: int):
        """Corrected logits `[b, V]` of one draft; with a pool only its `pool` best base ids stand."""
        if not pool or pool >= logits.shape[-1]:
            return add_correction(logits, self.correction(state, encoded))
        down, activation, up = self.embed_proj
        hidden = activation(down(torch.cat([state, encoded], dim=-1)))  # [b, r]
        base, ids = logits.topk(pool, dim=-1)  # [b, K]
        known = ids.clamp(max=self.config.vocab_size - 1)
        if type(up) is nn.Linear:
            corrections = torch.bmm(up.weight[known], hidden[:, :, None])[:, :, 0]
        else:
            # With an adapter around it the layer applies more than its weight.
            corrections = up(hidden).gather(1, known)
        corrections = corrections.to(base) * (known == ids)
        # The others fall out of reach, not to -inf: a processor may forbid the whole pool.
        return (logits - OUT_OF_POOL).scatter(1, ids, base + corrections)

    # Decoding ---------------------------------------------------------------------------------------------------

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise one sentence when this drafter cannot draft for `target`; warn once when it was trained for another.

        Raises:
            ValueError: other hidden size, layer count or vocabulary, or another device.
        """
        config, text = self.config, target.config.get_text_config(decoder=True)
        rows = target.get_output_embeddings().weight.shape[0]
        recorded = f" (it was trained for '{config.target_name_or_path}')" if config.target_name_or_path else ""
        for name, ours, theirs in (
            ("hidden size", config.hidden_size, text.hidden_size),
            ("layer count", config.num_target_layers, text.num_hidden_layers),
        ):
            if ours != theirs:
                raise ValueError(
                    f"the drafter expects a target of {name} {ours}{recorded}, this one has {theirs}; "
                    "use the drafter that was trained for this target."
                )
        # Heads padded to a round size, or grown by a few added tokens, still share all the ids that matter.
        if not config.vocab_size <= rows <= config.vocab_size * 1.25:
            raise ValueError(
                f"the drafter expects a vocabulary of {config.vocab_size}{recorded}, the target's LM head has {rows} "
                "rows; use the drafter that was trained for this target."
            )
        if target.device != self.device:
            raise ValueError(
                f"the drafter is on {self.device} and the target on {target.device}; "
                "move it with `drafter.to(target.device)`."
            )
        name = public_name(getattr(target.config, "_name_or_path", None))
        known = public_name(config.target_name_or_path)
        # An adapter is there to serve another target than the one its base was trained for.
        adapted = bool(getattr(self, "peft_config", None))
        other = known and name and name.split("/")[-1] != known.split("/")[-1]
        if other and not adapted and name not in self._warned_targets:
            self._warned_targets.add(name)
            warnings.warn(
                f"this drafter was trained for '{known}' and drafts for '{name}': the text stays exact, but fewer "
                "drafts may be accepted; adapt it with train_peft.py if they are.",
                stacklevel=2,
            )
        ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
        if config.mask_token_id in [*ends, text.pad_token_id] and "mask" not in self._warned_targets:
            self._warned_targets.add("mask")
            warnings.warn(
                f"mask_token_id {config.mask_token_id} is the target's end or pad token, which its texts contain; "
                "train with an id that the target never writes.",
                stacklevel=2,
            )

    def speculative_decode(self, target: PreTrainedModel, *args, **kwargs):
        """The decode loop of `generate` with this drafter; the dispatch calls it with `generate`'s prepared inputs."""
        self.check_target(target)
        return speculative_decode(target, self, *args, **kwargs)

    def generate_for(self, target: PreTrainedModel, *args, **kwargs):
        """`target.generate(..., assistant_model=self)`; what the Hub's `custom_generate` hook calls."""
        install_dispatch()
        return target.generate(*args, assistant_model=self, **kwargs)

    # Saving and loading -----------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Write weights, config, code, knobs and the `custom_generate` hook: a directory that loads anywhere."""
        if kwargs.get("is_main_process", True) and not Path(save_directory).is_file():
            # Before the weights: `push_to_hub=True` uploads what lies there when they are written.
            hook = Path(save_directory) / "custom_generate" / "generate.py"
            hook.parent.mkdir(parents=True, exist_ok=True)
            hook.write_text(CUSTOM_GENERATE, encoding="utf-8")
            self.generation_config.save_pretrained(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a drafter of ours, or one in the published layout (`model_type: qwen3` with a `dflash_config`).

        Raises:
            OSError: no such directory or repository, or weights that are cut off or corrupt.
        """
        place = Path(pretrained_model_name_or_path)
        if place.is_dir() and not (place / "config.json").exists() and kwargs.get("config") is None:
            raise OSError(f"no config.json in '{place}'; name a directory written by save_pretrained.")
        try:
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except Exception as error:
            words = f"{type(error).__name__} {error}".lower()
            if "safetensor" not in words or "no file named" in words:
                raise
            raise OSError(
                f"the weights in '{pretrained_model_name_or_path}' cannot be read ({error}); "
                "the file is cut off or corrupt: download or save it again."
            ) from error
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        names = ("revision", "cache_dir", "token", "subfolder", "local_files_only")
        hub = {name: kwargs[name] for name in names if name in kwargs}
        # Published checkpoints may have no such file; the defaults are meant for them.
        model.generation_config = DominoGenerationConfig()
        if not place.is_dir() or (place / "generation_config.json").exists():
            try:
                model.generation_config = DominoGenerationConfig.from_pretrained(pretrained_model_name_or_path, **hub)
            except OSError as error:
                if place.is_dir():
                    raise OSError(f"'{place / 'generation_config.json'}' cannot be read: {error}") from error
        return loaded


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


def embed_tokens(target: PreTrainedModel, token_ids: torch.Tensor, *, dtype, device) -> torch.Tensor:
    """Target embeddings `[..., H]` of ids, in the drafter's dtype."""
    table = target.get_input_embeddings()
    return table(token_ids.to(table.weight.device)).to(dtype=dtype, device=device)


def target_logits(
    target: PreTrainedModel,
    states: torch.Tensor,
    ids: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The target's LM head on states `[..., H]` -> `[..., V_target]`, scaled as the target does.

    With `ids` only their columns; `rows` are the head's weights of these ids, where the caller has them at hand.
    """
    head = target.get_output_embeddings()
    states = states.to(dtype=head.weight.dtype, device=head.weight.device)
    if ids is None:
        logits = head(states)
    else:
        bias = getattr(head, "bias", None)
        logits = F.linear(states, head.weight[ids] if rows is None else rows, None if bias is None else bias[ids])
    text = target.config.get_text_config(decoder=True)
    if divisor := getattr(text, "logits_scaling", None):
        logits = logits / divisor
    if factor := getattr(text, "logit_scale", None):
        logits = logits * factor
    if cap := getattr(text, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


# Written beside every saved drafter; text, because remote code has no repository to copy the file from.
CUSTOM_GENERATE = '''"""The Hub's `custom_generate` hook: a thin call to the drafter, which owns the decode loop."""


def generate(model, *args, assistant_model=None, **kwargs):
    """Same as `model.generate(..., assistant_model=assistant_model)`."""
    if assistant_model is None or not getattr(assistant_model, "is_domino_drafter", False):
        raise ValueError(
            "custom_generate needs the drafter: pass "
            "`assistant_model=AutoModel.from_pretrained(REPO, trust_remote_code=True)` beside it."
        )
    return assistant_model.generate_for(model, *args, **kwargs)
'''

install_dispatch()
DominoForSpeculation.register_for_auto_class("AutoModel")
