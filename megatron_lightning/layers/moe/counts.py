"""Tokens per expert of an optimizer step, as ``global_aux_loss`` needs them in the forward.

They are summed over the data-parallel ranks and over the micro-batches so far, as in Megatron-Core,
so that the loss of a micro-batch depends on those before it. A layer counts when its forward runs
first, and not when it is recomputed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.step_report import LossScale, StepReport
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.context import ALONE


class GlobalCounts:
    """Tokens per expert of the optimizer step so far, for one layer.

    A recomputation gets what the first forward of its micro-batch got.

    Args:
        report: The layer's, which knows the micro-batch.
    """

    def __init__(self, report: StepReport) -> None:
        self._report = report
        self.replicas = ALONE
        """Data-parallel ranks."""
        self.reset()

    def reset(self) -> None:
        """Begin an optimizer step."""
        self._sum: Tensor | None = None
        # By micro-batch: its mark, how often the layer has run, and what it got.
        self._given: dict[int, tuple[LossScale, int, Tensor]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, counts: Tensor) -> Tensor:
        """Add ``counts`` [E] of one micro-batch, and of all data-parallel ranks; return the sum.

        Raises:
            ConfigError: In the recomputation of a layer that runs several times in a micro-batch.
        """
        microbatch = self._report.microbatch
        if not self._report.is_recorded:
            _, times, given = self._given.get(microbatch.index, (None, 1, counts))
            if times > 1:
                raise ConfigError(
                    f"a layer with moe.router_load_balancing_type=global_aux_loss ran {times} "
                    "times in one micro-batch and is recomputed, and its counts grow from each "
                    "time to the next. Do not recompute it, or set the type to aux_loss."
                )
            return given
        mark = microbatch.scale_of_reports()
        last, times, _ = self._given.get(microbatch.index, (None, 0, counts))
        summed = all_reduce(counts, self.replicas)
        self._sum = summed.clone() if self._sum is None else self._sum + summed
        self._given[microbatch.index] = mark, times + 1 if last is mark else 1, self._sum
        return self._sum
