"""Steps that call the pipeline themselves, for those that are not a function of one micro-batch.

With ``PipelineOptions(explicit_steps=True)`` a step gets its whole batch, once, on every rank.
``run_pipeline(self, fn, batch)`` runs ``fn`` on every micro-batch on every stage, as a step is run
otherwise, and returns on every rank what it gave for the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.strategies.lightning_internals import attached_trainer


def run_pipeline(module: pl.LightningModule, fn: Callable[[Any], Any], batch: Any) -> Any:
    """Run ``fn`` on every micro-batch of ``batch``, through the pipeline if there is one.

    Where nothing is partitioned (one device, another strategy) it is ``fn(batch)``.

    Args:
        module: The LightningModule, of which this is part of a step.
        fn: Calls the pipelined module once and returns what a step may return; called with a
            micro-batch.
        batch: Nested tensors.

    Returns:
        The outputs of ``fn`` put together as those of a step are: scalars are means, and in
        training they are detached, since their backward has run. Tensors with dims are on the last
        stage only, except in ``predict_step``.

    Raises:
        ConfigError: Outside of a step, or without ``explicit_steps``.
        PipelineError: If a training step calls it twice.
    """
    trainer = attached_trainer(module)
    run: Callable[..., Any] | None = getattr(
        trainer.strategy if trainer is not None else None, "run_pipeline", None
    )
    return fn(batch) if run is None else run(fn, batch)
