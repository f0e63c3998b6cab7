"""Recognize the loss of another rank in the errors of a collective, and explain it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_lightning.errors import ConfigError

_LOST = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "remote process exited",
    "imed out",
)
# A path of gloo's source is in each gloo message. gloo's errors have no separate class.
_GLOO = "gloo/"


def is_lost_connection(exception: BaseException | None) -> bool:
    """Return whether an exception or a cause of the exception means the loss of another rank, by
    the backends' messages.

    The same words in another library's error, such as a timeout of a DataLoader, do not count.
    """
    while exception is not None:
        text = str(exception)
        from_backend = isinstance(exception, dist.DistError) or (
            isinstance(exception, RuntimeError) and _GLOO in text
        )
        if from_backend and any(words in text for words in _LOST):
            return True
        exception = exception.__cause__
    return False


@contextmanager
def called_by_all(call: str) -> Iterator[None]:
    """Explain the loss of another rank during ``call``, a collective, when no watch for failures
    runs any more.

    Raises:
        ConfigError: If another rank's program has ended.
    """
    try:
        yield
    except Exception as error:
        if not is_lost_connection(error):
            raise
        raise ConfigError(
            f"{call} waits for all ranks, and the program of another rank has ended or has failed. "
            "If nothing is printed there, it did not make the call: call it on all ranks, outside "
            "of `if trainer.is_global_zero:`, and use the result on rank 0."
        ) from error
