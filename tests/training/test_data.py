"""Data: rows of every kind, chats under real templates, mixtures, and the target's own answers."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from domino_spec.train_peft import main as train_main
from domino_spec.training.answers import (
    AnswerOptions,
    answer,
    answer_batch,
    load_answers,
    pack,
    part_files,
    prompt_key,
    read_jsonl,
    tokenize_prompt,
)
from domino_spec.training.answers import main as answer_main
from domino_spec.training.chat import supervise_turns
from domino_spec.training.data import (
    BlockCollator,
    load_mixture,
    load_rows,
    load_split,
    prepare_dataset,
    tokenize_row,
)
from domino_spec.training.states import row_key
from safetensors.torch import load_file
from tiny import MASK_ID, make_target, save_target
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from trl.scripts.utils import DatasetConfig


class FakeTokenizer:
    """Letters are ids 0 to 25; a chat template with role marks and an end mark; ids beyond are special."""

    pad_token_id, eos_token_id, bos, end = 62, 63, 61, 59
    added_tokens_decoder: dict = {}
    roles = {"system": 50, "user": 51, "assistant": 52}

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [self.bos] * add_special_tokens + [ord(letter) - 97 for letter in text]}

    def apply_chat_template(self, messages, add_generation_prompt=False, return_dict=True):
        ids = [self.bos]
        for message in messages:
            ids += [self.roles[message["role"]], *self(message["content"], False)["input_ids"], self.end]
        return {"input_ids": ids + [self.roles["assistant"]] * add_generation_prompt}


# Rows ---------------------------------------------------------------------------------------------------------------

CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f"},
]
CHAT_IDS = [61, 51, 0, 1, 59, 52, 2, 3, 59, 51, 4, 59, 52, 5, 59]


@pytest.mark.parametrize(
    ("row", "ids", "supervised"),
    [
        ({"prompt_ids": [1, 2], "completion_ids": [3, 4]}, [1, 2, 3, 4], [0, 0, 1, 1]),
        ({"input_ids": [1, 2, 3]}, [1, 2, 3], [1, 1, 1]),
        ({"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}, [1, 2, 3], [0, 1, 1]),
        ({"messages": CHAT}, CHAT_IDS, [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]),
        ({"prompt": "ab", "completion": "cd"}, [61, 0, 1, 2, 3], [0, 0, 0, 1, 1]),
        ({"prompt": CHAT[:3], "completion": CHAT[3:]}, CHAT_IDS, [0] * 13 + [1, 1]),
        ({"prompt": CHAT[:1], "response": "cd"}, CHAT_IDS[:9], [0] * 6 + [1] * 3),
        ({"prompt": "ab", "response": "cd"}, [61, 0, 1, 2, 3], [0, 0, 0, 1, 1]),
        ({"text": "abc"}, [61, 0, 1, 2], [1, 1, 1, 1]),
        ({"text": None, "messages": CHAT[:2]}, CHAT_IDS[:9], [0] * 6 + [1] * 3),
    ],
)
def test_tokenize_row(row, ids, supervised):
    assert tokenize_row(row, FakeTokenizer()) == {"input_ids": ids, "supervised": supervised}


def test_unknown_rows_are_named():
    with pytest.raises(ValueError, match=r"columns \['answer', 'question'\].*expected `messages`"):
        tokenize_row({"question": "a", "answer": "b"}, FakeTokenizer())


def test_prepare_dataset_drops_rows_that_cannot_teach():
    rows = Dataset.from_list(
        [
            {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5]},
            {"prompt_ids": [1, 2, 3, 4, 5, 6, 7], "completion_ids": [3, 4]},  # the answer lies past the cut
            {"prompt_ids": [1, 2], "completion_ids": [3]},  # nothing after its only anchor
            {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5, 6, 7, 8]},  # cut, still useful
        ]
    )
    useful, dropped = prepare_dataset(rows, FakeTokenizer(), max_length=6)
    assert dropped == 2
    assert useful["input_ids"][:] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    assert useful["supervised"][:] == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]


def test_collator_pads_on_the_right():
    batch = BlockCollator(62)(
        [{"input_ids": [1, 2, 3], "supervised": [0, 1, 1]}, {"input_ids": [4], "supervised": [1]}]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 62, 62]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["supervised"].tolist() == [[0, 1, 1], [1, 0, 0]]


# Chat templates -----------------------------------------------------------------------------------------------------

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
# Earlier thinking is dropped, the last answer always shows some; thinking can be switched off in the prompt.
QWEN3 = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% set parts = m.content.split('</think>') %}{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>
{{ parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' }}
</think>

{% endif %}{{ parts[-1].strip() }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
# The prompt opens the thinking that the template drops from every answer.
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}").replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)
MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MARKS += ("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>")


def letters(template: str, eos: str) -> PreTrainedTokenizerFast:
    """A token for every printable character, and the marks of the templates as special ones."""
    vocabulary = {chr(i): i - 9 for i in range(9, 127)}
    model = Tokenizer(WordLevel(vocabulary, unk_token="~"))
    model.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<bos>", eos_token=eos, additional_special_tokens=list(MARKS)
    )
    tokenizer.chat_template = template
    return tokenizer


def spans(rows: list[dict], tokenizer) -> list[list[str]]:
    """The supervised runs of every row as text."""
    found = []
    for row in rows:
        runs, before = [], 0
        for token, flag in zip(row["input_ids"], row["supervised"], strict=True):
            if flag:
                runs = runs if before else [*runs, []]
                runs[-1].append(token)
            before = flag
        found.append(["".join(tokenizer.convert_ids_to_tokens(run)) for run in runs])
    return found


def turns(*contents: str, system: str | None = None) -> list[dict]:
    chat = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + chat


@pytest.mark.parametrize(
    ("template", "eos", "end"),
    [(CHATML, "<|im_end|>", "<|im_end|>"), (LLAMA3, "<|eot_id|>", "<|eot_id|>"), (GEMMA, "<eos>", "<end_of_turn>")],
)
def test_turns_end_with_what_the_target_writes_last(template, eos, end):
    """ChatML, Llama 3 and Gemma shapes; none has generation tags, Gemma's end of turn is no end of sequence."""
    tokenizer = letters(template, eos)
    chat = turns("hi", "yes", "why?", "so it is")
    rows = supervise_turns(chat, tokenizer, {})
    assert spans(rows, tokenizer) == [[f"yes{end}", f"so it is{end}"]]
    assert tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] == rows[0]["input_ids"]
    # The first supervised token follows what the target was shown.
    prompt = tokenize_prompt({"messages": chat[:1]}, tokenizer)
    assert rows[0]["input_ids"][: len(prompt)] == prompt and rows[0]["supervised"].index(1) == len(prompt)
    # As prompt and completion only the completion counts.
    row = {"prompt": chat[:3], "completion": chat[3:]}
    assert spans([tokenize_row(row, tokenizer)], tokenizer) == [[f"so it is{end}"]]


