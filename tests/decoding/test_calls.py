"""Unusual calls, and the way into `generate`: what works, what is refused in one sentence, what stays untouched."""

import functools

import pytest
import torch
from checks import (
    KINDS,
    Recorder,
    RowLimits,
    as_inputs,
    assert_equal_text,
    both,
    eos_at,
    varied_prompt,
)
from domino_spec import DominoGenerationConfig, DraftOutput, install_dispatch, remove_dispatch
from domino_spec.target_domino import decoder_layers
from tiny import (
    BLOCK,
    MASK_ID,
    control,
    make_drafter,
    make_target,
    prompt_ids,
    ragged,
    scripted,
)
from transformers import DynamicCache, GenerationMixin, StoppingCriteriaList

# F26: unusual calls -------------------------------------------------------------------------------------------------


def test_several_return_sequences(target):
    drafter = scripted(make_drafter(target), "half", target)
    inputs = ragged([7, 4])
    torch.manual_seed(0)
    output = target.generate(
        **inputs, max_new_tokens=10, do_sample=True, num_return_sequences=2, assistant_model=drafter
    )
    assert output.shape == (4, 17)
    assert output[:, :7].tolist() == inputs["input_ids"].repeat_interleave(2, 0).tolist()
    assert output[0].tolist() != output[1].tolist()
    assert len(drafter.last_speculation.acceptance_lengths) == 4


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"use_cache": False}, "use_cache"),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
)
def test_unsupported_calls_are_refused(kwargs, words):
    target = make_target()
    drafter = scripted(make_drafter(target), "oracle", target)
    with pytest.raises(ValueError, match=f"(?i){words}"):
        target.generate(prompt_ids(), max_new_tokens=8, do_sample=False, assistant_model=drafter, **kwargs)


def test_beams_run_without_drafts():
    """The library warns that the assistant is ignored; the text is beam search's."""
    target = make_target()
    drafter = scripted(make_drafter(target), "oracle", target)
    plain = target.generate(prompt_ids(), max_new_tokens=8, num_beams=3, do_sample=False)
    beams = target.generate(prompt_ids(), max_new_tokens=8, num_beams=3, do_sample=False, assistant_model=drafter)
    assert beams.tolist() == plain.tolist()
    assert drafter.last_speculation is None
    with pytest.raises(ValueError, match="streamer"):
        target.generate(prompt_ids(), num_beams=3, max_new_tokens=8, assistant_model=drafter, streamer=Recorder())


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_batches(kind):
    """A streamer is given what plain decoding gives it, also where that is a batch."""
    target, inputs = make_target(), ragged([7, 4])
    drafter = scripted(make_drafter(target), kind, target)
    Recorder.made.clear()
    both(target, drafter, inputs, 9, streamer=Recorder)
    theirs, ours = Recorder.made
    assert ours.tokens == theirs.tokens and ours.ended == theirs.ended == 1


@pytest.mark.parametrize("implementation", ["static", "offloaded_static", "offloaded"])
def test_other_caches_are_equal_or_refused(implementation):
    target = make_target()
    if implementation.startswith("offloaded") and not torch.accelerator.is_available():
        pytest.skip("offloading needs an accelerator")
    drafter = scripted(make_drafter(target), "half", target)
    try:
        assert_equal_text(target, drafter, as_inputs(prompt_ids()), 9, cache_implementation=implementation)
    except ValueError as error:
        assert "generate without assistant_model" in str(error) or "cache_implementation" in str(error)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family_name", ["qwen3", "llama", "mistral"])
def test_passed_cache_over_two_turns(family_name, kind):
    """The cache of the first call serves the second; both equal plain decoding with a cache of its own."""
    target = make_target(family_name, **({"sliding_window": 8} if family_name == "mistral" else {}))
    for assistant in (None, scripted(make_drafter(target), kind, target)):
        extra = {"do_sample": False} | ({} if assistant is None else {"assistant_model": assistant})
        first = target.generate(
            **as_inputs(prompt_ids()),
            past_key_values=DynamicCache(config=target.config),
            max_new_tokens=9,
            return_dict_in_generate=True,
            **extra,
        )
        assert first.past_key_values.get_seq_length() == 15
        second = as_inputs(torch.cat([first.sequences, prompt_ids(5, seed=8)], dim=1))
        out = target.generate(**second, past_key_values=first.past_key_values, max_new_tokens=15, **extra)
        assert out.tolist() == target.generate(**second, max_new_tokens=15, do_sample=False).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family_name", ["llama", "mistral"])
def test_hidden_states_and_attentions(family_name, kind):
    """Layer by layer of plain decoding's shapes: sliding windows shorter than the text, and batches, included."""
    target = make_target(family_name, **({"sliding_window": 8} if family_name == "mistral" else {}))
    target.set_attn_implementation("eager")
    drafter = scripted(make_drafter(target), kind, target)
    for inputs in (varied_prompt(target), ragged([7, 4])):
        plain, assisted = both(
            target,
            drafter,
            inputs,
            9,
            return_dict_in_generate=True,
            output_hidden_states=True,
            output_attentions=True,
            eos_token_id=eos_at(target, inputs, 3),
        )
        for name in ("hidden_states", "attentions"):
            ours, theirs = getattr(assisted, name), getattr(plain, name)
            assert len(ours) == len(theirs) >= 4
            for step, reference in zip(ours, theirs, strict=True):
                for a, b in zip(step, reference, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def count_hooks(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_are_removed():
    target = make_target()
    drafter = make_drafter(target)
    before = count_hooks(target)
    target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)
    assert count_hooks(target) == before

    def fail(*args, **kwargs):
        raise RuntimeError("no drafts today")

    drafter.draft = fail
    with pytest.raises(RuntimeError, match="no drafts today"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)
    assert count_hooks(target) == before


def test_too_many_drafts_are_refused():
    target = make_target()
    drafter = make_drafter(target)
    drafter.draft = lambda *args, **kwargs: DraftOutput(torch.zeros(1, 40, dtype=torch.long))
    with pytest.raises(ValueError, match="max_drafts"):
        target.generate(prompt_ids(), max_new_tokens=8, assistant_model=drafter)


# The way in ---------------------------------------------------------------------------------------------------------


def test_other_assistants_are_untouched():
    target = make_target()
    assistant = make_target("llama", seed=4)
    plain = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False)
    assisted = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False, assistant_model=assistant)
    assert assisted.tolist() == plain.tolist()
    lookup = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    assert lookup.tolist() == plain.tolist()
    with pytest.raises(ValueError, match="num_return_sequences"):
        target.generate(
            prompt_ids(), max_new_tokens=4, do_sample=True, num_return_sequences=2, assistant_model=assistant
        )


