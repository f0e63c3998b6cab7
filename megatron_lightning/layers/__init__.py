"""The layers of a transformer, plain and tensor-parallel."""

from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo
from megatron_lightning.layers.linear.embedding import VocabParallelEmbedding
from megatron_lightning.layers.linear.parallel_linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelLinear,
)
from megatron_lightning.layers.losses.loss import (
    CrossEntropy,
    VocabParallelCrossEntropy,
    vocab_parallel_cross_entropy,
)
from megatron_lightning.layers.step_report import StepReport, log_reports

__all__ = [
    "ColumnParallelLinear",
    "CoreAttention",
    "CrossEntropy",
    "Documents",
    "RowParallelLinear",
    "SequenceInfo",
    "StepReport",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelLinear",
    "log_reports",
    "vocab_parallel_cross_entropy",
]
