"""Record when the actions of a pipeline step ran, to lay the executed schedule beside the simulated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.timeline import Timeline
from megatron_lightning.pipeline.trace import Executed, trace_lines
from megatron_lightning.strategies.megatron import MegatronStrategy


class PipelineTimeline(pl.Callback):
    """Writes the timeline of one training step, ``rank_0.jsonl`` and so on, a file for each rank.

    Every line is one action, see :mod:`megatron_lightning.pipeline.trace`. The ranks of a pipeline start their clocks together,
    right before the step. ``megatron-lightning schedule --trace DIR`` draws the files.

    Args:
        dirpath: Folder of the files; None: ``pipeline_timeline`` in the Trainer's ``default_root_dir``.
        step: Training batch to record, counted over the whole fit; the first ones are slower than the rest.
    """

    def __init__(self, dirpath: str | None = None, step: int = 10) -> None:
        if step < 0:
            raise ConfigError(f"step is {step}; batches are counted from 0. Set it to 0 or more.")
        self.dirpath, self.step = dirpath, step
        self._seen = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that there is a pipeline to look at.

        Raises:
            ConfigError: Under another strategy than MegatronStrategy.
        """
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise ConfigError(
                f"PipelineTimeline records the pipeline of MegatronStrategy, and the Trainer has a "
                f"{type(trainer.strategy).__name__}. Set strategy to megatron, or remove the callback."
            )
        self._seen = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clocks of a pipeline's ranks together; a collective in the step that is recorded."""
        if self._seen == self.step and isinstance(trainer.strategy, MegatronStrategy):
            strategy = trainer.strategy
            strategy.executor.timeline = Timeline(strategy.context.device)
            if strategy.context.pp.process_group is not None:
                dist.barrier(group=strategy.context.pp.process_group)
            strategy.executor.timeline.restart()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write what was recorded."""
        if self._seen == self.step and isinstance(trainer.strategy, MegatronStrategy):
            executor = trainer.strategy.executor
            if executor.timeline is not None:
                folder = Path(self.dirpath or Path(trainer.default_root_dir, "pipeline_timeline"))
                folder.mkdir(parents=True, exist_ok=True)
                rank = trainer.global_rank
                executed = [Executed(rank, *interval) for interval in executor.timeline.intervals()]
                (folder / f"rank_{rank}.jsonl").write_text(trace_lines(executed))
            executor.timeline = None
        self._seen += 1