def test_templates_that_drop_earlier_thinking():
    """A turn that is shown otherwise later on is learnt from the chat as it was then."""
    tokenizer = letters(QWEN3, "<|im_end|>")
    chat = turns("a", "<think>hm</think>b", "c", "<think>ah</think>d")
    rows = supervise_turns(chat, tokenizer, {})
    assert spans(rows, tokenizer) == [
        ["<think>\nah\n</think>\n\nd<|im_end|>"],
        ["<think>\nhm\n</think>\n\nb<|im_end|>"],
    ]
    assert "hm" not in "".join(tokenizer.convert_ids_to_tokens(rows[0]["input_ids"]))
    prepared, dropped = prepare_dataset(Dataset.from_list([{"messages": chat}]), tokenizer, 200)
    assert (len(prepared), dropped) == (2, 0)


def test_thinking_off_is_a_template_option():
    tokenizer = letters(QWEN3, "<|im_end|>")
    off = {"enable_thinking": False}
    rows = supervise_turns(turns("a", "b"), tokenizer, {}, off)
    assert spans(rows, tokenizer) == [["b<|im_end|>"]]
    thinking = supervise_turns(turns("a", "b"), tokenizer, {})
    assert spans(thinking, tokenizer) == [["<think>\n\n</think>\n\nb<|im_end|>"]]
    # A row's own option goes before the run's, as in TRL.
    row = {"messages": turns("a", "b"), "chat_template_kwargs": {"enable_thinking": True}}
    assert tokenize_row(row, tokenizer, off) == thinking[0]
    prompt = tokenize_prompt({"prompt": turns("a")}, tokenizer, off)
    assert rows[0]["input_ids"][: len(prompt)] == prompt and len(prompt) == rows[0]["supervised"].index(1)


