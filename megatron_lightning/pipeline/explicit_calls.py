"""Checks of steps with explicit pipeline calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_lightning.errors import ConfigError, PipelineError


class ExplicitCalls:
    """Count of the calls of ``run_pipeline`` in the step named ``hook``."""

    def __init__(self, hook: str) -> None:
        self._hook = hook
        self._trains = hook == "training_step"
        self._count = 0

    def begin(self, *, trains: bool = True) -> str:
        """Count a call and return the name of the step. Refuse a second call that would train.

        Args:
            trains: Whether gradients are computed in the call. Any number of calls may do without.
        """
        self._count += trains
        if self._trains and self._count > 1:
            raise PipelineError(
                f"{self._hook} called run_pipeline twice, and each call would complete the "
                "gradients of the step. Put the inputs into one batch, call it under "
                "torch.no_grad() for values alone, or set pipeline_model_parallel_size=1 and "
                "optimize manually."
            )
        return self._hook

    def check(self, output: Any) -> Any:
        """Return the step's output. Refuse a training step without a call, or with a graph that
        would get no backward.
        """
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self._trains and not self._count:
            raise PipelineError(
                f"{self._hook} did not call run_pipeline(self, fn, batch) with gradients, which "
                "explicit_steps=True needs. Call it once, or set explicit_steps=False, which runs "
                "the full step for every micro-batch."
            )
        if self._trains and isinstance(loss, Tensor) and loss.requires_grad:
            raise PipelineError(
                f"{self._hook} returned a loss with a graph of its own; backward runs inside "
                "run_pipeline, so that graph would be lost. Compute all of the loss in the "
                "function given to run_pipeline."
            )
        return output


def not_in_a_step() -> ConfigError:
    """Return the error of a call of ``run_pipeline`` outside of a step."""
    return ConfigError(
        "run_pipeline was called outside of a training, validation, test or predict step, or the "
        "strategy runs full steps for every micro-batch. Call it in a step, and set "
        "pipeline_options=PipelineOptions(explicit_steps=True)."
    )
