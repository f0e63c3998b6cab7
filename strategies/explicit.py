"""Steps that say themselves what the pipeline runs: the way out for those that are not a function of one micro-batch.

With ``PipelineOptions(explicit_steps=True)`` a step gets its whole batch, once, on every rank.
``run_pipeline(self, fn, batch)`` runs ``fn`` on every micro-batch on every stage, as a step is run otherwise, and returns on
every rank what it gave for the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from megatron_lightning.errors import ConfigError, PipelineError
from megatron_lightning.strategies.lightning_internals import attached_trainer


def run_pipeline(module: pl.LightningModule, fn: Callable[[Any], Any], batch: Any) -> Any:
    """Run ``fn`` on every micro-batch of ``batch``, through the pipeline if there is one.

    Where nothing is cut (one device, another strategy) it is ``fn(batch)``.

    Args:
        module: The LightningModule, of which this is part of a step.
        fn: Calls the pipelined module once and returns what a step may return; called with a micro-batch.
        batch: Nested tensors.

    Returns:
        The outputs of ``fn`` put together as those of a step are: scalars are means, and in training they are detached, since
        their backward has run. Tensors with dims are on the last stage only, save in ``predict_step``.

    Raises:
        ConfigError: Outside of a step, or without ``explicit_steps``.
        PipelineError: If a training step calls it twice.
    """
    trainer = attached_trainer(module)
    run: Callable[..., Any] | None = getattr(trainer.strategy if trainer is not None else None, "run_pipeline", None)
    return fn(batch) if run is None else run(fn, batch)


class ExplicitStep:
    """One call of a hook that runs the pipeline itself.

    Args:
        hook: Its name.
        flush: Runs a function on the micro-batches of a batch.
        once: Whether the hook has to do so exactly once, since gradients come of it.
    """

    def __init__(self, hook: str, flush: Callable[[Callable[[Any], Any], Any], Any], *, once: bool) -> None:
        self._hook, self._flush, self._once = hook, flush, once
        self._calls = 0

    def run_pipeline(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Run the flush.

        Raises:
            PipelineError: For a second one that would train.
        """
        self._calls += 1
        if self._once and self._calls > 1:
            raise PipelineError(
                f"{self._hook} called run_pipeline twice, and each call would complete the gradients of the step. Put the "
                "inputs into one batch, or set pipeline_model_parallel_size=1 and optimize manually."
            )
        return self._flush(fn, batch)

    def check(self, output: Any) -> Any:
        """Return what the hook returned.

        Raises:
            PipelineError: If a training step did not run the pipeline, or its loss has gradients that nobody would compute.
        """
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self._once and not self._calls:
            raise PipelineError(
                f"{self._hook} did not call run_pipeline(self, fn, batch), which explicit_steps=True asks of it. Call it once, "
                "or set explicit_steps=False, which runs the whole step for every micro-batch."
            )
        if self._once and isinstance(loss, Tensor) and loss.requires_grad:
            raise PipelineError(
                f"{self._hook} returned a loss with a graph of its own; backward runs inside run_pipeline, so that graph "
                "would be lost. Compute all of the loss in the function given to run_pipeline."
            )
        return output


def not_in_a_step() -> ConfigError:
    """Return the error of a call of ``run_pipeline`` that no step made."""
    return ConfigError(
        "run_pipeline was called outside of a training, validation, test or predict step, or the strategy runs whole steps "
        "for every micro-batch. Call it in a step, and set pipeline_options=PipelineOptions(explicit_steps=True)."
    )