def test_templates_that_refuse_system_messages():
    """The system message begins the first user message, for training and for answering alike."""
    tokenizer = letters(GEMMA, "<eos>")
    chat = turns("hi", "yes", system="Be brief.")
    folded = turns("Be brief.\n\nhi", "yes")
    assert supervise_turns(chat, tokenizer, {}) == supervise_turns(folded, tokenizer, {})
    assert tokenize_prompt({"messages": chat}, tokenizer) == tokenize_prompt({"messages": folded}, tokenizer)
    with pytest.raises(ValueError, match="refuses a chat of system, assistant: System role not supported; change"):
        supervise_turns([chat[0], chat[2]], tokenizer, {})


def test_turns_that_cannot_be_found_are_dropped_and_counted():
    """A template that never shows what its prompt asked for, and a chat that begins with an answer."""
    tokenizer = letters(FORGETFUL, "<|im_end|>")
    rows = Dataset.from_list([{"messages": turns("a", "b")}, {"messages": turns("a", "b")[1:]}])
    useful, dropped = prepare_dataset(rows, tokenizer, 100)
    assert (len(useful), dropped) == (0, 2)


# Sources ------------------------------------------------------------------------------------------------------------


def write_jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_files_of_every_kind(tmp_path):
    tokenizer, rows = FakeTokenizer(), [{"messages": CHAT}, {"messages": CHAT[:2]}]
    expected = [tokenize_row(row, tokenizer) for row in rows]
    data = Dataset.from_list(rows)
    data.to_parquet(tmp_path / "rows.parquet")
    data.to_json(tmp_path / "rows.json")
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.jsonl.xz").write_bytes(lzma.compress((tmp_path / "rows.jsonl").read_bytes()))
    for ending in ("parquet", "json", "jsonl", "jsonl.xz"):
        found = load_rows(str(tmp_path / f"rows.{ending}"), tokenizer)
        assert [tokenize_row(row, tokenizer) for row in found] == expected, ending
    Dataset.from_dict({"prompt": ["ab"], "completion": ["cd"]}).to_csv(tmp_path / "rows.csv")
    (tmp_path / "rows.txt").write_text("abc\nde\n")
    assert tokenize_row(load_rows(str(tmp_path / "rows.csv"), tokenizer)[0], tokenizer)["supervised"] == [
        0,
        0,
        0,
        1,
        1,
    ]
    assert load_rows(str(tmp_path / "rows.txt"), tokenizer)["text"][:] == ["abc", "de"]
    with pytest.raises(ValueError, match="JSONL file has only 'train'"):
        load_rows(str(tmp_path / "rows.jsonl"), tokenizer, split="test")
    with pytest.raises(ValueError, match="columns .*question.*expected `messages`"):
        load_rows(write_jsonl(tmp_path / "other.jsonl", [{"question": "a"}]), tokenizer)


def test_rows_of_different_kinds_in_one_file(tmp_path):
    """None is lost because the first row has other columns, or a prompt of another type."""
    rows = [
        {"text": "abc"},
        {"messages": CHAT[:2], "source": 3},
        {"prompt": CHAT[:1], "completion": CHAT[1:2], "source": "x"},
        {"prompt": "ab", "response": "cd"},
        {"prompt_ids": [1, 2], "completion_ids": [3, 4]},
        {"input_ids": [1, 2, 3]},
    ]
    tokenizer = FakeTokenizer()
    found = load_rows(write_jsonl(tmp_path / "rows.jsonl", rows), tokenizer)
    useful, dropped = prepare_dataset(found, tokenizer, 100)
    assert dropped == 0
    assert [dict(row) for row in useful] == [tokenize_row(row, tokenizer) for row in rows]


