"""State of a run beside module and optimizers: samples consumed, positions in the data, random
states.

The state is stored under ``"megatron_lightning"`` in Lightning's dict. Except for random states and
states of data loaders, the state is the same on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from megatron_lightning.assembly.part import Part
from megatron_lightning.checkpoint.agreement import gather
from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.format.structure import check_progress
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.replica_rng import ReplicaStreams
from megatron_lightning.parallel.rng import EXPERTS
from megatron_lightning.pipeline.batch.metrics import check_persistent_states
from megatron_lightning.strategies.checkpoint.global_batch import step_size
from megatron_lightning.strategies.lightning_internals import restart_fetching, training_loaders
from megatron_lightning.strategies.progress import Progress
from megatron_lightning.strategies.step.loaders.dataloaders import training_samplers
from megatron_lightning.strategies.step.loaders.plain_objects import equal_values


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
        self._random_states: tuple[list[Tensor] | None, list[Tensor] | None] = (None, None)
        self._positions: list[dict[str, Any]] = []
        self._repeats_validation = False
        self.step_size: dict[str, Any] | None = None
        """Global batch of the resumed run. None: unknown, or no resumed run."""

    def write_to(
        self, checkpoint: Mapping[str, Any], module: pl.LightningModule, part: Part
    ) -> dict[str, Any]:
        """Return ``checkpoint`` with the state of the run. All ranks call this.

        Raises:
            CheckpointError: If metrics of several replicas have persistent states.
        """
        check_persistent_states(module, self._context.dp_cp.size)
        context = self._context
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        mine: dict[str, Any] = {}
        drawn_by_steps, drawn_by_hooks = self._streams().states()
        # User code draws the same numbers on all ranks of a replica, and parallel layers draw other
        # numbers on each model-parallel rank: one state for each replica, and one for each place in
        # it.
        if context.tp.rank == context.pp.rank == context.cp.rank == 0:
            mine["data"] = (context.dp.rank, drawn_by_steps, fit_loop.get("combined_loader"))
        streams = context.rng.state_dict()
        # Experts lie on the ranks in another grid, and have a place of their own.
        experts = {EXPERTS: streams.pop(EXPERTS)}
        mine["layers"] = {_place_in_replica(context): streams} if context.dp.rank == 0 else {}
        if context.edp.rank == 0:
            mine["layers"][_place_among_experts(context)] = experts
        ranks = gather(context.axis("world"), mine)
        data = [rank["data"] for rank in ranks if "data" in rank]
        size = step_size(module.trainer, context.dp.size)
        state = {
            "consumed_samples": self._progress.consumed_samples,
            "skipped_steps": self._progress.skipped_steps,
            "run": dict(self._progress.run),
            "step_size": None if size is None else size.as_dict(),
            "samplers": [sampler.state_dict() for sampler in training_samplers(module.trainer)],
            "layout": asdict(context.layout),
            "tied": dict(part.tied),
            "random_states": {replica: states for replica, states, _ in data},
            "hooks_random_state": drawn_by_hooks,
            "loaders": {replica: loader for replica, _, loader in data if loader},
            "layer_streams": {k: v for rank in ranks for k, v in rank["layers"].items()},
        }
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
        self.step_size = state.get("step_size")
        self._positions = [] if _epoch_finished(checkpoint) else state["samplers"]
        self._repeats_validation = _in_validation(checkpoint)
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
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = (
                saved[0] if is_shared else state["loaders"][context.dp.rank]
            )
        states = state["random_states"]
        self._random_states = (
            states.get(context.dp.rank),
            state.get("hooks_random_state") or states.get(0),
        )
        # Under another layout the places mean other layers: the streams begin anew from the seed.
        if state["layout"] == asdict(context.layout):
            for place in (_place_in_replica(context), _place_among_experts(context)):
                context.rng.load_state_dict(state["layer_streams"].get(place, {}))

    def restore_random_state(self) -> None:
        """Draw the next random numbers of the run that saved the checkpoint."""
        self._streams().restore(*self._random_states)

    def restore_position(self, trainer: pl.Trainer) -> None:
        """Continue the pass over the data from the checkpoint's position. Called when training
        starts.
        """
        if not self._positions:
            # The save drew random numbers before the loaders of the next epoch did.
            if self._repeats_validation:
                self.restore_random_state()
            return
        samplers = training_samplers(trainer)
        # Lightning looks for state_dict on loaders.
        if len(samplers) == len(training_loaders(trainer)):
            warnings.filterwarnings(
                "ignore", "You're resuming from a checkpoint that ended before the epoch ended"
            )
        for sampler, position in zip(samplers, self._positions, strict=False):
            sampler.load_state_dict(position)
        # Workers fetched ahead before the position was known.
        if any(sampler.started for sampler in samplers):
            restart_fetching(trainer)
        self._positions = []
        self.restore_random_state()


def _place_in_replica(context: ParallelContext) -> str:
    sequence = f"-cp{context.cp.rank}" if context.cp.size > 1 else ""
    return f"tp{context.tp.rank}-pp{context.pp.rank}{sequence}"


def _place_among_experts(context: ParallelContext) -> str:
    return f"etp{context.etp.rank}-ep{context.ep.rank}-pp{context.pp.rank}"


def _epoch_finished(checkpoint: Mapping[str, Any]) -> bool:
    """Whether Lightning's loops will begin a new pass over the data."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    # An exception may end the last batch before its training.
    current = progress.get("current", {})
    return bool(progress.get("is_last_batch", False)) and current.get("processed") == current.get(
        "ready"
    )


def _in_validation(checkpoint: Mapping[str, Any]) -> bool:
    """Whether Lightning's loops will return to a validation."""
    progress = (
        checkpoint.get("loops", {})
        .get("fit_loop", {})
        .get("epoch_loop.val_loop.batch_progress", {})
    )
    total = progress.get("total", {})
    return bool(total.get("started", 0) > total.get("processed", 0))
