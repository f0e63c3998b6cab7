"""Exceptions of this package. Every message states the finding, the reason for the failure, and the
setting to change.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

_log = logging.getLogger(__name__)


class MegatronLightningError(Exception):
    """Base of all errors of this package."""


class ConfigError(MegatronLightningError, ValueError):
    """A setting, or a combination of settings, that cannot work. Raised before any process group
    exists if possible.
    """


class DataError(MegatronLightningError, ValueError):
    """Unreadable input data. The message names the file and, if known, the line."""


class CheckpointError(MegatronLightningError, RuntimeError):
    """A missing, incomplete, damaged or unfitting checkpoint."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A path without a checkpoint."""

    @classmethod
    def at(cls, path: object) -> MissingCheckpointError:
        """Return the error for ``path``, in Lightning's words."""
        return cls(
            f"Checkpoint file not found: {path}. There is neither a file nor a directory; check "
            "the path."
        )


class ReportedError(CheckpointError):
    """Damage that a command has printed as JSON before it ends."""


class ShardingError(MegatronLightningError, RuntimeError):
    """A parameter or module in contradiction to the declared sharding."""

    @classmethod
    def drifted(cls, names: Sequence[str], axis: str, ranks: Sequence[int]) -> ShardingError:
        """Return the error for replicated tensors with different values on different ranks."""
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
    """A step not runnable by a pipeline. The message names rank, stage, action and micro-batch."""


class RankError(MegatronLightningError, RuntimeError):
    """Ranks in different collective calls. The message names the calls."""


class RecomputeError(MegatronLightningError, RuntimeError):
    """An activation with a differing recomputation."""


class NonFiniteError(MegatronLightningError, FloatingPointError):
    """An infinite or NaN loss or gradient. The message names the rank, the parameter and the
    micro-batch.
    """


class SpikeError(MegatronLightningError, RuntimeError):
    """A loss or gradient norm far above the last steps, as a reason to stop the run."""


class NoProgressError(MegatronLightningError, RuntimeError):
    """A run restarted again and again by the launcher, and failing before any new step."""


EXPLAINED = (ConfigError, DataError, CheckpointError, NoProgressError)
"""Errors with a sufficient message: printed as one line, without a traceback."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, shown by the traceback. Python 3.10 has no notes and logs the
    note.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        _log.error("%s: %s", type(error).__name__, note)
