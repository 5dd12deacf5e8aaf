"""What a training run would be, from configs alone: sizes, what is trained, memory, steps and schedule.

Models are built on the meta device and activations are counted on fake tensors, so an 8B target costs a second and
no memory. Every check that a real run makes before it loads weights is made here too.
"""

from __future__ import annotations

import math
import os
from copy import deepcopy
from dataclasses import dataclass

import torch
from domino_spec.configuration_domino import DominoConfig
from domino_spec.modeling_domino import DominoForSpeculation
from domino_spec.training.adapter import attach_adapter, settle_schedule
from domino_spec.training.data import can_teach, load_rows, tokenize_row
from domino_spec.training.start import check_source_layers
from domino_spec.training.states import StatesFormat, kept_dtype
from domino_spec.training.trainer import Curriculum
from rich import box
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# Rows that are tokenised to learn what a row is like; smaller datasets are counted whole.
SAMPLED_ROWS = 1000
# fp32: gradient and AdamW's two moments, beside the weight itself.
TRAINED_BYTES = 12
# Tensors of the size of a logits chunk that live at once in stage 2, without and with the target's law in the loss;
# peak memory on a CPU gave 5.8 and 10.8.
LOGITS_COPIES = {False: 6, True: 11}

Section = tuple[str, list[tuple[str, str]]]


@dataclass(frozen=True)
class DataSize:
    """What is known of the data.

    Args:
        rows, tokens, supervised (int or None where unknown): usable rows, their tokens, those with a loss.
        state_bytes (int or None): size of the target's states of these rows, if they are kept.
        held_out (int): rows of them that are kept for tau.
        note (str): where the numbers come from.
    """

    rows: int | None
    tokens: int | None
    supervised: int | None
    state_bytes: int | None
    held_out: int
    note: str

    @property
    def train_rows(self) -> int | None:
        return None if self.rows is None else self.rows - self.held_out


def dry_run(script, args, model, config: DominoConfig | None) -> list[Section]:
    """Check the run and describe it.

    Args:
        script, args, model: the parsed arguments of `train_peft.py`.
        config: of a new drafter; None where `--model_name_or_path` names one.
    Returns:
        titles, each with its (name, value) rows.
    Raises:
        ValueError: whatever the run itself would raise for these arguments.
    """
    drafter, target = build_on_meta(script, model, config)
    settle_schedule(drafter, args)
    processes = args.dry_run_processes or args.world_size
    data = measure_data(script, args, states_format(args, drafter.config, target))
    per_epoch, total = optimizer_steps(data.train_rows, args, processes)
    curriculum = None
    if total is not None:
        curriculum = Curriculum.planned(args, total)
    return [
        ("drafter", layout_rows(drafter.config)),
        ("parameters", parameter_rows(drafter)),
        ("trained", trained_rows(drafter, curriculum)),
        ("memory per device (estimate)", memory_rows(args, drafter, target, processes)),
        ("data", data_rows(args, data)),
        ("steps", step_rows(args, processes, per_epoch, total)),
        ("schedule", schedule_rows(args, curriculum)),
    ]


def build_on_meta(script, model, config: DominoConfig | None):
    """Drafter and target without weights, checked against each other.

    Raises:
        ValueError: a drafter for another target, or source layers that do not fit.
    """
    target_config = AutoConfig.from_pretrained(script.target_model_name_or_path)
    dtype = getattr(torch, model.dtype) if model.dtype not in (None, "auto") else target_config.dtype
    if config is None:
        config = DominoConfig.from_pretrained(model.model_name_or_path)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(target_config, dtype=dtype or torch.float32)
        drafter = DominoForSpeculation(config)
    if model.use_peft:
        attach_adapter(drafter, model)
    drafter.check_target(target)
    if script.init_layers_from_target:
        check_source_layers(drafter, target, script.init_layers_from_target)
    return drafter, target


# Data ---------------------------------------------------------------------------------------------------------------


def states_format(args, config: DominoConfig, target) -> StatesFormat:
    """How the target's states would be kept."""
    own, dtype = kept_dtype(target, args.states_dtype)
    return StatesFormat(config.target_name_or_path or "", "", own, config.target_layer_ids, config.hidden_size, dtype)


