#!/usr/bin/env bash
# Train a small GPT on 4 CPU processes with TP 2 x PP 2 and invented data; further arguments are passed on.
#   examples/train_gpt_cpu.sh --train-iters 5 --metrics-jsonl metrics.jsonl
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
)
PARALLEL=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --distributed-backend gloo
)
TRAINING=(
    --micro-batch-size 2
    --global-batch-size 8
    --train-iters 20
    --lr 1e-3
    --lr-decay-style cosine
    --min-lr 1e-4
    --eval-iters 0
    --log-interval 1
)
DATA=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 1000
)

exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py \
    "${MODEL[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "$@"
