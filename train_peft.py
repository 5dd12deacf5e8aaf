"""Train a Domino drafter for a frozen target.

    # 1. let the target answer prompts
    python -m domino_spec.training.answers --target_model_name_or_path TARGET --prompts prompts.jsonl \\
        --output_file answers.jsonl
    # 2. train on the answers (add --cpu after `launch` on a machine without a GPU)
    accelerate launch train_peft.py --target_model_name_or_path TARGET --dataset_name answers.jsonl \\
        --output_dir runs/drafter --num_hidden_layers 3 --block_size 8 --mask_token_id 3
    # both at once, the answers in OUTPUT_DIR/answers.jsonl: --dataset_name prompts.jsonl --generate_answers
    # continue from an existing drafter: --model_name_or_path DRAFTER
    # adapt an existing drafter to a target that has drifted from it, by LoRA on its head:
    accelerate launch train_peft.py --target_model_name_or_path TARGET --dataset_name answers.jsonl \\
        --output_dir runs/adapter --model_name_or_path DRAFTER --use_peft
    # check a run and print its sizes without loading anything: --dry_run
    python train_peft.py --config recipes/qwen3-8b.yaml --dry_run --dry_run_processes 8

Arguments carry TRL's names wherever TRL has one; a YAML file with the same names is taken by --config.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

import huggingface_hub
import torch
from accelerate import PartialState
from datasets import concatenate_datasets
from domino_spec import DominoConfig, DominoForSpeculation
from domino_spec.training.adapter import (
    DrafterModelConfig,
    attach_adapter,
    check_options,
    describe_training,
    feature_layer,
    save_adapter,
)
from domino_spec.training.answers import AnswerOptions, answer, part_files
from domino_spec.training.card import RunFacts, answers_settings, changed_options, command_line, write_plots
from domino_spec.training.config import DominoTrainingConfig
from domino_spec.training.data import (
    BlockCollator,
    frequent_ids,
    load_mixture,
    load_split,
    prepare_dataset,
    prepare_prompts,
)
from domino_spec.training.dry_run import dry_run, show
from domino_spec.training.objective import DominoObjective
from domino_spec.training.start import FeatureScale, initialise_from_target
from domino_spec.training.states import prepare_states
from domino_spec.training.trainer import DominoTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DatasetMixtureConfig, ScriptArguments, TrlParser
from trl.scripts.utils import DatasetConfig


@dataclass
class DominoScriptArguments(ScriptArguments, DatasetMixtureConfig, AnswerOptions):
    """Where the data is, which target it is for, and how that answers prompts.

    Raises:
        ValueError: streaming, or two places for the data.
    """

    target_model_name_or_path: str | None = field(default=None, metadata={"help": "The frozen target."})
    prompts_file: str | None = field(
        default=None, metadata={"help": "Prompts to join to an answers file that was packed without them."}
    )
    generate_answers: bool = field(
        default=False,
        metadata={"help": "Let the target answer the dataset's prompts first (OUTPUT_DIR/answers.jsonl), resumable."},
    )
    eval_rows: int = field(
        default=32, metadata={"help": "Rows for tau: of the test split, or held out where there is none."}
    )
    num_hidden_layers: int = field(default=5, metadata={"help": "Draft layers of a new drafter."})
    block_size: int = field(default=16, metadata={"help": "Slots of a block, the anchor included."})
    mask_token_id: int | None = field(default=None, metadata={"help": "Id that the target never writes."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped layers (default: spread)."})
    causal_encoder: str = field(default="gru", metadata={"help": "gru or attention."})
    head_hidden_size: int = field(default=1024, metadata={"help": "Width of the causal encoder."})
    head_rank: int = field(default=256, metadata={"help": "Rank of the correction."})
    pure_draft_prefix_len: int = field(default=1, metadata={"help": "Leading drafts without correction."})
    shift_label: bool = field(default=True, metadata={"help": "Slot k predicts anchor+k+1 (else anchor+k)."})
    init_layers_from_target: list[int] | None = field(
        default=None, metadata={"help": "Target layers of equal shape that a new drafter's layers start from."}
    )

    def __post_init__(self):
        DatasetMixtureConfig.__post_init__(self)
        AnswerOptions.__post_init__(self)
        if self.dataset_streaming or self.streaming:
            raise ValueError(
                "streaming is on; held-out rows and step counts need the whole dataset: switch it off, "
                "or take a part of it with --dataset_train_split 'train[:100000]'."
            )
        if self.dataset_name and self.datasets:
            raise ValueError("dataset_name and datasets are both given; put all into datasets.")

    @property
    def sources(self) -> str:
        """Where the data comes from, in words."""
        return self.dataset_name or ", ".join(entry.path for entry in self.datasets)

    def answers_file(self, args: DominoTrainingConfig, suffix: str = "") -> str:
        """Where the target's answers go."""
        return os.path.join(args.output_dir, f"answers{suffix}.jsonl")


