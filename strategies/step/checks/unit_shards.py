"""Refusal of steps that compute with shards of ``data_parallel="fsdp"`` beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.step_run import StepRun

_TORCH_NAMES = ("DTensor", "sharding strategy registered")  # in torch's own messages


class UnitShards(StepParticipant):
    """Refuses steps that compute with the parameters of FSDP2's units beside the model."""

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
            raise _refusal(run, "fails with them") from error

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Check a loss, before backward.

        Raises:
            ShardingError: If the loss contains shards.
        """
        if isinstance(loss, DTensor):
            raise _refusal(run, "returns a loss of them")


def _refusal(run: StepRun, what: str) -> ShardingError:
    return ShardingError(
        f"{type(run.module).__name__}.{run.hook} computes with parameters outside of the forwards "
        f'of their modules, and {what}. data_parallel="fsdp" gives a rank shards of them there '
        "(DTensors). Set weight_decay of the optimizer for a penalty on weights (for SGD twice the "
        'factor of the sum of squares), compute it in the forwards, or set data_parallel="zero1".'
    )
