"""The layers of a transformer, plain and tensor-parallel."""

from megatron_lightning.layers.attention import CoreAttention
from megatron_lightning.layers.embedding import VocabParallelEmbedding
from megatron_lightning.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelLinear,
)
from megatron_lightning.layers.loss import (
    CrossEntropy,
    VocabParallelCrossEntropy,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "ColumnParallelLinear",
    "CoreAttention",
    "CrossEntropy",
    "RowParallelLinear",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelLinear",
    "vocab_parallel_cross_entropy",
]
