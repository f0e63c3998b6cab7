"""The layers of a transformer, plain and tensor-parallel."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.layers.embedding import VocabParallelEmbedding
    from megatron_lightning.layers.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelLinear
    from megatron_lightning.layers.loss import CrossEntropy, VocabParallelCrossEntropy, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "CrossEntropy",
    "RowParallelLinear",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelLinear",
    "vocab_parallel_cross_entropy",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "ColumnParallelLinear": "megatron_lightning.layers.linear",
        "CrossEntropy": "megatron_lightning.layers.loss",
        "RowParallelLinear": "megatron_lightning.layers.linear",
        "VocabParallelCrossEntropy": "megatron_lightning.layers.loss",
        "VocabParallelEmbedding": "megatron_lightning.layers.embedding",
        "VocabParallelLinear": "megatron_lightning.layers.linear",
        "vocab_parallel_cross_entropy": "megatron_lightning.layers.loss",
    },
)