def test_dispatch_is_idempotent_and_can_be_removed():
    target = make_target()
    drafter = scripted(make_drafter(target), "oracle", target)
    installed = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode
    install_dispatch()
    assert (GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode) == installed
    try:
        remove_dispatch()
        assert GenerationMixin._assisted_decoding is installed[0].__wrapped__
        assert GenerationMixin._validate_generation_mode is installed[1].__wrapped__
        drafter.last_speculation = None
        with pytest.raises(Exception):  # noqa: B017 - whatever the library says to an assistant that cannot generate
            target.generate(prompt_ids(), max_new_tokens=4, do_sample=False, assistant_model=drafter)
        assert drafter.last_speculation is None
    finally:
        install_dispatch()
    assert_equal_text(target, drafter, as_inputs(prompt_ids()))
    assert drafter.last_speculation.mean_acceptance_length > 1


def test_prepared_config_is_not_read_for_knobs():
    """`generate` carries library defaults for assistants (20 drafts, threshold 0.4); the drafter's own knobs count."""
    target = make_target()
    target.generation_config.num_assistant_tokens = 1
    target.generation_config.assistant_confidence_threshold = 1.0
    drafter = make_drafter(target)
    assert_equal_text(target, drafter, as_inputs(prompt_ids()))
    assert len(drafter.last_speculation.acceptance_rate_per_position) == BLOCK


def test_knobs_are_checked_at_the_call():
    target = make_target()
    drafter = make_drafter(target)
    drafter.generation_config = DominoGenerationConfig()
    drafter.generation_config.rollout = "sideways"
    with pytest.raises(ValueError, match="rollout is 'sideways'"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


def test_mask_token_in_the_prompt():
    """The mask id is an ordinary token for the target."""
    target = make_target()
    ids = prompt_ids()
    ids[0, 3] = MASK_ID
    assert_equal_text(target, scripted(make_drafter(target), "half", target), as_inputs(ids))


@pytest.mark.parametrize("kind", ["oracle", "half"])
def test_prompt_given_as_embeddings(kind):
    target = make_target("llama")
    ids = prompt_ids()
    embeds = target.get_input_embeddings()(ids)
    plain = target.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False)
    right = plain[0].tolist()

    def propose(row, n):
        tokens = (right[len(row) :] + [0] * n)[:n]
        return [token if kind == "oracle" or i < 2 else (token + 1) % 58 for i, token in enumerate(tokens)]

    drafter = control(make_drafter(target), propose)
    drafted = target.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert torch.equal(plain, drafted)
    assert drafter.last_speculation.mean_acceptance_length > 1


def test_positions_of_the_caller():
    target = make_target("llama")
    drafter = scripted(make_drafter(target), "wrong", target)
    ids = prompt_ids()
    kwargs = {"max_new_tokens": 12, "do_sample": False, "position_ids": torch.arange(7)[None] * 3 + 11}
    plain = target.generate(ids, **kwargs)
    assert not torch.equal(plain, target.generate(ids, max_new_tokens=12, do_sample=False))
    assert torch.equal(plain, target.generate(ids, assistant_model=drafter, **kwargs))


@pytest.mark.parametrize("kind", ["oracle", "half"])
def test_criterion_with_values_of_its_own_per_row(kind):
    target = make_target("llama")
    drafter = scripted(make_drafter(target), kind, target)
    plain = assert_equal_text(
        target,
        drafter,
        ragged([7, 4]),
        eos_token_id=63,
        stopping_criteria=lambda: StoppingCriteriaList([RowLimits([10, 14])]),
    )
    assert plain.shape[1] == 14


def test_vision_layers_are_not_tapped():
    class Both(torch.nn.Module):
        def __init__(self, target):
            super().__init__()
            self.vision = torch.nn.ModuleList(torch.nn.Identity() for _ in range(4))
            self.text, self.config = target, target.config

        def get_decoder(self):
            return self.text.get_decoder()

    target = make_target("llama")
    assert decoder_layers(Both(target)) is target.model.layers


def test_a_wrapper_of_somebody_else_stays():
    ours = GenerationMixin._assisted_decoding

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    try:
        GenerationMixin._assisted_decoding = theirs
        remove_dispatch()
        assert GenerationMixin._assisted_decoding is theirs
    finally:
        GenerationMixin._assisted_decoding = ours
        install_dispatch()


def test_a_callers_cache_stops_recording():
    target = make_target("mistral", sliding_window=8)
    drafter = scripted(make_drafter(target), "half", target)
    cache = DynamicCache(config=target.config)
    target.generate(prompt_ids(), max_new_tokens=20, do_sample=False, assistant_model=drafter, past_key_values=cache)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
