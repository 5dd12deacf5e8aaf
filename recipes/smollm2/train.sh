#!/usr/bin/env sh
# How the shipped drafter was made, start to end. Hours on two cores; every step can be interrupted and run again.
#   PROMPTS: JSONL files with more prompts (`messages` in each row); OUT: where everything goes.
set -eu
cd "$(dirname "$0")/../.."
OUT=${OUT:-runs/smollm2}
STEPS=${STEPS:-3000}
mkdir -p "$OUT"
TARGET=$(python -m domino_spec.examples.smollm2_target)
python recipes/smollm2/make_prompts.py --output_file "$OUT/prompts.jsonl" --extra_prompts ${PROMPTS:-} \
    --per_kind 1500 --extra_per_kind 2500
python -m domino_spec.training.answers --target_model_name_or_path "$TARGET" --prompts "$OUT/prompts.jsonl" \
    --output_file "$OUT/answers.jsonl" --max_new_tokens 128 --answer_batch_size 128 --dtype float32 ${MAX_PROMPTS:+--max_prompts $MAX_PROMPTS}
# An interrupted run goes on from its last whole checkpoint.
accelerate launch --cpu train_peft.py --config recipes/smollm2.yaml --target_model_name_or_path "$TARGET" \
    --dataset_name "$OUT/answers.jsonl" --output_dir "$OUT/drafter" --max_steps "$STEPS" \
    --resume_from_checkpoint True
