"""The drafter: training and drafting agree, fast paths equal naive ones, checkpoints are complete."""

import json

import pytest
import torch
from domino_spec import DominoConfig, DominoForSpeculation
from domino_spec.head_domino import add_correction
from domino_spec.processors_domino import DraftProcessors
from domino_spec.target_domino import decoder_layers, embed_tokens, tapped_states, target_logits
from domino_spec.training.objective import DominoObjective, target_states
from safetensors.torch import load_file, save_file
from tiny import BLOCK, VOCAB, make_drafter, make_target, prompt_ids

VARIANTS = [
    (encoder, shift, prefix) for encoder in ("gru", "attention") for shift in (True, False) for prefix in range(3)
]


def variant(target, encoder="gru", shift_label=True, prefix=1, **overrides):
    return make_drafter(
        target, causal_encoder=encoder, shift_label=shift_label, pure_draft_prefix_len=prefix, **overrides
    )


class TeacherForcing(DraftProcessors):
    """Pins every draft to the given tokens, where some are given, and records the logits of each."""

    def __init__(self, tokens=None):
        super().__init__([])
        self.tokens, self.values_only, self.seen = tokens, False, []

    def __bool__(self):
        return True

    def __call__(self, input_ids, logits):
        i = len(self.seen)
        self.seen.append(logits.detach().clone())
        if self.tokens is None:
            return logits
        return torch.full_like(logits, -torch.inf).index_fill(1, self.tokens[i : i + 1], 0.0)

    @property
    def logits(self) -> torch.Tensor:
        """Of all drafts, `[batch, n, V]`."""
        return torch.stack(self.seen, dim=1)


@torch.no_grad()
def training_logits(target, drafter, ids, anchors):
    """Base and corrected logits `[1, M, n, V]` of the blocks at `anchors`, by the training path."""
    objective = DominoObjective(drafter, target)
    mask = torch.ones_like(ids)
    tapped = target_states(target, drafter.config.target_layer_ids, ids, mask).tapped
    z = objective.draft_states(ids, mask, anchors, tapped)
    base = target_logits(target, z)
    start = drafter.config.pure_draft_prefix_len
    encoded = objective.encode_prefixes(ids, anchors)
    late = add_correction(base[:, :, start:], drafter.correction(z[:, :, start:], encoded[:, :, start:]))
    return base, torch.cat([base[:, :, :start], late], dim=2), tapped


