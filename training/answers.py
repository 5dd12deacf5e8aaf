"""Let the target answer prompts: the data a drafter is trained on. Batched, resumable, settings recorded.

    python -m domino_spec.training.answers --target_model_name_or_path TARGET --prompts prompts.jsonl \\
        --output_file answers.jsonl

Input rows are `{"messages": [...]}` or `{"prompt": ...}`, text or messages. Output rows are what the trainer reads as
it is: `{"key", "prompt_ids", "completion_ids"}`; token ids, because text that is tokenised again may give other tokens
than those the target wrote. Run the same command again after an interruption: answered prompts are skipped. The first
line of the output is `{"settings": {...}}`; an output made with other settings is refused rather than mixed.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from domino_spec.training.chat import render
from tqdm.auto import tqdm

# Fields of a generation config that are set for every answer, or that do not change it.
NEUTRAL = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p")
NEUTRAL += ("use_cache", "transformers_version")


def _json_object(text: str) -> dict:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"chat_template_kwargs is {text!r}; expected a JSON object, like '{{\"a\": false}}'.")
    return found


@dataclass
class AnswerOptions:
    """How the target answers.

    Raises:
        ValueError: a value out of range.
    """

    max_new_tokens: int = field(default=512, metadata={"help": "Most tokens of an answer."})
    max_prompts: int | None = field(default=None, metadata={"help": "Answer only the first so many prompts."})
    max_prompt_tokens: int = field(default=1024, metadata={"help": "Longer prompts are skipped and counted."})
    temperature: float = field(default=0.0, metadata={"help": "0 answers greedily, 1 samples the target's own law."})
    top_p: float = field(default=1.0, metadata={"help": "Sample among ids that make up so much probability."})
    top_k: int = field(default=0, metadata={"help": "Sample among so many most likely ids; 0: all."})
    answer_seed: int = field(default=0, metadata={"help": "Of sampled answers."})
    answer_batch_size: int = field(default=16, metadata={"help": "Prompts answered at a time."})
    chat_template_kwargs: dict | str | None = field(
        default=None,
        metadata={"help": "Options of the chat template as JSON, like '{\"enable_thinking\": false}'."},
    )

    def __post_init__(self):
        for name in ("max_new_tokens", "max_prompt_tokens", "answer_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"temperature, top_p and top_k are {self.temperature}, {self.top_p} and {self.top_k}; "
                "expected at least 0, a share above 0 up to 1, and at least 0."
            )
        if isinstance(self.chat_template_kwargs, str):
            self.chat_template_kwargs = _json_object(self.chat_template_kwargs)

    @property
    def sampling(self) -> dict:
        """What `generate` is told."""
        options = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            options |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return options

    def settings(self, target) -> dict:
        """Everything that decides what is answered, for the first line of the output.

        Sampled answers depend on the batch they are drawn in; greedy ones do not, nor on a seed.
        """
        settings = {
            "target": os.path.basename(os.path.normpath(target.config._name_or_path or "target")),
            "dtype": str(target.dtype).removeprefix("torch."),
        } | self.sampling
        if self.temperature > 0:
            settings |= {"seed": self.answer_seed, "batch_size": self.answer_batch_size}
        if self.chat_template_kwargs:
            settings["chat_template_kwargs"] = self.chat_template_kwargs
        # A penalty or another processor that the target's own generation config switches on.
        own = {
            name: value
            for name, value in target.generation_config.to_diff_dict().items()
            if name not in NEUTRAL and not name.startswith(("_", "output_")) and not name.endswith("_id")
        }
        return settings | ({"generation_config": own} if own else {})


def prompt_key(prompt_ids: list[int]) -> str:
    """Short name of a prompt that does not depend on its place in a file."""
    return hashlib.sha256(",".join(map(str, prompt_ids)).encode()).hexdigest()[:16]


def read_jsonl(path: str | Path, cut: bool = False) -> Iterator[dict]:
    """Rows of a JSONL file, `.xz` included.

    Args:
        cut: drop a last line without its end, which an interrupted writer leaves behind.
    Raises:
        ValueError: a line that is no JSON object, with its number.
    """
    path = Path(path)
    opened = lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else open(path, encoding="utf-8")
    with opened as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or (cut and not line.endswith("\n")):
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"line {number} of '{path}' is no JSON: {error}; expected one object a line."
                ) from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} of '{path}' is a {type(row).__name__}; expected one object a line.")
            yield row


def tokenize_prompt(row: dict, tokenizer, template_kwargs: dict | None = None) -> list[int]:
    """Token ids of one prompt row, chat template and generation prompt applied where it carries messages.

    Raises:
        ValueError: no prompt in the row, or none before its answer.
    """
    if row.get("prompt_ids") is not None:
        return list(row["prompt_ids"])
    messages = row.get("messages") if row.get("messages") is not None else row.get("prompt")
    if messages is None:
        raise ValueError(f"a prompt row has the keys {sorted(row)}; expected `messages` or `prompt`.")
    if isinstance(messages, str):
        return tokenizer(messages)["input_ids"]
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("a prompt row has no message before the assistant's; expected something to answer.")
    return render(messages, tokenizer, row, template_kwargs, True)


def load_answers(path: str | Path, tokenizer=None, prompts: str | Path | None = None) -> list[dict]:
    """Answers as rows with `prompt_ids` and `completion_ids`; rows of any other kind come through as they are.

    Args:
        path: a file written by this script, possibly packed by `--pack` (which leaves the prompts out).
        tokenizer, prompts: needed for a packed file: the prompts are joined to their answers by key.
    Raises:
        ValueError: a packed file without `prompts`, or prompts that match none of its answers.
    """
    rows = [row for row in read_jsonl(path) if "settings" not in row]
    packed = [row for row in rows if "completion_ids" in row and "prompt_ids" not in row]
    if not packed:
        return rows
    if prompts is None:
        raise ValueError(f"'{path}' holds answers without their prompts; name the prompts file too.")
    known = {prompt_key(ids): ids for ids in (tokenize_prompt(row, tokenizer) for row in read_jsonl(prompts))}
    joined = [{**row, "prompt_ids": known[row["key"]]} for row in rows if row["key"] in known]
    if not joined:
        raise ValueError(
            f"none of the answers in '{path}' belongs to a prompt in '{prompts}': other tokenizer or file?"
        )
    return joined


def left_padded(prompts: list[list[int]], pad_token_id: int, device) -> dict[str, torch.Tensor]:
    """`generate` inputs of prompts of any lengths."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad_token_id] * (width - len(ids)) + ids for ids in prompts], device=device),
        "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device),
    }