def test_mixtures_take_usable_rows_in_their_shares(tmp_path):
    tokenizer = FakeTokenizer()
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "abc"}] * 30 + [{"text": "a"}] * 3)
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT[:2]}] * 10)

    def mix(*fractions):
        entries = [DatasetConfig(path=path, fraction=f) for path, f in zip((texts, chats), fractions, strict=True)]
        return load_mixture(entries, tokenizer, lambda rows: prepare_dataset(rows, tokenizer, 100))

    mixture, dropped = mix(None, None)
    assert (len(mixture), dropped) == (40, 3)
    mixture, _ = mix(1, 1)
    assert [len(ids) for ids in mixture["input_ids"]] == [4] * 10 + [9] * 10
    mixture, _ = mix(0.75, 0.25)
    assert [len(ids) for ids in mixture["input_ids"]] == [4] * 30 + [9] * 10
    with pytest.raises(ValueError, match=r"fractions are \[1, None\]; expected one above 0 for each"):
        mix(1, None)


# Answers ------------------------------------------------------------------------------------------------------------

GREEDY = AnswerOptions(max_new_tokens=8, answer_batch_size=2)
SAMPLED = AnswerOptions(max_new_tokens=8, answer_batch_size=2, temperature=1.0, top_k=20, answer_seed=5)
PROMPTS = [{"messages": CHAT[:1]}, {"messages": CHAT}, {"prompt": "hello"}, {"prompt": "abcdefgh"}, {"prompt": "zz"}]


def answers_of(path) -> dict:
    return {row["key"]: row for row in list(read_jsonl(path))[1:]}


def test_answers_are_the_targets_own():
    target = make_target()
    ids = [[5, 9, 2], [4, 4, 4, 4, 4, 1]]
    plain = [target.generate(torch.tensor([row]), max_new_tokens=8, do_sample=False)[0].tolist() for row in ids]
    free = answer_batch(target, ids, 62, max_new_tokens=8, do_sample=False)
    assert free == [text[len(row) :] for text, row in zip(plain, ids, strict=True)]
    end = free[0][3]
    target.generation_config.eos_token_id = [end, 63]
    first = free[0].index(end)
    assert answer_batch(target, ids, 62, max_new_tokens=8, do_sample=False)[0] == free[0][: first + 1]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
