"""LoRA on a drafter: exactly what is said trains, adapters work unmerged, merged, elsewhere, and after a resume."""

import copy
import inspect
import json
import warnings

import pytest
import torch
from checks import run_elsewhere
from domino_spec import DominoForSpeculation, train_peft
from domino_spec.configuration_domino import DominoGenerationConfig
from domino_spec.head_domino import gru_weights
from domino_spec.training import adapter as adapter_module
from domino_spec.training.adapter import (
    DrafterModelConfig,
    attach_adapter,
    check_options,
    describe_training,
    feature_layer,
    load_adapter,
    save_adapter,
    trained_tensors,
)
from domino_spec.training.config import DominoTrainingConfig
from domino_spec.training.data import BlockCollator
from domino_spec.training.objective import DominoObjective, target_states
from domino_spec.training.start import FeatureScale
from domino_spec.training.tau import simulated_tau
from domino_spec.training.trainer import DominoTrainer
from peft import PeftModel
from tiny import VOCAB, batch_of, drawn, make_drafter, make_target, one_row, prompt_ids, save_target

SCOPES = ("head", "all", "head_full_backbone")


def options(**changes) -> DrafterModelConfig:
    """Options of an adaptation run, rank 4."""
    return DrafterModelConfig(**{"model_name_or_path": "base", "use_peft": True, "lora_r": 4} | changes)


