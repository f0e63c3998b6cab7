"""Parts common to the data modules of a run: the model beside the data, the position in the data,
and the loaders.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_lightning.data.order.reading_thread import ReadingThreadLoader
from megatron_lightning.errors import ConfigError

Batch = dict[str, torch.Tensor]


class RunDataModule(pl.LightningDataModule):
    """Base of the data modules of pre-training and fine-tuning.

    Args:
        num_workers: Worker processes of each loader on each rank. 0 reads in the training process.
        reading_thread: Whether a thread of the training process reads the next batches.

    Raises:
        ConfigError: For a reading thread beside worker processes.
    """

    def __init__(self, num_workers: int, *, reading_thread: bool = False) -> None:
        super().__init__()
        if reading_thread and num_workers:
            raise ConfigError(
                f"reading_thread=True beside num_workers={num_workers}: the thread reads in the "
                "place of worker processes. Set one of the two."
            )
        self.num_workers = num_workers
        self.reading_thread = reading_thread
        self._module: pl.LightningModule | None = None

    def use_model(self, module: pl.LightningModule | None) -> None:
        """Read missing settings, such as tokenizer or vocabulary, from a module's model."""
        self._module = module

    def _run_module(self) -> pl.LightningModule | None:
        """Return the module set by :meth:`use_model`, or else the Trainer's."""
        if self._module is None and self.trainer is not None:
            return self.trainer.lightning_module
        return self._module

    def _consumed_samples(self) -> int | None:
        """Return the samples consumed by the run. None: there is no run, or no count."""
        strategy = None if self.trainer is None else self.trainer.strategy
        return getattr(strategy, "consumed_samples", None)

    def _loader_of(self, dataset: Dataset[Any], **options: Any) -> DataLoader[Batch]:
        kind = ReadingThreadLoader if self.reading_thread else DataLoader
        return kind(
            dataset,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            **options,
        )
