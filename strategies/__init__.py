"""Installed as megatron_lightning.strategies; always import it by that name."""

if __name__ != "megatron_lightning.strategies":  # a second copy of these classes would fail isinstance checks
    raise ImportError("import megatron_lightning.strategies, not strategies")

# Not lazily: importing this package is what makes Trainer(strategy="megatron") known.
from megatron_lightning.strategies.checkpoint_io import ShardedCheckpointIO
from megatron_lightning.strategies.explicit import run_pipeline
from megatron_lightning.strategies.megatron import MegatronStrategy
from megatron_lightning.strategies.precision import MegatronHalfPrecision, MegatronMixedPrecision

__all__ = ["MegatronHalfPrecision", "MegatronMixedPrecision", "MegatronStrategy", "ShardedCheckpointIO", "run_pipeline"]