def filled(model: PeftModel, seed: int = 5) -> PeftModel:
    """The adapter as after training: a fresh one changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def make_rows(count: int = 8, length: int = 24) -> list[dict]:
    """Random rows with a prompt of four tokens."""
    supervised = [0] * 4 + [1] * (length - 4)
    return [{"input_ids": prompt_ids(length, seed=i)[0].tolist(), "supervised": supervised} for i in range(count)]


def make_trainer(directory, target, model: PeftModel, rows=None, scaled: bool = True, **changes) -> DominoTrainer:
    """A trainer over a drafter with an adapter, set up as the script sets it up."""
    drafter = model.get_base_model()
    rows = make_rows() if rows is None else rows
    scale, layer = None, feature_layer(drafter)
    if scaled and layer is not None:
        scale = FeatureScale.measure(drafter, target, [BlockCollator(62)(rows[:4])])
        scale.fc = layer
        scale.attach()
    settings = {"max_steps": 4, "save_strategy": "no", "logging_steps": 1, "num_anchors": 6, "learning_rate": 1e-2}
    args = DominoTrainingConfig(output_dir=str(directory), use_cpu=True, disable_tqdm=True, **settings | changes)
    return DominoTrainer(
        DominoObjective(drafter, target), args, scale, model, train_dataset=rows, data_collator=BlockCollator(62)
    )


def copied(drafter) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}


def watch(drafter) -> list:
    """A list that gets everything the drafter proposes from now on; its source runs in other processes too."""
    plain, seen = drafter.draft, []

    def draft(*args, **kwargs):
        output = plain(*args, **kwargs)
        seen.append(output.token_ids.tolist())
        return output

    drafter.draft = draft
    return seen


def drafts(target, model) -> list[list[list[int]]]:
    """Everything the drafter proposes while the target answers one prompt."""
    drafter = model.get_base_model() if isinstance(model, PeftModel) else model
    seen = watch(drafter)
    ids = torch.tensor([[5, 9, 2, 44, 17, 3]])
    target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False, assistant_model=model
    )
    del drafter.draft
    return seen


# What trains --------------------------------------------------------------------------------------------------------

GRU_HEAD = {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}
ATTENTION_HEAD = {f"prefix_attention.{name}.weight" for name in ("in_proj", "qkv_proj", "o_proj")}
ATTENTION_HEAD |= {"embed_proj.0.weight", "embed_proj.2.weight"}
LAYER = {f"self_attn.{name}_proj.weight" for name in "qkvo"} | {f"mlp.{name}_proj.weight" for name in ("gate", "up")}
LINEAR = {"fc.weight"} | {f"layers.{i}.{name}" for i in (0, 1) for name in LAYER | {"mlp.down_proj.weight"}}


def expected_tensors(drafter, scope: str) -> set[str]:
    """What a scope is documented to train, by hand."""
    head = GRU_HEAD if drafter.config.causal_encoder == "gru" else ATTENTION_HEAD
    expected = {f"{name} by LoRA" for name in head}
    if scope == "all":
        expected |= {f"{name} by LoRA" for name in LINEAR}
    if scope == "head_full_backbone":
        backbone = {name for name, _ in drafter.named_parameters() if not name.startswith(("prefix_", "embed_proj"))}
        expected |= {f"{name} in full" for name in backbone}
        if drafter.config.causal_encoder == "attention":
            expected.add("prefix_attention.norm.weight in full")
    return expected


@pytest.mark.parametrize("encoder", ["gru", "attention"])
@pytest.mark.parametrize("scope", SCOPES)
def test_exactly_what_the_log_says_trains(scope, encoder, tmp_path):
    """F18: the documented set and nothing else moves; all else, the target too, is bit-identical."""
    target = make_target()
    drafter = make_drafter(target, causal_encoder=encoder)
    expected, base = expected_tensors(drafter, scope), copied(drafter)
    frozen = copied(target)
    model = attach_adapter(drafter, options(lora_scope=scope))
    sizes = trained_tensors(drafter)
    assert set(sizes) == expected
    trained = {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    assert sum(sizes.values()) == sum(dict(drafter.named_parameters())[name].numel() for name in trained)
    log = describe_training(drafter)
    assert log.startswith(f"trains {sum(sizes.values()):,} of ")
    for label, size in sizes.items():
        assert any(label.split(".")[-2] in line and f"{size:,}" in line for line in log.splitlines()[1:]), label
    before = copied(drafter)
    make_trainer(tmp_path, target, model, lambda_decay_ratio=0.0, max_steps=6).train()
    moved = {name for name, parameter in drafter.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == trained
    assert all(torch.equal(parameter, frozen[name]) for name, parameter in target.named_parameters())
    after = {name.replace(".base_layer", "").replace(".original_module", ""): p for name, p in copied(drafter).items()}
    assert all(torch.equal(after[name], weight) for name, weight in base.items())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lora_target_modules": ["q_proj"]}, {f"layers.{i}.self_attn.q_proj.weight by LoRA" for i in (0, 1)}),
        ({"lora_target_modules": [r"layers\.1\.mlp\.(up|gate)_proj"]}, "up gate"),
        ({"lora_target_modules": ["all-linear"]}, "linear"),
        ({"lora_target_parameters": ["prefix_gru.weight_hh_l0"]}, {"prefix_gru.weight_hh_l0 by LoRA"}),
        ({"lora_modules_to_save": ["prefix_gru"]}, "full gru"),
        ({"lora_modules_to_save": ["embed_proj.2", "norm"]}, "full up"),
    ],
)
def test_named_targets(changes, expected):
    """Names that are given replace the scope's; modules trained in full take LoRA's place."""
    drafter = make_drafter(make_target())
    gru, rest = {name for name in GRU_HEAD if "gru" in name}, {name for name in GRU_HEAD if "embed" in name}
    norms = {name for name, _ in drafter.named_parameters() if "norm" in name}
    sets = {
        "up gate": {f"layers.1.mlp.{name}_proj.weight by LoRA" for name in ("up", "gate")},
        "linear": {f"{name} by LoRA" for name in LINEAR | rest},
        "full gru": {f"{name} in full" for name in gru} | {f"{name} by LoRA" for name in rest},
        "full up": {f"{name} by LoRA" for name in gru | {"embed_proj.0.weight"}}
        | {f"{name} in full" for name in norms | {"embed_proj.2.weight"}},
    }
    attach_adapter(drafter, options(**changes))
    assert set(trained_tensors(drafter)) == (sets[expected] if isinstance(expected, str) else expected)


def test_lora_options_reach_the_layers():
    def layer(**changes):
        model = attach_adapter(make_drafter(make_target()), options(**changes))
        return model.get_base_model().embed_proj[2], model.peft_config["default"]

    plain, config = layer(lora_r=5, lora_alpha=20)
    assert plain.lora_A["default"].weight.shape == (5, 8) and plain.scaling["default"] == 4
    assert config.task_type is None and config.base_model_name_or_path == "base"
    assert layer(lora_r=4, lora_alpha=20, use_rslora=True)[0].scaling["default"] == 10
    full = {"lora_modules_to_save": ["prefix_gru"]}
    assert layer(lora_dropout=0.25, **full)[0].lora_dropout["default"].p == 0.25
    assert "default" in layer(use_dora=True, **full)[0].lora_magnitude_vector
    assert layer(model_name_or_path="/home/me/base")[1].base_model_name_or_path == "base"
    assert layer(model_name_or_path="me/base", model_revision="v2")[1].revision == "v2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_name_or_path": None}, "--use_peft adapts an existing drafter: name it by --model_name_or_path"),
        ({"use_peft": False}, "--lora_r is given without --use_peft"),
        ({"use_peft": False, "lora_r": 16, "use_dora": True}, "--use_dora is given without"),
        ({"load_in_4bit": True}, "--load_in_4bit is given, but drafters are"),
        ({"bnb_4bit_quant_storage": "uint8"}, "--bnb_4bit_quant_storage is given"),
        ({"lora_task_type": "CAUSAL_LM"}, "lora_task_type is 'CAUSAL_LM'"),
        ({"lora_r": 0}, "lora_r is 0; expected a rank"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0"),
        ({"lora_scope": "all", "lora_target_modules": ["fc"]}, "give one or the other"),
    ],
)
def test_options_refused_before_loading(changes, words):
    with pytest.raises(ValueError, match=words):
        check_options(options(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"lora_target_modules": ["q_proj", "query"]},
            "lora_target_modules names 'query', which the",
        ),
        ({"lora_target_parameters": ["weight_hr_l0"]}, "lora_target_parameters names 'weight_hr_l0'"),
        ({"lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save names 'lm_head'"),
        ({"lora_target_modules": ["prefix_gru"]}, "a GRU, which PEFT cannot wrap"),
        ({"lora_dropout": 0.1}, "PEFT has no lora_dropout for LoRA on parameters"),
        ({"use_dora": True}, "PEFT has no use_dora for LoRA on parameters"),
        ({"lora_modules_to_save": ["prefix_gru", "embed_proj"]}, "all that would get LoRA is in lora_modules_to_save"),
    ],
)
def test_options_refused_by_the_drafter(changes, words):
    with pytest.raises(ValueError, match=words):
        attach_adapter(make_drafter(make_target()), options(**changes))


def test_untrained_heads_are_refused():
    with pytest.raises(ValueError, match="correction head is untrained"):
        attach_adapter(make_drafter(make_target(), trained_head=False), options())


# Unmerged adapters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_stepwise_encoder_honours_the_adapter(full):
    """The GRU's cell reads weights by itself; the module's own forward is the naive reference."""
    drafter = make_drafter(make_target())
    bare = copy.deepcopy(drafter.prefix_gru)
    model = filled(attach_adapter(drafter, options(**{"lora_modules_to_save": ["prefix_gru"]} if full else {})))
    embeds = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))

    def stepwise():
        state, parts = None, []
        for i in range(5):
            encoded, state = drafter.encode_step(embeds[:, i : i + 1], state)
            parts.append(encoded)
        return torch.cat(parts, dim=1)

    with torch.no_grad():
        torch.testing.assert_close(stepwise(), drafter.causal_encoder(embeds)[0], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(stepwise(), bare(embeds)[0], atol=1e-2)
        adapted = stepwise()
        with model.disable_adapter():
            torch.testing.assert_close(stepwise(), bare(embeds)[0], rtol=1e-5, atol=1e-5)
        if not full:
            model.merge_adapter()
            torch.testing.assert_close(stepwise(), adapted, rtol=1e-5, atol=1e-5)
            with model.disable_adapter():
                torch.testing.assert_close(gru_weights(drafter.prefix_gru)[0], bare.weight_ih_l0, rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoder", ["gru", "attention"])
@pytest.mark.parametrize(
    "knobs", [{}, {"rollout": "parallel"}, {"candidate_pool_size": 5}, {"use_head": False, "num_assistant_tokens": 3}]
)
def test_unmerged_drafts_equal_merged_ones(encoder, knobs):
    """On every drafting path, and they are not the base's drafts."""
    target = make_target()
    model = filled(attach_adapter(make_drafter(target, causal_encoder=encoder), options(lora_scope="all")))
    knobs = knobs | {"num_assistant_tokens_schedule": "constant"}  # the adaptive one looks at the clock
    model.generation_config = DominoGenerationConfig(**knobs)
    unmerged = drafts(target, model)
    with model.disable_adapter():
        assert drafts(target, model) != unmerged
    merged = model.merge_and_unload()
    assert type(merged) is DominoForSpeculation and merged.generation_config.to_dict().items() >= knobs.items()
    assert drafts(target, merged) == unmerged


