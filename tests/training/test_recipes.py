"""Recipes parse and plan, the dry run tells what a run would be, and the launch configurations are accelerate's."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from datasets import Dataset
from domino_spec import DominoForSpeculation
from domino_spec.train_peft import DominoScriptArguments, drafter_config
from domino_spec.train_peft import main as train_main
from domino_spec.training import dry_run as dry_run_module
from domino_spec.training.adapter import DrafterModelConfig
from domino_spec.training.config import DominoTrainingConfig
from domino_spec.training.dry_run import activation_bytes, build_on_meta, dry_run, gib, optimizer_steps, show
from domino_spec.training.objective import DominoObjective
from domino_spec.training.trainer import COMPLETE, DominoTrainer
from rich.console import Console
from tiny import MASK_ID, batch_of, make_drafter, make_target, prompt_ids, save_target
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import AutoModelForCausalLM
from trl import TrlParser

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LAUNCH = {path.stem: path for path in (ROOT / "recipes" / "accelerate").glob("*.yaml")}

QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
QWEN3 |= {"rope_theta": 1000000, "dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
# The published sizes of the recipes' targets.
TARGETS = {
    "qwen3-8b": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "qwen3-4b": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "llama-3.1-8b": {
        **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "dtype": "bfloat16", "bos_token_id": 128000},
        **{"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 8192}},
        **{"eos_token_id": [128001, 128008, 128009], "tie_word_embeddings": False},
    },
    "smollm2": {
        **{"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536},
        **{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 8192, "rope_theta": 100000, "dtype": "bfloat16", "bos_token_id": 1},
        **{"eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True},
    },
}
# Parameters of the target; of the drafter's backbone and head; the layers it taps.
SIZES = {
    "qwen3-8b": (8_190_735_360, 1_048_626_944, 55_934_976, [1, 9, 17, 25, 33]),
    "qwen3-4b": (4_022_468_096, 537_427_200, 50_823_168, [1, 9, 17, 25, 33]),
    "llama-3.1-8b": (8_030_261_248, 1_174_456_064, 49_872_896, [1, 8, 15, 22, 29]),
    "smollm2": (134_515_008, 11_617_152, 7_036_928, [1, 14, 27]),
}


def parse(*arguments: str):
    """Arguments as the script takes them."""
    parser = TrlParser((DominoScriptArguments, DominoTrainingConfig, DrafterModelConfig))
    return parser.parse_args_and_config(list(arguments))


def save_config(directory: Path, **fields) -> str:
    """A target that is a config alone."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    return str(directory)


def save_rows(path: Path, count: int = 120, prompt: int = 4, answer: int = 20) -> str:
    """Rows of token ids: they need no tokenizer."""
    row = {"prompt_ids": list(range(prompt)), "completion_ids": list(range(answer))}
    path.write_text("".join(json.dumps({"key": str(i)} | row) + "\n" for i in range(count)))
    return str(path)


@pytest.fixture
def tiny_call(tmp_path):
    """The least arguments of a dry run on a tiny target."""
    target = make_target().config.to_dict()
    call = ["--target_model_name_or_path", save_config(tmp_path / "target", **target), "--dry_run"]
    call += ["--dataset_name", save_rows(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "out")]
    return [*call, "--num_hidden_layers", "2", "--block_size", "6", "--mask_token_id", str(MASK_ID)]


def plan(*arguments: str) -> dict[str, dict[str, str]]:
    """The dry run's sections."""
    script, args, model = parse(*arguments)
    return {title: dict(rows) for title, rows in dry_run(script, args, model, drafter_config(script, model))}


# Recipes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_key_of_a_recipe_is_an_option_and_arrives(recipe):
    keys = yaml.safe_load(recipe.read_text())
    script, args, model = parse("--config", str(recipe), "--use_cpu", "true")
    for name, value in keys.items():
        holder = next(part for part in (script, args, model) if name in part.__dataclass_fields__)
        arrived = getattr(holder, name)
        assert type(value) is not str or name not in ("learning_rate", "weight_decay", "warmup_steps"), name
        assert getattr(arrived, "value", arrived) == value, name


