"""From datasets to blocks: token rows with a supervision mask, anchors, and the block attention mask."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from datasets import Dataset, concatenate_datasets, load_dataset
from domino_spec.training.answers import load_answers, tokenize_prompt
from domino_spec.training.chat import supervise_turns

# Columns that `tokenize_row` reads; others may hold anything and are left where they are.
COLUMNS = ("messages", "prompt", "completion", "response", "text", "tools", "chat_template_kwargs")
COLUMNS += ("input_ids", "completion_mask", "key", "prompt_ids", "completion_ids")
FILE_LOADERS = {".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def load_rows(dataset_name: str, tokenizer, *, config: str | None = None, split: str = "train", prompts_file=None):
    """Dataset of a local file (.jsonl, .jsonl.xz, .json, .parquet, .csv, .txt), a directory, or the Hub.

    Args:
        dataset_name: a file, or whatever `datasets.load_dataset` takes.
        config, split: as `datasets.load_dataset` takes them.
        prompts_file: prompts to join to a packed answers file.
    Raises:
        FileNotFoundError: a path that looks like a file and is none.
        ValueError: another split than "train" of a JSONL file.
    """
    ending = os.path.splitext(dataset_name.removesuffix(".xz"))[1]
    if ending not in (".jsonl", *FILE_LOADERS):
        return load_dataset(dataset_name, config, split=split)
    if not os.path.exists(dataset_name):
        raise FileNotFoundError(f"no dataset file '{dataset_name}'; name an existing file or a Hub dataset.")
    if ending != ".jsonl":
        return load_dataset(FILE_LOADERS[ending], data_files=dataset_name, split=split)
    if split != "train":
        raise ValueError(f"the split '{split}' of '{dataset_name}' is asked for; a JSONL file has only 'train'.")
    rows = load_answers(dataset_name, tokenizer, prompts_file)
    # Rows of one file may be of different kinds; a dataset has the columns of its first row, so each gets all.
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    if not columns:
        tokenize_row(rows[0] if rows else {}, tokenizer)
    return Dataset.from_list([{name: row.get(name) for name in columns} for row in rows], on_mixed_types="use_json")


def load_mixture(entries, tokenizer, prepare: Callable, prompts_file=None) -> tuple[Dataset, int]:
    """One dataset of several, in the shares that are asked for.

    Args:
        entries (list of `trl.DatasetConfig`): `path` is whatever `load_rows` takes; `fraction`, given for all or none,
            is the share of the mixture, whose size is capped so that no row comes twice.
        prepare: rows -> usable token rows and the number of those dropped, as `prepare_dataset` gives them; datasets
            of different columns can be mixed after that, and fractions count what is usable.
        prompts_file: as for `load_rows`.
    Raises:
        ValueError: fractions for some only.
    """
    parts, dropped = [], 0
    for entry in entries:
        if entry.data_dir or entry.data_files:
            files = {"data_dir": entry.data_dir, "data_files": entry.data_files}
            rows = load_dataset(entry.path, entry.name, split=entry.split, **files)
        else:
            rows = load_rows(entry.path, tokenizer, config=entry.name, split=entry.split, prompts_file=prompts_file)
        part, lost = prepare(rows if entry.columns is None else rows.select_columns(entry.columns))
        parts.append(part)
        dropped += lost
    fractions = [entry.fraction for entry in entries]
    if any(fraction is not None for fraction in fractions):
        if not all(fractions):
            raise ValueError(
                f"the mixture's fractions are {fractions}; expected one above 0 for each, or none at all."
            )
        weights = [fraction / sum(fractions) for fraction in fractions]
        total = min(len(part) / weight for part, weight in zip(parts, weights, strict=True))
        parts = [part.select(range(round(weight * total))) for part, weight in zip(parts, weights, strict=True)]
    return concatenate_datasets(parts), dropped


def load_split(dataset_name: str, config: str | None, split: str) -> Dataset | None:
    """A split of a directory or a Hub dataset, where there is one; files have none beside "train"."""
    if os.path.isfile(dataset_name):
        return None
    splits = load_dataset(dataset_name, config)
    return splits[split] if split in splits else None


def tokenize_row(row: dict, tokenizer, template_kwargs: dict | None = None) -> dict[str, list[int]]:
    """`input_ids` and `supervised` (1 where the target would have written the token) of one row.

    Understands what TRL understands: pre-tokenised (`input_ids`, optional `completion_mask`), answers
    (`prompt_ids`, `completion_ids`), `messages`, `prompt` + `completion` (text or messages) and `text`; and `response`
    for `completion`, as servers' logs have it.

    Args:
        template_kwargs: options of the chat template.
    Raises:
        ValueError: none of these columns.
    """
    return tokenize_turns(row, tokenizer, template_kwargs)[0]


def tokenize_turns(row: dict, tokenizer, template_kwargs: dict | None = None) -> list[dict[str, list[int]]]:
    """`tokenize_row`, and the chats that the row's template shows only as they were at an earlier turn."""
    completion = row.get("completion") if row.get("completion") is not None else row.get("response")
    if row.get("completion_ids") is not None:
        return [_join(row["prompt_ids"], row["completion_ids"])]
    if row.get("input_ids") is not None:
        mask = row.get("completion_mask") or [1] * len(row["input_ids"])
        return [{"input_ids": list(row["input_ids"]), "supervised": list(mask)}]
    if row.get("messages") is not None:
        return supervise_turns(row["messages"], tokenizer, row, template_kwargs)
    if completion is not None and row.get("prompt") is not None:
        if isinstance(row["prompt"], str):
            prompt = tokenizer(row["prompt"])["input_ids"]
            return [_join(prompt, tokenizer(completion, add_special_tokens=False)["input_ids"])]
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        return supervise_turns(row["prompt"] + answer, tokenizer, row, template_kwargs, len(row["prompt"]))
    if row.get("text") is not None:
        ids = tokenizer(row["text"])["input_ids"]
        return [{"input_ids": ids, "supervised": [1] * len(ids)}]
    raise ValueError(
        f"a dataset row has the columns {sorted(row)}; expected `messages`, `prompt` and `completion`, `text`, "
        "`input_ids`, or `prompt_ids` and `completion_ids`."
    )


