"""The shipped drafter on the real target: what the README promises, on a few prompts."""

from pathlib import Path

import pytest
import torch
from domino_spec.examples.smollm2_target import smollm2_path
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [
    "A train travels 60 miles in 1.5 hours. How far does it go in 4 hours at the same speed?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What are the main causes of the French Revolution?",
    "Tom has 3 boxes with 12 pencils each. He gives away 10 pencils. How many are left?",
]
MORE = [f"Explain how {x} works in two paragraphs." for x in ("a refrigerator", "a vaccine", "inflation", "a bicycle")]
MORE += [f"Write a Python function that {x}." for x in ("sorts a list", "counts words", "reverses a string")]
MORE += [f"What is {a} times {b} plus {c}?" for a, b, c in ((12, 7, 5), (8, 19, 3), (25, 4, 11))]


@pytest.fixture(scope="module")
def pair():
    path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    drafter = AutoModel.from_pretrained(ROOT, trust_remote_code=True, dtype=torch.float32).eval()
    # tau of whole blocks, whatever this machine's clock says about their worth.
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield tokenizer, target, drafter
    torch.set_num_threads(threads)


def chat(tokenizer, prompts):
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )


@pytest.mark.parametrize("rollout", ["sequential", "parallel"])
def test_greedy_text_is_the_targets_own(pair, rollout):
    tokenizer, target, drafter = pair
    drafter.generation_config.rollout = rollout
    inputs = chat(tokenizer, PROMPTS[:1])
    plain = target.generate(**inputs, max_new_tokens=64, do_sample=False)
    drafted = target.generate(**inputs, max_new_tokens=64, do_sample=False, assistant_model=drafter)
    drafter.generation_config.rollout = "sequential"
    assert torch.equal(plain, drafted)
    assert drafter.last_speculation.mean_acceptance_length > 1.3


def test_batch_of_chats(pair):
    tokenizer, target, drafter = pair
    inputs = chat(tokenizer, PROMPTS)
    plain = target.generate(**inputs, max_new_tokens=48, do_sample=False)
    drafted = target.generate(**inputs, max_new_tokens=48, do_sample=False, assistant_model=drafter)
    assert torch.equal(plain, drafted)


def test_adaptive_batch_of_chats(pair):
    tokenizer, target, drafter = pair
    inputs = chat(tokenizer, PROMPTS)
    plain = target.generate(**inputs, max_new_tokens=48, do_sample=False)
    drafter.generation_config.num_assistant_tokens_schedule = "adaptive"
    drafted = target.generate(**inputs, max_new_tokens=48, do_sample=False, assistant_model=drafter)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    assert torch.equal(plain, drafted)
    assert drafter.last_speculation.num_plain_steps > 0


def test_head_earns_its_keep(pair):
    tokenizer, target, drafter = pair
    inputs = chat(tokenizer, PROMPTS)
    taus = {}
    for use_head in (True, False):
        drafter.generation_config.use_head = use_head
        target.generate(**inputs, max_new_tokens=64, do_sample=False, assistant_model=drafter)
        taus[use_head] = drafter.last_speculation.mean_acceptance_length
    drafter.generation_config.use_head = True
    assert taus[True] > taus[False] > 1.2, taus


def test_pipeline(pair):
    tokenizer, target, drafter = pair
    messages = [{"role": "user", "content": PROMPTS[3]}]
    texts = []
    for extra in ({}, {"assistant_model": drafter}):
        answer = pipeline("text-generation", model=target, tokenizer=tokenizer, **extra)
        texts.append(answer(messages, max_new_tokens=24, do_sample=False)[0]["generated_text"])
    assert texts[0] == texts[1]
    assert drafter.last_speculation.num_rounds < 23


@pytest.mark.slow
def test_greedy_text_of_more_prompts(pair):
    tokenizer, target, drafter = pair
    for prompt in PROMPTS + MORE:
        inputs = chat(tokenizer, [prompt])
        plain = target.generate(**inputs, max_new_tokens=128, do_sample=False)
        drafted = target.generate(**inputs, max_new_tokens=128, do_sample=False, assistant_model=drafter)
        assert torch.equal(plain, drafted), prompt
