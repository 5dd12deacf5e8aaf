"""Configuration of a Domino drafter, and its drafting knobs; imports no torch."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

CAUSAL_ENCODERS = ("gru", "attention")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# `dflash_config` key of the published layout -> attribute here, the only place where the value lives in memory.
PUBLISHED_KEYS = {
    "mask_token_id": "mask_token_id",
    "target_layer_ids": "target_layer_ids",
    "emb_dim": "head_rank",
    "gru_hidden_dim": "head_hidden_size",
    "shift_label": "shift_label",
    "pure_draft_prefix_len": "pure_draft_prefix_len",
    "causal_encoder": "causal_encoder",
}
KNOBS: dict[str, Any] = {
    "num_assistant_tokens": None,
    "num_assistant_tokens_schedule": "adaptive",
    "assistant_confidence_threshold": 0.0,
    "rollout": "sequential",
    "refinement_steps": None,
    "candidate_pool_size": 64,
    "confidence_bias": -0.5,
    "confidence_slope": 0.6,
    "lookup": True,
    "use_head": True,
    "synchronize_timers": False,
}
ROLLOUTS = ("sequential", "parallel")
SCHEDULES = ("adaptive", "constant")
# The first entry is the one SGLang's loader looks for.
ARCHITECTURES = ["DFlashDraftModel", "DominoForSpeculation"]


def default_target_layer_ids(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """Tapped target layers for a drafter of `num_draft_layers`, zero-based.

    One draft layer taps the middle; otherwise the ids are evenly spaced from 1 to `num_target_layers - 3`. A target
    too shallow for that many distinct ids is tapped evenly over all its layers, with at most as many taps as layers.

    Source: DFlash's recipe, which Domino keeps (paper, appendix on training details).
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    first, last, count = 1, num_target_layers - 3, num_draft_layers
    if last - first + 1 < count:
        first, last, count = 0, num_target_layers - 1, min(count, num_target_layers)
    step = (last - first) / max(count - 1, 1)
    return [round(first + i * step) for i in range(count)]