@pytest.mark.parametrize("ids", [torch.arange(VOCAB), torch.tensor([3, 60, 7])])
def test_vocabulary_estimate_honours_the_adapter(ids):
    """Training on some ids reads rows of W_up: with the adapter's part in them."""
    target = make_target()
    drafter = make_drafter(target)
    states, encoded = torch.randn(9, 32), torch.randn(9, 16)
    objective = DominoObjective(drafter, target)
    bare = drafter.correction(states, encoded)[:, ids]
    torch.testing.assert_close(objective.corrections(states, encoded, ids), bare)
    filled(attach_adapter(drafter, options()))
    adapted = drafter.correction(states, encoded)[:, ids]
    torch.testing.assert_close(objective.corrections(states, encoded, ids), adapted)
    assert not torch.allclose(adapted, bare, atol=1e-2)


@pytest.mark.parametrize("knobs", [{}, {"rollout": "parallel"}, {"candidate_pool_size": 5}])
def test_a_head_trained_in_full_drafts_and_learns(knobs):
    """PEFT then keeps a copy of the whole head beside the original one."""
    target = make_target()
    drafter = make_drafter(target)
    changes = {"lora_target_modules": ["layers.0.self_attn.q_proj"], "lora_modules_to_save": ["embed_proj"]}
    model = filled(attach_adapter(drafter, options(**changes)))
    model.generation_config = DominoGenerationConfig(num_assistant_tokens_schedule="constant", **knobs)
    unmerged = drafts(target, model)
    with model.disable_adapter():
        assert drafts(target, model) != unmerged
    for ids in (None, torch.arange(20)):
        drafter.zero_grad()
        objective = DominoObjective(drafter, target, frequent_ids=ids)
        objective(**drawn(batch_of(one_row(target))), lam=0.5)["loss"].backward()
        assert all(p.grad is not None and p.grad.any() for p in drafter.correction_layers.parameters())
    assert drafts(target, model.merge_and_unload()) == unmerged


