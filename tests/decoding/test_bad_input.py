"""What a user gets wrong is answered in one sentence that says what was expected."""

import pytest
import torch
from domino_spec import DominoConfig, DominoForSpeculation, DominoGenerationConfig
from tiny import VOCAB, make_drafter, make_target, prompt_ids, scripted
from transformers import CONFIG_MAPPING, AutoModelForCausalLM


def refuse(target, drafter, words, ids=None, **kwargs):
    with pytest.raises(ValueError, match=words) as caught:
        target.generate(
            prompt_ids() if ids is None else ids, max_new_tokens=4, do_sample=False, assistant_model=drafter, **kwargs
        )
    assert "\n" not in str(caught.value)


def test_another_targets_drafter():
    target = make_target()
    refuse(make_target(hidden_size=48), make_drafter(target), "hidden size 32.*has 48")
    refuse(make_target(num_hidden_layers=6), make_drafter(target), "layer count 4.*has 6")
    refuse(make_target(vocab_size=200), make_drafter(target), "vocabulary of 64.*200 rows")
    refuse(make_target(vocab_size=63, pad_token_id=0), make_drafter(target), "vocabulary of 64.*63 rows")


def test_the_recorded_target_is_named():
    target = make_target()
    drafter = make_drafter(target, target_name_or_path="owner/SmallTarget")
    refuse(make_target(hidden_size=48), drafter, "trained for 'owner/SmallTarget'")


def test_a_fine_tune_is_warned_about_once(recwarn):
    target = make_target()
    drafter = make_drafter(target, target_name_or_path="owner/SmallTarget")
    target.config._name_or_path = "other/Finetune"
    for _ in range(3):
        target.generate(prompt_ids(), max_new_tokens=2, assistant_model=drafter)
    told = [w for w in recwarn if "owner/SmallTarget" in str(w.message)]
    assert len(told) == 1 and "other/Finetune" in str(told[0].message)
    target.config._name_or_path = "/some/where/SmallTarget"
    target.generate(prompt_ids(), max_new_tokens=2, assistant_model=drafter)
    assert len([w for w in recwarn if "owner/SmallTarget" in str(w.message)]) == 1


@pytest.mark.parametrize(("ours", "theirs"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("encoder", ["gru", "attention"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_another_dtype_works(ours, theirs, encoder, do_sample):
    target = make_target().to(theirs)
    drafter = make_drafter(target, causal_encoder=encoder).to(ours)
    for rollout in ("sequential", "parallel"):
        drafter.generation_config.rollout = rollout
        ids = prompt_ids(7, batch=2)
        output = target.generate(ids, max_new_tokens=10, do_sample=do_sample, assistant_model=drafter)
        assert output.shape == (2, 17)
        if theirs == torch.float32 and not do_sample:
            assert output.tolist() == target.generate(ids, max_new_tokens=10, do_sample=False).tolist()


@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.99])
def test_truncated_weights(tmp_path, keep):
    make_drafter(make_target()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(OSError, match="cut off or corrupt"):
        DominoForSpeculation.from_pretrained(tmp_path)


def test_no_such_directory(tmp_path):
    with pytest.raises(OSError):
        DominoForSpeculation.from_pretrained(tmp_path / "nothing")


def test_empty_prompt():
    target = make_target()
    refuse(target, make_drafter(target), "prompt is empty", torch.zeros(1, 0, dtype=torch.long))


def test_generation_up_to_the_last_position():
    """Blocks that would reach past the last position are cut there; from there on plain steps, as the target does."""
    target = make_target(max_position_embeddings=16)
    drafter = scripted(make_drafter(target), "half", target)
    for length in (10, 15, 16, 18):
        plain = target.generate(prompt_ids(length), max_new_tokens=6, do_sample=False)
        output = target.generate(prompt_ids(length), max_new_tokens=6, do_sample=False, assistant_model=drafter)
        assert output.tolist() == plain.tolist()


def test_one_token_prompt():
    target = make_target()
    drafter = scripted(make_drafter(target), "oracle", target)
    plain = target.generate(prompt_ids(1), max_new_tokens=9, do_sample=False)
    output = target.generate(prompt_ids(1), max_new_tokens=9, do_sample=False, assistant_model=drafter)
    assert output.tolist() == plain.tolist() and drafter.last_speculation.mean_acceptance_length > 2


@pytest.mark.parametrize("mask_token_id", [VOCAB, -3])
def test_mask_id_out_of_range(mask_token_id):
    with pytest.raises(ValueError, match=f"mask_token_id is {mask_token_id}; expected an id below vocab_size"):
        DominoConfig.from_target(make_target().config, num_hidden_layers=1, mask_token_id=mask_token_id)


def test_mask_id_changed_after_construction():
    target = make_target()
    config = DominoConfig.from_target(target.config, num_hidden_layers=1, mask_token_id=5)
    config.mask_token_id = 1000
    with pytest.raises(ValueError, match="mask_token_id is 1000"):
        DominoForSpeculation(config)


@pytest.mark.parametrize(
    ("knob", "words"),
    [
        ({"rollout": "tree"}, "rollout is 'tree'"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens is 0; expected an integer of at least 1"),
        ({"num_assistant_tokens": 2.5}, "num_assistant_tokens is 2.5"),
        ({"num_assistant_tokens_schedule": "heuristic"}, "num_assistant_tokens_schedule is 'heuristic'"),
        ({"refinement_steps": 0}, "refinement_steps is 0"),
        ({"candidate_pool_size": -1}, "candidate_pool_size is -1"),
        ({"candidate_pool_size": None}, "candidate_pool_size is None"),
        ({"assistant_confidence_threshold": 1.5}, "assistant_confidence_threshold is 1.5; expected 0 to 1"),
    ],
)
def test_knobs_out_of_range(knob, words):
    with pytest.raises(ValueError, match=words):
        DominoGenerationConfig(**knob)


def test_knobs_survive_the_file(tmp_path):
    knobs = {"num_assistant_tokens": 3, "rollout": "parallel", "refinement_steps": 2, "candidate_pool_size": 7}
    knobs |= {"assistant_confidence_threshold": 0.25, "use_head": False}
    DominoGenerationConfig(**knobs).save_pretrained(tmp_path)
    loaded = DominoGenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in knobs} == knobs


def test_unknown_generate_arguments_are_refused():
    target = make_target()
    refuse(target, make_drafter(target), "rollot", rollot="parallel")


def test_unknown_config_values_are_named():
    with pytest.raises(ValueError, match=r"unknown config values \['gru_size'\]"):
        DominoConfig.from_target(make_target().config, gru_size=3, mask_token_id=3)


def test_recurrent_targets_are_refused():
    config = CONFIG_MAPPING["mamba"](vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, state_size=4)
    target = AutoModelForCausalLM.from_config(config)
    refuse(target, make_drafter(make_target()), "recurrent state")
