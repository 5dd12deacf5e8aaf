"""DominoConfig: fits every target family, travels through both layouts, refuses what cannot work."""

import json

import pytest
import torch
from domino_spec import DominoConfig, DominoForSpeculation
from domino_spec.configuration_domino import default_target_layer_ids
from tiny import MASK_ID, VOCAB, make_drafter, make_target, prompt_ids
from transformers import CONFIG_MAPPING, AutoConfig, T5Config

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "block_size": 6,
    "mask_token_id": MASK_ID,
    "head_hidden_size": 16,
    "head_rank": 8,
}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "query_pre_attn_scalar": 8}
TARGETS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "gemma3_text": GEMMA,
    "gpt_neox": {},
}


@pytest.mark.parametrize("family_name", TARGETS)
def test_from_target_fits_every_family(family_name):
    """The drafter takes the target's sizes and drafts for it; the text stays exact."""
    target = make_target(family_name, **TARGETS[family_name])
    drafter = make_drafter(target)
    config, theirs = drafter.config, target.config
    assert (config.vocab_size, config.hidden_size, config.num_target_layers) == (VOCAB, 32, 4)
    assert config.num_attention_heads == theirs.num_attention_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert config.num_key_value_heads == 2
    assert config.rms_norm_eps == (getattr(theirs, "rms_norm_eps", None) or 1e-6)
    assert config.max_position_embeddings == 256
    assert config.pad_token_id == 62
    assert config.rope_parameters["rope_type"] == "default" and config.rope_parameters["rope_theta"] >= 10000
    assert not any(isinstance(value, dict) for value in config.rope_parameters.values())
    inverse = drafter.rotary_emb.inv_freq
    assert inverse.shape == (config.head_dim // 2,) and inverse.isfinite().all()
    ids = prompt_ids(7, batch=2)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False}
    plain = target.generate(ids, **call)
    assert target.generate(ids, **call, assistant_model=drafter).tolist() == plain.tolist()
    assert drafter.last_speculation.num_drafted > 0


def test_rope_base_and_scaling_come_from_the_target():
    scaling = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    target = make_target("qwen3", rope_parameters=scaling)
    rope = DominoConfig.from_target(target.config, num_hidden_layers=1, mask_token_id=MASK_ID).rope_parameters
    assert {key: rope[key] for key in scaling} == scaling
    mixed = CONFIG_MAPPING["gemma3_text"](
        num_hidden_layers=4,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "default", "rope_theta": 777.0},
        },
    )
    config = DominoConfig.from_target(mixed, num_hidden_layers=1, mask_token_id=3)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 777.0}
    partial = make_target("gpt_neox").config
    config = DominoConfig.from_target(partial, num_hidden_layers=1, mask_token_id=3)
    assert "partial_rotary_factor" not in config.rope_parameters


def test_from_target_takes_overrides():
    target = make_target("qwen3")
    config = DominoConfig.from_target(
        target.config, num_hidden_layers=3, block_size=9, mask_token_id=2, target_layer_ids=[0, 3], head_rank=5
    )
    assert (config.num_hidden_layers, config.block_size, config.mask_token_id) == (3, 9, 2)
    assert config.target_layer_ids == [0, 3] and config.head_rank == 5


@pytest.mark.parametrize(
    ("draft_layers", "target_layers", "expected"),
    [
        (1, 36, [18]),
        (1, 1, [0]),
        (5, 36, [1, 9, 17, 25, 33]),
        (3, 30, [1, 14, 27]),
        (2, 4, [0, 3]),
        (3, 4, [0, 2, 3]),
        (5, 4, [0, 1, 2, 3]),
        (2, 5, [1, 2]),
    ],
)
def test_default_taps(draft_layers, target_layers, expected):
    assert default_target_layer_ids(draft_layers, target_layers) == expected


def test_default_taps_are_always_valid():
    for draft_layers in range(1, 9):
        for target_layers in range(1, 40):
            ids = default_target_layer_ids(draft_layers, target_layers)
            assert len(set(ids)) == len(ids) == min(draft_layers, target_layers)
            assert min(ids) >= 0 and max(ids) < target_layers and ids == sorted(ids)


# Layouts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"shift_label": False, "pure_draft_prefix_len": 2}, {"target_layer_ids": [3]}]
)
def test_round_trip_through_json(tmp_path, changes):
    config = DominoConfig(**SIZES | changes)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    again = DominoConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    for name in (
        "block_size",
        "target_layer_ids",
        "shift_label",
        "pure_draft_prefix_len",
        "head_rank",
        "causal_encoder",
    ):
        assert getattr(again, name) == getattr(config, name), name
    assert DominoConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert written["architectures"][0] == "DFlashDraftModel"
    assert written["block_size"] == config.block_size and written["num_target_layers"] == 4
    assert written["rope_theta"] == 10000.0
    published = written["dflash_config"]
    assert published["mask_token_id"] == MASK_ID and published["target_layer_ids"] == config.target_layer_ids
    assert published["emb_dim"] == 8 and published["gru_hidden_dim"] == 16
    assert published["shift_label"] is config.shift_label
    # A value has one place only.
    assert not {"mask_token_id", "target_layer_ids", "head_rank", "shift_label"} & set(written)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "domino"),
        ({"shift_label": False}, "domino"),
        ({"pure_draft_prefix_len": 0}, "domino_extended"),
        ({"pure_draft_prefix_len": 2}, "domino_extended"),
        ({"causal_encoder": "attention"}, "domino_extended"),
    ],
)
def test_projector_type_says_what_sglang_can_run(changes, expected):
    config = DominoConfig(**SIZES | changes)
    assert config.to_dict()["dflash_config"]["projector_type"] == expected
    assert DominoConfig.from_dict(config.to_dict()).projector_type == expected