def measure_data(script, args, states: StatesFormat) -> DataSize:
    """Rows and tokens of a local dataset; of one elsewhere nothing, since reading it is no matter of a second.

    Raises:
        FileNotFoundError: a path that looks like a file and is none.
        ValueError: rows of no known kind, or too few of them.
    """
    unread = None
    if script.generate_answers:
        unread = "the target has not answered yet"
    elif script.datasets or not script.sources.endswith((".jsonl", ".jsonl.xz")):
        unread = f"{script.sources} is no local file and was not read"
    if unread:
        return DataSize(None, None, None, None, script.eval_rows, unread)
    tokenizer = local_tokenizer(script.target_model_name_or_path)
    rows = load_rows(script.dataset_name, tokenizer, prompts_file=script.prompts_file)
    if tokenizer is None and not {"completion_ids", "input_ids"} & set(rows.column_names):
        note = f"no tokenizer in {script.target_model_name_or_path}: tokens were not counted"
        return DataSize(len(rows), None, None, None, script.eval_rows, note)
    sample = [
        tokenize_row(row, tokenizer, script.chat_template_kwargs)
        for row in rows.select(range(min(SAMPLED_ROWS, len(rows))))
    ]
    cut = [{key: value[: args.max_length] for key, value in row.items()} for row in sample]
    usable = [row for row in cut if can_teach(row)]
    share = len(rows) / len(sample)
    count = round(len(usable) * share)
    if count <= script.eval_rows:
        raise ValueError(
            f"{count} usable rows, {script.eval_rows} of them to be held out; "
            "nothing left to learn from: add rows or lower --eval_rows."
        )
    tokens = round(sum(len(row["input_ids"]) for row in usable) * share)
    supervised = round(sum(sum(row["supervised"]) for row in usable) * share)
    state_bytes = round(sum(states.row_bytes(row["supervised"]) for row in usable) * share)
    note = "all rows counted" if len(rows) == len(sample) else f"from the first {len(sample)} of {len(rows)} rows"
    return DataSize(count, tokens, supervised, state_bytes, script.eval_rows, note)


def local_tokenizer(name_or_path: str):
    """The target's tokenizer, None in a directory that holds a config alone."""
    held = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if os.path.isdir(name_or_path) and not any(os.path.exists(os.path.join(name_or_path, name)) for name in held):
        return None
    return AutoTokenizer.from_pretrained(name_or_path)


def data_rows(args, data: DataSize) -> list[tuple[str, str]]:
    """Rows, tokens, and what keeping the target's states of them takes."""
    if data.rows is None:
        return [("rows", f"unknown: {data.note}")]
    rows = [("rows", f"{data.train_rows} to train on, {data.held_out} held out ({data.note})")]
    if data.tokens is not None:
        place = "disk" if args.states_cache_dir else "memory" if args.keep_states else "memory or disk, if kept"
        rows.append(("tokens", f"{data.tokens}, {data.supervised} of them supervised"))
        rows.append(("target states of all rows", f"{gib(data.state_bytes)} of {place}"))
    return rows


# Drafter ------------------------------------------------------------------------------------------------------------


def layout_rows(config: DominoConfig) -> list[tuple[str, str]]:
    """Shapes and conventions, one line each."""
    encoder = f"{config.causal_encoder} {config.head_hidden_size}, correction of rank {config.head_rank}"
    place = "anchor+k+1" if config.shift_label else "anchor+k"
    return [
        ("layers", f"{config.num_hidden_layers} of width {config.hidden_size}, MLP {config.intermediate_size}"),
        (
            "attention heads",
            f"{config.num_attention_heads} of {config.head_dim}, {config.num_key_value_heads} for keys",
        ),
        ("tapped target layers", f"{config.target_layer_ids} of {config.num_target_layers}"),
        ("block", f"{config.block_size} slots, {config.num_drafts} drafts (slot k predicts {place})"),
        ("mask token id", f"{config.mask_token_id} of {config.vocab_size}"),
        ("head", f"{encoder}; the first {config.pure_draft_prefix_len} drafts uncorrected"),
    ]


