"""Styles of a :class:`ShardingPlan`: rules that replace or mark a module of a plain model for
tensor parallelism.
"""

from megatron_lightning.layers.styles.context import ContextAttention, ContextGroup
from megatron_lightning.layers.styles.delta_net import DeltaNetHeads
from megatron_lightning.layers.styles.expert import ExpertLinear, ExpertParallel, ExpertRouter
from megatron_lightning.layers.styles.parameters import (
    ParameterShards,
    Split,
    TensorParallelExperts,
)
from megatron_lightning.layers.styles.regions import (
    CopyOutput,
    GatherSequence,
    ParallelInput,
    ReduceOutput,
    ShardSequence,
    ShareInput,
)
from megatron_lightning.layers.styles.sequence_region import SequenceRegion
from megatron_lightning.layers.styles.shared_rows import DividedRows, GatheredTokens
from megatron_lightning.layers.styles.stacked_experts import DispatchedExperts
from megatron_lightning.layers.styles.state_space import GroupedHeads
from megatron_lightning.layers.styles.tensor import (
    ColumnParallel,
    HeadParallel,
    HeadsNorm,
    KeyOrValue,
    QueryKeyValue,
    RowParallel,
    SequenceParallel,
    StreamDropout,
    local_heads_per_group,
)
from megatron_lightning.layers.styles.transposed import (
    TransposedColumnParallel,
    TransposedRowParallel,
)
from megatron_lightning.layers.styles.vocabulary import (
    GatherLogits,
    VocabParallel,
    VocabParallelLoss,
)

__all__ = [
    "ColumnParallel",
    "ContextAttention",
    "ContextGroup",
    "CopyOutput",
    "DeltaNetHeads",
    "DispatchedExperts",
    "DividedRows",
    "ExpertLinear",
    "ExpertParallel",
    "ExpertRouter",
    "GatherLogits",
    "GatherSequence",
    "GatheredTokens",
    "GroupedHeads",
    "HeadParallel",
    "HeadsNorm",
    "KeyOrValue",
    "ParallelInput",
    "ParameterShards",
    "QueryKeyValue",
    "ReduceOutput",
    "RowParallel",
    "SequenceParallel",
    "SequenceRegion",
    "ShardSequence",
    "ShareInput",
    "Split",
    "StreamDropout",
    "TensorParallelExperts",
    "TransposedColumnParallel",
    "TransposedRowParallel",
    "VocabParallel",
    "VocabParallelLoss",
    "local_heads_per_group",
]