def test_answering_resumes_as_if_never_interrupted(tmp_path, options):
    """Sampled answers too are those of the uninterrupted run, wherever it was cut."""
    target, tokenizer = make_target(), FakeTokenizer()
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    answer(target, tokenizer, iter(PROMPTS), whole, options)
    expected = answers_of(whole)
    assert len(expected) == 5
    first = expected[prompt_key(tokenizer.apply_chat_template(CHAT[:1], True)["input_ids"])]
    assert first["prompt_ids"] == [61, 51, 0, 1, 59, 52] and len(first["completion_ids"]) == 8
    # A conversation that ends with an answer is asked again without it.
    assert [61, 51, 0, 1, 59, 52, 2, 3, 59, 51, 4, 59, 52] in [row["prompt_ids"] for row in expected.values()]

    data = whole.read_bytes()
    places = [i for i, byte in enumerate(data) if byte == 10]
    for cut in (5, places[0] + 1, places[1] + 20, places[3] + 1, len(data) - 3):
        broken.write_bytes(data[:cut])
        generate, calls = target.generate, []

        def counting(*args, generate=generate, calls=calls, **kwargs):
            calls.append(kwargs["input_ids"].shape[0])
            return generate(*args, **kwargs)

        target.generate = counting
        answer(target, tokenizer, iter(PROMPTS), broken, options)
        del target.generate
        assert answers_of(broken) == expected
        done = max(0, data[:cut].count(b"\n") - 1)
        # A sampled batch is drawn again as a whole.
        assert sum(calls) == 5 - (done if options is GREEDY else done // 2 * 2)
        assert json.loads(broken.read_text().splitlines()[0]) == {"settings": options.settings(target)}
    before = whole.read_bytes()
    torch.manual_seed(99)
    answer(target, tokenizer, iter(PROMPTS), whole, options)
    assert whole.read_bytes() == before


def test_processes_answer_shares_of_the_same_batches(tmp_path):
    target, tokenizer = make_target(), FakeTokenizer()
    one = answer(target, tokenizer, PROMPTS, tmp_path / "answers.jsonl", SAMPLED)
    parts = [answer(target, tokenizer, PROMPTS, tmp_path / "answers.jsonl", SAMPLED, rank, 2) for rank in range(2)]
    assert parts == part_files(tmp_path / "answers.jsonl", 2) and one not in parts
    shares = [answers_of(part) for part in parts]
    assert [len(share) for share in shares] == [3, 2] and shares[0] | shares[1] == answers_of(one)


def test_settings_record_whatever_decides_the_answers(tmp_path):
    target, tokenizer = make_target(), FakeTokenizer()
    target.config._name_or_path = "/models/Tiny"
    settings = {"target": "Tiny", "dtype": "float32", "max_new_tokens": 8, "do_sample": False}
    assert GREEDY.settings(target) == settings
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 1.0, "seed": 5, "batch_size": 2}
    assert SAMPLED.settings(target) == settings | sampled
    off = AnswerOptions(max_new_tokens=8, chat_template_kwargs='{"enable_thinking": false}')
    assert off.settings(target) == settings | {"chat_template_kwargs": {"enable_thinking": False}}
    answer(target, tokenizer, PROMPTS, tmp_path / "answers.jsonl", GREEDY)
    target.generation_config.repetition_penalty = 1.3
    assert GREEDY.settings(target) == settings | {"generation_config": {"repetition_penalty": 1.3}}
    with pytest.raises(ValueError, match="same settings to resume"):
        answer(target, tokenizer, PROMPTS, tmp_path / "answers.jsonl", GREEDY)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature, top_p and top_k are -1.0"),
        ({"top_p": 0.0}, "top_p and top_k are 0.0, 0.0"),
        ({"chat_template_kwargs": "{thinking"}, "expected a JSON object"),
        ({"chat_template_kwargs": "[1]"}, "expected a JSON object"),
    ],
)
def test_bad_answer_options(option, said):
    with pytest.raises(ValueError, match=said):
        AnswerOptions(**option)


def test_long_prompts_are_skipped_and_counted(tmp_path, capsys):
    options = AnswerOptions(max_new_tokens=2, max_prompt_tokens=6, max_prompts=4)
    path = answer(make_target(), FakeTokenizer(), PROMPTS, tmp_path / "answers.jsonl", options)
    assert len(answers_of(path)) == 2
    assert "skipped 2 prompts over 6 tokens" in capsys.readouterr().out


def test_packed_answers_join_their_prompts(tmp_path):
    target, tokenizer = make_target(), FakeTokenizer()
    path, prompts = tmp_path / "answers.jsonl", write_jsonl(tmp_path / "prompts.jsonl", PROMPTS)
    answer(target, tokenizer, read_jsonl(prompts), path, GREEDY)
    packed = pack(str(path))
    assert "prompt_ids" not in lzma.open(packed, "rt").read()
    plain = load_answers(path)
    assert load_answers(packed, tokenizer, prompts) == [
        {"key": row["key"], "completion_ids": row["completion_ids"], "prompt_ids": row["prompt_ids"]} for row in plain
    ]
    rows = load_rows(packed, tokenizer, prompts_file=prompts)
    assert tokenize_row(rows[0], tokenizer) == tokenize_row(plain[0], tokenizer)
    with pytest.raises(ValueError, match="without their prompts"):
        load_answers(packed, tokenizer)
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "qqq"}])
    with pytest.raises(ValueError, match="none of the answers"):
        load_answers(packed, tokenizer, other)
    with pytest.raises(FileNotFoundError, match="no dataset file"):
        load_rows(str(tmp_path / "nothing.jsonl"), tokenizer)


