"""Configuration objects: sizes of the transformer models, and the strategy's groups of options. No
torch here.
"""

from megatron_lightning.config.attention_kernels import AttentionBackend
from megatron_lightning.config.delta_net import DeltaNetConfig
from megatron_lightning.config.latent_attention import LatentAttentionConfig
from megatron_lightning.config.mamba import MambaConfig
from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.config.parallel import (
    ContextMixers,
    ContextOptions,
    CPCommType,
    DataParallel,
    DataParallelOptions,
    MixerKind,
    MomentsDtype,
    PipelineOptions,
)
from megatron_lightning.config.rope_scaling import RopeScaling, RopeType
from megatron_lightning.config.strategy import StrategySettings
from megatron_lightning.config.training import (
    CheckpointOptions,
    CompileOptions,
    CompileScope,
    GuardMode,
    GuardOptions,
    LossScaleOptions,
    NonFinite,
    RecomputeOptions,
    SaveErrorAction,
    StartMethod,
)
from megatron_lightning.config.transformer import (
    Activation,
    Normalization,
    PositionEmbedding,
    TransformerConfig,
)

__all__ = [
    "Activation",
    "AttentionBackend",
    "CPCommType",
    "CheckpointOptions",
    "CompileOptions",
    "CompileScope",
    "ContextMixers",
    "ContextOptions",
    "DataParallel",
    "DataParallelOptions",
    "DeltaNetConfig",
    "GuardMode",
    "GuardOptions",
    "LatentAttentionConfig",
    "LossScaleOptions",
    "MambaConfig",
    "MixerKind",
    "MoEConfig",
    "MomentsDtype",
    "NonFinite",
    "Normalization",
    "PipelineOptions",
    "PositionEmbedding",
    "RecomputeOptions",
    "RopeScaling",
    "RopeType",
    "SaveErrorAction",
    "StartMethod",
    "StrategySettings",
    "TransformerConfig",
]
