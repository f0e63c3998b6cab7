"""Steps that need the whole batch and call the pipeline themselves.

With ``PipelineOptions(explicit_steps=True)`` a step gets its whole batch, once, on every rank.
``run_pipeline(self, fn, batch)`` runs ``fn`` on every micro-batch on every stage, like an ordinary
step, and returns the result for the batch on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.lightning_internals.trainer import attached_trainer


def run_pipeline(module: pl.LightningModule, fn: Callable[[Any], Any], batch: Any) -> Any:
    """Run ``fn`` on every micro-batch of ``batch``, through the pipeline if there is one.

    Without a partitioned module (one device, another strategy) the result is ``fn(batch)``.

    Args:
        module: The LightningModule of the current step.
        fn: Calls the pipelined module once and returns a step's output. Called with a micro-batch.
        batch: Nested tensors.

    Returns:
        The outputs of ``fn``, merged like the outputs of a step: scalars are means, and in
        training scalars are detached, since the backward has run. Tensors with dims are on the last
        stage only, except in ``predict_step`` and in a training step under ``torch.no_grad()``.

    Raises:
        ConfigError: Outside of a step, or without ``explicit_steps``.
        PipelineError: If a training step calls this function twice with gradients. Under
            ``torch.no_grad()`` a training step may call this function any number of times.
    """
    trainer = attached_trainer(module)
    run: Callable[..., Any] | None = getattr(
        trainer.strategy if trainer is not None else None, "run_pipeline", None
    )
    return fn(batch) if run is None else run(fn, batch)
