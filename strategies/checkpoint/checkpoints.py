"""Translate between Lightning's checkpoint, a nested dict, and our sharded directories.

On every rank, Lightning builds the dict with that rank's part of the module. Tensors of the module,
of the optimizers and of callbacks with copies of the module are saved by global name, so any layout
reads these tensors. Everything else comes from rank 0. Values of single ranks (random states,
states of data loaders) are saved under ``"megatron_lightning"``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.assembly.state.optimizer_states import (
    check_optimizers,
    check_sizes,
    load_optimizer,
    merged_groups,
    optimizer_states,
    optimizer_tensors,
    state_prefix,
    view_of,
)
from megatron_lightning.assembly.state.state_entries import StateEntries
from megatron_lightning.bridge.folders.remembered_folders import write_kept
from megatron_lightning.checkpoint import TensorShards, open_checkpoint
from megatron_lightning.checkpoint.agreement import together
from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.local_copies.local import Pointer
from megatron_lightning.checkpoint.local_copies.local_plan import copy_plan, open_copy
from megatron_lightning.checkpoint.reading.renamed_states import (
    renamed_source,
    renamed_state,
    renamed_tensors,
)
from megatron_lightning.checkpoint.reading.source import CheckpointSource, PlainSource
from megatron_lightning.checkpoint.reading.vocabulary import fit_vocabulary
from megatron_lightning.checkpoint.writing.saver import Save, Saver
from megatron_lightning.checkpoint.writing.saving import Snapshot, take_snapshot, write_snapshot
from megatron_lightning.errors import CheckpointError
from megatron_lightning.launch.ranks import ProcessGroups
from megatron_lightning.layers.shared_rows.entry import found_mixers
from megatron_lightning.lightning_internals.checkpoints import trainer_state
from megatron_lightning.optim.gradients.parameter_shard import MainShard
from megatron_lightning.optim.stepping.distributed import DistributedOptimizer
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.peft.left_out_weights import LeftOutWeights
from megatron_lightning.peft.record import left_out_of, read_records
from megatron_lightning.precision.served.qat import resume_qat
from megatron_lightning.step.options import StrategyOptions
from megatron_lightning.step.progress import Progress
from megatron_lightning.strategies.checkpoint.run_state import RunState

if TYPE_CHECKING:
    from megatron_lightning.bridge.live.live_folder import FoldersOfCheckpoints


class Checkpoints:
    """Save and load the checkpoints of one run.

    Args:
        module: The LightningModule.
        ranks: Groups of this rank.
        options: The strategy's.
        progress: The strategy's counts.
        saver: Writes the checkpoints, in the background if requested.
        ranks_per_node: Ranks of each node.
        share_buffers: Makes buffers equal on all ranks with the same buffer, since every replica
            writes a part of a tensor.
        check_replicas: Checks that ranks hold equal values of replicated tensors.
        main_shards: Returns the main params of parameters kept as quantized data.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        ranks: ProcessGroups,
        options: StrategyOptions,
        progress: Progress,
        *,
        saver: Saver,
        ranks_per_node: int,
        share_buffers: Callable[[], None],
        check_replicas: Callable[[], None],
        main_shards: Callable[[], Mapping[str, MainShard]],
    ) -> None:
        self._module = module
        self._ranks = ranks
        self._context = ranks.context
        self._options = options
        self._progress = progress
        self._ranks_per_node = ranks_per_node
        self._share_buffers = share_buffers
        self._check_replicas = check_replicas
        self._main_shards = main_shards
        self._has_saved = False
        self._source: CheckpointSource | None = None
        self._path = ""
        self._is_plain = False
        self._renamed: dict[str, str] = {}  # names in the checkpoint -> names now
        self.saver = saver
        """Writes the checkpoints."""
        self._folders = None if options.checkpoint.also_save_hf is None else _folders_of(module)
        self.left_out = LeftOutWeights(options.checkpoint)
        """Leaves frozen weights out of checkpoints, on request."""
        self.state = RunState(ranks.context, progress, lambda: ranks.streams)
        """Samples consumed, data positions and random states, in the form of a checkpoint."""

    @property
    def _trainer(self) -> pl.Trainer:
        return self._module.trainer

    # ----------------------------------------------------------------------------------------- save

    def can_save(self, path: str) -> bool:
        """Return whether the ranks can save together, and warn if not. Not a collective.

        After an exception on some ranks only, nothing is saved, since the other ranks write no
        parts. Nothing is saved either after an exception in the middle of an optimizer step, or
        before the step on some ranks and after the step on other ranks: the parts would belong to
        two steps.
        """
        if self._trainer.state.status != TrainerStatus.INTERRUPTED or self._interrupted_together():
            return True
        warnings.warn(
            f"{path} is not saved: the exception reached only some of the "
            f"{self._context.world_size} ranks, or came in the middle of an optimizer step.",
            stacklevel=2,
        )
        return False

    def save(self, checkpoint: dict[str, Any], path: str, part: Part, *, background: bool) -> None:
        """Write ``checkpoint`` as a directory, if :meth:`can_save`. A rename commits the directory
        after every rank has written a part.

        Args:
            checkpoint: Lightning's dict.
            path: The directory.
            part: This rank's part of the module.
            background: Whether to return as soon as the state is copied. After the run nobody waits
                for the writing.

        Raises:
            CheckpointError: On every rank, if any rank failed. An existing checkpoint at ``path``
                is intact.
        """
        # The process may end right after a save outside of the loop: nothing may be left to a
        # thread.
        background &= self._trainer.state.status == TrainerStatus.RUNNING
        # Names may hold times or values of a rank.
        path = self._ranks.broadcast(path)
        tensors, plain_state, _ = self._divide(checkpoint, part)
        info = self._info(plain_state, part)

        def take(group: AxisGroup) -> Snapshot:
            return take_snapshot(path, tensors, plain_state, info=info, group=group)

        # Hugging Face folders are written after the shards, from the same snapshot, so that both
        # hold one step.
        exports = self._folders if self._exports() else None
        if exports is not None:
            exports.prepare()

        def write(snapshot: Snapshot, group: AxisGroup) -> None:
            write_snapshot(snapshot, group)
            if self._folders is not None:
                self._folders.note(path)
            if exports is not None:
                exports.write(path, group)

        self.saver.save(Save(path, take, write), self._context, background=background)
        if background:
            self._log_stall()

    def check_folders(self) -> None:
        """Check that Hugging Face folders can be written, if requested.

        Raises:
            ConfigError: If no model was loaded from a folder.
        """
        if self._folders is not None:
            self._folders.prepare()

    def finish_fit(self) -> None:
        """Write the folder of the last checkpoint, if requested. All ranks call this."""
        if self._folders is not None and self._options.checkpoint.also_save_hf == "end":
            self._folders.write_last(self._context.axis("world"))

    def _exports(self) -> bool:
        """Whether the checkpoint about to be saved gets a folder at once."""
        when = self._options.checkpoint.also_save_hf
        is_over = self._trainer.state.status == TrainerStatus.FINISHED
        return when == "every" or (when == "end" and is_over)

    def _info(self, rest: Mapping[str, Any], part: Part) -> dict[str, Any]:
        """Return the manifest's description of the run."""
        info = {
            "layout": asdict(self._context.layout),
            "consumed_samples": rest[OWN]["consumed_samples"],
        }
        info |= {
            "world_size": self._context.world_size,
            "global_step": rest.get("global_step"),
            "epoch": rest.get("epoch"),
        }
        info["tied"] = dict(part.tied)
        info |= self.left_out.describe(rest)
        if mixers := found_mixers(self._module):
            info["context_mixers"] = mixers
        config = getattr(self._module, "config", None)
        if is_dataclass(config) and not isinstance(config, type):
            info["config"] = asdict(config)
        return info

    def _interrupted_together(self) -> bool:
        """Whether an exception reached all ranks between the same two optimizer steps."""
        step = self._trainer.global_step
        is_updating = self._progress.is_updating(step) or self.state.points.is_updating(
            self._trainer
        )
        if self._context.world_size == 1:
            return not is_updating
        state = f"rank {self._context.rank} is updating" if is_updating else f"step {step}"
        return self._ranks.all_interrupted(state)

    def save_local(self, path: str, folder: str, part: Part) -> None:
        """In the background, write every rank's part to the disks of the rank's node and of the
        next node, and write the pointer ``path``.

        Raises:
            CheckpointError: On every rank, if this save, or the save before, failed on any rank.
                Older copies are intact.
        """
        tensors, plain_state, copies = self._divide(trainer_state(self._trainer), part)
        tensors += self._module_state(part).tied_shards() + copies
        pointer = self._pointer(folder, int(plain_state["global_step"]))
        plan = copy_plan(tensors, plain_state, path=self._ranks.broadcast(path), pointer=pointer)
        self.saver.save(plan, self._context, background=True)
        self._log_stall()

    def _log_stall(self) -> None:
        report = self.saver.last
        if report is not None:
            for logger in self._trainer.loggers:
                logger.log_metrics(
                    {"checkpoint_stall_s": report.stall_s}, step=self._trainer.global_step
                )

    def _pointer(self, folder: str, step: int) -> Pointer:
        size, run = self._context.world_size, self._progress.run
        return Pointer(folder, self._ranks_per_node, size, step, self._sharding, run=run)

    @property
    def _sharding(self) -> dict[str, Any]:
        """Settings that map shards to ranks."""
        sharding = {**asdict(self._context.layout), "data_parallel": self._options.data_parallel}
        return {**sharding, "main_params": True} if self._main_shards() else sharding

    def _divide(
        self, checkpoint: dict[str, Any], part: Part
    ) -> tuple[list[TensorShards], dict[str, Any], list[TensorShards]]:
        """Return this rank's tensors, the rest of the dict, and tied copies of entries."""
        self._share_buffers()
        write_kept(self._module, checkpoint)
        compares, self._has_saved = not self._has_saved, True
        if compares:
            self._check_replicas()
        plain_state = self.state.write_to(checkpoint, self._module, part)
        views = [view_of(handle) for handle in plain_state.pop("optimizer_states", [])]
        state = self._module_state(part)
        tensors = self.left_out.write_to(plain_state, state.module_shards(plain_state), state)
        entries = StateEntries(state).take(plain_state, compare=compares)
        tensors += entries.shards
        tensors += optimizer_tensors(views)
        if views:
            plain_state["optimizer_states"] = optimizer_states(views, part, self._context)
        return tensors, plain_state, entries.copies

    def _module_state(self, part: Part) -> ModuleState:
        return ModuleState(self._module, part, self._context, self._main_shards())

    def begin_fit(self, part: Part) -> None:
        """Record what checkpoints of the fit may leave out. All ranks call this."""
        self.left_out.begin(self._module_state(part))

    # ----------------------------------------------------------------------------------------- load

    def load(self, path: str, part: Part) -> dict[str, Any]:
        """Return Lightning's checkpoint. All ranks call this.

        ``state_dict`` has the names and shapes of the full model. :meth:`load_model` reads the
        values into the module later. :meth:`load_optimizers` reads the optimizer states into the
        optimizers later. All other tensors are this rank's part.

        Raises:
            CheckpointError: On every rank: for misshaped or damaged tensors.
        """
        # The checkpoint to load may still be on its way to the disk.
        self.saver.finish()
        module, state, world = self._module, self._module_state(part), self._context.axis("world")
        # Copies in a node's memory come first: newer, and read without the shared file system.
        copy = open_copy(
            path,
            world,
            ranks_per_node=self._ranks_per_node,
            layout=self._sharding,
            exchange_group=lambda: self.saver.group(self._context),
        )
        source = copy or open_checkpoint(path, group=world)
        self._path = path
        self._is_plain = isinstance(source, PlainSource)
        self._source = self._fitted(source, part)
        checkpoint = self._source.state()
        # Entries of callbacks are read now, since Lightning restores callbacks before the module.
        StateEntries(state).load(self._source, checkpoint)
        checkpoint["state_dict"] = {
            **checkpoint.get("state_dict", {}),
            **state.stored_tensors(self._source),
        }
        self.state.read_from(checkpoint, module)
        return checkpoint

    def load_model(self, checkpoint: Mapping[str, Any], part: Part, *, strict: bool) -> None:
        """Load the module from ``checkpoint["state_dict"]``, as left by hooks. All ranks call this.

        Raises:
            CheckpointError: On every rank: for missing, unexpected, misshaped or damaged tensors.
        """
        from megatron_lightning.peft.resume import check_scales

        state_dict: Mapping[str, Any] = checkpoint["state_dict"]
        check_scales(self._module, read_records(checkpoint), state_dict)
        resume_qat(self._module, checkpoint)
        state = self._module_state(part)
        self.left_out.before_load(state)
        source = state.edited(self._source, state_dict)
        local_keys = state.load_module(source, strict=strict, left_out=left_out_of(checkpoint))
        self.left_out.check_loaded(checkpoint, state)
        self._renamed = {} if self._is_plain else renamed_tensors(state_dict)
        plain_values = {
            name: value
            for name, value in state_dict.items()
            if not isinstance(value, Tensor) and name in self._module.state_dict()
        }
        self._module.load_state_dict({**plain_values, **local_keys}, strict=strict)

    def _fitted(self, source: CheckpointSource, part: Part) -> CheckpointSource:
        """Wrap the source to resize vocabulary tensors, if requested."""
        shapes = self._module_state(part).vocabulary_shapes()
        return fit_vocabulary(
            source, shapes, self._context, resize=self._options.checkpoint.resize_vocabulary
        )

    def load_optimizers(
        self, checkpoint: Mapping[str, Any], views: Sequence[DistributedOptimizer], part: Part
    ) -> None:
        """Read the optimizer states into the optimizers' tensors. All ranks call this.

        Raises:
            CheckpointError: On every rank, if no checkpoint is being loaded, or the checkpoint
                lacks the states of these optimizers.
        """
        source = self._source
        if source is None:
            raise CheckpointError("no checkpoint is being loaded.")
        states, world = checkpoint["optimizer_states"], self._context.axis("world")
        # A plain file numbers the parameters of optimizers. The optimizers exist by now.
        if self._is_plain and states:
            merged = merged_groups(views, part, self._context.pp)
            order = [[name for group in groups for name in group["params"]] for groups in merged]
            source = self._fitted(
                open_checkpoint(self._path, optimizer_parameters=order, group=world), part
            )
            states = source.state()["optimizer_states"]
            together(world, "loading the optimizers", lambda: check_sizes(merged, states))
        if not states and views:  # as in Lightning: states left out on purpose
            rank_zero_warn(
                "the checkpoint has no optimizer states: the optimizers begin with none."
            )
            views = []
        if names := self._renamed:
            states = [renamed_state(saved, names) for saved in states]
            for index in range(len(states)):
                source = renamed_source(source, state_prefix(index), names)
        together(world, "loading the optimizers", lambda: check_optimizers(views, states))
        for index, (view, saved) in enumerate(zip(views, states, strict=True)):
            load_optimizer(view, saved, source, state_prefix(index), world)
        self._source = None
        self.state.restore_random_state()


def _folders_of(module: pl.LightningModule) -> FoldersOfCheckpoints:
    """Make the writer of Hugging Face folders, imported by the runs that write folders."""
    from megatron_lightning.bridge.live.live_folder import FoldersOfCheckpoints

    return FoldersOfCheckpoints(module)
