"""From datasets to blocks: token rows with a supervision mask, anchors, and the block attention mask."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

import torch
from datasets import Dataset, load_dataset

from .answer_prompts import load_answers


def load_rows(dataset_name: str, tokenizer, *, config: str | None = None, split: str = "train", prompts_file=None):
    """Dataset of a local JSONL file (`.xz` too), of answers written by `answer_prompts.py`, or of the Hub.

    Args:
        dataset_name: a file, or whatever `datasets.load_dataset` takes.
        prompts_file: prompts to join to a packed answers file.
    Raises:
        FileNotFoundError: a path that looks like a file and is none.
    """
    if dataset_name.endswith((".jsonl", ".jsonl.xz")):
        if not os.path.exists(dataset_name):
            raise FileNotFoundError(f"no dataset file '{dataset_name}'; name an existing file or a Hub dataset.")
        return Dataset.from_list(load_answers(dataset_name, tokenizer, prompts_file))
    return load_dataset(dataset_name, config, split=split)


def tokenize_row(row: dict, tokenizer) -> dict[str, list[int]]:
    """`input_ids` and `supervised` (1 where the target would have written the token) of one row.

    Understands what TRL understands: pre-tokenised (`input_ids`, optional `completion_mask`), answers
    (`prompt_ids`, `completion_ids`), `messages`, `prompt` + `completion` (text or messages) and `text`.

    Raises:
        ValueError: none of these columns.
    """
    if row.get("completion_ids") is not None:
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        return {"input_ids": prompt + completion, "supervised": [0] * len(prompt) + [1] * len(completion)}
    if row.get("input_ids") is not None:
        mask = row.get("completion_mask") or [1] * len(row["input_ids"])
        return {"input_ids": list(row["input_ids"]), "supervised": list(mask)}
    if row.get("messages") is not None:
        return _supervise_turns(row["messages"], tokenizer)
    if row.get("completion") is not None:
        if not isinstance(row["prompt"], str):
            return _supervise_turns(list(row["prompt"]) + list(row["completion"]), tokenizer, len(row["prompt"]))
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        return {"input_ids": prompt + completion, "supervised": [0] * len(prompt) + [1] * len(completion)}
    if row.get("text") is not None:
        ids = tokenizer(row["text"])["input_ids"]
        return {"input_ids": ids, "supervised": [1] * len(ids)}
    raise ValueError(
        f"a dataset row has the columns {sorted(row)}; expected `messages`, `prompt` and `completion`, `text`, "
        "`input_ids`, or `prompt_ids` and `completion_ids`."
    )


def _supervise_turns(messages: list[dict], tokenizer, first: int = 0) -> dict[str, list[int]]:
    """Supervise assistant turns from message `first` on, up to their end-of-turn token.

    Turns are found by rendering prefixes of the chat, which needs no generation tags in the template. A turn that the
    template renders otherwise once more turns follow (as those do that drop earlier thinking) is left unsupervised.
    """

    def render(upto: int, generation_prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            messages[:upto], add_generation_prompt=generation_prompt, return_dict=True
        )["input_ids"]

    ids = render(len(messages), False)
    supervised = [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < first:
            continue
        prompt, turn = render(i, True), render(i + 1, False)
        if ids[: len(turn)] != turn or turn[: len(prompt)] != prompt:
            continue
        start, end = len(prompt), len(turn)
        # What a template puts behind the end-of-turn token the target never writes.
        ends = [j for j in range(start, end) if ids[j] == tokenizer.eos_token_id]
        end = ends[-1] + 1 if ends else end
        supervised[start:end] = [1] * (end - start)
    return {"input_ids": ids, "supervised": supervised}


def first_anchors(supervised: torch.Tensor) -> torch.Tensor:
    """Positions `[..., L]` bool that can be anchors: committed answer tokens whose next token is supervised too.

    The first token of the answer comes from the prefill, so it is the earliest anchor; position 0 has no context.
    """
    valid = supervised.bool().clone()
    valid[..., :-1] &= supervised[..., 1:].bool()
    valid[..., -1] = False
    valid[..., 0] = False
    return valid


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


def prepare_dataset(rows, tokenizer, max_length: int) -> tuple[Dataset, int]:
    """Tokenise, cut at `max_length`, drop rows that cannot teach anything; returns the number dropped."""

    def convert(row):
        made = tokenize_row(row, tokenizer)
        return {key: value[:max_length] for key, value in made.items()}

    made = rows.map(convert, remove_columns=rows.column_names, desc="tokenising")
    useful = made.filter(
        lambda row: len(row["supervised"]) > 1 and bool(first_anchors(torch.tensor(row["supervised"])).any()),
        desc="dropping rows without an anchor",
    )
    return useful, len(made) - len(useful)


def frequent_ids(rows, size: int) -> torch.Tensor:
    """The ids that supervised tokens have most often."""
    counts: Counter = Counter()
    for row in rows:
        counts.update(token for token, flag in zip(row["input_ids"], row["supervised"], strict=True) if flag)
    return torch.tensor([token for token, _ in counts.most_common(size)])
