#!/usr/bin/env sh
# The shipped drafter meets a fine-tuned SmolLM2 and is adapted to it by LoRA. A quarter of an hour on two cores with
# AMX; without it DTYPE=float32 is the faster choice.
#   OUT: where everything goes; STEPS: of the adaptation; SCOPES: what is adapted, one run each; DTYPE: to compute in.
set -eu
cd "$(dirname "$0")/../.."
OUT=${OUT:-runs/adapt}
STEPS=${STEPS:-240}
SCOPES=${SCOPES:-head all}
DTYPE=${DTYPE:-bfloat16}
BF16=$([ "$DTYPE" = bfloat16 ] && echo True || echo False)
mkdir -p "$OUT"
TARGET=$(python -m domino_spec.examples.smollm2_target)
TUNED="$OUT/SmolLM2-tuned"
# 1. A target that has drifted, and prompts that neither it nor the drafter has seen.
python recipes/smollm2/make_prompts.py --output_file "$OUT/prompts.jsonl" --per_kind 6000
[ -e "$TUNED" ] || python recipes/smollm2/tune_target.py --target_model_name_or_path "$TARGET" \
    --prompts "$OUT/prompts.jsonl" --output_dir "$OUT" --dtype "$DTYPE"
# 2. Its answers, to train on and to measure on; and the original's answers to the same, for comparison.
answer() { python -m domino_spec.training.answers --max_new_tokens 96 --answer_batch_size 96 --dtype "$DTYPE" "$@"; }
answer --target_model_name_or_path "$TUNED" --prompts "$OUT/adapt.jsonl" --output_file "$OUT/answers.jsonl"
answer --target_model_name_or_path "$TUNED" --prompts "$OUT/test.jsonl" --output_file "$OUT/test_answers.jsonl"
answer --target_model_name_or_path "$TARGET" --prompts "$OUT/test.jsonl" --output_file "$OUT/original_answers.jsonl"
# 3. tau of the shipped drafter on its own target and on the tuned one; adapters; tau with them.
measure() { python recipes/smollm2/measure_tau.py --draft_model_name_or_path . "$@"; }
echo "shipped drafter, original target"
measure --target_model_name_or_path "$TARGET" --answers "$OUT/original_answers.jsonl"
echo "shipped drafter, tuned target"
measure --target_model_name_or_path "$TUNED" --answers "$OUT/test_answers.jsonl"
for SCOPE in $SCOPES; do
    accelerate launch --cpu train_peft.py --target_model_name_or_path "$TUNED" --dtype "$DTYPE" --bf16 "$BF16" \
        --dataset_name "$OUT/answers.jsonl" --output_dir "$OUT/adapter_$SCOPE" --model_name_or_path . \
        --use_peft --lora_scope "$SCOPE" --eval_rows 8 --max_steps "$STEPS" --save_strategy no \
        --per_device_train_batch_size 4 --num_anchors 32 --max_length 512 --learning_rate 2e-3 \
        --loss_gamma 4 --vocab_sample_size 4096 --keep_states
    echo "adapter ($SCOPE, $(wc -c < "$OUT/adapter_$SCOPE/adapter_model.safetensors") bytes), tuned target"
    measure --target_model_name_or_path "$TUNED" --answers "$OUT/test_answers.jsonl" \
        --adapter_name_or_path "$OUT/adapter_$SCOPE"
done