def test_a_recipe_with_an_unknown_key_is_refused(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("num_anchor: 4\n")
    with pytest.raises(ValueError, match="num_anchor"):
        parse("--config", str(recipe), "--output_dir", str(tmp_path))


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-4b", "llama-3.1-8b"])
def test_recipes_keep_the_papers_settings(name):
    script, args, _ = parse("--config", str(ROOT / "recipes" / f"{name}.yaml"), "--use_cpu", "true")
    processes = ClusterConfig.from_yaml_file(LAUNCH["ddp"]).num_processes
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * processes == 16
    assert (args.learning_rate, args.weight_decay, args.warmup_steps, args.max_grad_norm) == (6e-4, 0, 0.04, 1)
    assert args.lr_scheduler_type == "cosine" and args.num_train_epochs == 6 and args.max_length == 3072
    assert (args.num_anchors, args.loss_gamma, args.stage1_ratio, args.lambda_decay_ratio) == (256, 7, 0, 1)
    assert (script.num_hidden_layers, script.block_size, script.head_hidden_size, script.head_rank) == (
        5,
        16,
        1024,
        256,
    )
    assert script.shift_label and script.pure_draft_prefix_len == 1 and script.causal_encoder == "gru"


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_recipes_plan_on_their_targets_config(name, tmp_path, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a dry run loads no weights")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", forbidden)
    monkeypatch.setattr(DominoForSpeculation, "from_pretrained", forbidden)
    target = save_config(tmp_path / "target", **TARGETS[name])
    recipe = ["--config", str(ROOT / "recipes" / f"{name}.yaml"), "--dry_run", "--dry_run_processes", "8"]
    recipe += ["--target_model_name_or_path", target, "--dataset_name", save_rows(tmp_path / "rows.jsonl", 1000)]
    recipe += ["--output_dir", str(tmp_path / "out")]
    started = time.process_time()
    sections = plan(*recipe)
    assert time.process_time() - started < 30
    assert not (tmp_path / "out").exists()
    parameters, backbone, head, taps = SIZES[name]
    assert sections["parameters"]["backbone"] == f"{backbone / 1e6:.2f} M"
    assert sections["parameters"]["head"] == f"{head / 1e6:.2f} M (+{head / backbone:.1%})"
    assert sections["drafter"]["tapped target layers"].startswith(str(taps))
    memory = sections["memory per device (estimate)"]
    width = {"smollm2": 4}.get(name, 2)
    assert memory[f"target weights ({'float32' if width == 4 else 'bfloat16'})"] == gib(parameters * width)
    assert memory["drafter weights (fp32)"] == gib(4 * (backbone + head))
    assert memory["gradients and AdamW states (fp32)"] == gib(12 * (backbone + head))
    if name != "smollm2":
        assert sections["steps"]["global batch"].endswith("= 16")
        assert sections["steps"]["optimizer steps of an epoch"] == str(-(-(1000 - 64) // 16))


def test_the_head_has_the_papers_size():
    """Domino reports +56 M parameters, +5.3%, for the head of its Qwen3-8B drafter."""
    _, backbone, head, _ = SIZES["qwen3-8b"]
    assert round(head / 1e6) == 56 and round(100 * head / backbone, 1) == 5.3


def test_shell_scripts_use_options_that_exist():
    known = {
        option
        for action in TrlParser((DominoScriptArguments, DominoTrainingConfig, DrafterModelConfig))._actions
        for option in action.option_strings
    } | {"--config"}
    for path in (ROOT / "recipes" / "smollm2").glob("*.sh"):
        command = re.search(r"train_peft\.py(.*\\\n)*.*", path.read_text()).group()
        used = re.findall(r"--\w+", command)
        assert used and set(used) <= known, path


# Dry run ------------------------------------------------------------------------------------------------------------


def test_dry_run_prints_and_writes_nothing(tiny_call, tmp_path, capsys):
    train_main([*tiny_call, "--max_steps", "100", "--stage1_ratio", "0.25", "--eval_rows", "20"])
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "  rows: 100 to train on, 20 held out (all rows counted)",
        "  tokens: 2880, 2400 of them supervised",
        "  stage switch: before step 26",
        "  step 1: lambda 1.000, head's learning rate x 0.00",
        "  step 26: lambda 1.000, head's learning rate x 0.13",
        "  optimizer steps of the run: 100",
    ):
        assert line in lines, line
    assert sorted(os.listdir(tmp_path)) == ["rows.jsonl", "target"]


def test_an_adaptive_switch_has_a_latest_step(tiny_call):
    schedule = plan(*tiny_call, "--max_steps", "100", "--stage_switch", "adaptive")["schedule"]
    assert schedule["stage switch"] == "before step 51 at the latest"


def test_trained_parts_follow_requires_grad(tiny_call):
    script, args, model = parse(*tiny_call, "--max_steps", "10", "--stage1_ratio", "0.5")
    drafter, _ = build_on_meta(script, model, drafter_config(script, model))
    curriculum = dry_run_module.Curriculum.planned(args, 10)
    stages = dict(dry_run_module.trained_rows(drafter, curriculum))
    assert "steps 1 to 5" in stages["stage 1"] and "prefix_gru" not in stages["stage 1"]
    assert stages["stage 2"].endswith("(fc, hidden_norm, layers, norm, prefix_gru, embed_proj)")
    drafter.requires_grad_(False)
    drafter.prefix_gru.requires_grad_(True)
    size = sum(p.numel() for p in drafter.prefix_gru.parameters()) / 1e6
    assert dict(dry_run_module.trained_rows(drafter, curriculum))["stage 2"].endswith(f"{size:.2f} M (prefix_gru)")
    assert dict(dry_run_module.trained_rows(drafter, None))["stage 1"] == "0.00 M ()"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mask_token_id", "64"], "mask_token_id is 64; expected an id below vocab_size"),
        (["--target_layer_ids", "1", "4"], "target_layer_ids is .1, 4.; expected distinct layers"),
        (["--init_layers_from_target", "1"], "init_layers_from_target is .1.; expected 2 layers"),
        (["--stage1_ratio", "1.5"], "stage1_ratio is 1.5; expected a share"),
        (["--eval_rows", "120"], "120 usable rows, 120 of them to be held out"),
        (["--max_length", "4"], "0 usable rows"),
        (["--dataset_name", "nothing.jsonl"], "no dataset file 'nothing.jsonl'"),
        (["--causal_encoder", "lstm"], "causal_encoder is 'lstm'"),
    ],
)
def test_dry_run_refuses_what_a_run_would_refuse(tiny_call, arguments, message):
    with pytest.raises(SystemExit, match=message):
        train_main([*tiny_call, *arguments])