def test_wrapped_drafter_is_an_assistant():
    """Knobs and statistics pass through PEFT's wrapper both ways; text is plain decoding's."""
    target = make_target()
    target.config._name_or_path = "tuned"
    drafter = make_drafter(target)
    drafter.config.target_name_or_path = "original"
    model = filled(attach_adapter(drafter, options()))
    ids = prompt_ids(6, batch=3)
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    model.last_speculation = None
    model.generation_config = DominoGenerationConfig(num_assistant_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=model)
    assert output.tolist() == plain.tolist()
    assert model.last_speculation is drafter.last_speculation is not None
    assert drafter.generation_config.num_assistant_tokens == 2
    assert len(model.last_speculation.acceptance_rate_per_position) <= 2
    model.generation_config.num_assistant_tokens = 1
    target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=model)
    assert len(model.last_speculation.acceptance_rate_per_position) <= 1
    assert model.device == drafter.device and model.dtype == torch.float32
    assert drafter.generate_for(target, ids, max_new_tokens=12, do_sample=False).tolist() == plain.tolist()


def test_adapter_on_a_bf16_drafter(tmp_path):
    """Loaded in bf16 it drafts, stepwise equal to the one-shot forward as far as bf16 goes."""
    target = make_target().bfloat16()
    drafter = make_drafter(target)
    save_adapter(filled(attach_adapter(drafter, options())), tmp_path)
    base = make_drafter(target).bfloat16()
    model = PeftModel.from_pretrained(base, tmp_path)
    assert base.prefix_gru.lora_A["default"].weight.dtype == torch.float32 and model.dtype == torch.bfloat16
    assert gru_weights(base.prefix_gru)[0].dtype == torch.bfloat16
    target.generate(prompt_ids(), max_new_tokens=6, do_sample=False, assistant_model=model)
    assert model.last_speculation.num_drafted > 0