# The command line ---------------------------------------------------------------------------------------------------


@pytest.fixture
def call(tmp_path):
    """`train_peft.py` on a tiny target of its own: options in, the output directory's path out."""
    save_target(tmp_path / "target", eos_token_id=63)

    def run(*options):
        arguments = ["--target_model_name_or_path", tmp_path / "target", "--use_cpu", "--max_steps", 1]
        arguments += ["--output_dir", tmp_path / "out", "--num_hidden_layers", 1, "--block_size", 6]
        arguments += ["--mask_token_id", MASK_ID, "--head_hidden_size", 8, "--head_rank", 4, "--eval_rows", 0]
        arguments += ["--num_anchors", 4, "--save_strategy", "no", "--disable_tqdm", True]
        train_main([str(argument) for argument in (*arguments, *options)])
        return tmp_path / "out"

    return run


def weights(directory) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_a_run_that_could_learn_nothing_stops(tmp_path, call, capsys):
    """F6: every label lost to truncation, or none there from the start; some lost: said, and the rest trains."""
    lost = {"prompt_ids": list(range(20)), "completion_ids": [1, 2, 3]}
    bare = {"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 0, 1]}
    for rows in ([lost] * 4, [bare] * 4):
        data = write_jsonl(tmp_path / "rows.jsonl", rows)
        with pytest.raises(SystemExit, match="0 usable rows.*learn from: add rows, raise --max_length"):
            call("--dataset_name", data, "--max_length", 20)
        assert not (tmp_path / "out" / "model.safetensors").exists()
    kept = {"prompt_ids": [1, 2, 3], "completion_ids": [4, 5, 6, 7]}
    capsys.readouterr()
    call("--dataset_name", write_jsonl(tmp_path / "rows.jsonl", [lost, bare, kept]), "--max_length", 20)
    said = capsys.readouterr().out
    assert "dropped 2 of 3 rows" in said and "1 rows, 4 supervised tokens" in said


def test_one_valid_anchor_trains(tmp_path, call):
    """F13: rows shorter than a block, one of whose tokens can be drafted."""
    data = write_jsonl(tmp_path / "rows.jsonl", [{"prompt_ids": [7, 8], "completion_ids": [3, 4]}] * 2)
    still = weights(call("--dataset_name", data, "--learning_rate", 0, "--warmup_steps", 0))
    moved = weights(call("--dataset_name", data, "--learning_rate", 0.1, "--warmup_steps", 0))
    assert not torch.equal(moved["fc.weight"], still["fc.weight"])
    assert all(weight.isfinite().all() for weight in moved.values())


CHATS = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1}"}]} for i in range(6)]


def test_answers_are_made_before_training_and_once(tmp_path, call):
    options = ["--dataset_name", write_jsonl(tmp_path / "prompts.jsonl", CHATS), "--generate_answers"]
    options += ["--max_new_tokens", 6, "--states_cache_dir", tmp_path / "states"]
    out = call(*options)
    answers = list(read_jsonl(out / "answers.jsonl"))
    settings = {"target": "target", "dtype": "float32", "max_new_tokens": 6, "do_sample": False}
    assert answers[0] == {"settings": settings}
    assert sorted(row["prompt_ids"] for row in answers[1:]) == [[50, i, i + 1, 63, 52] for i in range(6)]
    index = tmp_path / "states" / "index.json"
    before = (out / "answers.jsonl").read_bytes(), index.stat().st_mtime_ns
    call(*options)
    assert before == ((out / "answers.jsonl").read_bytes(), index.stat().st_mtime_ns)
    with pytest.raises(SystemExit, match="same settings to resume"):
        call(*options, "--temperature", 1)