def test_source_layers_of_another_shape_are_refused(tmp_path, tiny_call):
    config = make_target(num_key_value_heads=1).config.to_dict()
    drafter = make_drafter(make_target())
    drafter.save_pretrained(tmp_path / "drafter")
    call = [*tiny_call[:-6], "--model_name_or_path", str(tmp_path / "drafter")]
    call[1] = save_config(tmp_path / "other", **config)
    script, _, model = parse(*call)
    script.init_layers_from_target = [0, 1]
    with pytest.raises(ValueError, match=r"target layer 0 has a self_attn.k_proj.weight of \(8, 32\)"):
        build_on_meta(script, model, None)


def test_an_existing_drafter_is_planned_from_its_config(tmp_path, tiny_call):
    make_drafter(make_target(), num_hidden_layers=3).save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "model.safetensors").unlink()
    sections = plan(*tiny_call[:-6], "--model_name_or_path", str(tmp_path / "drafter"))
    assert sections["drafter"]["layers"].startswith("3 of width 32")


def test_data_is_counted_as_a_run_would_use_it(tmp_path, tiny_call, monkeypatch):
    rows = Path(tiny_call[tiny_call.index("--dataset_name") + 1])
    short = {"key": "s", "prompt_ids": [1, 2], "completion_ids": [3]}
    rows.write_text(rows.read_text() + json.dumps(short) + "\n")
    data = plan(*tiny_call, "--max_length", "10")["data"]
    assert data["rows"] == "88 to train on, 32 held out (all rows counted)"
    assert data["tokens"] == "1200, 720 of them supervised"
    # Of ten positions nine are tapped twice, and six give the law of a supervised token; width 32, fp32.
    assert data["target states of all rows"] == f"{gib(120 * (9 * 2 + 6) * 32 * 4)} of memory or disk, if kept"
    kept = plan(*tiny_call, "--max_length", "10", "--states_cache_dir", str(tmp_path), "--states_dtype", "bfloat16")
    assert kept["data"]["target states of all rows"] == f"{gib(120 * (9 * 2 + 6) * 32 * 2)} of disk"
    monkeypatch.setattr(dry_run_module, "SAMPLED_ROWS", 11)
    data = plan(*tiny_call, "--max_length", "10")["data"]
    assert data["rows"] == "89 to train on, 32 held out (from the first 11 of 121 rows)"
    assert data["tokens"] == "1210, 726 of them supervised"