# Training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"lora_modules_to_save": ["prefix_gru"]}])
def test_small_updates_survive_a_bf16_base(changes, tmp_path):
    """F19: 50 steps at learning rate 1e-4 move what trains as far over a bf16 base as over an fp32 one."""
    target = make_target()
    saved = make_drafter(target).bfloat16()
    distances = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter = copy.deepcopy(saved).to(dtype)
        torch.manual_seed(0)
        model = attach_adapter(drafter, options(**changes))
        trained = {name: p.detach().clone() for name, p in drafter.named_parameters() if p.requires_grad}
        assert all(tensor.dtype == torch.float32 for tensor in trained.values())
        make_trainer(tmp_path, target, model, max_steps=50, learning_rate=1e-4, lr_scheduler_type="constant").train()
        parameters = dict(drafter.named_parameters())
        distances.append({name: (parameters[name] - tensor).norm().item() for name, tensor in trained.items()})
    for name, distance in distances[0].items():
        assert distances[1][name] / distance > 0.5, name


def test_frozen_backbones_train_the_head_from_the_first_step(tmp_path):
    target = make_target()
    trainer = make_trainer(tmp_path, target, attach_adapter(make_drafter(target), options()))
    trainer.train()
    assert [entry["lambda"] for entry in trainer.curve if "lambda" in entry] == [0.0] * 4
    assert [len(group["params"]) for group in trainer.optimizer.param_groups] == [0, 8]
    for changes in ({"stage1_ratio": 0.3}, {"lambda_decay_ratio": 0.5}, {"stage_switch": "adaptive"}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} is .* but the backbone is frozen"):
            make_trainer(tmp_path, target, attach_adapter(make_drafter(target), options()), **changes)


@pytest.mark.parametrize("scope", SCOPES[1:])
def test_stage_one_holds_the_heads_adapter_back(scope, tmp_path):
    """The curriculum frees and freezes the adapter's own parameters, never the base's."""
    target = make_target()
    model = attach_adapter(make_drafter(target), options(lora_scope=scope))
    drafter = model.get_base_model()
    trained = {name for name, p in drafter.named_parameters() if p.requires_grad}
    head = {name for name in trained if name.startswith(("prefix_gru", "embed_proj"))}
    trainer = make_trainer(tmp_path, target, model, max_steps=6, stage1_ratio=0.5)
    start, seen, compute = copied(drafter), [], trainer.compute_loss

    def watching(*args, **kwargs):
        parameters = dict(drafter.named_parameters())
        assert {name for name, p in parameters.items() if p.requires_grad} == trained
        seen.append({name for name in start if not torch.equal(parameters[name], start[name])})
        return compute(*args, **kwargs)

    trainer.compute_loss = watching
    trainer.train()
    for step, moved in enumerate(seen):
        assert moved <= (trained if step > 3 else trained - head), step
        assert step < 2 or moved  # the rate of step 0 is zero
    assert {name for name, p in drafter.named_parameters() if not torch.equal(p, start[name])} == trained


@pytest.mark.parametrize("scope", SCOPES)
def test_saved_adapters_work_on_raw_features(scope, tmp_path):
    """While training, features may be scaled; the base's fc never changes and the saved adapter knows no scale."""
    target = make_target()
    base = make_drafter(target)
    model = filled(attach_adapter(copy.deepcopy(base), options(lora_scope=scope)))
    features = target_states(target, base.config.target_layer_ids, prompt_ids(9), torch.ones(1, 9)).tapped
    with torch.no_grad():
        expected = model.get_base_model().fc(features)
        trainer = make_trainer(tmp_path, target, model)
        assert (trainer.scale is None) == (scope == "head")
        torch.testing.assert_close(model.get_base_model().fc(features), expected, rtol=1e-4, atol=1e-4)
        trainer.save_model(str(tmp_path / "saved"))
        loaded = PeftModel.from_pretrained(base, tmp_path / "saved")
        torch.testing.assert_close(loaded.get_base_model().fc(features), expected, rtol=1e-4, atol=1e-4)
    saved = {name for name in adapter_module.load_peft_weights(str(tmp_path / "saved")) if ".fc." in name}
    kinds = {"head": set(), "all": {"fc.lora_A.weight", "fc.lora_B.weight"}, "head_full_backbone": {"fc.weight"}}
    assert {name.removeprefix("base_model.model.") for name in saved} == kinds[scope]