def flat_rope_parameters(target_config: Any) -> dict[str, Any]:
    """RoPE parameters of the target's full-attention layers as one flat dict with `rope_type` and `rope_theta`."""
    parameters = getattr(target_config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        # Models that mix attention kinds keep one set per kind; the drafter attends to the whole context.
        parameters = parameters.get("full_attention") or next(iter(parameters.values()))
    parameters = dict(parameters)
    parameters.setdefault("rope_type", "default")
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = getattr(target_config, "rope_theta", None) or 10000.0
    # The draft layers rotate whole heads; factors per dimension made for a part of the head do not fit them.
    if parameters.pop("partial_rotary_factor", None) not in (None, 1, 1.0) and "long_factor" in parameters:
        parameters = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    return parameters


def public_name(name_or_path: str | None) -> str | None:
    """A Hub id as it is; of a directory only its last part, which says nothing about anybody's machine."""
    if name_or_path and os.path.isabs(name_or_path):
        return os.path.basename(os.path.normpath(name_or_path))
    return name_or_path or None


class DominoConfig(PreTrainedConfig):
    """Sizes and conventions of a Domino drafter; builds from a target's config and reads the published layout.

    Args:
        vocab_size (int): rows of the target's vocabulary and of the correction head.
        hidden_size (int): width of the drafter, equal to the target's: embeddings and LM head are the target's.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim (int): Qwen3 sizes of
            the draft layers.
        rope_parameters (dict): `rope_type`, `rope_theta` and scaling, the target's.
        block_size (int): slots of a block, the anchor included.
        mask_token_id (int): the id that fills the slots after the anchor; an id the target never writes.
        num_target_layers (int): decoder layers of the target.
        target_layer_ids (list[int]): zero-based target layers whose outputs are tapped, each once.
        shift_label (bool): slot k predicts anchor+k+1 (True, `block_size` drafts) or anchor+k (False, one draft less).
        pure_draft_prefix_len (int): how many leading drafts the head leaves uncorrected.
        causal_encoder (str): `"gru"` (the paper's; SGLang serves it) or `"attention"`.
        head_hidden_size (int): width of the causal encoder's state.
        head_rank (int): rank of the correction.
        target_name_or_path (str, optional): the target it was trained for; another one is warned about.
        dflash_config (dict, optional): the same values in the published layout; read, and written by `to_dict`.

    Raises:
        ValueError: a value out of range, in one sentence that says what was expected.

    Source: Domino (arXiv 2605.29707), section 3; checkpoint layout of SGLang's DFlash loader.
    """

    model_type = "domino"
    # Older libraries otherwise build a config without arguments to compare with; a mask id cannot be guessed.
    has_no_defaults_at_init: ClassVar[bool] = True

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rope_parameters: dict | None = None
    tie_word_embeddings: bool = False
    block_size: int = 16
    mask_token_id: int | None = None
    num_target_layers: int = 36
    target_layer_ids: list[int] | None = None
    shift_label: bool = True
    pure_draft_prefix_len: int = 1
    causal_encoder: str = "gru"
    head_hidden_size: int = 1024
    head_rank: int = 256
    target_name_or_path: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, dflash_config: dict | None = None, **kwargs):
        kwargs.pop("model_type", None)
        if dflash_config is not None and not isinstance(dflash_config, dict):
            raise ValueError(f"dflash_config is {dflash_config!r}; expected an object with projector_type and sizes.")
        published = dict(dflash_config or {"projector_type": "domino"})
        projector = published.pop("projector_type", None)
        if not str(projector).startswith("domino"):
            raise ValueError(
                f"dflash_config.projector_type is {projector!r}; a Domino drafter has 'domino' there. "
                "A drafter without a correction head is not one of ours: load it with the library that wrote it."
            )
        for key, attribute in PUBLISHED_KEYS.items():
            if key in published:
                setattr(self, attribute, published[key])
        # Published configs keep RoPE's base at the top level.
        theta = kwargs.pop("rope_theta", None)
        if self.rope_parameters is None:
            scaling = kwargs.pop("rope_scaling", None) or {}
            self.rope_parameters = {"rope_type": "default", "rope_theta": theta or 10000.0, **scaling}
        self.check_sizes()
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_layer_ids is None:
            self.target_layer_ids = default_target_layer_ids(self.num_hidden_layers, self.num_target_layers)
        if isinstance(self.target_layer_ids, tuple):
            self.target_layer_ids = list(self.target_layer_ids)
        # Written by configs of ordinary decoders; the draft layers all attend to everything.
        for unused in ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"):
            kwargs.pop(unused, None)
        super().__post_init__(**kwargs)
        self.check()

    @property
    def num_drafts(self) -> int:
        """Drafts in one full block."""
        return self.block_size if self.shift_label else self.block_size - 1

    @property
    def first_draft_slot(self) -> int:
        """Slot whose state predicts the first draft."""
        return 0 if self.shift_label else 1

    @property
    def projector_type(self) -> str:
        """`"domino"` where SGLang can run the drafter; another name elsewhere, so that it refuses."""
        return "domino" if self.causal_encoder == "gru" and self.pure_draft_prefix_len == 1 else "domino_extended"

    def check_sizes(self) -> None:
        """Raise one sentence for the first value that is not an integer of the least size that works."""
        positive = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        positive += ("num_key_value_heads", "head_dim", "num_target_layers", "head_hidden_size", "head_rank")
        for name in positive:
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "head_dim" and value is None):
                raise ValueError(f"{name} is {value!r}; expected a positive integer.")
        if self.mask_token_id is not None and type(self.mask_token_id) is not int:
            raise ValueError(f"mask_token_id is {self.mask_token_id!r}; expected an integer.")
        if type(self.block_size) is not int or self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size!r}; expected at least 2, the anchor and one more slot.")
        if type(self.rms_norm_eps) not in (int, float) or self.rms_norm_eps <= 0:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps!r}; expected a small positive number.")

    def check(self) -> None:
        """Raise one sentence for the first value that cannot work."""
        self.check_sizes()
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act is {self.hidden_act!r}; expected 'silu', the draft layers are SwiGLU.")
        kind = self.rope_parameters.get("rope_type")
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope_parameters.rope_type is {kind!r}; expected one of {ROPE_TYPES}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, num_key_value_heads {self.num_key_value_heads}; "
                "expected the first to be a multiple of the second."
            )
        if self.causal_encoder not in CAUSAL_ENCODERS:
            raise ValueError(f"causal_encoder is {self.causal_encoder!r}; expected one of {CAUSAL_ENCODERS}.")
        if not isinstance(self.shift_label, bool):
            raise ValueError(f"shift_label is {self.shift_label!r}; expected true or false.")
        prefix = self.pure_draft_prefix_len
        if type(prefix) is not int or not 0 <= prefix <= self.num_drafts:
            raise ValueError(
                f"pure_draft_prefix_len is {prefix!r}; expected 0 to {self.num_drafts}, the drafts of a block."
            )
        if self.mask_token_id is None:
            raise ValueError("mask_token_id is missing; pass the id of a token that the target never writes.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}; expected an id below vocab_size ({self.vocab_size}), "
                "because the target's embedding has no row for it."
            )
        ids = self.target_layer_ids
        integers = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
        if not integers or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= self.num_target_layers:
            raise ValueError(
                f"target_layer_ids is {ids}; expected distinct layers from 0 to {self.num_target_layers - 1}."
            )

    @classmethod
    def from_target(cls, target_config: PreTrainedConfig, **overrides) -> DominoConfig:
        """Config of a drafter that fits a target.

        Args:
            target_config: config of any decoder-only model; multimodal ones give their text part.
            **overrides: any field of this class; `num_hidden_layers`, `block_size` and `mask_token_id` are the usual.
        Returns:
            DominoConfig: sizes, norms, RoPE, taps and special ids taken from the target where not overridden.
        Raises:
            ValueError: an encoder-decoder target, an unknown override, a value out of range.
        """
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"the target is a {target_config.model_type} encoder-decoder; Domino drafts for decoder-only models."
            )
        text = target_config.get_text_config(decoder=True)
        unknown = sorted(set(overrides) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"unknown config values {unknown}; expected fields of DominoConfig.")
        heads = getattr(text, "num_attention_heads", None) or max(1, text.hidden_size // 64)
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "max_position_embeddings": getattr(text, "max_position_embeddings", 2048),
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "rope_parameters": flat_rope_parameters(text),
            "num_target_layers": text.num_hidden_layers,
            "target_name_or_path": public_name(getattr(target_config, "_name_or_path", None)),
        }
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            fields[name] = getattr(text, name, None)
        return cls(**{**fields, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """The published layout: Qwen3-style sizes at the top, Domino's own values under `dflash_config`."""
        output = super().to_dict()
        published = {key: output.pop(attribute, None) for key, attribute in PUBLISHED_KEYS.items()}
        output["dflash_config"] = {"projector_type": self.projector_type, **published}
        output["architectures"] = list(ARCHITECTURES)
        # Readers of Qwen3-style configs look for the base at the top level.
        output["rope_theta"] = self.rope_parameters["rope_theta"]
        return output


DominoConfig.register_for_auto_class()


class DominoGenerationConfig(GenerationConfig):
    """Drafting knobs, loaded and saved as the drafter's `generation_config.json`.

    Args:
        num_assistant_tokens (int, optional): most drafts a round; None drafts whole blocks.
        num_assistant_tokens_schedule (str): `"adaptive"` drafts as many tokens as pay, none if none do;
            `"constant"` always drafts as many as it may.
        assistant_confidence_threshold (float, 0 to 1): a row's drafts end with the one at which the product of their
            confidences falls below it; 0 never ends them.
        confidence_bias, confidence_slope (float): a draft's confidence is `sigmoid(bias + slope * margin)`, where
            margin is the distance of its two best corrected logits; fitted on held-out answers.
        rollout (str): `"sequential"` corrects token after token; `"parallel"` corrects the whole block from its
            current guess, repeatedly (with processors that read the text, drafts go token after token all the same).
        refinement_steps (int, optional): most passes of the parallel rollout; None passes until nothing changes.
        candidate_pool_size (int): correct only so many best base ids of a slot; 0 corrects all.
        lookup (bool): where the last tokens occurred before, their continuation may be proposed instead of the
            drafter's tokens; the adaptive schedule says when.
        use_head (bool): False drafts with the backbone alone.
        synchronize_timers (bool): wait for the device before every reading of the clock.

    Raises:
        ValueError: a knob out of range.
    """

    def __init__(self, **kwargs):
        knobs = {name: kwargs.pop(name, default) for name, default in KNOBS.items()}
        unknown = sorted(set(kwargs) - set(vars(GenerationConfig())) - {"_from_model_config"})
        if unknown:
            raise ValueError(f"unknown drafting knobs {unknown}; expected {sorted(KNOBS)} or generate's own options.")
        super().__init__(**kwargs)
        for name, value in knobs.items():
            setattr(self, name, value)
        self.check()

    def confidence(self, margin):
        """Chance that drafts with these margins (a float tensor) are right, given that those before them are."""
        return (self.confidence_bias + self.confidence_slope * margin).sigmoid()

    def check(self) -> None:
        """Raise one sentence for the first knob that cannot work."""
        if self.rollout not in ROLLOUTS:
            raise ValueError(f"rollout is {self.rollout!r}; expected one of {ROLLOUTS}.")
        if self.num_assistant_tokens_schedule not in SCHEDULES:
            raise ValueError(
                f"num_assistant_tokens_schedule is {self.num_assistant_tokens_schedule!r}; "
                f"expected one of {SCHEDULES}."
            )
        for name, least in (("num_assistant_tokens", 1), ("refinement_steps", 1), ("candidate_pool_size", 0)):
            value = getattr(self, name)
            if value is None and name != "candidate_pool_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}.")
        for name in ("lookup", "use_head", "synchronize_timers"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False.")
        for name in ("confidence_bias", "confidence_slope"):
            if type(getattr(self, name)) not in (int, float) or not abs(getattr(self, name)) < 1e3:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a number.")
        cut = self.assistant_confidence_threshold or 0
        if not isinstance(cut, (int, float)) or not 0 <= cut <= 1:
            raise ValueError(
                f"assistant_confidence_threshold is {self.assistant_confidence_threshold!r}; expected 0 to 1."
            )
