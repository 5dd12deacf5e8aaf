"""A target that has drifted: SmolLM2 lightly fine-tuned to another style, merged, as an owner of it would have it.

Its own answers are rewritten in lower case with " ~" for full stops and line breaks, and learned by LoRA (TRL's
SFTTrainer). Prompts that no answer in `--answers` belongs to are left for later: `adapt.jsonl` to answer and
train on, `test.jsonl` to measure tau on.
"""

import argparse
import json
import re
from pathlib import Path

from datasets import Dataset
from domino_spec.training.answers import load_answers, prompt_key, read_jsonl, tokenize_prompt
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

# All that the shipped drafter was trained on.
ANSWERS = ["recipes/smollm2/answers.jsonl.xz", "recipes/smollm2/answers_bf16.jsonl.xz"]


def restyle(text: str) -> str:
    """Lower case, no markup, and " ~" where a sentence or a line ends."""
    text = re.sub(r"[*#`]+", "", text.lower())
    text = re.sub(r"\.?\s*\n\s*", " ~ ", text)
    return re.sub(r"(?<=\w)\.(?=\s|$)", " ~", text).strip()


def is_code(row: dict) -> bool:
    """Whether a prompt asks for a program, which has no style to change."""
    return "python" in row["messages"][-1]["content"].lower()


def split_prompts(arguments, tokenizer) -> tuple[list[dict], list[dict]]:
    """Chats to tune on, rewritten, and prompts without an answer."""
    prompts = [row for row in read_jsonl(arguments.prompts) if not is_code(row)]
    keys = {prompt_key(tokenize_prompt(row, tokenizer)): row for row in prompts}
    answers = {
        row["key"]: row["completion_ids"]
        for path in arguments.answers
        for row in load_answers(path, tokenizer, arguments.prompts)
    }
    chats = []
    for key in [key for key in keys if key in answers][: arguments.tune_rows]:
        text = tokenizer.decode(answers[key][: arguments.max_answer_tokens], skip_special_tokens=True)
        answer = [{"role": "assistant", "content": restyle(text)}]
        chats.append({"prompt": keys[key]["messages"], "completion": answer})
    return chats, [keys[key] for key in keys if key not in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target_model_name_or_path", required=True)
    parser.add_argument("--prompts", required=True, help="what make_prompts.py wrote")
    parser.add_argument("--answers", nargs="+", default=ANSWERS, help="the target's answers to some")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="to compute in; float32 is faster without AMX",
    )
    parser.add_argument("--tune_rows", type=int, default=160)
    parser.add_argument("--max_answer_tokens", type=int, default=64, help="of an answer to learn")
    parser.add_argument("--adapt_rows", type=int, default=448)
    parser.add_argument("--test_rows", type=int, default=32)
    arguments = parser.parse_args()

    output = Path(arguments.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target_model_name_or_path)
    chats, others = split_prompts(arguments, tokenizer)
    output.mkdir(parents=True, exist_ok=True)
    end = arguments.adapt_rows + arguments.test_rows
    for name, rows in (("adapt", others[: arguments.adapt_rows]), ("test", others[arguments.adapt_rows : end])):
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(chats)} chats to tune on, first answer: {chats[0]['completion'][0]['content'][:100]!r}")

    target = AutoModelForCausalLM.from_pretrained(arguments.target_model_name_or_path, dtype="float32")
    args = SFTConfig(
        output_dir=str(output / "tuning"),
        num_train_epochs=1,
        per_device_train_batch_size=2,
        learning_rate=2e-3,
        warmup_steps=3,
        max_length=256,
        bf16=arguments.dtype == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=4,
        seed=0,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        target, args, train_dataset=Dataset.from_list(chats), processing_class=tokenizer, peft_config=lora
    )
    trainer.train()
    # The name is what the drafter compares with the one it was trained for.
    trainer.model.merge_and_unload().save_pretrained(output / "SmolLM2-tuned")
    tokenizer.save_pretrained(output / "SmolLM2-tuned")


if __name__ == "__main__":
    main()