def test_dora_leaves_features_unscaled():
    """DoRA's norms are those of the weights on raw features, so a scale in front of its LoRA would bend them."""
    changes = {"lora_target_modules": ["fc", "embed_proj.2"], "use_dora": True}
    drafter = attach_adapter(make_drafter(make_target()), options(**changes)).get_base_model()
    assert feature_layer(drafter) is None
    assert feature_layer(make_drafter(make_target())) is not None


@pytest.mark.parametrize(
    ("scope", "changes"),
    [("head", {}), ("all", {}), ("head_full_backbone", {"lora_dropout": 0.2, "lora_modules_to_save": ["prefix_gru"]})],
)
def test_resumed_adapters_go_on_exactly(scope, changes, tmp_path):
    """F36: 10 steps, and 5 with a resume for 5 more: same weights, lambda and anchors."""
    target, rows = make_target(), make_rows()

    def run(directory, resume=None):
        torch.manual_seed(0)
        model = attach_adapter(make_drafter(target), options(lora_scope=scope, **changes))
        if resume:
            filled(model)
        stages = {} if scope == "head" else {"stage1_ratio": 0.2}
        settings = {"max_steps": 10, "save_strategy": "steps", "save_steps": 5} | stages
        trainer = make_trainer(directory, target, model, rows, **settings)
        anchors, samples = [], trainer.get_batch_samples

        def watching(*args):
            batches, weight = samples(*args)
            anchors.extend(batch["anchors"].tolist() for batch in batches)
            return batches, weight

        trainer.get_batch_samples = watching
        trainer.train(resume_from_checkpoint=resume)
        lambdas = [entry["lambda"] for entry in trainer.curve if "lambda" in entry]
        trainer.save_model(str(directory / "end"))
        weights = adapter_module.load_peft_weights(str(directory / "end"))
        return weights, lambdas, anchors

    whole, lambdas, anchors = run(tmp_path / "whole")
    again, lambdas_again, anchors_again = run(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-5"))
    assert lambdas == lambdas_again and len(lambdas) == 10
    assert len(anchors) == 10 and anchors[5:] == anchors_again
    assert whole.keys() == again.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(again[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_resume_from_another_adapter(tmp_path):
    model = attach_adapter(make_drafter(make_target()), options())
    save_adapter(model, tmp_path)
    other = attach_adapter(make_drafter(make_target()), options(lora_r=3))
    with pytest.raises(ValueError, match="resume with the LoRA options it was trained with"):
        load_adapter(other, str(tmp_path))
    other = attach_adapter(make_drafter(make_target()), options(lora_scope="all"))
    with pytest.raises(ValueError, match="resume with the LoRA options it was trained with"):
        load_adapter(other, str(tmp_path))
    with pytest.raises(ValueError, match="no adapter in"):
        load_adapter(other, str(tmp_path / "nowhere"))


# The whole way ------------------------------------------------------------------------------------------------------


def answer_rows(target, seeds, length: int = 40) -> list[dict]:
    """Rows as a target answers random prompts, and at which place its answer begins."""
    rows = []
    for seed in seeds:
        ids = target.generate(prompt_ids(7, seed=seed), max_new_tokens=length - 7, do_sample=False)[0].tolist()
        rows.append({"input_ids": ids, "completion_mask": [0] * 7 + [1] * (len(ids) - 7)})
    return rows


def run_script(directory, rows, *arguments: str) -> DominoTrainer:
    """Train on rows as the command line does, in this process."""
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = ["--target_model_name_or_path", str(directory / "target"), "--dataset_name", str(data)]
    call += ["--model_name_or_path", str(directory / "base"), "--output_dir", str(directory / "adapter")]
    call += ["--use_peft", "--use_cpu", "--max_steps", "4", "--eval_rows", "2", "--num_anchors", "8"]
    call += ["--save_strategy", "no", "--learning_rate", "3e-2", "--disable_tqdm", "True"]
    return train_peft.train([*call, *arguments])


ELSEWHERE = (
    f"""
from peft import PeftModel

{inspect.getsource(watch)}
"""
    + """
def drafts(model):
    drafter = model.get_base_model() if isinstance(model, PeftModel) else model
    seen = watch(drafter)
    assert text(model)[0] == plain_text
    del drafter.draft
    return seen

plain_text = plain
base = AutoModel.from_pretrained(arguments["base"], trust_remote_code=True, dtype=torch.float32)
result = {"base": drafts(base)}
model = PeftModel.from_pretrained(base, arguments["adapter"])
result["class"] = [type(model).__name__, type(base).__module__.split(".")[0]]
result["unmerged"] = drafts(model)
merged = model.merge_and_unload()
result["merged"] = drafts(merged)
merged.save_pretrained(arguments["merged"])
print("RESULT" + json.dumps(result))
"""
)

MERGED = (
    f"""
{inspect.getsource(watch)}
"""
    + """
drafter = AutoModel.from_pretrained(arguments["merged"], trust_remote_code=True)
seen = watch(drafter)
assert text(drafter)[0] == plain
print("RESULT" + json.dumps({"merged": seen, "name": drafter.config.target_name_or_path}))
"""
)


@pytest.mark.parametrize(("encoder", "scope"), [("gru", "head"), ("attention", "all"), ("gru", "head_full_backbone")])
def test_adapters_work_elsewhere(encoder, scope, tmp_path, capsys):
    """F20, F12: train by the script, move adapter and base, load by the README's line in a bare process, and merge."""
    target = save_target(tmp_path / "target")
    drafter = make_drafter(target, causal_encoder=encoder)
    drafter.bfloat16().save_pretrained(tmp_path / "base")
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir() if path.is_file()}
    trained = run_script(tmp_path, answer_rows(target, range(6)), "--lora_scope", scope, "--lora_r", "4")
    log = capsys.readouterr().out
    assert "by LoRA: " in log and f"adapter saved to {tmp_path / 'adapter'}" in log
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir() if path.is_file()} == before
    written = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= written
    assert not {"model.safetensors", "config.json"} & written
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "drafter = PeftModel.from_pretrained(base, " in card and "More Information Needed" not in card
    assert str(tmp_path) not in (tmp_path / "adapter" / "adapter_config.json").read_text()

    here = drafts(target, trained.adapter.eval())
    (tmp_path / "base").rename(tmp_path / "moved")
    (tmp_path / "adapter").rename(tmp_path / "moved adapter")
    places = {"target": tmp_path / "target", "merged": tmp_path / "merged"}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    moved = {"base": tmp_path / "moved", "adapter": tmp_path / "moved adapter"}
    result = run_elsewhere(ELSEWHERE, tmp_path / "first", **places, **moved)
    assert result["class"] == ["PeftModel", "transformers_modules"]
    assert result["unmerged"] == result["merged"] == here
    assert result["base"] != here
    assert run_elsewhere(MERGED, tmp_path / "second", **places)["merged"] == here


def test_merging_from_the_command_line(tmp_path, capsys):
    target = make_target()
    base = make_drafter(target).bfloat16()
    base.save_pretrained(tmp_path / "base")
    model = filled(attach_adapter(base, options()))
    save_adapter(model, tmp_path / "adapter")
    call = ["--model_name_or_path", str(tmp_path / "base"), "--adapter_name_or_path", str(tmp_path / "adapter")]
    call += ["--output_dir", str(tmp_path / "out"), "--target_model_name_or_path", "/somewhere/tuned"]
    adapter_module.main(call)
    merged = DominoForSpeculation.from_pretrained(tmp_path / "out")
    assert merged.dtype == torch.bfloat16 and merged.config.target_name_or_path == "tuned"
    assert (tmp_path / "out" / "modeling_domino.py").exists()
    expected = model.merge_and_unload().bfloat16()
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, merged.get_parameter(name)), name
    with pytest.raises(SystemExit, match="adapter: "):
        adapter_module.main([*call[:3], str(tmp_path / "nowhere"), *call[4:]])


