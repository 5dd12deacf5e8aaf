#!/usr/bin/env sh
# The whole way in a few minutes on a CPU: prompts, the target's answers, a short training run, a drafter that drafts.
# It shows that everything works; a drafter that is worth having takes the recipe in train.sh.
set -eu
cd "$(dirname "$0")/../.."
OUT=${OUT:-runs/train-demo}
mkdir -p "$OUT"
TARGET=$(python -m domino_spec.examples.smollm2_target)
python recipes/smollm2/make_prompts.py --output_file "$OUT/prompts.jsonl" --per_kind 40
python -m domino_spec.training.answers --target_model_name_or_path "$TARGET" --prompts "$OUT/prompts.jsonl" \
    --output_file "$OUT/answers.jsonl" --max_prompts 32 --max_new_tokens 48 --answer_batch_size 16 --dtype float32
accelerate launch --cpu train_peft.py --target_model_name_or_path "$TARGET" --dtype float32 \
    --dataset_name "$OUT/answers.jsonl" --output_dir "$OUT/drafter" --eval_rows 4 --max_steps 30 --save_strategy no \
    --num_hidden_layers 3 --block_size 8 --mask_token_id 3 --head_hidden_size 256 --head_rank 128 \
    --init_layers_from_target 27 28 29 --per_device_train_batch_size 2 --num_anchors 16 --max_length 512 \
    --stage1_ratio 0.25 --lambda_decay_ratio 0.6 --vocab_sample_size 4096 --ce_weight 0.5 --kl_weight 0.5 --learning_rate 1e-3
python -m domino_spec.examples.demo --draft_model_name_or_path "$OUT/drafter" --max_new_tokens 32