def drafter_config(script: DominoScriptArguments, model: DrafterModelConfig) -> DominoConfig | None:
    """Config of a new drafter, from the target's config alone; None where an existing drafter goes on.

    Raises:
        ValueError: a value out of range, or a size given for a drafter that has its own.
    """
    names = ("num_hidden_layers", "block_size", "mask_token_id", "target_layer_ids", "causal_encoder")
    names += ("head_hidden_size", "head_rank", "pure_draft_prefix_len", "shift_label")
    if not model.model_name_or_path:
        target_config = AutoConfig.from_pretrained(script.target_model_name_or_path)
        return DominoConfig.from_target(target_config, **{name: getattr(script, name) for name in names})
    fresh = DominoScriptArguments(dataset_name="")
    given = [
        f"--{name}" for name in (*names, "init_layers_from_target") if getattr(script, name) != getattr(fresh, name)
    ]
    if given:
        raise ValueError(f"{', '.join(given)} describe a new drafter; --model_name_or_path goes on with one as it is.")
    return None


def build_drafter(script: DominoScriptArguments, model: DrafterModelConfig, config, target):
    """An existing drafter or a new one for the target, and the adapter around it (None without --use_peft)."""
    if config is None:
        drafter = DominoForSpeculation.from_pretrained(
            model.model_name_or_path, revision=model.model_revision, dtype=torch.float32
        )
    else:
        drafter = DominoForSpeculation(config)
    adapter = attach_adapter(drafter, model) if model.use_peft else None
    drafter.to(target.device).check_target(target)
    if script.init_layers_from_target:
        initialise_from_target(drafter, target, script.init_layers_from_target)
    return drafter, adapter


def main(arguments: list[str] | None = None) -> None:
    """Read arguments, train, save."""
    try:
        train(arguments)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"train_peft.py: {error}")


def load_target(script: DominoScriptArguments, args: DominoTrainingConfig, model: DrafterModelConfig):
    """The frozen target on the training device, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(script.target_model_name_or_path)
    dtype = getattr(torch, model.dtype) if model.dtype not in (None, "auto") else "auto"
    target = AutoModelForCausalLM.from_pretrained(
        script.target_model_name_or_path, dtype=dtype, attn_implementation=model.attn_implementation
    )
    return target.eval().requires_grad_(False).to(args.device), tokenizer


def load_data(script: DominoScriptArguments, args: DominoTrainingConfig, tokenizer, target):
    """Rows to train on, and rows held out for tau (None without any).

    Raises:
        ValueError: nothing left to learn from.
    """
    entries = script.datasets or [
        DatasetConfig(path=script.dataset_name, name=script.dataset_config, split=script.dataset_train_split)
    ]
    dataset = usable_rows(script, args, tokenizer, target, entries, script.answers_file(args))
    test = evaluation_rows(script)
    share = script.test_split_size
    held_out = 0 if test else script.eval_rows if share is None else round(share * len(dataset))
    if len(dataset) <= held_out:
        raise ValueError(
            f"{len(dataset)} usable rows, {held_out} of them to be held out; "
            "nothing left to learn from: add rows, raise --max_length or lower --eval_rows."
        )
    if test:
        evaluation = usable_rows(script, args, tokenizer, target, [test], script.answers_file(args, "-test"))
        if not len(evaluation):
            raise ValueError(f"no usable row in '{test.split}'; raise --max_length, or name another split.")
        return dataset, evaluation
    if not held_out:
        return dataset, None
    parts = dataset.train_test_split(test_size=held_out, seed=0)
    return parts["train"], parts["test"]


def evaluation_rows(script: DominoScriptArguments) -> DatasetConfig | None:
    """The rows of the dataset's own test split that tau is measured on, where it has one."""
    if not script.eval_rows or script.datasets or script.dataset_test_split == script.dataset_train_split:
        return None
    split = load_split(script.dataset_name, script.dataset_config, script.dataset_test_split)
    if split is None:
        return None
    first = f"{script.dataset_test_split}[:{script.eval_rows}]"
    return DatasetConfig(path=script.dataset_name, name=script.dataset_config, split=first)


