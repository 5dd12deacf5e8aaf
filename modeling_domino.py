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
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_domino import DominoConfig, DominoGenerationConfig, public_name
from .draftcache_domino import DominoCache
from .generation_domino import install_dispatch, speculative_decode
from .head_domino import DraftRequest, add_correction, gru_weights, parallel_rollout, sequential_rollout
from .kernels_domino import FewRowsLinear
from .processors_domino import DraftProcessors
from .speculation_domino import DraftOutput, SpeculationStats, noise_columns
from .target_domino import embed_tokens, head_size, home_of, target_logits


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
        self.q_proj = FewRowsLinear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = FewRowsLinear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = FewRowsLinear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = FewRowsLinear(config.num_attention_heads * config.head_dim, width, bias=bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, block, context, rope, attention_mask, cache):
        """`block [b, q, H]` after attending to context and itself; `rope`: cos and sin `[b, C_new + q, d]` of both."""
        new, slots = context.shape[1], block.shape[1]
        query = self._heads(block, self.q_proj, self.q_norm, [x[:, new:] for x in rope])  # [b, heads, q, d]
        if cache is None:
            keys = self._heads(block, self.k_proj, self.k_norm, [x[:, new:] for x in rope])
            values = self._heads(block, self.v_proj)
            context_keys, context_values = self.add_context(context, [x[:, :new] for x in rope], None)
            keys, values = torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)
        else:
            # Few columns: one product for both.
            both = torch.cat([context, block], dim=1)
            keys, values = self._heads(both, self.k_proj, self.k_norm, rope), self._heads(both, self.v_proj)
            keys, values = cache.update(self.layer_idx, keys, values, block=slots)
        output = self._attend(query, keys, values, attention_mask)  # [b, q, heads, d]
        return self.o_proj(output.reshape(*block.shape[:2], -1))

    def _attend(self, query, keys, values, attention_mask):
        alike = attention_mask is None or (torch.is_tensor(attention_mask) and attention_mask.shape[2] == 1)
        if alike and self.config._attn_implementation == "sdpa" and not self.training:
            # All slots see the same keys, so the heads of a group may stand side by side as more slots of one head:
            # nothing has to be repeated for them.
            query = query.unflatten(1, (keys.shape[1], self.num_key_value_groups))  # [b, kv_heads, groups, q, d]
            output = F.scaled_dot_product_attention(
                query.flatten(2, 3), keys, values, attn_mask=attention_mask, scale=self.scaling
            )
            return output.view_as(query).flatten(1, 2).transpose(1, 2)
        if alike and attention_mask is not None:
            attention_mask = attention_mask.expand(-1, -1, query.shape[2], -1)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        return attend(
            self, query, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, is_causal=False
        )[0]

    def add_context(self, context, context_rope, cache):
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


class DominoMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DominoConfig):
        super().__init__()
        self.gate_proj = FewRowsLinear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = FewRowsLinear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = FewRowsLinear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, states):
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


class DominoDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm attention and SwiGLU. The context is not normed again: `hidden_norm` did that for all layers."""

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DominoAttention(config, layer_idx)
        self.mlp = DominoMLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, block, context, rope, attention_mask, cache):
        block = block + self.self_attn(self.input_layernorm(block), context, rope, attention_mask, cache)
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
        self.fc = FewRowsLinear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
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

    @property
    def correction_layers(self) -> nn.Sequential:
        """`W_down`, SiLU and `W_up` as they apply now: an adapter's own copy where it has one of the whole head."""
        layers = self.embed_proj
        if hasattr(layers, "modules_to_save"):  # PEFT's wrapper, whose forward chooses in the same way
            active = layers.active_adapters
            known = active and all(name in layers.modules_to_save for name in active)
            own = known and not layers.disable_adapters
            layers = layers.modules_to_save[active[0]] if own else layers.original_module
        return layers

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
        rope = self.rotary_emb(noise_embeds, torch.cat([context_position_ids, block_position_ids], dim=1))
        states = noise_embeds
        for layer in self.layers:
            states = layer(states, context, rope, attention_mask, cache)
        return self.norm(states)

    def add_context(self, context_hidden_states, context_position_ids, cache: DominoCache) -> None:
        """Put tapped states `[batch, new, T * H]` into the cache; no block runs."""
        context = self.hidden_norm(self.fc(context_hidden_states))
        rope = self.rotary_emb(context, context_position_ids)
        for layer in self.layers:
            layer.self_attn.add_context(context, rope, cache)

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

    @torch.no_grad()
    def draft(
        self,
        target: PreTrainedModel,
        anchor_ids: torch.LongTensor,
        context_hidden_states: torch.Tensor,
        cache: DominoCache,
        *,
        input_ids: torch.LongTensor,
        max_drafts: int,
        context_mask: torch.Tensor | None = None,
        logits_processor=None,
        noise=None,
    ) -> DraftOutput:
        """Propose up to `max_drafts` tokens for each row; the only place where the drafter's tokens come from.

        Args:
            target: lends its embedding and LM head.
            anchor_ids (int `[batch, 1]`): last committed token of each row.
            context_hidden_states (float `[batch, new, T * H]`): tapped states committed since the last call.
            cache (DominoCache): this generation's context cache, extended here.
            input_ids (int `[batch, length]`): committed sequences with the anchor at the end.
            max_drafts (int): upper bound, 0 allowed (the context is still taken in).
            context_mask (bool `[batch, new]`, optional): which of the new states are real; None: all.
            logits_processor (optional): `generate`'s processors; those that a draft can go through are applied.
            noise (optional): under sampling, float `[batch, n, V]` or anything whose `[i]` is `[batch, V]`: the noise
                that the target's own draw of the i-th token will use.
        Returns:
            DraftOutput: `token_ids [batch, n]`, and the drafter's confidence in each.
        Source: Domino, section 3.3.
        """
        n = min(max_drafts, self.config.num_drafts)
        context = context_hidden_states.to(device=self.device, dtype=self.dtype)
        positions = cache.extend(context.shape[1], context_mask)
        if n == 0:
            self.add_context(context, positions, cache)
            return DraftOutput(anchor_ids.new_zeros(anchor_ids.shape[0], 0))
        anchor_ids = anchor_ids.to(self.device)
        embed = functools.partial(embed_tokens, target, dtype=self.dtype, device=self.device)
        states = self._block_states(embed, anchor_ids, context, positions, cache)[:, :n]  # z of the drafts
        base_logits = target_logits(target, states)  # [batch, n, V_target]
        if not isinstance(logits_processor, DraftProcessors):
            logits_processor = DraftProcessors(logits_processor or [])
        request = DraftRequest(
            embed, anchor_ids, states, base_logits, input_ids, logits_processor, noise_columns(noise)
        )
        knobs = self.generation_config
        parallel = knobs.rollout == "parallel" and knobs.use_head and logits_processor.values_only
        return (parallel_rollout if parallel else sequential_rollout)(self, request)

    def _block_states(self, embed, anchor_ids, context, positions, cache: DominoCache) -> torch.Tensor:
        """One pass over the block [anchor, mask, ...]: states `[batch, num_drafts, H]` of the slots that draft."""
        config = self.config
        block_ids = anchor_ids.new_full((anchor_ids.shape[0], config.block_size), config.mask_token_id)
        block_ids[:, :1] = anchor_ids
        slots = torch.arange(config.block_size, device=self.device)
        block_positions = cache.next_position[:, None] + slots  # the anchor stands right after the context
        mask = cache.block_mask(config.block_size)
        return self(embed(block_ids), context, block_positions, positions, mask, cache)[:, config.first_draft_slot :]

    def encode_step(self, embeds: torch.Tensor, state):
        """One step of the causal encoder, `[b, 1, H]` -> `[b, 1, S]`; the GRU by its cell, which packs nothing."""
        encoder = self.causal_encoder
        if self.config.causal_encoder != "gru":
            return encoder(embeds, state)
        if state is None:
            weights = gru_weights(encoder)
            state = (embeds.new_zeros(embeds.shape[0], weights[1].shape[1]), *weights)
        hidden = torch.gru_cell(embeds[:, 0], *state)  # [b, S]
        return hidden[:, None], (hidden, *state[1:])

    # Decoding ---------------------------------------------------------------------------------------------------

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise one sentence when this drafter cannot draft for `target`; warn once when it was trained for another.

        Raises:
            ValueError: other hidden size, layer count or vocabulary, or another device.
        """
        config, text = self.config, target.config.get_text_config(decoder=True)
        rows = head_size(target)
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
        place = home_of(target, target.get_input_embeddings())[0]
        if place != self.device:
            raise ValueError(
                f"the drafter is on {self.device} and the target's embedding on {place}; "
                f"move it with `drafter.to('{place}')`."
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
