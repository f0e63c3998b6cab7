"""Exceptions of this package. Every message states what was found, why it cannot work, and what to
set.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

_log = logging.getLogger(__name__)


class MegatronLightningError(Exception):
    """Base of all errors of this package."""


class ConfigError(MegatronLightningError, ValueError):
    """A setting, or a combination of settings, that cannot work; raised before any process group
    exists if possible.
    """


class DataError(MegatronLightningError, ValueError):
    """Input data that cannot be read; the message names the file and, where there is one, the
    line.
    """


class CheckpointError(MegatronLightningError, RuntimeError):
    """A checkpoint that is missing, incomplete, damaged, or does not fit the model."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A path without a checkpoint."""

    @classmethod
    def at(cls, path: object) -> MissingCheckpointError:
        """Return the error for ``path``, in Lightning's words."""
        return cls(
            f"Checkpoint file not found: {path}. There is neither a file nor a directory; check "
            "the path."
        )


class ShardingError(MegatronLightningError, RuntimeError):
    """A parameter or module that contradicts its declared sharding."""

    @classmethod
    def drifted(cls, names: Sequence[str], axis: str, ranks: Sequence[int]) -> ShardingError:
        """Return the error for tensors that ranks replicate and that have drifted apart."""
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return cls(
            f"{len(names)} tensor(s) that the {axis} ranks {list(ranks)} replicate have other "
            f"values on some of them: {', '.join(names[:5])}{more}. Usual causes: a hook that "
            "writes values which depend on the rank, a loss that is computed on one rank, random "
            "draws from a generator that the ranks do not share, or an average of weights that is "
            "kept outside of the pipeline's units: use Lightning's WeightAveraging or "
            "EMAWeightAveraging callback for averages."
        )


class PipelineError(MegatronLightningError, RuntimeError):
    """A step that a pipeline cannot run; the message names rank, stage, action and micro-batch."""


class RecomputeError(MegatronLightningError, RuntimeError):
    """An activation whose recomputation differs."""


class NonFiniteError(MegatronLightningError, FloatingPointError):
    """A loss or gradient that is infinite or NaN; the message names the rank, the parameter and the
    micro-batch.
    """


class SpikeError(MegatronLightningError, RuntimeError):
    """A loss or gradient norm far above those of the last steps, at which a run was to stop."""


class NoProgressError(MegatronLightningError, RuntimeError):
    """A run that its launcher starts again and again, and that fails before any new step."""


EXPLAINED = (ConfigError, DataError, CheckpointError, NoProgressError)
"""Errors whose message is all that a user needs: printed as one line, without a traceback."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, which its traceback shows; Python 3.10 has none and logs it."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        _log.error("%s: %s", type(error).__name__, note)