def ended(target, completions: torch.Tensor) -> list[list[int]]:
    """New ids `[batch, new]` as lists that end after the first end-of-sequence token."""
    eos = target.generation_config.eos_token_id
    stops = set(eos if isinstance(eos, list) else [eos])
    rows = completions.tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in stops), len(row))] for row in rows]


@torch.inference_mode()
def answer_batch(target, prompts: list[list[int]], pad_token_id: int, **sampling) -> list[list[int]]:
    """Completions, ended after the first end-of-sequence token, of left-padded prompts in one `generate`."""
    inputs = left_padded(prompts, pad_token_id, target.device)
    output = target.generate(**inputs, pad_token_id=pad_token_id, **sampling)
    return ended(target, output[:, inputs["input_ids"].shape[1] :])


def _batches(prompts: Iterable[dict], tokenizer, options: AnswerOptions) -> tuple[list[dict[str, list[int]]], int]:
    """Prompts by key in batches of like length, and how many were too long.

    Batches are formed of all prompts, answered or not: sampled answers depend on their batch, and a resumed run has to
    draw the same. Sorting is confined to a window, so that a stopped run keeps the file's mixture.
    """
    found, skipped = {}, 0
    for row in islice(prompts, options.max_prompts):
        ids = tokenize_prompt(row, tokenizer, options.chat_template_kwargs)
        if len(ids) <= options.max_prompt_tokens:
            found[prompt_key(ids)] = ids
        else:
            skipped += 1
    size = options.answer_batch_size
    items, window = list(found.items()), 8 * size
    ordered = [x for i in range(0, len(items), window) for x in sorted(items[i : i + window], key=lambda x: len(x[1]))]
    return [dict(ordered[i : i + size]) for i in range(0, len(ordered), size)], skipped