def usable_rows(script: DominoScriptArguments, args: DominoTrainingConfig, tokenizer, target, entries, answers_file):
    """Token rows of a mixture of datasets, or of the target's answers to their prompts (--generate_answers)."""
    kwargs = script.chat_template_kwargs

    def prepare(rows):
        return prepare_dataset(rows, tokenizer, args.max_length, kwargs)

    if script.generate_answers:
        with args.main_process_first(desc="tokenising prompts"):
            prompts, _ = load_mixture(
                entries, tokenizer, lambda rows: (prepare_prompts(rows, tokenizer, kwargs), 0), script.prompts_file
            )
        answer(target, tokenizer, prompts, answers_file, script, args.process_index, args.world_size)
        PartialState().wait_for_everyone()
        files = [str(path) for path in part_files(answers_file, args.world_size)]
        entries = [DatasetConfig(path=path) for path in files]
    # One process tokenises, the others then find its result.
    with args.main_process_first(desc="tokenising"):
        dataset, dropped = load_mixture(entries, tokenizer, prepare, script.prompts_file)
    if dropped and args.should_log:
        print(f"dropped {dropped} of {len(dataset) + dropped} rows: no supervised token left to draft.")
    return dataset


def build_objective(args: DominoTrainingConfig, drafter, target, train, held_out=None) -> DominoObjective:
    """The loss, with the target's states computed before training where that is asked for."""
    store = None
    if args.keep_states or args.states_cache_dir:
        store = prepare_states(
            target,
            drafter.config.target_layer_ids,
            train if held_out is None else concatenate_datasets([train, held_out]),
            directory=args.states_cache_dir,
            dtype=args.states_dtype,
            rank=args.process_index,
            world=args.world_size,
        )
    return DominoObjective(
        drafter,
        target,
        loss=args.draft_loss(),
        frequent_ids=frequent_ids(train, args.vocab_sample_size) if args.vocab_sample_size else None,
        num_negatives=max(256, args.vocab_sample_size // 4),
        logits_chunk_size=args.logits_chunk_size,
        block_attention=args.block_attention,
        store=store,
    )


def measure_scale(args: DominoTrainingConfig, drafter, target, train, collator) -> FeatureScale | None:
    """The feature scale over the first rows, attached to what reads the features and trains; None without that."""
    layer = feature_layer(drafter)
    if not args.scale_features or layer is None:
        return None
    sample = [collator([train[i]]) for i in range(min(16, len(train)))]
    scale = FeatureScale.measure(
        drafter, target, [{k: v.to(args.device) for k, v in batch.items()} for batch in sample]
    )
    scale.fc = layer
    scale.attach()
    return scale


def run_facts(script, args, model, arguments: list[str] | None, train, held_out) -> RunFacts:
    """What the model card tells beyond what the trainer logs."""
    answered = script.sources
    if script.generate_answers:
        answered = str(part_files(script.answers_file(args), args.world_size)[0])
    return RunFacts(
        target=script.target_model_name_or_path,
        dataset=script.sources,
        drafter=model.model_name_or_path,
        rows=len(train),
        tokens=sum(map(len, train["input_ids"])),
        supervised=sum(map(sum, train["supervised"])),
        held_out=len(held_out or ()),
        settings=answers_settings(answered),
        adapter=model.use_peft,
        command=command_line(sys.argv[1:] if arguments is None else arguments, args.world_size),
        changed=changed_options(script) | changed_options(args) | changed_options(model),
    )


def save_result(trainer: DominoTrainer, tokenizer) -> None:
    """The drafter in bf16 or its adapter, what there is to look at, and all of it on the Hub if asked for.

    Called by all processes, which may each hold a shard.
    """
    directory = trainer.args.output_dir
    state = trainer.accelerator.get_state_dict(trainer.model)
    if not trainer.is_world_process_zero():
        return
    if trainer.adapter is None:
        drafter = DominoForSpeculation(trainer.objective.config)
        drafter.load_state_dict(trainer.raw_state_dict(state))
        drafter.generation_config = trainer.objective.drafter.generation_config
        drafter.to(torch.bfloat16).save_pretrained(directory)
    else:
        save_adapter(trainer.adapter, directory, trainer.raw_state_dict(state))
    tokenizer.save_pretrained(directory)
    trainer.write_curve(directory)
    write_plots(directory, trainer.curve, trainer.curriculum.stage1_steps)
    trainer.create_model_card()
    print(f"{'drafter' if trainer.adapter is None else 'adapter'} saved to {directory}")
    if trainer.args.push_to_hub:
        push_result(trainer)


def push_result(trainer: DominoTrainer) -> None:
    """Upload the output directory as it is; the Trainer's own push would save over it first."""
    args = trainer.args
    huggingface_hub.upload_folder(
        repo_id=trainer.hub_model_id,
        folder_path=args.output_dir,
        commit_message="End of training",
        token=args.hub_token,
        revision=args.hub_revision,
        ignore_patterns=["_*", "checkpoint-*"],
    )


def train(arguments: list[str] | None = None) -> DominoTrainer | None:
    """The run itself, or with --dry_run its plan; bad input raises before anything is written."""
    parser = TrlParser((DominoScriptArguments, DominoTrainingConfig, DrafterModelConfig))
    script, args, model = parser.parse_args_and_config(arguments)
    if not script.target_model_name_or_path:
        raise ValueError("--target_model_name_or_path is missing.")
    if not script.dataset_name and not script.datasets:
        raise ValueError("--dataset_name is missing, and so is a mixture (`datasets` in a --config file).")
    check_options(model)
    config = drafter_config(script, model)
    if args.dry_run:
        if args.process_index == 0:
            show(dry_run(script, args, model, config))
        return None
    target, tokenizer = load_target(script, args, model)
    train, held_out = load_data(script, args, tokenizer, target)
    torch.manual_seed(args.seed)
    drafter, adapter = build_drafter(script, model, config, target)
    if args.should_log:
        supervised = sum(map(sum, train["supervised"]))
        size = sum(p.numel() for p in drafter.parameters())
        print(f"{len(train)} rows, {supervised} supervised tokens; drafter of {size / 1e6:.1f} M parameters")
        if adapter is not None:
            print(describe_training(drafter))
    collator = BlockCollator(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0)
    scale = measure_scale(args, drafter, target, train, collator)
    trainer = DominoTrainer(
        build_objective(args, drafter, target, train, held_out),
        args,
        scale,
        adapter,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collator,
        processing_class=tokenizer,
    )
    trainer.facts = run_facts(script, args, model, arguments, train, held_out)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if held_out is not None:
        metrics = trainer.evaluate()
        if args.should_log:
            print(metrics)
    save_result(trainer, tokenizer)
    # Left to the interpreter's exit, the process group's threads now and then abort a process whose work is done.
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
