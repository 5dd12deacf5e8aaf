"""tau from simulated rounds over a target's answers: of a drafter, or of a drafter with an adapter."""

import argparse

import torch
from domino_spec import DominoForSpeculation
from domino_spec.training.data import load_rows, prepare_dataset
from domino_spec.training.objective import DominoObjective
from domino_spec.training.tau import simulated_tau
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target_model_name_or_path", required=True)
    parser.add_argument("--draft_model_name_or_path", required=True)
    parser.add_argument("--adapter_name_or_path")
    parser.add_argument("--answers", required=True, help="what training.answers wrote")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.target_model_name_or_path)
    target = AutoModelForCausalLM.from_pretrained(arguments.target_model_name_or_path, dtype=torch.float32).eval()
    drafter = DominoForSpeculation.from_pretrained(arguments.draft_model_name_or_path, dtype=torch.float32).eval()
    if arguments.adapter_name_or_path:
        drafter = PeftModel.from_pretrained(drafter, arguments.adapter_name_or_path).get_base_model()
    rows, _ = prepare_dataset(load_rows(arguments.answers, tokenizer), tokenizer, max_length=1024)
    result = simulated_tau(DominoObjective(drafter, target), rows)
    tau = ", ".join(f"{name} {result[f'tau_{name}']:.3f}" for name in ("base", "final"))
    print(f"tau over {len(rows)} answers: {tau}")


if __name__ == "__main__":
    main()