def test_text_without_a_tokenizer_is_counted_by_rows(tmp_path, tiny_call):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "w1 w2 w3"}) + "\n" for _ in range(50)))
    call = [*tiny_call, "--dataset_name", str(tmp_path / "text.jsonl")]
    data = plan(*call)["data"]
    assert data["rows"].startswith("18 to train on, 32 held out (no tokenizer in") and "tokens" not in data
    call[1] = str(tmp_path / "with-tokenizer")
    save_target(call[1])
    assert plan(*call)["data"]["tokens"] == "150, 150 of them supervised"


def test_data_elsewhere_is_not_read(tiny_call):
    sections = plan(*tiny_call, "--dataset_name", "org/rows")
    assert sections["data"]["rows"] == "unknown: org/rows is no local file and was not read"
    assert sections["steps"]["optimizer steps of the run"].startswith("unknown until the rows are")
    assert (
        plan(*tiny_call, "--dataset_name", "org/rows", "--max_steps", "7")["steps"]["optimizer steps of the run"]
        == "7"
    )


@pytest.mark.parametrize(("rows", "batch", "accumulation", "epochs"), [(10, 1, 1, 2), (11, 2, 4, 1.5), (7, 3, 2, 3)])
def test_steps_are_the_trainers(tmp_path, rows, batch, accumulation, epochs):
    args = DominoTrainingConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs,
    )
    target = make_target()
    data = Dataset.from_list([{"input_ids": [1, 2, 3], "supervised": [0, 1, 1]}] * rows)
    trainer = DominoTrainer(DominoObjective(make_drafter(target), target), args, None, train_dataset=data)
    counted = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
    assert optimizer_steps(rows, args, 1) == (counted[1], counted[6])


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
def test_steps_of_several_processes_are_accelerates(tmp_path, rows, drop_last):
    args = DominoTrainingConfig(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=2, dataloader_drop_last=drop_last
    )
    sampler = BatchSampler(SequentialSampler(range(rows)), 2, drop_last)
    batches = len(DataLoader(range(rows), batch_sampler=BatchSamplerShard(sampler, 8, 0)))
    assert optimizer_steps(rows, args, 8) == (max(batches, 1), 3 * max(batches, 1))