def _join(prompt: list[int], completion: list[int]) -> dict[str, list[int]]:
    return {"input_ids": prompt + completion, "supervised": [0] * len(prompt) + [1] * len(completion)}


def first_anchors(supervised: torch.Tensor) -> torch.Tensor:
    """Positions `[..., L]` bool that can be anchors: committed answer tokens whose next token is supervised too.

    The first token of the answer comes from the prefill, so it is the earliest anchor; position 0 has no context.
    """
    valid = supervised.bool().clone()
    valid[..., :-1] &= supervised[..., 1:].bool()
    valid[..., -1] = False
    valid[..., 0] = False
    return valid


def can_teach(row: dict[str, list[int]]) -> bool:
    """Whether a token row has an anchor."""
    return len(row["supervised"]) > 1 and bool(first_anchors(torch.tensor(row["supervised"])).any())


def sample_anchors(valid: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None):
    """Up to `num_anchors` anchors a row, without repetition.

    Args:
        valid (bool `[batch, L]`): from `first_anchors`.
    Returns:
        anchors int `[batch, M]` (sorted; surplus entries are 0) and their validity bool `[batch, M]`.
    """
    most = min(num_anchors, int(valid.sum(-1).max()))
    noise = torch.rand(valid.shape, generator=generator).to(valid.device).masked_fill(~valid, -1.0)
    chosen = noise.topk(max(most, 1), dim=-1)
    kept = chosen.values >= 0
    anchors = chosen.indices.masked_fill(~kept, valid.shape[1]).sort(-1).values
    kept = anchors < valid.shape[1]
    return anchors.masked_fill(~kept, 0), kept


def block_attention_mask(anchors: torch.Tensor, block_size: int, context_mask: torch.Tensor) -> torch.Tensor:
    """Who sees whom when all blocks of a sequence run side by side.

    Args:
        anchors (int `[batch, M]`); context_mask (bool `[batch, L]`): real context positions.
    Returns:
        bool `[batch, 1, M * B, L + M * B]`: a slot sees context strictly before its anchor, and its own block.
    """
    batch_size, length = context_mask.shape
    before = torch.arange(length, device=anchors.device)[None, None] < anchors[:, :, None]  # [b, M, L]
    context = (before & context_mask[:, None]).repeat_interleave(block_size, dim=1)  # [b, M * B, L]
    block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block_size)
    own = (block[:, None] == block[None]).expand(batch_size, -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def flex_block_mask(anchors: torch.Tensor, block_size: int, context_mask: torch.Tensor):
    """`block_attention_mask` as FlexAttention's BlockMask: no full-size mask is written, hidden tiles cost nothing."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch_size, length = context_mask.shape
    slots = anchors.shape[1] * block_size

    def visible(row, head, query, key):
        block = query // block_size
        place = key.clamp(max=length - 1)
        context = (key < anchors[row, block]) & context_mask[row, place]
        return torch.where(key < length, context, (key - length) // block_size == block)

    return create_block_mask(visible, batch_size, None, slots, length + slots, device=anchors.device)


@dataclass
class BlockCollator:
    """Pad rows on the right and cut them at `max_length`."""

    pad_token_id: int

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        batch = {"input_ids": [], "attention_mask": [], "supervised": []}
        for row in rows:
            gap = width - len(row["input_ids"])
            batch["input_ids"].append(row["input_ids"] + [self.pad_token_id] * gap)
            batch["attention_mask"].append([1] * len(row["input_ids"]) + [0] * gap)
            batch["supervised"].append(row["supervised"] + [0] * gap)
        return {key: torch.tensor(value) for key, value in batch.items()}


def prepare_dataset(rows, tokenizer, max_length: int, template_kwargs: dict | None = None) -> tuple[Dataset, int]:
    """Tokenise, cut at `max_length`, drop rows that cannot teach anything; returns the number dropped."""

    def convert(batch: dict[str, list]) -> dict[str, list]:
        made: dict[str, list] = {"input_ids": [], "supervised": []}
        for values in zip(*batch.values(), strict=True):
            for row in tokenize_turns(dict(zip(batch, values, strict=True)), tokenizer, template_kwargs):
                for key, value in row.items():
                    made[key].append(value[:max_length])
        return made

    made = rows.map(convert, batched=True, remove_columns=rows.column_names, desc="tokenising")
    useful = made.filter(can_teach, desc="dropping rows without an anchor")
    return useful, len(made) - len(useful)


def prepare_prompts(rows, tokenizer, template_kwargs: dict | None = None) -> Dataset:
    """The prompts of rows of any kind that has some, as `prompt_ids`; answers in the rows are left out."""
    return rows.map(
        lambda row: {"prompt_ids": tokenize_prompt(row, tokenizer, template_kwargs)},
        remove_columns=rows.column_names,
        desc="tokenising prompts",
    )


def frequent_ids(rows, size: int) -> torch.Tensor:
    """The ids that supervised tokens have most often."""
    counts: Counter = Counter()
    for row in rows:
        counts.update(token for token, flag in zip(row["input_ids"], row["supervised"], strict=True) if flag)
    return torch.tensor([token for token, _ in counts.most_common(size)])
