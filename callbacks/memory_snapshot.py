"""Keep the history of a GPU's allocations for an out-of-memory error."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from megatron_lightning import compat
from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import print_message


class MemorySnapshot(pl.Callback):
    """Write ``oom_rank_<n>.pickle`` when a rank's GPU runs out of memory.

    Drop the file on https://docs.pytorch.org/memory_viz. The page shows every block with the
    allocating line. Recording costs about a microsecond an allocation. CPUs record nothing.

    Args:
        dirpath: Folder. None: ``memory`` in the Trainer's ``default_root_dir``.
        max_entries: Allocations and releases to keep.

    Raises:
        ConfigError: If ``max_entries`` is not a positive number.
    """

    def __init__(self, dirpath: str | Path | None = None, max_entries: int = 100_000) -> None:
        if not is_count(max_entries):
            raise ConfigError(f"max_entries is {max_entries!r}; it must be a positive integer.")
        self.dirpath = dirpath
        self.max_entries = max_entries
        self._records = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to record."""
        self._records = trainer.strategy.root_device.type == "cuda"
        if self._records:
            compat.record_allocations(self.max_entries)
        else:
            rank_zero_info("MemorySnapshot: only allocations of GPUs are recorded.")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop recording."""
        self._stop()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the file if memory is the reason."""
        if self._records and isinstance(exception, torch.OutOfMemoryError):
            folder = Path(self.dirpath or Path(str(trainer.default_root_dir), "memory"))
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"oom_rank_{trainer.global_rank}.pickle"
            compat.write_allocations(str(path))
            print_message(f"the allocations of rank {trainer.global_rank} are in {path}")
        self._stop()

    def _stop(self) -> None:
        if self._records:
            self._records = False
            compat.record_allocations(None)