def test_published_layout_loads(tmp_path):
    """A checkpoint of others: `model_type: qwen3`, no code, no drafting knobs; equal to the one it came from."""
    target = make_target("qwen3")
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for name in ("auto_map", "causal_encoder"):
        written.pop(name, None)
    written["dflash_config"].pop("causal_encoder")
    written |= {"model_type": "qwen3", "architectures": ["DominoDraftModel"], "rope_theta": 1000000.0}
    written |= {"rope_parameters": None, "rope_scaling": None, "layer_types": ["full_attention"] * 2}
    written |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 2}
    del written["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    for name in ("generation_config.json", "modeling_domino.py", "configuration_domino.py", "speculation_domino.py"):
        (tmp_path / name).unlink()
    loaded, info = DominoForSpeculation.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    config = loaded.config
    assert config.model_type == "domino" and config.causal_encoder == "gru"
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000.0}
    assert (config.block_size, config.mask_token_id, config.head_rank, config.head_hidden_size) == (6, MASK_ID, 8, 16)
    assert config.target_layer_ids == drafter.config.target_layer_ids
    for name, parameter in drafter.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert loaded.generation_config.rollout == "sequential"
    ids = prompt_ids()
    plain = target.generate(ids, max_new_tokens=8, do_sample=False)
    assert target.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=loaded).tolist() == plain.tolist()
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "domino"


def test_published_values_win_over_top_level_defaults():
    config = DominoConfig(
        **{key: value for key, value in SIZES.items() if key not in ("mask_token_id", "head_rank")},
        dflash_config={"projector_type": "domino", "mask_token_id": 5, "target_layer_ids": [1], "emb_dim": 3},
    )
    assert (config.mask_token_id, config.target_layer_ids, config.head_rank) == (5, [1], 3)


def test_library_reads_a_saved_config_through_auto_classes(tmp_path):
    AutoConfig.register("domino", DominoConfig, exist_ok=True)
    config = DominoConfig(**SIZES)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict()["dflash_config"] == config.to_dict()["dflash_config"]


def test_local_paths_stay_private():
    target = make_target()
    target.config._name_or_path = "/home/somebody/models/SmallTarget/"
    config = DominoConfig.from_target(target.config, num_hidden_layers=1, mask_token_id=MASK_ID)
    assert config.target_name_or_path == "SmallTarget"
    target.config._name_or_path = "owner/name"
    config = DominoConfig.from_target(target.config, num_hidden_layers=1, mask_token_id=MASK_ID)
    assert config.target_name_or_path == "owner/name"


# Validation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({name: 0}, f"{name} is 0; expected a positive integer") for name in SIZES if name.startswith("num_")),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"hidden_size": 0, "head_dim": 8}, "hidden_size is 0"),
        ({"head_rank": 0}, "head_rank is 0"),
        ({"head_hidden_size": 0}, "head_hidden_size is 0"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"block_size": 1}, "block_size is 1; expected at least 2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3.*multiple"),
        ({"causal_encoder": "lstm"}, "causal_encoder is 'lstm'"),
        ({"pure_draft_prefix_len": -1}, "pure_draft_prefix_len is -1; expected 0 to 6"),
        ({"pure_draft_prefix_len": 7}, "pure_draft_prefix_len is 7; expected 0 to 6"),
        ({"pure_draft_prefix_len": 6, "shift_label": False}, "pure_draft_prefix_len is 6; expected 0 to 5"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"mask_token_id": VOCAB}, "mask_token_id is 64; expected an id below"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [4]}, "expected distinct layers from 0 to 3"),
        ({"target_layer_ids": [-1]}, "expected distinct layers from 0 to 3"),
        ({"target_layer_ids": [1, 1]}, "expected distinct layers"),
        ({"dflash_config": {"projector_type": "dflash"}}, "projector_type is 'dflash'"),
        ({"dflash_config": {"projector_type": "domino", "shift_label": "yes"}}, "shift_label"),
        ({"dflash_config": {"mask_token_id": 3}}, "projector_type is None; a Domino drafter"),
        ({"dflash_config": "x"}, "dflash_config is 'x'; expected an object"),
        ({"mask_token_id": "3"}, "mask_token_id is '3'; expected an integer"),
        ({"mask_token_id": 1.5}, "mask_token_id is 1.5; expected an integer"),
        ({"pure_draft_prefix_len": 1.5}, "pure_draft_prefix_len is 1.5; expected 0 to 6"),
        ({"target_layer_ids": ["a"]}, "expected distinct layers"),
        ({"target_layer_ids": 2}, "expected distinct layers"),
        ({"rms_norm_eps": "a"}, "rms_norm_eps is 'a'; expected a small positive number"),
        ({"head_rank": True}, "head_rank is True; expected a positive integer"),
        ({"hidden_act": "foo"}, "hidden_act is 'foo'; expected 'silu'"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "rope_type is 'foo'; expected one of"),
    ],
)
def test_impossible_values_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        DominoConfig(**SIZES | changes)


def test_from_target_refuses_unknown_fields_and_encoder_decoders():
    with pytest.raises(ValueError, match=r"unknown config values \['blok_size'\]"):
        DominoConfig.from_target(make_target().config, blok_size=3)
    with pytest.raises(ValueError, match="encoder-decoder"):
        DominoConfig.from_target(T5Config())


def test_drafts_and_slots():
    shifted, plain = DominoConfig(**SIZES), DominoConfig(**SIZES | {"shift_label": False})
    assert (shifted.num_drafts, shifted.first_draft_slot) == (6, 0)
    assert (plain.num_drafts, plain.first_draft_slot) == (5, 1)