def kept_bytes(drafter, args) -> int:
    """Bytes that a real forward of the backbone keeps for its backward pass."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    slots, config = args.num_anchors * drafter.config.block_size, drafter.config

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        drafter(
            torch.randn(1, slots, config.hidden_size),
            torch.randn(1, args.max_length, len(config.target_layer_ids) * config.hidden_size),
            torch.arange(slots)[None],
            torch.arange(args.max_length)[None],
            torch.ones(1, 1, slots, args.max_length + slots, dtype=torch.bool),
        )
        return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)


def test_activation_estimate_is_what_a_forward_keeps(tmp_path):
    args = DominoTrainingConfig(output_dir=str(tmp_path), use_cpu=True, max_length=50, num_anchors=7)
    drafter = make_drafter(make_target()).train()
    assert activation_bytes(args, drafter.config) == pytest.approx(kept_bytes(drafter, args), rel=0.01)
    half = DominoTrainingConfig(output_dir=str(tmp_path), use_cpu=True, max_length=50, num_anchors=7, bf16=True)
    assert activation_bytes(half, drafter.config) < activation_bytes(args, drafter.config)
    saving = DominoTrainingConfig(
        output_dir=str(tmp_path), use_cpu=True, max_length=50, num_anchors=7, gradient_checkpointing=True
    )
    deep = make_drafter(make_target(), num_hidden_layers=6).config
    assert activation_bytes(saving, deep) < activation_bytes(args, deep) / 2


def test_a_frozen_backbone_keeps_no_activations(tiny_call):
    script, args, model = parse(*tiny_call)
    drafter, target = build_on_meta(script, model, drafter_config(script, model))
    memory = dict(dry_run_module.memory_rows(args, drafter, target, 1))
    assert memory["drafter activations"] == gib(activation_bytes(args, drafter.config)) != gib(0)
    assert "gradient buckets of DDP" not in memory
    drafter.requires_grad_(False)
    drafter.embed_proj.requires_grad_(True)
    memory = dict(dry_run_module.memory_rows(args, drafter, target, 2))
    trained = sum(p.numel() for p in drafter.embed_proj.parameters())
    assert memory["drafter activations"] == gib(0)
    assert memory["gradients and AdamW states (fp32)"] == gib(12 * trained)
    assert memory["gradient buckets of DDP"] == gib(4 * trained)


def test_logits_estimate_is_bounded_by_the_chunk(tmp_path, tiny_call):
    memory = [
        plan(*tiny_call, "--num_anchors", str(anchors))["memory per device (estimate)"]["logits"]
        for anchors in (64, 1024, 4096)
    ]
    # 384 tokens would be drafted, 256 are at a time: 64 ids, 4 bytes, six copies.
    assert memory == [gib(6 * 64 * 4 * tokens) for tokens in (256, 256, 256)]
    taught = plan(*tiny_call, "--num_anchors", "64", "--kl_weight", "0.5", "--logits_chunk_size", "512")
    assert taught["memory per device (estimate)"]["logits"] == gib(11 * 64 * 4 * 384)


def test_tables_on_a_terminal_and_lines_elsewhere():
    sections = [("steps", [("global batch", "[16]")])]
    screen, file = Console(force_terminal=True, width=80), Console(force_terminal=False)
    with screen.capture() as drawn, file.capture() as written:
        show(sections, screen)
        show(sections, file)
    assert "\x1b[" in drawn.get() and "global batch" in drawn.get() and "[16]" in drawn.get()
    assert written.get() == "steps\n  global batch: [16]\n"


# Options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parent"),
    [
        (DominoScriptArguments, DominoScriptArguments.__mro__[1]),
        (DominoTrainingConfig, DominoTrainingConfig.__mro__[1]),
    ],
)
def test_every_option_of_ours_has_a_help_text(options, parent):
    ours = set(options.__dataclass_fields__) - set(parent.__dataclass_fields__)
    assert ours
    for name in sorted(ours):
        text = options.__dataclass_fields__[name].metadata.get("help", "")
        assert len(text) > 10 and text[-1] in ".)" and not text.startswith(" "), f"{name}: {text!r}"


def test_help_reads_well():
    shown = TrlParser((DominoScriptArguments, DominoTrainingConfig, DrafterModelConfig)).format_help()
    for name in ("--target_model_name_or_path", "--stage1_ratio", "--dry_run", "--use_peft"):
        assert name in shown
    assert "The frozen target." in shown and "Share of the steps with the head frozen" in " ".join(shown.split())


# Launch configurations ----------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """What `accelerate launch` hands to its launcher for a configuration of ours."""
    seen = []
    for launcher in ("deepspeed_launcher", "multi_gpu_launcher", "simple_launcher"):
        monkeypatch.setattr(launch, launcher, lambda arguments, name=launcher: seen.append((name, arguments)))

    def run(name: str):
        command = ["--config_file", str(LAUNCH[name]), "train_peft.py"]
        launch.launch_command(launch.launch_command_parser().parse_args(command))
        return seen[-1]

    return run


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ddp", DistributedType.MULTI_GPU),
        ("fsdp", DistributedType.FSDP),
        ("deepspeed_zero2", DistributedType.DEEPSPEED),
    ],
)
def test_launch_configurations_are_accelerates(name, kind, launched):
    config = load_config_from_file(str(LAUNCH[name]))
    assert config.distributed_type == kind and config.num_processes == 8 and config.mixed_precision == "bf16"
    known = {action.dest for action in launch.launch_command_parser()._actions}
    # accelerate sets whatever it finds in these sections without asking whether it exists.
    sections = (config.fsdp_config or {}) | (config.deepspeed_config or {})
    assert set(sections) <= known
    launcher, arguments = launched(name)
    assert launcher == ("deepspeed_launcher" if kind == DistributedType.DEEPSPEED else "multi_gpu_launcher")
    assert arguments.num_processes == 8 and arguments.mixed_precision == "bf16"
    assert arguments.use_fsdp == (kind == DistributedType.FSDP)


def test_all_launch_configurations_are_tested():
    assert set(LAUNCH) == {"ddp", "fsdp", "deepspeed_zero2"}


def test_fsdp_plugin_shards_the_draft_layers(monkeypatch, launched):
    """The environment that accelerate makes of the file, and the plugin it makes of that; no GPU is needed so far."""
    environment = prepare_multi_gpu_env(launched("fsdp")[1])
    for key, value in environment.items():
        if key.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True and plugin.transformer_cls_names_to_wrap
    drafter = make_drafter(make_target())
    plugin.set_auto_wrap_policy(DominoObjective(drafter, make_target()))
    wrapped = [name for name, module in drafter.named_modules() if plugin.auto_wrap_policy(module, False, 0)]
    assert wrapped == ["layers.0", "layers.1"]


def sharded_worker(rank: int, store: str) -> None:
    """One of two processes: gradients and evaluation in shards equal those of the whole drafter."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    target = make_target().requires_grad_(False)
    rows = [{"input_ids": prompt_ids(30, seed=i)[0].tolist(), "supervised": [0] * 4 + [1] * 26} for i in range(2)]
    anchors = torch.tensor([[5, 9, 14, 20]])
    for lam in (1.0, 0.4):
        whole = DominoObjective(make_drafter(target), target, logits_chunk_size=12)
        for row in rows:
            (whole(**batch_of(row), anchors=anchors, lam=lam)["loss"] / 2).backward()
        sharded = DominoObjective(make_drafter(target), target, logits_chunk_size=12)
        for layer in sharded.drafter.layers:
            fully_shard(layer)
        fully_shard(sharded)
        sharded(**batch_of(rows[rank]), anchors=anchors, lam=lam)["loss"].backward()
        for (name, p), q in zip(whole.named_parameters(), sharded.parameters(), strict=True):
            assert q.to_local().shape != p.shape, name
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-6, msg=name)
    register_fsdp_forward_method(sharded, "accepted_lengths")
    expected, found = whole.accepted_lengths(rows[0]), sharded.accepted_lengths(rows[0])
    assert all(torch.equal(expected[0][name], found[0][name]) for name in ("base", "final"))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_shards_on_two_cpu_processes_give_the_whole_drafters_gradients(tmp_path):
    torch.multiprocessing.spawn(sharded_worker, (str(tmp_path / "store"),), nprocs=2)