def test_script_refuses_adapters_as_drafters(tmp_path):
    target = save_target(tmp_path / "target")
    save_adapter(attach_adapter(make_drafter(target), options()), tmp_path / "base")
    with pytest.raises(ValueError, match="is an adapter, not a drafter; merge it with its drafter by"):
        run_script(tmp_path, make_rows(4))
    assert not (tmp_path / "adapter").exists()


def test_dry_run_counts_what_the_adapter_trains(tmp_path, capsys):
    target = save_target(tmp_path / "target")
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path / "base")
    attach_adapter(drafter, options())
    expected = sum(trained_tensors(drafter).values())
    assert run_script(tmp_path, make_rows(8), "--lora_r", "4", "--dry_run", "True") is None
    shown = capsys.readouterr().out
    assert f"steps 1 to 4: {expected / 1e6:.2f} M (prefix_gru, embed_proj)" in shown
    assert "step 1: lambda 0.000" in shown
    assert not (tmp_path / "adapter").exists()


def test_pushes_go_where_the_trainer_says(tmp_path, monkeypatch):
    """The Trainer makes the repository at its start; at the end what was saved is uploaded as it lies there."""
    target = save_target(tmp_path / "target")
    make_drafter(target).save_pretrained(tmp_path / "base")
    uploads = []
    monkeypatch.setattr(
        "transformers.Trainer.init_hf_repo", lambda self, **kwargs: setattr(self, "hub_model_id", "me/a")
    )
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **kwargs: uploads.append(kwargs))
    rows = answer_rows(target, range(4))
    run_script(tmp_path, rows, "--push_to_hub", "True", "--hub_strategy", "end", "--hub_token", "secret")
    assert [upload["repo_id"] for upload in uploads] == ["me/a"]
    assert uploads[0]["folder_path"] == str(tmp_path / "adapter") and uploads[0]["token"] == "secret"


