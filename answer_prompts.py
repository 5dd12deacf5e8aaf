"""Let the target answer prompts: the data a drafter is trained on. Batched, resumable, settings recorded.

    python answer_prompts.py --target_model_name_or_path TARGET --prompts prompts.jsonl --output_file answers.jsonl

Input rows are `{"messages": [...]}` or `{"prompt": "..."}`. Output rows are what the trainer reads as it is:
`{"key", "prompt_ids", "completion_ids"}`; token ids, because text that is tokenised again may give other tokens than
those the target wrote. Run the same command again after an interruption: answered prompts are skipped. The first line
of the output is `{"settings": {...}}`; an output made with other settings is refused rather than mixed.
"""

import argparse
import hashlib
import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm.auto import tqdm


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


def tokenize_prompt(row: dict, tokenizer) -> list[int]:
    """Token ids of one prompt row, chat template and generation prompt applied where it carries messages."""
    messages = row.get("messages", row.get("prompt"))
    if messages is None:
        raise ValueError(f"a prompt row has the keys {sorted(row)}; expected `messages` or `prompt`.")
    if isinstance(messages, str):
        return tokenizer(messages)["input_ids"]
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


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


@torch.inference_mode()
def answer_batch(target, prompts: list[list[int]], pad_token_id: int, **sampling) -> list[list[int]]:
    """Completions, ended after the first end-of-sequence token, of left-padded prompts in one `generate`."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[pad_token_id] * (width - len(ids)) + ids for ids in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=target.device)
    output = target.generate(input_ids=input_ids, attention_mask=mask, pad_token_id=pad_token_id, **sampling)
    eos = target.generation_config.eos_token_id
    stops = set(eos if isinstance(eos, list) else [eos])
    completions = []
    for row in output[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        completions.append(row[:end])
    return completions


def answer(target, tokenizer, prompts: Iterator[dict], output_file: str, settings: dict, batch_size: int) -> None:
    """Append to `output_file` the target's answer to every prompt that it does not hold yet."""
    output = Path(output_file)
    done = set()
    if output.exists() and output.stat().st_size:
        rows = list(read_jsonl(output, cut=True))
        if rows and rows[0].get("settings") != settings:
            raise ValueError(
                f"'{output}' was made with {rows[0].get('settings')}, now asked for {settings}; "
                "use the same settings to resume, or another --output_file."
            )
        done = {row["key"] for row in rows[1:]}
        os.truncate(output, output.read_bytes().rfind(b"\n") + 1)
    waiting = {}
    for row in prompts:
        ids = tokenize_prompt(row, tokenizer)
        if prompt_key(ids) not in done:
            waiting[prompt_key(ids)] = ids
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    # Prompts of like length share a batch, within a window so that a stopped run keeps the file's mixture.
    window, items = 8 * batch_size, list(waiting.items())
    ordered = [x for i in range(0, len(items), window) for x in sorted(items[i : i + window], key=lambda x: len(x[1]))]
    with open(output, "a", encoding="utf-8") as file, tqdm(total=len(ordered) + len(done), initial=len(done)) as bar:
        if output.stat().st_size == 0:
            file.write(json.dumps({"settings": settings}) + "\n")
        tokens = 0
        for start in range(0, len(ordered), batch_size):
            batch = ordered[start : start + batch_size]
            sampling = {key: value for key, value in settings.items() if key not in ("target", "dtype", "seed")}
            completions = answer_batch(target, [ids for _, ids in batch], pad, **sampling)
            for (key, ids), completion in zip(batch, completions, strict=True):
                row = {"key": key, "prompt_ids": ids, "completion_ids": completion}
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                tokens += len(completion)
            file.flush()
            bar.update(len(batch))
            bar.set_postfix(tokens=tokens, tokens_per_second=round(tokens / bar.format_dict["elapsed"], 1))


def pack(path: str) -> str:
    """Write `path + '.xz'` without the prompts: small enough to keep, and nobody else's text in it."""
    with lzma.open(path + ".xz", "wt", encoding="utf-8", preset=9) as file:
        for row in read_jsonl(path):
            row.pop("prompt_ids", None)
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    return path + ".xz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target_model_name_or_path", required=True)
    parser.add_argument("--prompts", required=True, help="JSONL file with `messages` or `prompt` in each row")
    parser.add_argument("--output_file", required=True)
    parser.add_argument("--max_prompts", type=int, help="answer only the first so many")
    parser.add_argument("--max_prompt_tokens", type=int, default=1024, help="longer prompts are skipped and counted")
    parser.add_argument("--max_new_tokens", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--temperature", type=float, default=0.0, help="0 answers greedily")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pack", action="store_true", help="also write OUTPUT.xz without the prompts")
    arguments = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.target_model_name_or_path)
    dtype = getattr(torch, arguments.dtype)
    target = AutoModelForCausalLM.from_pretrained(arguments.target_model_name_or_path, dtype=dtype).eval()
    target.to("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    settings = {
        "target": os.path.basename(os.path.normpath(arguments.target_model_name_or_path)),
        "dtype": arguments.dtype,
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": arguments.temperature > 0,
    }
    if arguments.temperature > 0:
        settings |= {"temperature": arguments.temperature, "top_k": 0, "top_p": 1.0, "seed": arguments.seed}
    prompts = list(read_jsonl(arguments.prompts))[: arguments.max_prompts]
    short = [row for row in prompts if len(tokenize_prompt(row, tokenizer)) <= arguments.max_prompt_tokens]
    if len(short) < len(prompts):
        print(f"skipped {len(prompts) - len(short)} prompts over {arguments.max_prompt_tokens} tokens")
    answer(target, tokenizer, short, arguments.output_file, settings, arguments.batch_size)
    if arguments.pack:
        print(f"packed without prompts: {pack(arguments.output_file)}")


if __name__ == "__main__":
    main()
