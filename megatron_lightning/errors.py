"""The exceptions users meet. Every message says what was found, why it cannot work, and what to set."""

from __future__ import annotations


class MegatronLightningError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(MegatronLightningError, ValueError):
    """A setting, or a combination of settings, that cannot work; raised before any process group exists if possible."""


class DataError(MegatronLightningError, ValueError):
    """Input data that cannot be read; the message names the file and, where there is one, the line."""


class CheckpointError(MegatronLightningError, RuntimeError):
    """A checkpoint that is missing, incomplete, damaged, or does not fit the model."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A path at which no checkpoint stands."""

    @classmethod
    def at(cls, path: object) -> MissingCheckpointError:
        """Say so of ``path``, in Lightning's words."""
        return cls(f"Checkpoint file not found: {path}. There is neither a file nor a directory; check the path.")


class ShardingError(MegatronLightningError, RuntimeError):
    """A parameter or module whose declared sharding does not hold."""


class PipelineError(MegatronLightningError, RuntimeError):
    """A pipeline step that broke its contract; the message names rank, stage, action and micro-batch."""


class RecomputeError(MegatronLightningError, RuntimeError):
    """An activation that cannot be computed again as it was."""


class NonFiniteError(MegatronLightningError, FloatingPointError):
    """A loss or gradient that is infinite or NaN; the message names the rank, the parameter and the micro-batch."""