# A target that drifts ----------------------------------------------------------------------------------------------


def chains(successor: torch.Tensor, seed: int, count: int = 32, length: int = 16) -> torch.Tensor:
    """Texts in which every word follows from the one before, `[count, length]`."""
    words = [torch.randint(0, 58, (count,), generator=torch.Generator().manual_seed(seed))]
    while len(words) < length:
        words.append(successor[words[-1]])
    return torch.stack(words, dim=1)


def teach(target, successor: torch.Tensor, steps: int) -> None:
    """Let a tiny target learn a language of chains."""
    optimizer = torch.optim.AdamW(target.parameters(), lr=3e-3)
    for step in range(steps):
        ids = chains(successor, seed=step)
        optimizer.zero_grad()
        target(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    target.requires_grad_(False)


def held_out_tau(target, drafter) -> float:
    """tau on answers to prompts that no training has seen."""
    with torch.no_grad():
        return simulated_tau(DominoObjective(drafter.eval(), target), chain_answers(target, 900, 6))["tau_final"]


def chain_answers(target, seed: int, count: int) -> list[dict]:
    """The target's own answers of 20 words to prompts of 4."""
    prompts = torch.randint(0, 58, (count, 4), generator=torch.Generator().manual_seed(seed))
    ids = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=20, do_sample=False)
    return [{"input_ids": row, "supervised": [0] * 4 + [1] * 20} for row in ids.tolist()]


def test_adapter_recovers_a_drifted_target(tmp_path):
    """A tuned target costs its drafter tau; LoRA on the head alone wins most of it back."""
    torch.manual_seed(0)
    target = make_target(initializer_range=0.1)
    known = torch.randperm(58)
    tuned = known.clone()
    tuned[:20] = known[:20].roll(1)
    teach(target, known, 150)
    drafter = make_drafter(target, pure_draft_prefix_len=0, head_hidden_size=32, head_rank=32, initializer_range=0.1)
    objective = DominoObjective(drafter, target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    batch = BlockCollator(62)(chain_answers(target, 0, 48))
    generator = torch.Generator().manual_seed(0)
    for _ in range(80):
        optimizer.zero_grad()
        objective(**drawn(batch, 4, generator), lam=0.2)["loss"].backward()
        optimizer.step()
    before = held_out_tau(target, drafter)
    target.requires_grad_(True)
    teach(target, tuned, 60)
    drifted = held_out_tau(target, drafter)
    model = attach_adapter(drafter, options(lora_r=16))
    settings = {"max_steps": 80, "per_device_train_batch_size": 16, "learning_rate": 1e-2, "logging_steps": 20}
    make_trainer(tmp_path, target, model, chain_answers(target, 1, 48), **settings).train()
    after = held_out_tau(target, drafter)
    assert drifted < 0.8 * before
    assert after - drifted > 0.5 * (before - drifted)