# F2 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoder", "shift_label", "prefix"), VARIANTS)
def test_training_logits_equal_drafting_logits(target, encoder, shift_label, prefix):
    """Slot by slot, from anchors in the middle of one sequence whose context reached the cache in uneven pieces."""
    drafter = variant(target, encoder, shift_label, prefix)
    ids = prompt_ids(24)
    anchors = torch.tensor([[3, 9, 12]])
    _, trained, tapped = training_logits(target, drafter, ids, anchors)
    cache, done = drafter.new_cache(1), 0
    n = drafter.config.num_drafts
    for block, anchor in enumerate(anchors[0].tolist()):
        force = TeacherForcing(ids[0, anchor + 1 :])
        with torch.no_grad():
            output = drafter.draft(
                target,
                ids[:, anchor : anchor + 1],
                tapped[:, done:anchor],
                cache,
                input_ids=ids[:, : anchor + 1],
                max_drafts=BLOCK,
                logits_processor=force,
            )
        done = anchor
        assert output.token_ids.tolist() == ids[:, anchor + 1 : anchor + 1 + n].tolist()
        assert len(force.seen) == n == (BLOCK if shift_label else BLOCK - 1)
        torch.testing.assert_close(force.logits[0], trained[0, block], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift_label", [True, False])
def test_labels_are_the_tokens_that_drafting_predicts(shift_label):
    """Draft i's label is the token i places after the anchor, whatever slot it comes from."""
    target = make_target()
    drafter = variant(target, shift_label=shift_label)
    ids = prompt_ids(20)
    anchors = torch.tensor([[2, 11, 16]])
    objective = DominoObjective(drafter, target)
    places, valid = objective.labels(ids, torch.ones_like(ids), anchors, torch.ones_like(anchors, dtype=torch.bool))
    n = drafter.config.num_drafts
    assert places[0, 0].tolist() == list(range(3, 3 + n))
    assert valid[0, 0].all() and valid[0, 1].all()
    assert valid[0, 2].tolist() == [True] * 3 + [False] * (n - 3)
    supervised = torch.ones_like(ids)
    supervised[0, 5] = 0
    _, valid = objective.labels(ids, supervised, anchors, torch.ones_like(anchors, dtype=torch.bool))
    assert valid[0, 0].tolist() == [True] * 2 + [False] * (n - 2)


def overfit(target, drafter, ids, steps):
    objective = DominoObjective(drafter, target).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    anchors = torch.arange(4, ids.shape[1] - 1)[None]
    for step in range(steps):
        lam = max(0.0, 1 - step / (0.6 * steps))
        loss = objective(ids, torch.ones_like(ids), torch.ones_like(ids), lam=lam, anchors=anchors)["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    drafter.eval()


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("encoder", ["gru", "attention"])
def test_overfit_drafter_accepts_whole_blocks(encoder, shift_label):
    """Trained on one answer, the drafter proposes it block by block in the real loop."""
    target = make_target("qwen3")
    drafter = variant(target, encoder, shift_label, initializer_range=0.05)
    n = drafter.config.num_drafts
    plain = target.generate(prompt_ids(), max_new_tokens=1 + 4 * (n + 1), do_sample=False)
    overfit(target, drafter, plain, 180)
    for rollout in ("sequential", "parallel"):
        drafter.generation_config.rollout = rollout
        assisted = target.generate(
            prompt_ids(), max_new_tokens=plain.shape[1] - 7, do_sample=False, assistant_model=drafter
        )
        assert assisted.tolist() == plain.tolist()
        assert drafter.last_speculation.acceptance_lengths == [[n + 1] * 4]


# F3 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["gru", "attention"])
def test_missing_head_weights_come_up_initialised(tmp_path, encoder):
    target = make_target()
    drafter = variant(target, encoder, head_hidden_size=64, head_rank=32)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = {name for name in tensors if name.startswith(("prefix_", "embed_proj"))}
    assert len(gone) > 3
    save_file({name: x for name, x in tensors.items() if name not in gone}, file, {"format": "pt"})
    fresh = DominoForSpeculation(drafter.config)
    for _ in range(3):
        junk = [torch.full((1000, 1000), float("nan")) for _ in range(8)]  # what freed memory would hold
        del junk
        loaded, info = DominoForSpeculation.from_pretrained(tmp_path, output_loading_info=True)
        assert set(info["missing_keys"]) == gone
        for name, parameter in loaded.named_parameters():
            expected = fresh.get_parameter(name)
            assert parameter.isfinite().all(), name
            if name in gone and parameter.numel() > 100:
                torch.testing.assert_close(parameter.std(), expected.std(), rtol=0.15, atol=1e-6)
            elif name in gone:
                torch.testing.assert_close(parameter, expected)
            else:
                torch.testing.assert_close(parameter, tensors[name])
        buffers = dict(loaded.named_buffers())
        assert buffers.keys() == dict(fresh.named_buffers()).keys() and buffers
        for name, buffer in fresh.named_buffers():
            torch.testing.assert_close(buffers[name], buffer)


# F8 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("encoder", ["gru", "attention"])
def test_blocks_do_not_see_states_from_their_anchor_on(encoder, implementation):
    target = make_target()
    drafter = variant(target, encoder)
    drafter.set_attn_implementation(implementation)
    objective = DominoObjective(drafter, target)
    ids = prompt_ids(24)
    anchors = torch.tensor([[1, 4, 9, 10, 15]])
    mask = torch.ones_like(ids)
    tapped = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = objective.draft_states(ids, mask, anchors, tapped)
        for place in (1, 4, 9, 10, 14):
            changed = tapped.clone()
            changed[:, place:] += torch.randn(1, 24 - place, 64, generator=torch.Generator().manual_seed(1)) * 10
            after = objective.draft_states(ids, mask, anchors, changed)
            for i, anchor in enumerate(anchors[0].tolist()):
                same = torch.equal(before[:, i], after[:, i])
                assert same == (anchor <= place), (anchor, place)
        # Nor anything of another block: changing one anchor's token leaves the others alone.
        other = ids.clone()
        other[0, 9] = (other[0, 9] + 1) % 58
        after = objective.draft_states(other, mask, anchors, tapped)
    assert [torch.equal(before[:, i], after[:, i]) for i in range(5)] == [True, True, False, True, True]


def test_eager_equals_sdpa():
    target = make_target()
    drafter = variant(target)
    ids, anchors = prompt_ids(24), torch.tensor([[2, 9]])
    logits = []
    for implementation in ("eager", "sdpa"):
        drafter.set_attn_implementation(implementation)
        logits.append(training_logits(target, drafter, ids, anchors)[1])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


# F10 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_token_id", [VOCAB, VOCAB + 5, -1, None])
def test_mask_token_without_a_row_is_refused(mask_token_id):
    with pytest.raises(ValueError, match="mask_token_id"):
        make_drafter(make_target(), mask_token_id=mask_token_id)


@pytest.mark.parametrize("role", ["eos", "eos_list", "pad"])
def test_mask_token_with_a_meaning_is_warned_about_once(role, recwarn):
    target = make_target(**{"eos": {"eos_token_id": 60}, "eos_list": {"eos_token_id": [1, 60]}}.get(role, {}))
    if role == "pad":
        target.config.pad_token_id = 60
    drafter = make_drafter(target)
    for _ in range(2):
        drafter.check_target(target)
    assert len([w for w in recwarn if "mask_token_id 60" in str(w.message)]) == 1


# F11 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["gru", "attention"])
def test_stepwise_encoder_equals_one_shot(encoder):
    drafter = variant(make_target(), encoder)
    if encoder == "attention":
        torch.nn.init.normal_(drafter.prefix_attention.distance_bias)
    embeds = torch.randn(3, BLOCK, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, _ = drafter.causal_encoder(embeds)
        state, steps = None, []
        for i in range(BLOCK):
            encoded, state = drafter.encode_step(embeds[:, i : i + 1], state)
            steps.append(encoded)
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-6)
        # Causal: what comes later changes nothing.
        changed = embeds.clone()
        changed[:, 3:] += 1
        assert torch.equal(drafter.causal_encoder(changed)[0][:, :3], whole[:, :3])


def draft_all(target, drafter, ids, logits_processor=None, **knobs):
    for name, value in knobs.items():
        setattr(drafter.generation_config, name, value)
    with torch.no_grad():
        tapped = target_states(target, drafter.config.target_layer_ids, ids, torch.ones_like(ids)).tapped[:, :-1]
        return drafter.draft(
            target,
            ids[:, -1:],
            tapped,
            drafter.new_cache(ids.shape[0]),
            input_ids=ids,
            max_drafts=drafter.config.num_drafts,
            logits_processor=logits_processor,
        )


@pytest.mark.parametrize("encoder", ["gru", "attention"])
@pytest.mark.parametrize("rollout", ["sequential", "parallel"])
def test_zero_correction_drafts_the_backbone_alone(encoder, rollout):
    target = make_target()
    drafter = variant(target, encoder)
    ids = prompt_ids(9, batch=2)
    corrected = draft_all(target, drafter, ids, rollout=rollout)
    backbone = draft_all(target, drafter, ids, use_head=False)
    assert corrected.token_ids.tolist() != backbone.token_ids.tolist()
    torch.nn.init.zeros_(drafter.embed_proj[2].weight)
    zeroed = draft_all(target, drafter, ids, rollout=rollout, use_head=True)
    assert zeroed.token_ids.tolist() == backbone.token_ids.tolist()
    torch.testing.assert_close(zeroed.confidences, backbone.confidences)


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("encoder", ["gru", "attention"])
def test_every_prefix_length_sets_every_slot(target, encoder, shift_label):
    """Draft i is the backbone's for i < prefix and base + correction from there on, recomputed naively."""
    ids = prompt_ids(9, batch=2)
    drafts = BLOCK if shift_label else BLOCK - 1
    for prefix in range(drafts + 1):
        drafter = variant(target, encoder, shift_label, prefix)
        records = TeacherForcing(), TeacherForcing()
        draft_all(target, drafter, ids, records[0], use_head=False)
        sequential = draft_all(target, drafter, ids, records[1], use_head=True, rollout="sequential")
        parallel = draft_all(target, drafter, ids, use_head=True, rollout="parallel")
        assert sequential.token_ids.tolist() == parallel.token_ids.tolist()
        torch.testing.assert_close(sequential.confidences, parallel.confidences, rtol=1e-4, atol=1e-4)
        backbone, logits = records[0].logits, records[1].logits
        assert logits.shape == (2, drafts, VOCAB) and logits.isfinite().all()
        assert sequential.token_ids.tolist() == logits.argmax(-1).tolist()
        torch.testing.assert_close(logits[:, :prefix], backbone[:, :prefix])
        for i in range(prefix, drafts):
            assert not torch.allclose(logits[:, i], backbone[:, i], atol=1e-3), (prefix, i)


@pytest.mark.parametrize("encoder", ["gru", "attention"])
@pytest.mark.parametrize("shift_label", [True, False])
def test_parallel_rollout_equals_sequential(target, encoder, shift_label):
    drafter = variant(target, encoder, shift_label, prefix=0)
    for seed in range(4):
        ids = prompt_ids(8, batch=3, seed=seed)
        naive = draft_all(target, drafter, ids, rollout="sequential")
        fast = draft_all(target, drafter, ids, rollout="parallel", refinement_steps=None)
        assert fast.token_ids.tolist() == naive.token_ids.tolist()
        for steps in range(1, drafter.config.num_drafts):
            part = draft_all(target, drafter, ids, rollout="parallel", refinement_steps=steps)
            assert part.token_ids[:, :steps].tolist() == naive.token_ids[:, :steps].tolist()


@pytest.mark.parametrize("most", [0, 1, 2, 4])
@pytest.mark.parametrize("rollout", ["sequential", "parallel"])
def test_fewer_drafts_are_the_first_of_all(most, rollout):
    target = make_target()
    drafter = variant(target)
    drafter.generation_config.rollout = rollout
    ids = prompt_ids(9, batch=2)
    whole = draft_all(target, drafter, ids)
    tapped = target_states(target, drafter.config.target_layer_ids, ids, torch.ones_like(ids)).tapped[:, :-1]
    with torch.no_grad():
        part = drafter.draft(target, ids[:, -1:], tapped, drafter.new_cache(2), input_ids=ids, max_drafts=most)
    assert part.token_ids.shape == (2, most)
    assert part.token_ids.tolist() == whole.token_ids[:, :most].tolist()


def test_correction_depends_on_the_drafted_tokens():
    """The head is what makes a draft depend on the drafts before it."""
    target = make_target()
    drafter = variant(target)
    states, base = torch.randn(1, BLOCK, 32), torch.randn(1, BLOCK, VOCAB)
    first, second = torch.randn(1, BLOCK, 32), torch.randn(1, BLOCK, 32)
    second[:, :3] = first[:, :3]
    with torch.no_grad():
        a, b = drafter.correct_block(base, states, first), drafter.correct_block(base, states, second)
    assert torch.equal(a[:, :3], b[:, :3]) and not torch.allclose(a[:, 3:], b[:, 3:])
    assert torch.equal(a[:, :1], base[:, :1])


# Candidate pool -----------------------------------------------------------------------------------------------------


def test_candidate_pool():
    """Draft by draft, a pool removes ids from the choice and changes no other's logit."""
    target = make_target()
    drafter = variant(target)
    ids = prompt_ids(9, batch=2)
    outputs, logits = [], []
    for pool in (0, VOCAB, VOCAB - 1, 5):
        seen = TeacherForcing()
        outputs.append(draft_all(target, drafter, ids, seen, candidate_pool_size=pool))
        logits.append(seen.logits)
    assert torch.equal(outputs[0].token_ids, outputs[1].token_ids)
    torch.testing.assert_close(logits[1], logits[0])
    assert ((logits[2] > -1e3).sum(-1) == VOCAB - 1).all()
    # After the first corrected draft the prefixes may differ; until there a pool only removes ids.
    kept = logits[3] > -1e3
    assert (kept.sum(-1) == 5).all()
    torch.testing.assert_close(logits[3][:, :2][kept[:, :2]], logits[0][:, :2][kept[:, :2]])
    drafter.generation_config.candidate_pool_size = 5
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    assert target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()


# F14 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_ids", [[0, 3], [2, 1], [3]])
def test_tapped_features_are_the_layers_outputs(target, layer_ids):
    """Training and drafting read what a plain forward hook on the layer sees; the last layer's before the norm."""
    seen = {}
    handles = [
        layer.register_forward_hook(lambda module, inputs, output, i=i: seen.__setitem__(i, output))
        for i, layer in enumerate(target.model.layers)
    ]
    ids = prompt_ids(9)
    try:
        tapped = target_states(target, layer_ids, ids, torch.ones_like(ids)).tapped
    finally:
        for handle in handles:
            handle.remove()
    outputs = [seen[i][0] if isinstance(seen[i], tuple) else seen[i] for i in layer_ids]
    assert torch.equal(tapped, torch.cat(outputs, -1))
    hidden = target(ids, output_hidden_states=True).hidden_states
    for part, i in zip(tapped.split(32, -1), layer_ids, strict=True):
        if i < 3:
            torch.testing.assert_close(part, hidden[i + 1])
        else:
            torch.testing.assert_close(target.model.norm(part), hidden[4])
    drafter = make_drafter(target, target_layer_ids=layer_ids)
    contexts = []
    draft = drafter.draft

    def recording(target, anchor_ids, context_hidden_states, cache, **kwargs):
        contexts.append(context_hidden_states)
        target(ids)  # a drafter may run the target itself: that must leave nothing in the taps
        return draft(target, anchor_ids, context_hidden_states, cache, **kwargs)

    drafter.draft = recording
    output = target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    context = torch.cat(contexts, 1)
    again = target_states(target, layer_ids, output, torch.ones_like(output)).tapped
    assert context.shape[1] >= 13
    torch.testing.assert_close(context, again[:, : context.shape[1]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer_ids", [[-1, 2], [1, 4], [2, 2], []])
def test_bad_layer_ids_are_refused(layer_ids):
    target = make_target()
    with pytest.raises(ValueError, match="target_layer_ids"):
        make_drafter(target, target_layer_ids=layer_ids)
    if layer_ids:
        with pytest.raises(ValueError, match="target_layer_ids"), tapped_states(target, layer_ids):
            pass


def test_decoder_layers_are_found():
    target = make_target()
    assert decoder_layers(target) is target.model.layers
    with pytest.raises(ValueError, match="decoder layers"):
        members = {"config": target.config, "get_decoder": lambda self: self}
        decoder_layers(type("NoLayers", (torch.nn.Linear,), members)(2, 2))


# F17 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollout", ["sequential", "parallel"])
@pytest.mark.parametrize("pool", [0, 9])
def test_padded_target_head(rollout, pool):
    """A head of 72 rows over a vocabulary of 64: the extra ids are drafted uncorrected, the text stays exact."""
    target = make_target(vocab_size=72)
    target.config.vocab_size = VOCAB
    drafter = make_drafter(target)
    assert drafter.config.vocab_size == VOCAB
    drafter.generation_config.rollout, drafter.generation_config.candidate_pool_size = rollout, pool
    ids = prompt_ids(7, batch=2)
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    assert (plain[:, 7:] >= VOCAB).any()
    assert target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()
    assert drafter.last_speculation.num_drafted > 0
    warm = target.generate(ids, max_new_tokens=8, do_sample=True, assistant_model=drafter)
    assert warm.shape == (2, 15)


def test_resized_target():
    target = make_target()
    drafter = make_drafter(target)
    target.resize_token_embeddings(VOCAB + 3)
    ids = prompt_ids()
    plain = target.generate(ids, max_new_tokens=10, do_sample=False)
    assert target.generate(ids, max_new_tokens=10, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()
    target.resize_token_embeddings(VOCAB - 8)
    with pytest.raises(ValueError, match="vocabulary of 64.*56 rows"):
        target.generate(ids % 50, max_new_tokens=4, assistant_model=drafter)


def test_scaled_embeddings_and_soft_cap_are_the_targets_own():
    """Gemma scales its embeddings and caps its logits; the drafter borrows both as they are."""
    target = make_target("gemma3_text", query_pre_attn_scalar=8, final_logit_softcapping=5.0)
    ids = prompt_ids(9)
    embeds = embed_tokens(target, ids, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(embeds, target.model.embed_tokens.weight[ids] * 32**0.5)
    with torch.no_grad():
        output = target.model(ids).last_hidden_state
        torch.testing.assert_close(target_logits(target, output), target(ids).logits)


# F22 ----------------------------------------------------------------------------------------------------------------

LAYER_TENSORS = [
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
]
CONTRACT = {f"layers.{i}.{name}" for i in range(2) for name in LAYER_TENSORS} | {
    *("norm.weight", "fc.weight", "hidden_norm.weight", "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"),
    *("embed_proj.0.weight", "embed_proj.2.weight"),
}


@pytest.mark.parametrize("encoder", ["gru", "attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_are_complete(tmp_path, encoder, dtype):
    drafter = variant(make_target(), encoder).to(dtype)
    with torch.no_grad():
        for i, parameter in enumerate(drafter.parameters()):
            parameter.fill_(i + 1)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {name for name, _ in drafter.named_parameters()}
    if encoder == "gru":
        assert set(tensors) == CONTRACT
        assert {x.dtype for x in tensors.values()} == {dtype}
    assert not any("embed_tokens" in name or "lm_head" in name for name in tensors)
    loaded, info = DominoForSpeculation.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert loaded.dtype == dtype
    for i, parameter in enumerate(loaded.parameters()):
        assert (parameter == i + 1).all()
    assert loaded.generation_config.num_assistant_tokens == 3


def test_checkpoint_shapes_are_the_contracts(tmp_path):
    drafter = variant(make_target())
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    assert shapes["fc.weight"] == (32, 64)
    assert shapes["prefix_gru.weight_ih_l0"] == (48, 32) and shapes["prefix_gru.weight_hh_l0"] == (48, 16)
    assert shapes["embed_proj.0.weight"] == (8, 48) and shapes["embed_proj.2.weight"] == (VOCAB, 8)
    assert (tmp_path / "custom_generate" / "generate.py").exists()
    knobs = json.loads((tmp_path / "generation_config.json").read_text())
    assert "transformers_version" in knobs
    drafter.config.save_pretrained(tmp_path / "again")
    assert DominoConfig.from_pretrained(tmp_path / "again").to_dict() == drafter.config.to_dict()


def test_fresh_head_corrects_nothing():
    drafter = make_drafter(make_target(), trained_head=False)
    assert not drafter.embed_proj[2].weight.any()
    for name, parameter in drafter.named_parameters():
        assert parameter.isfinite().all() and (parameter.any() or name == "embed_proj.2.weight")


# DominoCache --------------------------------------------------------------------------------------------------------


def test_context_in_pieces_equals_context_at_once():
    """Ragged rows: what a row drafts does not depend on its neighbours nor on how its context arrived."""
    target = make_target()
    drafter = variant(target)
    ids = prompt_ids(12, batch=2)
    tapped = target_states(target, drafter.config.target_layer_ids, ids, torch.ones_like(ids)).tapped
    lengths = (11, 7)
    single, alone, seen = [], [TeacherForcing(), TeacherForcing()], TeacherForcing()
    with torch.no_grad():
        for row, length in enumerate(lengths):
            single.append(
                drafter.draft(
                    target,
                    ids[row : row + 1, length : length + 1],
                    tapped[row : row + 1, :length],
                    drafter.new_cache(1),
                    input_ids=ids[row : row + 1, : length + 1],
                    max_drafts=BLOCK,
                    logits_processor=alone[row],
                )
            )
        cache = drafter.new_cache(2)
        # Row 0 brings 4 + 5 + 2 states, row 1 brings 4 (behind padding) + 2 + 1.
        first = torch.stack([tapped[0, :4], tapped[1, :4]])
        drafter.draft(target, ids[:, 4:5], first, cache, input_ids=ids[:, :5], max_drafts=0)
        second = torch.zeros(2, 5, 64)
        second[0], second[1, :2] = tapped[0, 4:9], tapped[1, 4:6]
        real = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
        drafter.draft(target, ids[:, 4:5], second, cache, input_ids=ids[:, :5], max_drafts=0, context_mask=real)
        third = torch.full((2, 2, 64), 50.0)
        third[0], third[1, :1] = tapped[0, 9:11], tapped[1, 6:7]
        real = torch.tensor([[True, True], [True, False]])
        anchors = torch.stack([ids[0, 11:12], ids[1, 7:8]])
        together = drafter.draft(
            target, anchors, third, cache, input_ids=ids, max_drafts=BLOCK, context_mask=real, logits_processor=seen
        )
    for row in range(2):
        torch.testing.assert_close(seen.logits[row], alone[row].logits[0], rtol=1e-4, atol=1e-4)
        assert together.token_ids[row].tolist() == single[row].token_ids[0].tolist()
