"""What tests share: assisted calls beside plain ones, stops that fall inside a block, streams, a bare process."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from tiny import prompt_ids
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

KINDS = ("oracle", "wrong", "half")

# Runs with `python -I`, in an empty directory; `domino_spec` cannot be imported there, whatever is installed.
PREAMBLE = """
import json, shutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "domino_spec":
            raise ImportError("domino_spec is blocked in this test")

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin

torch.set_num_threads(1)
arguments = json.loads(sys.argv[1])
target = AutoModelForCausalLM.from_pretrained(arguments["target"]).eval()
ids = torch.tensor([[5, 9, 2, 44, 17, 3]])
mask = torch.ones_like(ids)
plain = target.generate(input_ids=ids, attention_mask=mask, max_new_tokens=14, do_sample=False).tolist()

def text(drafter, **kwargs):
    drafter.last_speculation = None
    output = target.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=14, do_sample=False, assistant_model=drafter, **kwargs
    )
    assert drafter.last_speculation is not None, "plain generation ran"
    return output.tolist(), drafter.last_speculation.acceptance_lengths

def sentence(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def as_inputs(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def both(target, drafter, inputs, max_new_tokens: int = 20, **kwargs):
    """Plain and assisted output of the same call; keyword arguments that are functions are made afresh for each."""

    def call(**extra):
        fresh = {key: value() if key in ("stopping_criteria", "streamer") else value for key, value in kwargs.items()}
        return target.generate(**inputs, max_new_tokens=max_new_tokens, **{"do_sample": False} | fresh, **extra)

    return call(), call(assistant_model=drafter)


def assert_equal_text(target, drafter, inputs, max_new_tokens: int = 20, **kwargs) -> torch.Tensor:
    plain, assisted = both(target, drafter, inputs, max_new_tokens, **kwargs)
    assert assisted.tolist() == plain.tolist()
    return plain


def assert_same_draws(target, drafter, inputs, max_new_tokens: int = 16, seed: int = 0, **kwargs) -> torch.Tensor:
    """The sampled text is plain sampling's under the same seed, and the generator stands where plain leaves it."""
    outputs, states = [], []
    for extra in ({}, {"assistant_model": drafter}):
        torch.manual_seed(seed)
        outputs.append(target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=True, **kwargs, **extra))
        states.append(torch.get_rng_state())
    assert outputs[1].tolist() == outputs[0].tolist()
    assert torch.equal(*states)
    return outputs[0]


def eos_at(target, inputs, position: int, rows=(0,), **kwargs) -> int:
    """The greedy token at new `position` of the first of `rows`, which must not come earlier there."""
    plain = target.generate(**inputs, max_new_tokens=position + 1, do_sample=False, **kwargs)
    return plain[rows[0], -1].item()


def varied_prompt(target, length: int = 7, distinct: int = 4) -> dict[str, torch.Tensor]:
    """A prompt whose first `distinct` greedy tokens differ, so that a stop at one of them is not met before it."""
    for seed in range(100):
        inputs = as_inputs(prompt_ids(length, seed=seed))
        new = target.generate(**inputs, max_new_tokens=distinct, do_sample=False)[0, length:].tolist()
        if len(set(new)) == distinct:
            return inputs
    raise AssertionError("no prompt with varied continuation")


class Recorder(BaseStreamer):
    """Everything a streamer was given, flat, and whether it was ended."""

    made: list = []

    def __init__(self):
        self.tokens, self.ended = [], 0
        Recorder.made.append(self)

    def put(self, value):
        self.tokens.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


def assert_same_record(plain, assisted):
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = getattr(assisted, name), getattr(plain, name)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Calls(LogitsProcessor):
    """Remembers what it was called with, and changes the scores by how often it was called."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids.tolist(), scores.argmax(-1).tolist()))
        return scores.roll(len(self.seen) % 3, dims=-1)


class LastTokenIs(StoppingCriteria):
    """Reads the last token only: anything seen late is missed."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class LengthIs(StoppingCriteria):
    """Fires at one exact length and at no other."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] == self.length)


class RowLimits(StoppingCriteria):
    """Another length limit for every row of the batch."""

    def __init__(self, limits):
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.limits


def run_elsewhere(script: str, tmp_path: Path, **arguments) -> dict:
    """Run a script in a new process that has nothing but the directories it is given."""
    home, nowhere = tmp_path / "home", tmp_path / "nowhere"
    home.mkdir()
    nowhere.mkdir()
    environment = {key: os.environ[key] for key in ("PATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY") if key in os.environ}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HOME": str(home)}
    code = textwrap.dedent(PREAMBLE + script)
    command = [sys.executable, "-I", "-c", code, json.dumps({key: str(value) for key, value in arguments.items()})]
    done = subprocess.run(command, cwd=nowhere, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(nowhere.iterdir())
    return json.loads(done.stdout.split("RESULT")[-1])