def test_mixtures_and_test_splits(tmp_path, call, capsys):
    """`datasets` of a YAML file; a dataset's own test split is what tau is measured on."""
    answers = write_jsonl(tmp_path / "rows.jsonl", [{"prompt_ids": [1, 2, 3], "completion_ids": [4, 5, 6]}] * 8)
    hub = tmp_path / "hub"
    for split, count in (("train", 5), ("test", 3)):
        (hub / "data").mkdir(parents=True, exist_ok=True)
        Dataset.from_dict({"text": ["w1 w2 w3 w4 w5"] * count}).to_parquet(hub / "data" / f"{split}.parquet")
    config = tmp_path / "mixture.yaml"
    config.write_text(f"datasets:\n  - path: {answers}\n  - path: {hub}\n    split: train\n")
    call("--config", config)
    assert "13 rows, 49 supervised tokens" in capsys.readouterr().out
    assert f'[{{"path": "{answers}", "split": "train"}}, ' in (tmp_path / "out" / "README.md").read_text()
    assert len(load_split(str(hub), None, "test")) == 3 and load_split(str(hub), None, "validation") is None
    call("--dataset_name", hub, "--eval_rows", 2)
    said = capsys.readouterr().out
    assert "5 rows, 25 supervised tokens" in said and "eval_tau_final" in said
    Dataset.from_dict({"text": ["w1"] * 3}).to_parquet(hub / "data" / "test.parquet")
    with pytest.raises(SystemExit, match=r"no usable row in 'test\[:2\]'"):
        call("--dataset_name", hub, "--eval_rows", 2)
    with pytest.raises(SystemExit, match="streaming is on"):
        call("--dataset_name", hub, "--dataset_streaming")
    with pytest.raises(SystemExit, match="both given"):
        call("--config", config, "--dataset_name", hub)


def test_the_answering_script(tmp_path, monkeypatch, capsys):
    save_target(tmp_path / "target", eos_token_id=None)
    command = ["answers", "--target_model_name_or_path", str(tmp_path / "target"), "--dtype", "float32"]
    command += ["--prompts", write_jsonl(tmp_path / "prompts.jsonl", CHATS)]
    command += ["--output_file", str(tmp_path / "answers.jsonl"), "--max_new_tokens", "4", "--temperature", "0.7"]
    monkeypatch.setattr(sys, "argv", [*command, "--top_p", "0.9", "--max_prompts", "4", "--pack"])
    answer_main()
    first = next(read_jsonl(tmp_path / "answers.jsonl"))["settings"]
    assert (first["temperature"], first["top_p"], first["dtype"]) == (0.7, 0.9, "float32")
    assert len(answers_of(tmp_path / "answers.jsonl.xz")) == 4
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="answers: .*same settings to resume"):
        answer_main()


def test_two_processes_share_answering_and_states(tmp_path):
    """Each answers and computes its share, one file a process; then they train on all of it."""
    save_target(tmp_path / "target", eos_token_id=None)
    data = write_jsonl(tmp_path / "prompts.jsonl", CHATS)
    arguments = f"""--target_model_name_or_path {tmp_path}/target --dataset_name {data} --output_dir {tmp_path}/out
        --generate_answers --answer_batch_size 2 --max_new_tokens 6 --states_cache_dir {tmp_path}/states --use_cpu
        --num_hidden_layers 1 --block_size 6 --mask_token_id {MASK_ID} --head_hidden_size 8 --head_rank 4
        --num_anchors 4 --eval_rows 1 --max_steps 1 --save_strategy no --disable_tqdm True"""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = str(Path(__file__).parents[2] / "train_peft.py")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, script, *arguments.split()], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "5 rows, 30 supervised tokens" in done.stdout and done.stdout.count("drafter saved to") == 1
    shares = [answers_of(path) for path in part_files(tmp_path / "out" / "answers.jsonl", 2)]
    assert sorted(map(len, shares)) == [2, 4] and len(shares[0] | shares[1]) == 6
    shards = json.loads((tmp_path / "states" / "index.json").read_text())["shards"]
    assert sorted(key for keys in shards.values() for key in keys) == sorted(
        row_key(row["prompt_ids"] + row["completion_ids"], [0] * len(row["prompt_ids"]) + [1] * 6)
        for row in (shares[0] | shares[1]).values()
    )
