"""State of a run beside module and optimizers: samples consumed, positions in the data, random
states.

The state is stored under ``"megatron_lightning"`` in Lightning's dict. Except for random states and
states of data loaders, the state is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_lightning.assembly.part import Part
from megatron_lightning.checkpoint.agreement import gather
from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.format.structure import check_progress
from megatron_lightning.errors import CheckpointError
from megatron_lightning.lightning_internals.loaders import (
    enter_pass,
    load_loader_states,
    restart_fetching,
    training_loaders,
)
from megatron_lightning.lightning_internals.logs import hide_repeated_data
from megatron_lightning.lightning_internals.loops import (
    begin_epoch,
    end_epoch,
    is_validation_due,
    seconds_between_validations,
    set_validated_at,
)
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.random.replica_rng import (
    ReplicaStreams,
    host_states,
    plain_host_states,
    set_host_states,
)
from megatron_lightning.parallel.random.rng import EXPERTS
from megatron_lightning.pipeline.batch.metrics import check_persistent_states
from megatron_lightning.step.loaders.plain_objects import equal_values
from megatron_lightning.step.progress import Progress
from megatron_lightning.strategies.checkpoint.global_batch import step_size
from megatron_lightning.strategies.checkpoint.loop_progress import (
    Loops,
    ResumePlace,
    awaits_validation,
    has_begun,
    place_of,
    settle,
)
from megatron_lightning.strategies.checkpoint.resume_point import ResumePoints, copy_leaf
from megatron_lightning.strategies.step.loaders.dataloaders import (
    training_generators,
    training_samplers,
)


class RunState:
    """Write the state of a run into checkpoints, and restore the state.

    Args:
        context: Groups of this rank.
        progress: The strategy's counts.
        streams: Returns the random streams of this rank.
    """

    def __init__(
        self,
        context: ParallelContext,
        progress: Progress,
        streams: Callable[[], ReplicaStreams],
    ) -> None:
        self._context = context
        self._progress = progress
        self._streams = streams
        self.points = ResumePoints(lambda trainer: self._own_state(trainer))  # noqa: PLW0108 (shared by copies)
        """Points of the run where a checkpoint resumes. A callback of fits."""
        self._random_states: tuple[list[Tensor] | None, list[Tensor] | None] = (None, None)
        self._other_states: Mapping[str, Any] = {}  # of Python, NumPy and loaders
        self._positions: list[dict[str, Any]] = []
        self._resumed: Loops | None = None  # until training starts
        self._max_steps: int | None = None  # if a validation awaits a run without steps
        self.step_size: dict[str, Any] | None = None
        """Global batch of the resumed run. None: unknown, or no resumed run."""

    def _own_state(self, trainer: pl.Trainer) -> dict[str, Any]:
        size = step_size(trainer, self._context.dp.size)
        return {
            "consumed_samples": self._progress.consumed_samples,
            "skipped_steps": self._progress.skipped_steps,
            "drawn": self._streams().states(),
            "drawn_on_host": host_states(),
            "streams": self._context.rng.state_dict(),
            # Of the point: an evaluation after the fit detaches the loaders.
            "step_size": None if size is None else size.as_dict(),
        }

    def write_to(
        self, checkpoint: Mapping[str, Any], module: pl.LightningModule, part: Part
    ) -> dict[str, Any]:
        """Return ``checkpoint`` with the state of the run. All ranks call this.

        Raises:
            CheckpointError: If metrics of several replicas have persistent states.
        """
        check_persistent_states(module, self._context.dp_cp.size)
        context, trainer = self._context, module.trainer
        point = self.points.now(trainer)
        mine: dict[str, Any] = {}
        drawn_by_steps, drawn_by_hooks = point.drawn
        # User code draws the same numbers on all ranks of a replica, and parallel layers draw other
        # numbers on each model-parallel rank: one state for each replica, and one for each place in
        # it.
        if context.tp.rank == context.pp.rank == context.cp.rank == 0:
            loader = point.loops["state_dict"].get("combined_loader")
            host = {"host": plain_host_states(point.drawn_on_host), "loaders": point.generators}
            mine["data"] = (context.dp.rank, drawn_by_steps, loader, host)
        streams = dict(point.streams)
        # Experts lie on the ranks in another grid, and have a place of their own.
        experts = {EXPERTS: streams.pop(EXPERTS)}
        mine["layers"] = {_place_in_replica(context): streams} if context.dp.rank == 0 else {}
        if context.edp.rank == 0:
            mine["layers"][_place_among_experts(context)] = experts
        ranks = gather(context.axis("world"), mine)
        data = [rank["data"] for rank in ranks if "data" in rank]
        state = {
            "consumed_samples": point.consumed_samples,
            "skipped_steps": point.skipped_steps,
            "run": dict(self._progress.run),
            "step_size": point.step_size,
            "samplers": point.samplers,
            "layout": asdict(context.layout),
            "tied": dict(part.tied),
            "random_states": {replica: states for replica, states, _, _ in data},
            "other_random_states": {replica: states for replica, _, _, states in data},
            "hooks_random_state": drawn_by_hooks,
            "loaders": {replica: loader for replica, _, loader, _ in data if loader},
            "layer_streams": {k: v for rank in ranks for k, v in rank["layers"].items()},
        }
        if self._progress.fired:
            state["guards"] = dict(self._progress.fired)
        if "loops" in checkpoint:  # a hook may have removed them
            loops = {**checkpoint["loops"], "fit_loop": point.loops}
            checkpoint = {**checkpoint, "epoch": point.epoch, "loops": loops}
        return {**checkpoint, OWN: state}

    def read_from(self, checkpoint: dict[str, Any], module: pl.LightningModule) -> None:
        """Remove our entry from a checkpoint, and resume from the entry if this run trains.

        Raises:
            CheckpointError: If loaders have states of their own and the number of replicas has
                changed. If metrics of several replicas have persistent states.
        """
        context = self._context
        check_persistent_states(module, context.dp_cp.size)
        state = checkpoint.pop(OWN, None)  # hooks see the dict of one device
        if state is None or module.trainer.state.fn != TrainerFn.FITTING:
            return
        check_progress(state)
        self._progress.consumed_samples = state["consumed_samples"]
        self._progress.skipped_steps = state.get("skipped_steps", 0)
        for guard, count in state.get("guards", {}).items():
            self._progress.fired[guard] = self._progress.fired.get(guard, 0) + count
        self.step_size = state.get("step_size")
        loops = checkpoint.get("loops", {}).get("fit_loop", {})  # absent: the user counts anew
        self._positions = state["samplers"]
        if state["loaders"]:
            saved = list(state["loaders"].values())
            is_shared = all(equal_values(one, saved[0]) for one in saved)
            if len(saved) != context.dp.size and not is_shared:
                raise CheckpointError(
                    "the checkpoint holds the states of the data loaders of "
                    f"{len(saved)} data-parallel ranks, and there are "
                    f"{context.dp.size}. Resume with as many, or use a map-style "
                    "dataset, whose position is valid for any number."
                )
            # States that are equal on all ranks are of the data, not of a rank.
            loops.setdefault("state_dict", {})["combined_loader"] = (
                saved[0] if is_shared else state["loaders"][context.dp.rank]
            )
        states = state["random_states"]
        self._random_states = (
            states.get(context.dp.rank),
            state.get("hooks_random_state") or states.get(0),
        )
        self._other_states = state.get("other_random_states", {}).get(context.dp.rank, {})
        self._resumed = loops
        if "epoch_progress" in loops:
            self._resume(module.trainer, loops, checkpoint)
        # Under another layout the places mean other layers: the streams begin anew from the seed.
        if state["layout"] == asdict(context.layout):
            for place in (_place_in_replica(context), _place_among_experts(context)):
                context.rng.load_state_dict(state["layer_streams"].get(place, {}))

    def _resume(self, trainer: pl.Trainer, loops: Loops, checkpoint: Mapping[str, Any]) -> None:
        """Bring the loops of a checkpoint into a form that Lightning resumes exactly."""
        self.points.loaded = {
            "loops": tree_map(copy_leaf, dict(loops)),
            "epoch": checkpoint["epoch"],
            "samplers": self._positions,
        }
        settle(loops)
        steps, max_steps = checkpoint["global_step"], trainer.max_steps
        if awaits_validation(loops) and 0 <= max_steps <= steps:
            # Lightning leaves a fit without steps at once, and so without the validation.
            self._max_steps = max_steps
            trainer.fit_loop.epoch_loop.max_steps = steps + 1

    def begin_validation(self, trainer: pl.Trainer) -> None:
        """Restore ``max_steps``, raised so that a run without steps does its pending validation."""
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps = self._max_steps
            self._max_steps = None

    def restore_random_state(self) -> None:
        """Draw the next random numbers of the run that saved the checkpoint."""
        self._streams().restore(*self._random_states)
        if self._other_states:
            set_host_states(self._other_states["host"])

    def restore_position(self, trainer: pl.Trainer, undo: ExitStack) -> None:
        """Continue the pass over the data from the checkpoint's position. Called when training
        starts. Lightning's warning of data that come again is hidden until ``undo`` is closed.
        """
        if self._resumed is not None:
            self._restore_data(trainer, self._resumed, undo)
            self.restore_random_state()
            self._restore_validation(trainer, self._resumed)
            self._resumed = None
        self.points.begin(trainer)

    def _restore_data(self, trainer: pl.Trainer, loops: Loops, undo: ExitStack) -> None:
        place = place_of(loops)
        load_loader_states(trainer)
        samplers = training_samplers(trainer)
        if len(samplers) == len(training_loaders(trainer)):
            undo.callback(hide_repeated_data())
        if place is not ResumePlace.IN_EPOCH and loops["state_dict"].get("combined_loader"):
            enter_pass(trainer)
        if place is ResumePlace.IN_EPOCH:
            for sampler, position in zip(samplers, self._positions, strict=False):
                sampler.load_state_dict(position)
            # Workers fetched ahead before the position was known.
            if any(sampler.started for sampler in samplers):
                restart_fetching(trainer)
        states = self._other_states.get("loaders", ())
        for generator, drawn in zip(training_generators(trainer), states, strict=False):
            generator.set_state(drawn)
        if place is ResumePlace.BETWEEN_EPOCHS or not has_begun(loops):
            begin_epoch(trainer)
        elif place is ResumePlace.END_OF_EPOCH and not awaits_validation(loops):
            end_epoch(trainer)

    def _restore_validation(self, trainer: pl.Trainer, loops: Loops) -> None:
        if awaits_validation(loops) and seconds_between_validations(trainer) is not None:
            set_validated_at(trainer, float("-inf"))
        if self._max_steps is not None and not is_validation_due(trainer):
            # The run validates at other times than the saved run.
            self.begin_validation(trainer)


def _place_in_replica(context: ParallelContext) -> str:
    sequence = f"-cp{context.cp.rank}" if context.cp.size > 1 else ""
    return f"tp{context.tp.rank}-pp{context.pp.rank}{sequence}"


def _place_among_experts(context: ParallelContext) -> str:
    return f"etp{context.etp.rank}-ep{context.ep.rank}-pp{context.pp.rank}"
