"""The strategy's checkpoint hooks: which of Lightning's calls become sharded directories, and which stay Lightning's own."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerStatus

from megatron_lightning.checkpoint import read_full
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.strategies import preflight
from megatron_lightning.strategies.checkpoint_io import ShardedCheckpointIO
from megatron_lightning.strategies.checkpointing import CheckpointGlue
from megatron_lightning.strategies.last import committed_requeue
from megatron_lightning.strategies.lightning_internals import trainer_state, training_loaders
from megatron_lightning.strategies.links import link_paths
from megatron_lightning.strategies.saver import Saver, SaveReport
from megatron_lightning.strategies.stepping import MegatronSteps


class MegatronCheckpoints(MegatronSteps):
    """Saves and loads directories of any layout through Lightning's hooks.

    Args:
        layout: Sizes of the parallel axes.
        checkpoint_options: How checkpoints are written; None: the defaults.
        settings: See :class:`MegatronSteps`.
    """

    def __init__(self, layout: ParallelLayout, *, checkpoint_options: CheckpointOptions | None, **settings: Any) -> None:
        super().__init__(layout, **settings)
        self.checkpoint_options = checkpoint_options or CheckpointOptions()
        self._checkpoints = CheckpointGlue(self, Saver(self.checkpoint_options, self._timeout))

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning asks for the optimizer state after the module's."""
        return True

    def on_train_start(self) -> None:
        """Continue an interrupted epoch: with the data order and the random numbers it would have had."""
        self._checkpoints.remembered.start()
        samplers = self.train_samplers()
        loaders = training_loaders(self.module.trainer)
        knows = self._checkpoints.progress.knows_position  # a plain checkpoint does not
        if knows and len(samplers) == len(loaders):  # Lightning looks for state_dict on loaders
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        self._checkpoints.progress.restore_position(samplers)

    @property
    def _checkpoints_are_whole(self) -> bool:
        """Whether they are Lightning's own: with a plugin of the user's, and in a process that has no ranks yet (or had none:
        the one that spawned them).
        """
        return self.user_checkpoint_io is not None or self._context is None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the module's state."""
        self.wait_for_parameters()
        state = self.module.state_dict()
        return state if self._units is None else self._units.as_used(state)

    def whole_module_state(self, folder: str) -> dict[str, Any] | None:
        """See the base class; the parts are put together in a checkpoint."""
        if self.context.tp.size * self.context.pp.size == 1 and self._units is None:
            return None
        path = f"{folder}/{self.broadcast(f'.weights-{uuid.uuid4().hex}.ckpt')}"
        self._checkpoints.save({"state_dict": self.lightning_module_state_dict()}, path)
        whole: dict[str, Any] = read_full(path)["state_dict"] if self.local_rank == 0 else {}
        self.barrier()
        self.remove_checkpoint(path)
        return whole

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return a handle of the optimizer's state, which :meth:`save_checkpoint` writes by global name."""
        if self._checkpoints_are_whole:
            return super().optimizer_state(optimizer)
        return self._checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a sharded checkpoint directory; committed by one rename when every rank has written its part.

        After an exception on some ranks only, nothing is saved: the others are not here to write their parts. Nor is it after
        one in the middle of an optimizer step, or before it on some ranks and after it on others: the parts would be of two
        steps. A checkpoint plugin of the user's own gets Lightning's dict instead, with our progress in it.

        Raises:
            ConfigError: If there are ``storage_options`` and no plugin that understands them.
        """
        if self._context is None:  # asked before the Trainer's setup: the module is whole
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.user_checkpoint_io is not None:
            super().save_checkpoint(self._checkpoints.progress.added_to(checkpoint), filepath, storage_options)
            return
        preflight.check_storage(storage_options)
        if self.module.trainer.state.status == TrainerStatus.INTERRUPTED:
            if not self._interrupted_together():
                warnings.warn(
                    f"{filepath} is not saved: the exception reached only some of the {self.context.world_size} ranks, or "
                    "came in the middle of an optimizer step.",
                    stacklevel=2,
                )
                return
            self.forget_batch()
        # After the run nobody would wait for a save in the background.
        running = self.module.trainer.state.status == TrainerStatus.RUNNING
        links = link_paths(self.module.trainer)
        # ModelCheckpoint makes room for a link by deleting a directory of its name, which may be the last good checkpoint.
        in_danger = any(link.is_dir() and not link.is_symlink() for link in links)
        path, background = self.broadcast((str(filepath), running and self.saves_in_background and not in_danger))
        waiting = links if self.is_global_zero else None
        self._checkpoints.save(checkpoint, path, background=background, links=waiting)
        if background:
            self._log_stall()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; it is also where ModelCheckpoint lets go of a link that it has just made."""
        if self._checkpoints.saver.awaits_links:
            self._checkpoints.saver.hold_links(link_paths(self.module.trainer))
        super().barrier(name)

    def _log_stall(self) -> None:
        report = self._checkpoints.saver.last
        if report is not None:
            for logger in self.module.trainer.loggers:
                logger.log_metrics({"checkpoint_stall_s": report.stall_s}, step=self.module.trainer.global_step)

    def _interrupted_together(self) -> bool:
        """Whether an exception reached all ranks between the same two optimizer steps."""
        step = self.module.trainer.global_step
        if self.context.world_size == 1:
            return not self.is_updating
        return self.all_ranks_interrupted(f"rank {self.global_rank} is updating" if self.is_updating else f"step {step}")

    def save_local_copy(self, filepath: str, folder: str) -> None:
        """Keep every rank's state on its node's own disk and on the next node's, in the background; all ranks call this.

        Args:
            filepath: The pointer on the shared file system that leads to the copies; ``ckpt_path`` for going on from them.
            folder: Folder on each node; ``{node_rank}`` in it stands for the node's number.

        Raises:
            CheckpointError: On every rank, if this save, or the one before, failed on one of them and ``on_save_error`` is
                "raise"; older copies are intact.
        """
        checkpoint = trainer_state(self.module.trainer)
        self._checkpoints.save_local(checkpoint, str(self.broadcast(filepath)), folder)
        self._log_stall()

    @property
    def saves_in_background(self) -> bool:
        """Whether checkpoints are written while training goes on."""
        return self.checkpoint_options.async_save or isinstance(self._checkpoint_io, AsyncCheckpointIO)

    @property
    def last_save(self) -> SaveReport | None:
        """What the last checkpoint cost this rank: seconds that training waited, seconds until it was committed, bytes."""
        return self._checkpoints.saver.last

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read this rank's part of a checkpoint of any layout, or of a plain Lightning checkpoint file."""
        if self._context is None:  # asked before the Trainer's setup: there are no parts yet
            whole: dict[str, Any] = ShardedCheckpointIO().load_checkpoint(checkpoint_path, weights_only=weights_only)
            return whole
        if self.user_checkpoint_io is not None:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            self._checkpoints.progress.take_from(checkpoint)
            return checkpoint
        self.end_if_left_alone()
        self._prepare_to_load()
        self.finish_saving()
        return self._checkpoints.load(self.broadcast(committed_requeue(str(checkpoint_path))))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of the module."""
        if self._context is None:  # asked before the Trainer's setup: the module is whole
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._checkpoints.load_model(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer states."""
        if self._checkpoints_are_whole:
            super().load_optimizer_state_dict(checkpoint)
            if self._runner is not None:
                self._checkpoints.progress.restore_random_state()
            return
        self._checkpoints.load_optimizers(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint."""
        if self.user_checkpoint_io is not None:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero and not self._checkpoints.remembered.keeps(str(filepath)):
            self._checkpoints.saver.remove(str(filepath))

    def on_exception(self, exception: BaseException) -> None:
        """Let a save in the background come to its end: the other ranks' threads write their parts of it."""
        super().on_exception(exception)
        self._checkpoints.saver.finish_quietly()

    def finish_saving(self) -> None:
        """Wait until the save in the background, if there is one, is committed.

        Raises:
            CheckpointError: If it failed and ``on_save_error`` is "raise".
        """
        self._checkpoints.saver.finish()
