"""Installed as megatron_lightning.strategies. Always import it by that name."""

# A second copy of these classes would fail isinstance checks.
if __name__ != "megatron_lightning.strategies":
    raise ImportError("import megatron_lightning.strategies, not strategies")

# Not lazily: importing this package is what makes Trainer(strategy="megatron") known.
from megatron_lightning.launch.restart import run_with_restarts
from megatron_lightning.step.repeats.rerun import RerunResult
from megatron_lightning.strategies.checkpoint.io import ShardedCheckpointIO
from megatron_lightning.strategies.fp8 import MegatronFP8Precision
from megatron_lightning.strategies.megatron import MegatronStrategy
from megatron_lightning.strategies.precision import MegatronHalfPrecision, MegatronMixedPrecision
from megatron_lightning.strategies.step.explicit import run_pipeline

__all__ = [
    "MegatronFP8Precision",
    "MegatronHalfPrecision",
    "MegatronMixedPrecision",
    "MegatronStrategy",
    "RerunResult",
    "ShardedCheckpointIO",
    "run_pipeline",
    "run_with_restarts",
]
