#!/usr/bin/env sh
# How the shipped drafter was made, start to end. Hours on two cores; every step can be interrupted and run again.
#   PROMPTS: JSONL files with more prompts (`messages` in each row); OUT: where everything goes.
set -eu
cd "$(dirname "$0")/../.."
OUT=${OUT:-runs/smollm2}
STEPS=${STEPS:-3000}
mkdir -p "$OUT"
TARGET=$(python -m domino_spec.smollm2_target)
python recipes/smollm2/make_prompts.py --output_file "$OUT/prompts.jsonl" --extra_prompts ${PROMPTS:-} \
    --per_kind 1500 --extra_per_kind 2500
python answer_prompts.py --target_model_name_or_path "$TARGET" --prompts "$OUT/prompts.jsonl" \
    --output_file "$OUT/answers.jsonl" --max_new_tokens 128 --answer_batch_size 128 --dtype float32 ${MAX_PROMPTS:+--max_prompts $MAX_PROMPTS}
# Go on from the last checkpoint of an interrupted run.
RESUME=$(ls -d "$OUT"/drafter/checkpoint-* 2>/dev/null | head -n 1)
accelerate launch --cpu train_peft.py --target_model_name_or_path "$TARGET" --dtype float32 \
    --dataset_name "$OUT/answers.jsonl" --output_dir "$OUT/drafter" --eval_rows 16 --loss_gamma 4 --max_steps "$STEPS" \
    --num_hidden_layers 3 --block_size 8 --mask_token_id 3 --head_hidden_size 256 --head_rank 128 \
    --init_layers_from_target 27 28 29 --per_device_train_batch_size 4 --num_anchors 16 --max_length 512 \
    --stage1_ratio 0.25 --lambda_decay_ratio 0.6 --vocab_sample_size 4096 --distill_weight 0.5 --learning_rate 1e-3 \
    --keep_states --eval_strategy steps --eval_steps 750 --save_steps 250 --save_total_limit 2 ${RESUME:+--resume_from_checkpoint True}