def parameter_rows(drafter: DominoForSpeculation) -> list[tuple[str, str]]:
    """Backbone, head and both, with the size of the saved file."""
    head = count(drafter.head_parameters())
    total = count(drafter.parameters())
    return [
        ("backbone", millions(total - head)),
        ("head", f"{millions(head)} (+{head / (total - head):.1%})"),
        ("total", f"{millions(total)}, {gib(2 * total)} in bf16"),
    ]


def trained_rows(drafter: DominoForSpeculation, curriculum: Curriculum | None) -> list[tuple[str, str]]:
    """Parts with a gradient, stage by stage, as `requires_grad` tells."""
    later = parts(drafter)
    first = parts(drafter, without={id(p) for p in drafter.head_parameters()})
    if curriculum is None:
        return [("stage 1", first), ("stage 2", later)]
    switch, total = curriculum.stage1_steps, curriculum.total_steps
    rows = [("stage 1", f"steps 1 to {switch}: {first}" if switch else "none: the head is free from the first step")]
    return [*rows, ("stage 2", f"steps {switch + 1} to {total}: {later}" if switch < total else "none")]


def parts(drafter: DominoForSpeculation, without: set[int] = frozenset()) -> str:
    """Size and top-level names of what would be trained."""
    trained = {n: p for n, p in drafter.named_parameters() if p.requires_grad and id(p) not in without}
    names = dict.fromkeys(name.split(".")[0] for name in trained)
    return f"{millions(count(trained.values()))} ({', '.join(names)})"


# Memory -------------------------------------------------------------------------------------------------------------


def memory_rows(args, drafter: DominoForSpeculation, target, processes: int) -> list[tuple[str, str]]:
    """What one device holds at the worst moment of a step with rows of full length, and the sum."""
    trained = count(p for p in drafter.parameters() if p.requires_grad)
    text = target.config.get_text_config(decoder=True)
    positions = args.per_device_train_batch_size * args.max_length
    # A frozen backbone keeps nothing: neither its weights nor its inputs want a gradient.
    backbone_trains = any(p.requires_grad for p in drafter.backbone_parameters())
    sizes = {
        f"target weights ({str(target.dtype).removeprefix('torch.')})": count(target.parameters())
        * target.dtype.itemsize,
        "drafter weights (fp32)": 4 * count(drafter.parameters()),
        "gradients and AdamW states (fp32)": TRAINED_BYTES * trained,
        # The tapped layers, the last one, and a layer's insides on the way.
        "target states of a batch": positions
        * target.dtype.itemsize
        * ((len(drafter.config.target_layer_ids) + 3) * text.hidden_size + 3 * drafter.config.intermediate_size),
        "drafter activations": activation_bytes(args, drafter.config) if backbone_trains else 0,
        "logits": logits_bytes(args, drafter.config, text.vocab_size),
    }
    if processes > 1:
        sizes["gradient buckets of DDP"] = 4 * trained
    sizes["sum"] = sum(sizes.values())
    return [(name, gib(size)) for name, size in sizes.items()]


def activation_bytes(args, config: DominoConfig) -> int:
    """Bytes that the backbone keeps for its backward pass, counted by running it on tensors without memory.

    Source: saved-tensor hooks (torch.autograd.graph) on fake tensors (torch's FakeTensorMode).
    """
    config, kept = deepcopy(config), {}
    slots = args.num_anchors * config.block_size
    shape, length = (args.per_device_train_batch_size, slots), args.max_length
    inputs_of_layers = 0
    if args.gradient_checkpointing:
        # Of all layers only the inputs stay, and one layer at a time is there in full.
        inputs_of_layers = 4 * shape[0] * slots * config.hidden_size * config.num_hidden_layers
        config.num_hidden_layers = 1
    with FakeTensorMode():
        drafter = DominoForSpeculation(config).train()
        weights = {id_of(p) for p in drafter.parameters()}

        def keep(tensor):
            if id_of(tensor) not in weights:
                kept[id_of(tensor)] = tensor
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=args.bf16),
        ):
            drafter(
                torch.zeros(*shape, config.hidden_size),
                torch.zeros(shape[0], length, len(config.target_layer_ids) * config.hidden_size),
                torch.zeros(*shape, dtype=torch.long),
                torch.zeros(shape[0], length, dtype=torch.long),
                torch.ones(shape[0], 1, slots, length + slots, dtype=torch.bool),
            )
        return inputs_of_layers + sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def id_of(tensor: torch.Tensor) -> int:
    """The same number for all views of one storage."""
    return tensor.untyped_storage()._cdata


