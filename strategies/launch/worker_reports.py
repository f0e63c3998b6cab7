"""Failures of worker processes, on their way to the process that started them.

torch gives the starter a worker's traceback as text. An error whose message suffices reaches the
starter as itself, so that a caller can catch ``ConfigError`` under any launcher.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path

_SUFFIX = ".failed"
_FIRST = "first"


class WorkerReports:
    """Files in a folder of this node, which workers write and their starter reads.

    Args:
        folder: Empty; exists as long as the workers do.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def write(self, local_rank: int, error: BaseException | None) -> None:
        """Record that a worker fails and has printed why.

        Args:
            local_rank: Of the worker.
            error: Sent to the starter; None: its traceback is to be read there.
        """
        if error is not None:
            with suppress(Exception):  # not every error can be pickled
                content = pickle.dumps(error)
                pickle.loads(content)
                # Only the first one is sent.
                with open(self._folder / _FIRST, "xb") as file:
                    file.write(content)
        (self._folder / f"{local_rank}{_SUFFIX}").touch()

    def has(self, local_rank: int) -> bool:
        """Return whether a worker has recorded its failure."""
        return (self._folder / f"{local_rank}{_SUFFIX}").exists()

    def error(self) -> BaseException | None:
        """Return the error that the first worker sent; None: no worker sent any."""
        try:
            error = pickle.loads((self._folder / _FIRST).read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            return None
        return error if isinstance(error, BaseException) else None
