"""What keeps a pipeline rank's part of a model from being run as if it were all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from megatron_lightning.errors import PipelineError


class CallGuard:
    """Forward pre-hook of the pipelined module. It stays after a run, as the module stays a part; and it is plain data, so
    that the module can be copied and pickled.

    Args:
        num_ranks: Pipeline ranks that share the module's layers.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._open = num_ranks, False

    @classmethod
    def on(cls, pipelined: nn.Module, num_ranks: int) -> CallGuard:
        """Return the guard of ``pipelined``, which an earlier run may have left there."""
        guard = next((hook for hook in pipelined._forward_pre_hooks.values() if isinstance(hook, cls)), None)
        if guard is None:
            guard = cls(num_ranks)
            pipelined.register_forward_pre_hook(guard)
        return guard

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Around a step, which calls the module as it should."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def __call__(self, pipelined: nn.Module, args: object) -> None:
        """Let the call pass in a step.

        Raises:
            PipelineError: Outside of one.
        """
        if not self._open:
            raise PipelineError(
                f"{type(pipelined).__name__} was called outside of a training, validation, test or predict step, and this rank "
                f"holds only part of its layers (pipeline {self._num_ranks}). Call it in a step: trainer.validate and "
                "trainer.predict run one. A checkpoint holds the whole model: load_from_checkpoint reads a consolidated one."
            )