def logits_bytes(args, config: DominoConfig, vocab_size: int) -> int:
    """fp32 logits of the draft tokens that meet the vocabulary at one time."""
    tokens = args.per_device_train_batch_size * args.num_anchors * config.num_drafts
    tokens = min(tokens, max(args.logits_chunk_size, config.num_drafts))
    ids = min(vocab_size, args.vocab_sample_size * 5 // 4) if args.vocab_sample_size else vocab_size
    return 4 * LOGITS_COPIES[args.draft_loss().needs_teacher] * tokens * ids


# Steps --------------------------------------------------------------------------------------------------------------


def optimizer_steps(rows: int | None, args, processes: int) -> tuple[int | None, int | None]:
    """Optimizer steps of an epoch and of the run, as the Trainer counts them; None where the rows are not known."""
    per_epoch = None
    if rows is not None:
        whole = math.floor if args.dataloader_drop_last else math.ceil
        batches = whole(whole(rows / args.per_device_train_batch_size) / processes)
        per_epoch = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
    if args.max_steps > 0:
        return per_epoch, args.max_steps
    return per_epoch, None if per_epoch is None else math.ceil(args.num_train_epochs * per_epoch)


def step_rows(args, processes: int, per_epoch: int | None, total: int | None) -> list[tuple[str, str]]:
    """Global batch, steps of an epoch and of the run."""
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    unknown = "unknown until the rows are: name a local file, or give --max_steps"
    return [
        (
            "global batch",
            f"{batch} x {accumulation} accumulated x {processes} processes = {batch * accumulation * processes}",
        ),
        ("blocks of a step", f"up to {batch * accumulation * processes * args.num_anchors}"),
        ("optimizer steps of an epoch", unknown if per_epoch is None else str(per_epoch)),
        ("optimizer steps of the run", unknown if total is None else str(total)),
    ]


def schedule_rows(args, curriculum: Curriculum | None) -> list[tuple[str, str]]:
    """Lambda and the head's learning-rate factor at some steps of the run."""
    if curriculum is None:
        return [("stage switch", f"after {args.stage1_ratio:.0%} of the steps")]
    total, switch = curriculum.total_steps, curriculum.stage1_steps
    steps = sorted({0, switch, *(round(share * (total - 1)) for share in (0.25, 0.5, 0.75, 1))} & set(range(total)))
    latest = " at the latest" if args.stage_switch == "adaptive" else ""
    rows = [("stage switch", f"before step {switch + 1}{latest}" if 0 < switch < total else "none")]
    for step in steps:
        value = f"lambda {curriculum.lam(step):.3f}, head's learning rate x {curriculum.head_factor(step):.2f}"
        rows.append((f"step {step + 1}", value))
    return rows


# Printing -----------------------------------------------------------------------------------------------------------


def count(parameters) -> int:
    """Numbers in these parameters."""
    return sum(p.numel() for p in parameters)


def millions(number: int) -> str:
    """Parameters in millions."""
    return f"{number / 1e6:.2f} M"


def gib(size: int) -> str:
    """Bytes in a unit that leaves digits before the point."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"


def show(sections: list[Section], console: Console | None = None) -> None:
    """Print tables on a terminal, `name: value` lines elsewhere."""
    console = console or Console()
    for title, rows in sections:
        if not console.is_terminal:
            lines = [title, *(f"  {name}: {value}" for name, value in rows)]
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
            continue
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=box.SIMPLE)
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)
