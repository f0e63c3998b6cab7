"""Lightning's calls for checkpoints, and full tensors and folders of the model for users."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from torch import Tensor, nn
from typing_extensions import override

from megatron_lightning.assembly.state.full_state import path_of
from megatron_lightning.assembly.state.optimizer_states import OptimizerHandle
from megatron_lightning.checkpoint.requeue import committed_requeue
from megatron_lightning.checkpoint.writing.saver import SaveReport
from megatron_lightning.resilience.lost_connection import called_by_all
from megatron_lightning.step.overrides import unwrapped
from megatron_lightning.strategies.checkpoint.io import ShardedCheckpointIO, complete_io, users_io
from megatron_lightning.strategies.checks.plugins import check_storage_options
from megatron_lightning.strategies.hooks.rank_hooks import RankHooks

if TYPE_CHECKING:
    # Imported on first use: most runs write no folder.
    from megatron_lightning.bridge.folder_model import Plan
    from megatron_lightning.bridge.live.live_folder import LiveFolder
    from megatron_lightning.bridge.live.weight_stream import WeightStream


class CheckpointHooks(RankHooks):
    """Save and load by global names. Collect the full model as on one device."""

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Plugin for plain checkpoint files: the user's own, or ours."""
        self._checkpoint_io = complete_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @property
    def _saves_plain_files(self) -> bool:
        """Whether Lightning writes the checkpoints: with a checkpoint plugin of the user, or in a
        process without ranks (yet).
        """
        return self.run is None or users_io(self._checkpoint_io) is not None

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def last_save(self) -> SaveReport | None:
        """Cost of the last checkpoint on this rank: seconds of waiting in training, seconds until
        the commit, bytes.
        """
        return None if self.run is None else self.run.checkpoints.saver.last

    @property
    def saves_in_background(self) -> bool:
        """Whether checkpoints are written while training continues."""
        return self.options.checkpoint.async_save or isinstance(
            self._checkpoint_io, AsyncCheckpointIO
        )

    @property
    def writing_since(self) -> float | None:
        """Begin of the save now written in the background, in seconds of ``time.monotonic()``.
        None: no save is being written. Any thread may ask.
        """
        return None if self.run is None else self.run.checkpoints.saver.writing_since

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the module's state."""
        return self.module.state_dict() if self.run is None else self.run.module_state()

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return a handle of the optimizer's state. :meth:`save_checkpoint` writes the state by
        global name.
        """
        if self._saves_plain_files:
            return super().optimizer_state(optimizer)
        return OptimizerHandle(
            unwrapped(optimizer), self._running.training.accumulation.view(unwrapped(optimizer))
        )

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a sharded checkpoint directory. A checkpoint plugin of the user's own gets
        Lightning's dict instead.
        """
        if self.run is not None:
            self._refuse_in_step("a checkpoint")
            # Before the first collective: ranks without the exception never join a collective.
            if not self._saves_plain_files and not self.run.checkpoints.can_save(str(filepath)):
                return
            self.ranks.course.mark("trainer.save_checkpoint()")
            self.run.share_written()
        with nullcontext() if self.run is None else self.run.at_last_update():
            self._save(checkpoint, filepath, storage_options)

    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if self._saves_plain_files:
            if self.run is not None:
                checkpoint = self.run.checkpoints.state.write_to(checkpoint, self.module, self.part)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        check_storage_options(storage_options)
        background = self.saves_in_background
        self._running.checkpoints.save(checkpoint, str(filepath), self.part, background=background)

    def save_local_copy(self, filepath: str, folder: str) -> None:
        """Keep every rank's state on the disks of the rank's node and of the next node, in the
        background.
        All ranks call this.

        Args:
            filepath: Pointer file to the copies, on the shared file system. ``ckpt_path`` for
                resuming from them.
            folder: Folder on each node. ``{node_rank}`` represents the node's number.

        Raises:
            CheckpointError: On every rank, if this save, or the one before, failed on any rank and
                ``on_save_error`` is "raise". Older copies are intact.
        """
        self._refuse_in_step("a checkpoint")
        self._running.share_written()
        with self._running.at_last_update():
            self._running.checkpoints.save_local(filepath, folder, self.part)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read this rank's part of a checkpoint of any layout, or of a plain Lightning checkpoint
        file.
        """
        if self.run is None:  # asked before the Trainer's setup: the module is full
            full: dict[str, Any] = ShardedCheckpointIO().load_checkpoint(
                checkpoint_path, weights_only=weights_only
            )
            return full
        if self._saves_plain_files:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            self.run.checkpoints.state.read_from(checkpoint, self.module)
            return checkpoint
        self.run.partitioned.assemble()
        # Lightning calls this before setup, and nothing can be read to ``meta``.
        if self.options.data_parallel == "fsdp":
            self.run.partitioned.place(self.precision_plugin)
        return self.run.checkpoints.load(
            self.broadcast(committed_requeue(str(checkpoint_path))), self.part
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of the full tensors in ``checkpoint["state_dict"]``."""
        if self.run is None or self._saves_plain_files:
            super().load_model_state_dict(checkpoint, strict)
            return
        self.run.partitioned.assemble()
        self.run.checkpoints.load_model(checkpoint, self.part, strict=strict)
        self.run.follow_load()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's shards of the optimizer states."""
        if self.run is not None:
            self.run.training.follow_restored_groups()
        if not self._saves_plain_files:
            views = [
                self._running.training.accumulation.view(optimizer) for optimizer in self.optimizers
            ]
            self._running.checkpoints.load_optimizers(checkpoint, views, self.part)
            return
        super().load_optimizer_state_dict(checkpoint)
        if self.run is not None:
            self.run.checkpoints.state.restore_random_state()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint as soon as a newer checkpoint is committed."""
        if self._saves_plain_files:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._running.checkpoints.saver.remove(str(filepath))

    def finish_saving(self) -> None:
        """Wait until the save in the background, if any, is committed.

        Raises:
            CheckpointError: If the save failed and ``on_save_error`` is "raise".
        """
        if self.run is not None:
            self.run.checkpoints.saver.finish()

    # ---------------------------------------------------------------------------------- full model

    def full_tensors(self, module: nn.Module | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor of every parameter and saved buffer on every rank, tensor by
        tensor. Works during a run and afterwards.

        A collective: all ranks call this, and take all tensors. No rank has more than the rank's
        part and a single full tensor. A tied parameter appears once under every name.

        Args:
            module: A sub-module of the LightningModule. Yielded names are then relative to the
                sub-module. None: the LightningModule.

        Raises:
            ConfigError: If ``module`` is no part of the LightningModule.
            PipelineError: In a step, over several pipeline ranks.
        """
        if self.run is None:  # in the process that has started the ranks, the module is full
            root = self.module
            prefix = f"{path_of(root, module)}." if module not in {None, root} else ""
            state = {n: t for n, t in root.state_dict().items() if isinstance(t, Tensor)}
            return ((n[len(prefix) :], t) for n, t in state.items() if n.startswith(prefix))
        with self._together("strategy.full_tensors()"):
            return self.run.full_state(module).tensors()

    def full_state_dict(self, module: nn.Module | None = None) -> dict[str, Any]:
        """Return the module's full state, as on one device, on the CPU of rank 0, and an empty dict
        on all other ranks. Works during a run and afterwards.

        A collective: all ranks call this. For arguments and errors see :meth:`full_tensors`.
        """
        if self.run is None:
            root = self.module if module is None else module
            path_of(self.module, root)
            return dict(root.state_dict())
        with self._together("strategy.full_state_dict()"):
            return self.run.full_state(module).collect(keeps=self.is_global_zero)

    def _together(self, call: str) -> AbstractContextManager[None]:
        """Enter around a call of all ranks."""
        self.ranks.course.mark(call)
        return nullcontext() if self.ranks.failure_watch is not None else called_by_all(call)

    def _live_folder(
        self, module: nn.Module | None, dtype: torch.dtype | None, plan: Plan | None = None
    ) -> LiveFolder:
        """Return the Hugging Face folder of a model. A collective."""
        from megatron_lightning.bridge.live.live_folder import LiveFolder

        run = self._running
        return LiveFolder(self.module, module, run.full_state, self.context, dtype=dtype, plan=plan)

    def export_hf_weights(
        self, module: nn.Module | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of all tensors in a model's Hugging Face folder, tensor by tensor,
        on every rank's device. Works during a run and afterwards.

        A collective: all ranks call this, and take all tensors.

        Args:
            module: A model in the LightningModule. None: the first model loaded from a folder.
            dtype: Dtype of floating tensors. None: the folder's.

        Raises:
            ConfigError: If the model was not loaded from a folder.
            PipelineError: In a step, over several pipeline ranks.
        """
        self.ranks.course.mark("strategy.export_hf_weights()")
        return self._live_folder(module, dtype).weights()

    def weights(
        self,
        weight_format: str = "transformers",
        module: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> WeightStream:
        """Return the weights of a model as a stream for another engine, such as vLLM or SGLang:
        ``metadata()``, and on iteration name and full tensor, tensor by tensor, with the current
        values.

        A collective, like each iteration: all ranks iterate, and take all tensors. A
        :class:`GPTModel` built without a folder takes the names of the first matching family.

        Args:
            weight_format: "transformers": names in folders, as read by vLLM and SGLang, and tied
                names. "state_dict": names of the model's ``state_dict()`` in the installed
                ``transformers``. The installed version merges the experts of some families.
            module: A model in the LightningModule. None: the model loaded from a folder, or the
                only :class:`GPTModel`.
            dtype: Dtype of floating tensors. None: the folder's, or the model's.

        Raises:
            ConfigError: If no family of ``transformers`` describes the model.
            PipelineError: In a step, over several pipeline ranks.
        """
        from megatron_lightning.bridge.live.weight_stream import (
            WeightStream,
            check_format,
            streamed_model,
        )

        check_format(weight_format)
        self.ranks.course.mark("strategy.weights()")
        model, plan = streamed_model(self.module, module)
        return WeightStream(lambda: self._live_folder(model, dtype, plan), weight_format)

    def save_hf_pretrained(
        self,
        path: str | os.PathLike[str],
        module: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a model as a Hugging Face folder, with the files, names, dtypes, configuration and
        tokenizer of the model's source folder. The new folder appears in one rename.

        A collective: all ranks call this, and each rank writes a share of the files. For
        ``module``, ``dtype`` and errors see :meth:`export_hf_weights`.

        Args:
            path: The folder, on a file system shared by all ranks.
            module: See above.
            dtype: See above.
            overwrite: Replace an existing target.

        Raises:
            CheckpointError: On every rank, if the target exists, or a rank failed.
        """
        self.ranks.course.mark("strategy.save_hf_pretrained()")
        self._live_folder(module, dtype).write(Path(path), overwrite=overwrite)

    def full_module_state(self) -> dict[str, Any] | None:
        """Return :meth:`full_state_dict` on the first rank of every node. All ranks call this.

        Returns:
            None if this rank's own module is full.
        """
        self.ranks.course.mark("strategy.full_module_state()")
        if self.layout.model_parallel_size == 1 and self.part.units is None:
            return None
        return self._running.full_state().collect(keeps=self.local_rank == 0)
