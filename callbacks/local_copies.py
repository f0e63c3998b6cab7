"""Keep the newest state on the nodes' own disks: frequent saves without the shared file system."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl

from megatron_lightning.checkpoint.format.storage import is_remote
from megatron_lightning.errors import ConfigError
from megatron_lightning.lightning_internals.checkpoints import SavesBeside
from megatron_lightning.strategies.megatron import MegatronStrategy


class LocalCopyCheckpoint(SavesBeside):
    """Save every rank's state to its node's own disk, with a copy on the next node.
    ``ckpt_path="last"`` finds the copies.

    A small file, ``local.ckpt``, on the shared file system lists the places of the copies. A run of
    the same layout resumes from the newest copy with every rank's part on any node, so a node may
    be lost if both its neighbors survive. A run of another layout resumes from the newest copy
    complete on every node. Otherwise, a run resumes from the newest checkpoint beside
    ``local.ckpt``. The two newest copies are kept.

    Args:
        folder: Folder on each node's own disk, with ``{node_rank}`` for the node's number.
        every_n_train_steps: Optimizer steps between two copies.
        every_n_minutes: Minutes between two copies, instead.
        dirpath: Shared folder of ``local.ckpt``. None: the folder of the first other
            ``ModelCheckpoint`` that has one on a disk, or as for ``ModelCheckpoint``.
    """

    CHECKPOINT_NAME_LAST = "local"

    def __init__(
        self,
        folder: str,
        every_n_train_steps: int | None = None,
        every_n_minutes: float | None = None,
        dirpath: str | Path | None = None,
    ) -> None:
        intervals = [value for value in (every_n_train_steps, every_n_minutes) if value is not None]
        if len(intervals) != 1 or intervals[0] <= 0:
            raise ConfigError(
                f"every_n_train_steps is {every_n_train_steps} and every_n_minutes is "
                f"{every_n_minutes}: copies need one interval. Set one of the two to a positive "
                "number."
            )
        super().__init__(
            dirpath=dirpath,
            save_top_k=0,
            save_last=True,
            every_n_train_steps=every_n_train_steps or 0,
            every_n_epochs=0,
            train_time_interval=None
            if every_n_minutes is None
            else timedelta(minutes=every_n_minutes),
            enable_version_counter=False,
        )
        self.folder = folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the strategy."""
        super().setup(trainer, pl_module, stage)
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise ConfigError(
                "LocalCopyCheckpoint saves each rank's shards, and "
                f"{type(trainer.strategy).__name__} has none. Use MegatronStrategy, or "
                "ModelCheckpoint."
            )
        if is_remote(str(self.dirpath)):
            raise ConfigError(
                f"dirpath is {self.dirpath}, which cannot hold the file local.ckpt. Set it to a "
                "directory that all nodes share."
            )

    def _takes(self, folder: str) -> bool:
        return not is_remote(folder)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save nothing, since a normally ended run needs no copies."""

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            strategy.save_local_copy(filepath, self.folder)
            self._last_global_step_saved = trainer.global_step
            self._last_checkpoint_saved = filepath
