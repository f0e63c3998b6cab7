#!/usr/bin/env bash
# Real text, training on 2 x 2 processes, the same run resumed on another layout, and text from the
# model. Writes to demo/. Run it with `make demo`, which makes the environment first.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
rm -rf demo
SECONDS=0
step() { printf '\n=== %s s: %s\n\n' "$SECONDS" "$1"; }

step "tokenize the standard library's source (a SentencePiece vocabulary is trained on it first)"
megatron-lightning preprocess --output-prefix demo/stdlib --input stdlib --vocab-size 2048 --append-eod \
  --empty-documents skip --workers 2

# The limit lets the progress bar count to the last step of both runs, not to the end of the data.
step "train on 4 processes: tensor parallel 2 x pipeline parallel 2"
megatron-lightning fit --config configs/tiny_cpu.yaml --trainer.limit_train_batches=240

step "resume the checkpoint on 2 processes: data parallel 2, the same global batch"
megatron-lightning fit --config configs/tiny_cpu.yaml --trainer.devices=2 \
  --trainer.strategy.tensor_model_parallel_size=1 --trainer.strategy.pipeline_model_parallel_size=1 \
  --data.batch_size=8 --trainer.max_steps=240 --trainer.limit_train_batches=240 \
  --ckpt_path=demo/checkpoints/last.ckpt

step "generate on one process"
megatron-lightning generate --checkpoint demo/checkpoints/last.ckpt --tokenizer-model demo/stdlib_tokenizer.model \
  --prompts "def __init__(self" "import " "class Test" --max-new-tokens 64 --temperature 0.7 --top-k 40

step "validation loss (an untrained model has ln 2048 = 7.62)"
python examples/show_losses.py demo/logs
printf '\nDone in %s s. Curves: tensorboard --logdir demo/logs\n' "$SECONDS"
