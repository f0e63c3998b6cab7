"""Record when the actions of a pipeline run were executed, to compare with the simulated
schedule.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules.trace import Executed, trace_lines
from megatron_lightning.pipeline.timeline import Timeline
from megatron_lightning.strategies.megatron import MegatronStrategy


class PipelineTimeline(pl.Callback):
    """Write the timeline of one training step, ``rank_0.jsonl`` and so on, a file for each rank.

    Every line is an action, see :mod:`megatron_lightning.pipeline.schedules.trace`. The ranks of a
    pipeline start their clocks together, right before the step. ``megatron-lightning schedule
    --trace DIR`` draws the files.

    Args:
        dirpath: Folder of the files. None: ``pipeline_timeline`` in the Trainer's
            ``default_root_dir``.
        step: Training batch to record, counted over the fit. The first batches are slower than
            later batches.
    """

    def __init__(self, dirpath: str | None = None, step: int = 10) -> None:
        if step < 0:
            raise ConfigError(f"step is {step}; batches are counted from 0. Set it to 0 or more.")
        self.dirpath = dirpath
        self.step = step
        self._seen = 0
        self._timeline: Timeline | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse other strategies than MegatronStrategy."""
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise ConfigError(
                "PipelineTimeline records the pipeline of MegatronStrategy, and the Trainer has a "
                f"{type(trainer.strategy).__name__}. Set strategy to megatron, or remove the "
                "callback."
            )
        self._seen = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clocks of a pipeline's ranks together. A collective in the recorded step."""
        if self._seen == self.step and isinstance(trainer.strategy, MegatronStrategy):
            strategy = trainer.strategy
            self._timeline = Timeline(strategy.context.device)
            strategy.executor.observers.append(self._timeline)
            if strategy.context.pp.process_group is not None:
                dist.barrier(group=strategy.context.pp.process_group)
            self._timeline.restart()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write the timeline."""
        if self._timeline is not None and isinstance(trainer.strategy, MegatronStrategy):
            trainer.strategy.executor.observers.remove(self._timeline)
            rank = trainer.global_rank
            folder = Path(self.dirpath or Path(trainer.default_root_dir, "pipeline_timeline"))
            folder.mkdir(parents=True, exist_ok=True)
            executed = [Executed(rank, *interval) for interval in self._timeline.intervals()]
            (folder / f"rank_{rank}.jsonl").write_text(trace_lines(executed))
            self._timeline = None
        self._seen += 1