def test_resuming_in_shards_is_refused(tmp_path):
    args = DominoTrainingConfig(output_dir=str(tmp_path), use_cpu=True)
    target = make_target()
    trainer = DominoTrainer(DominoObjective(make_drafter(target), target), args, None)
    trainer.is_fsdp_enabled = True
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / COMPLETE).touch()
    with pytest.raises(ValueError, match="checkpoint-3' in shards .FSDP. is not supported"):
        trainer.train(resume_from_checkpoint=True)


def test_deepspeed_environment(launched):
    _, environment = prepare_deepspeed_cmd_env(launched("deepspeed_zero2")[1])
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true" and environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert environment["ACCELERATE_GRADIENT_CLIPPING"] == "1.0"
    assert environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "auto"


def test_deepspeed_plugin(monkeypatch, launched):
    pytest.importorskip("deepspeed")
    from accelerate.utils import DeepSpeedPlugin

    _, environment = prepare_deepspeed_cmd_env(launched("deepspeed_zero2")[1])
    for key, value in environment.items():
        if key.startswith("ACCELERATE_"):
            monkeypatch.setenv(key, value)
    plugin = DeepSpeedPlugin()
    assert plugin.deepspeed_config["zero_optimization"]["stage"] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(LAUNCH))
def test_launch_configurations_train(name, tmp_path):
    """A short run on all GPUs under each configuration leaves a drafter that loads."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    save_target(tmp_path / "target")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH[name])]
    command += ["--num_processes", str(torch.cuda.device_count()), str(ROOT / "train_peft.py")]
    command += ["--target_model_name_or_path", str(tmp_path / "target"), "--mask_token_id", str(MASK_ID), "--bf16"]
    command += ["--dataset_name", save_rows(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "out")]
    command += ["--num_hidden_layers", "2", "--block_size", "6", "--num_anchors", "8", "--max_steps", "4"]
    subprocess.run(command, check=True, cwd=ROOT)
    drafter = DominoForSpeculation.from_pretrained(tmp_path / "out")
    assert all(p.isfinite().all() for p in drafter.parameters())
