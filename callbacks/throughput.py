"""Log the speed of training: seconds of a batch, samples and tokens a second, of the full job."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.microbatches import batch_size_of
from megatron_lightning.strategies.megatron import MegatronStrategy


class SpeedMonitor(pl.Callback):
    """Log ``throughput/seconds_per_batch``, ``samples_per_second`` and, where the sequence is
    known, ``tokens_per_second``.

    The samples of all data-parallel ranks are counted, each once. Time is the wall time of the last
    batches, waiting for data included, without validation and saves. The first batch, which
    connects and compiles, is left out. Tokens are samples times the sequence length, read from the
    batch where the LightningModule or the data module declares ``sequence_dims``.

    Args:
        window: Number of batches to average over.
    """

    def __init__(self, window: int = 20) -> None:
        if window < 1:
            raise ConfigError(f"window is {window}; it must be a positive integer.")
        # Of batches: time, samples and tokens so far.
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=window + 1)
        self._samples = self._tokens = self._consumed = 0
        self._paused_s = 0.0
        self._interrupted = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting."""
        self._ends.clear()
        self._consumed = getattr(trainer.strategy, "consumed_samples", 0)
        self._interrupted = False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave out the time until the next batch."""
        self._interrupted = True

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leave out the time until the next batch."""
        self._interrupted = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Leave out the time since the batch before, if something else than training ran."""
        if self._interrupted and self._ends:
            self._paused_s = time.perf_counter() - self._ends[-1][0]
        self._interrupted = False

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch and log the speeds."""
        samples = self._samples_of(trainer, batch)
        self._samples += samples
        self._tokens += samples * _sequence_length(trainer, pl_module, batch)
        self._ends.append((time.perf_counter() - self._paused_s, self._samples, self._tokens))
        (began, *before), (ended, *counted) = self._ends[0], self._ends[-1]
        if ended > began:
            seconds = ended - began
            num_samples, num_tokens = (
                now - then for now, then in zip(counted, before, strict=True)
            )
            speeds = {
                "seconds_per_batch": seconds / (len(self._ends) - 1),
                "samples_per_second": num_samples / seconds,
            }
            if num_tokens:
                speeds["tokens_per_second"] = num_tokens / seconds
            for key, value in speeds.items():
                pl_module.log(
                    f"throughput/{key}", value, on_step=True, on_epoch=False, batch_size=1
                )

    def _samples_of(self, trainer: pl.Trainer, batch: Any) -> int:
        """Return the samples of a batch on all data-parallel ranks."""
        if not isinstance(trainer.strategy, MegatronStrategy):
            return (batch_size_of(batch) or 1) * trainer.world_size
        before, self._consumed = self._consumed, trainer.strategy.consumed_samples
        return self._consumed - before


def _sequence_length(trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> int:
    """Return the tokens of a sample; 0 if no sequence dim is declared."""
    dims: Mapping[str, int] | None = getattr(pl_module, "sequence_dims", None)
    if dims is None:
        dims = getattr(getattr(trainer, "datamodule", None), "sequence_dims", None)
    entries = batch if isinstance(batch, Mapping) else {}
    found = [
        entries[name].shape[dim]
        for name, dim in (dims or {}).items()
        if isinstance(entries.get(name), Tensor)
    ]
    return max(found, default=0)
