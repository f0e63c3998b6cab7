"""Failures of worker processes, on the way to the starting process.

torch gives the starter a worker's traceback as text. An error with a sufficient message reaches the
starter as an exception, so that a caller can catch ``ConfigError`` under any launcher.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path

_SUFFIX = ".failed"
_FIRST = "first"


class WorkerReports:
    """Files in a folder of this node, written by workers and read by the starter.

    Args:
        folder: Empty. Exists as long as the workers.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def write(self, local_rank: int, error: BaseException | None) -> None:
        """Record that a worker fails and has printed the reason.

        Args:
            local_rank: Local rank of the worker.
            error: Sent to the starter. None: the starter reads the worker's traceback.
        """
        if error is not None:
            with suppress(Exception):  # not every error can be pickled
                content = pickle.dumps(error)
                pickle.loads(content)
                # Only the first error is sent.
                with open(self._folder / _FIRST, "xb") as file:
                    file.write(content)
        (self._folder / f"{local_rank}{_SUFFIX}").touch()

    def has(self, local_rank: int) -> bool:
        """Return whether a worker has recorded a failure."""
        return (self._folder / f"{local_rank}{_SUFFIX}").exists()

    def error(self) -> BaseException | None:
        """Return the error sent by the first failed worker. None: no worker sent an error."""
        try:
            error = pickle.loads((self._folder / _FIRST).read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            return None
        return error if isinstance(error, BaseException) else None