def _answered(path: Path, settings: dict) -> set[str]:
    """Keys of a file's answers; a line that was cut by an interruption is taken out.

    Raises:
        ValueError: answers made with other settings.
    """
    if not path.exists() or not path.stat().st_size:
        return set()
    rows = list(read_jsonl(path, cut=True))
    if rows and rows[0].get("settings") != settings:
        raise ValueError(
            f"'{path}' was made with {rows[0].get('settings')}, now asked for {settings}; "
            "use the same settings to resume, or another file."
        )
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return {row["key"] for row in rows[1:]}


def answer(
    target,
    tokenizer,
    prompts: Iterable[dict],
    output_file: str | Path,
    options: AnswerOptions,
    rank: int = 0,
    world: int = 1,
) -> Path:
    """Append to a file the target's answer to every prompt that it does not hold yet.

    Args:
        rank, world: this process answers the `rank`-th of `world` shares of the batches.
    Returns:
        the file: `output_file` with one process, one of `part_files` with several.
    Raises:
        ValueError: the file was made with other settings.
    """
    settings = options.settings(target)
    output = part_files(output_file, world)[rank]
    done = _answered(output, settings)
    batches, skipped = _batches(prompts, tokenizer, options)
    if skipped and rank == 0:
        print(f"skipped {skipped} prompts over {options.max_prompt_tokens} tokens", flush=True)
    batches = batches[rank::world]
    total = sum(map(len, batches))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "a", encoding="utf-8") as file, tqdm(total=total, desc="answers", disable=rank > 0) as bar:
        if not done and not output.stat().st_size:
            file.write(json.dumps({"settings": settings}) + "\n")
        tokens = 0
        for batch in batches:
            missing = {key: ids for key, ids in batch.items() if key not in done}
            bar.update(len(batch) - len(missing))
            if not missing:
                continue
            asked = batch if options.temperature > 0 else missing
            torch.manual_seed(int(hashlib.sha256(f"{options.answer_seed},{min(batch)}".encode()).hexdigest()[:15], 16))
            completions = answer_batch(target, list(asked.values()), pad, **options.sampling)
            for (key, ids), completion in zip(asked.items(), completions, strict=True):
                if key in missing:
                    row = {"key": key, "prompt_ids": ids, "completion_ids": completion}
                    file.write(json.dumps(row, separators=(",", ":")) + "\n")
                    tokens += len(completion)
            file.flush()
            bar.update(len(missing))
            bar.set_postfix(tokens=tokens, tokens_per_second=round(tokens / max(bar.format_dict["elapsed"], 1e-3), 1))
    return output


def part_files(output_file: str | Path, world: int) -> list[Path]:
    """A file for each of several processes: `answers.jsonl` becomes `answers-0-of-2.jsonl` and so on."""
    path = Path(output_file)
    return [path] if world == 1 else [path.with_stem(f"{path.stem}-{rank}-of-{world}") for rank in range(world)]


def pack(path: str) -> str:
    """Write `path + '.xz'` without the prompts: small enough to keep, and nobody else's text in it."""
    with lzma.open(path + ".xz", "wt", encoding="utf-8", preset=9) as file:
        for row in read_jsonl(path):
            row.pop("prompt_ids", None)
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    return path + ".xz"


@dataclass
class ScriptOptions:
    """Which target answers what."""

    target_model_name_or_path: str = field(metadata={"help": "The target."})
    prompts: str = field(metadata={"help": "JSONL file with `messages` or `prompt` in each row."})
    output_file: str = field(metadata={"help": "Answers; an existing file is gone on with."})
    dtype: str = field(default="bfloat16", metadata={"help": "float32, bfloat16 or float16."})
    pack: bool = field(default=False, metadata={"help": "Also write OUTPUT.xz without the prompts."})


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

    parser = HfArgumentParser((ScriptOptions, AnswerOptions), description=__doc__)
    try:
        script, options = parser.parse_args_into_dataclasses()
        tokenizer = AutoTokenizer.from_pretrained(script.target_model_name_or_path)
        target = AutoModelForCausalLM.from_pretrained(script.target_model_name_or_path, dtype=script.dtype).eval()
        target.to("cuda" if torch.cuda.is_available() else "cpu")
        answer(target, tokenizer, read_jsonl(script.prompts), script.output_file, options)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"answers: {error}")
    if script.pack:
        print(f"packed without prompts: {pack(script.output_file)}")


if __name__ == "__main__":
    main()
