"""What speculation costs where it cannot help, and keeps where it is perfect.

    python -m domino_spec.benchmarks.never_slower [--dtype bfloat16] [--max_new_tokens 256] [--repeats 7]

Four ways of writing one answer, in turn, as often as `--repeats`; medians of seconds an answer:

    plain       `generate` without a drafter
    wrong ids   adaptive; the drafter does its full work, then every id it proposes is replaced by a wrong one
    right ids   adaptive; as above, but replaced by the answer's own ids
    fixed       right ids with a full block every round (num_assistant_tokens_schedule="constant")

Lookup is off, so that nothing but the drafter proposes. In bfloat16 rounding may let a text part from all texts that
right ids can be taken from; what was proposed from there on was not right, so that answer is taken again, with its
text known, at most `MOST_RETAKES` times in all. Exits with 1 where wrong ids cost more than 5% over plain, or right
ids keep less than 95% of the fixed speed.
"""

import argparse
import statistics
import sys
import time

import torch
from domino_spec import DominoForSpeculation
from domino_spec.examples.smollm2_target import smollm2_path
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

MOST_RETAKES = 20
PROMPT = "Explain how a steam engine works, what it was used for, and which inventions made it better."


class Forced:
    """The drafter's `draft`, whose proposals are replaced by the answer's ids, moved by `offset`."""

    def __init__(self, drafter, vocab_size: int):
        self.draft, self.vocab_size = drafter.draft, vocab_size
        self.texts: list[list[int]] = []  # prompt and answer, as far as they were seen to differ; likeliest last
        self.offset = 0
        self.parted = False  # the text being written is none of them

    def __call__(self, *args, input_ids, **kwargs):
        own = self.draft(*args, input_ids=input_ids, **kwargs)
        written = input_ids[0].tolist()
        place, width = len(written), own.token_ids.shape[1]
        known = [text for text in self.texts if text[:place] == written]
        self.parted |= width > 0 and not known
        ids = torch.tensor((known or self.texts)[-1][place : place + width])
        own.token_ids[0, : len(ids)] = (ids + self.offset) % self.vocab_size
        return own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft_model_name_or_path", default=".")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = getattr(torch, arguments.dtype)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path())
    target = AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=dtype).eval()
    drafter = DominoForSpeculation.from_pretrained(arguments.draft_model_name_or_path, dtype=dtype).eval()
    forced = drafter.draft = Forced(drafter, target.config.vocab_size)
    drafter.generation_config.lookup = False
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    target.generation_config.eos_token_id = None  # all ways write as many tokens
    length = {"max_new_tokens": arguments.max_new_tokens, "pad_token_id": tokenizer.pad_token_id}

    latest: dict[str, list[int]] = {}
    retaken: list[str] = []

    def seconds(way: str) -> float:
        """Of one answer that was written as its way says."""
        drafter.generation_config.num_assistant_tokens_schedule = "constant" if way == "fixed" else "adaptive"
        forced.offset = 1 if way == "wrong ids" else 0
        while True:
            forced.texts.sort(key=lambda text: text == latest.get(way))
            forced.parted = False
            started = time.perf_counter()
            extra = {} if way == "plain" else {"assistant_model": drafter}
            output = target.generate(**inputs, do_sample=False, **length, **extra)
            elapsed = time.perf_counter() - started
            text = latest[way] = output[0].tolist()
            if text not in forced.texts:
                forced.texts.append(text)
            if not forced.parted or forced.offset:
                return elapsed
            retaken.append(way)
            if len(retaken) > MOST_RETAKES:
                sys.exit(f"{len(retaken)} answers parted from all known ones; expected fewer: try --dtype float32.")

    ways = ("plain", "wrong ids", "right ids", "fixed")
    for way in ("plain", *ways[1:] * 2):  # warm up
        seconds(way)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    tau = {}
    for number in tqdm(range(arguments.repeats), unit="turn"):
        for way in ways[number % 4 :] + ways[: number % 4]:
            taken[way].append(seconds(way))
            if way != "plain":
                tau[way] = drafter.last_speculation.mean_acceptance_length
    medians = {way: statistics.median(values) for way, values in taken.items()}
    for way, value in medians.items():
        spread = f"{min(taken[way]):.2f} to {max(taken[way]):.2f}"
        print(f"{way:10s} {value:.2f} s ({spread})" + (f", tau {tau[way]:.2f}" if way in tau else ""))
    print(f"answers taken again because their text was new: {len(retaken)}")
    cost = medians["wrong ids"] / medians["plain"]
    kept = medians["fixed"] / medians["right ids"]
    print(
        f"wrong ids take {cost:.3f} of plain's time (bar 1.05); right ids keep {kept:.1%} of the fixed speed (bar 95%)"
    )
    sys.exit(cost > 1.05 or kept < 0.95)


if __name__ == "__main__":
    main()
