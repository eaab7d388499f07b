#!/usr/bin/env bash
# Train a model of Llama 3 8B's shape on long sequences, split over the GPUs of one node.
#
#   DATA=data/books_text TOKENIZER=/models/Llama-3-8B examples/train_llama3_8b.sh
#
# SCRIPT may name a Megatron-LM checkout's own pretrain_gpt.py, which runs unmodified. Whatever
# follows on the command line is passed on and wins: examples/train_llama3_8b.sh --train-iters 10
# DATA is what tools/preprocess_text.py was given as --output-prefix.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA=${DATA:?the --output-prefix that tools/preprocess_text.py wrote}
TOKENIZER=${TOKENIZER:?a Hugging Face tokenizer: the one that DATA was made with}
SCRIPT=${SCRIPT:-examples/pretrain_gpt.py}
GPUS=${GPUS:-8}                # ranks on this node
TP=${TP:-1}                    # tensor parallel size; the other ranks share the sequence
SEQ_LENGTH=${SEQ_LENGTH:-131072}
CHECKPOINTS=${CHECKPOINTS:-out/llama3_8b}

PARALLEL=(
    --tensor-model-parallel-size "$TP"
    --context-parallel-size "$((GPUS / TP))"
    --distflash-attn
    --use-distributed-optimizer
)
if [ "$TP" -gt 1 ]; then
    PARALLEL+=(--sequence-parallel)
fi

MODEL=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --position-embedding-type rope
    --rotary-base 500000
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
)

TRAINING=(
    --bf16
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters 1000
    --lr 3e-5
    --min-lr 3e-6
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

DATASET=(
    --data-path "$DATA"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER"
    --split 99,1,0
    # Attention masks by position; a mask of this length would not fit in memory.
    --no-create-attention-mask-in-dataloader
)

OUTPUT=(
    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --save-interval 200
    --eval-interval 200
    --eval-iters 5
    --log-interval 1
    --tensorboard-dir "$CHECKPOINTS/tensorboard"
)

export CUDA_DEVICE_MAX_CONNECTIONS=1
exec torchrun --standalone --nproc-per-node "$GPUS" -m megatron_distflash.run "$SCRIPT" \
    "${PARALLEL[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${DATASET[@]}" "${OUTPUT[@]}" "$@"
