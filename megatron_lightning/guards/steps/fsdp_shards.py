"""Refusal of steps that compute with shards of ``data_parallel="fsdp"`` beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun

_TORCH_NAMES = ("DTensor", "sharding strategy registered")  # in torch's own messages


class FsdpShards(Guard):
    """Refuse steps that compute with the parameters of FSDP2's units beside the model."""

    sentence = (
        '`data_parallel="fsdp"`: a step computes with parameters outside of the forwards of their '
        "modules, where a rank has shards of them"
    )
    may_warn = False

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether ranks shard parameters."""
        return scope.part.units is not None

    @contextmanager
    def around_forward(self, run: StepRun, stage: int, microbatch: int) -> Iterator[None]:
        """Explain an error of torch.

        Raises:
            ShardingError: In place of the error.
        """
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, ShardingError) or not any(n in str(error) for n in _TORCH_NAMES):
                raise
            self.judge.refuse(_refusal(run, "fails with them"))
            raise

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Check a loss, before backward.

        Raises:
            ShardingError: If the loss contains shards.
        """
        if isinstance(loss, DTensor):
            self.judge.refuse(_refusal(run, "returns a loss of them"))


def _refusal(run: StepRun, what: str) -> ShardingError:
    return ShardingError(
        f"{type(run.module).__name__}.{run.hook} computes with parameters outside of the forwards "
        f'of their modules, and {what}. data_parallel="fsdp" gives a rank shards of them there '
        "(DTensors). Set weight_decay of the optimizer for a penalty on weights (for SGD twice the "
        'factor of the sum of squares), compute it in the forwards, or set data_parallel="zero1".'
    )
