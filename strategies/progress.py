"""What a checkpoint holds of a run beside module and optimizers: samples consumed, positions in the data, random states.

It stands under ``"megatron_lightning"`` in Lightning's dict, with the metrics of all replicas. All of it but random states and
states of data loaders is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from megatron_lightning.checkpoint.agreement import gather
from megatron_lightning.checkpoint.naming import OWN
from megatron_lightning.checkpoint.structure import check_progress
from megatron_lightning.errors import CheckpointError
from megatron_lightning.strategies.lightning_internals import restart_fetching
from megatron_lightning.strategies.metric_states import merge_metric_states, split_metric_states

if TYPE_CHECKING:
    from megatron_lightning.strategies.sampling import ResumableSampler
    from megatron_lightning.strategies.stepping import MegatronSteps


class RunProgress:
    """Notes and restores the progress of one strategy's run.

    Args:
        strategy: Whose run it is.
    """

    def __init__(self, strategy: MegatronSteps) -> None:
        self._strategy = strategy
        self._metrics_apart: dict[str, list[Tensor]] = {}
        self._random_state: list[Tensor] | None = None
        self._positions: list[dict[str, Any]] = []
        self._repeats_validation = False

    def added_to(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return ``checkpoint`` with what only we know of the run, and the metrics of all replicas; all ranks call this."""
        metrics = merge_metric_states(self._strategy.module, self._strategy.context.dp_cp)
        state = checkpoint["state_dict"]
        state = {**state, **{name: value for name, value in metrics.merged.items() if name in state}}
        return {**checkpoint, "state_dict": state, OWN: self._state(checkpoint) | {"metrics": metrics.apart}}

    def _state(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return progress, and what each rank has of its own."""
        strategy = self._strategy
        context = strategy.context
        fit_loop = rest.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        mine: dict[str, Any] = {}
        if context.tp.rank == context.pp.rank == context.cp.rank == 0:
            mine["data"] = (context.dp.rank, strategy.runner.rng.state(), fit_loop.get("combined_loader"))
        if context.dp.rank == 0:
            mine["layers"] = (f"tp{context.tp.rank}-pp{context.pp.rank}", context.rng.state_dict())
        ranks = gather(context.axis("world"), mine)
        data = [rank["data"] for rank in ranks if "data" in rank]
        return {
            "consumed_samples": strategy.consumed_samples,
            "skipped_steps": strategy.skipped_steps,
            "samplers": [sampler.state_dict() for sampler in strategy.train_samplers()],
            "layout": asdict(context.layout),
            "tied": dict(strategy.assembly.tied),
            "random_states": {replica: states for replica, states, _ in data},
            "loaders": {replica: loader for replica, _, loader in data if loader},
            "layer_streams": dict(rank["layers"] for rank in ranks if "layers" in rank),
        }

    def take_from(self, checkpoint: dict[str, Any]) -> None:
        """Take what is ours out of a checkpoint, and go on from there if this run trains.

        Raises:
            CheckpointError: If loaders have states of their own, and there are not as many replicas as saved them.
        """
        own = checkpoint.pop(OWN, None)  # hooks see the dict that they know from one device
        self._metrics_apart = (own or {}).get("metrics", {})
        if own is None or self._strategy.module.trainer.state.fn != TrainerFn.FITTING:
            return
        check_progress(own)
        strategy = self._strategy
        context = strategy.context
        strategy.consumed_samples, strategy.skipped_steps = own["consumed_samples"], own.get("skipped_steps", 0)
        self._positions = [] if _epoch_finished(checkpoint) else own["samplers"]
        self._repeats_validation = _in_validation(checkpoint)
        replica = context.dp.rank
        if own["loaders"]:
            if len(own["loaders"]) != context.dp.size:
                raise CheckpointError(
                    f"the checkpoint holds the states of the data loaders of {len(own['loaders'])} data-parallel ranks, and "
                    f"there are {context.dp.size}. Resume with as many, or use a map-style dataset, whose position is "
                    "valid for any number."
                )
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own["loaders"][replica]
        self._random_state = own["random_states"].get(replica)
        streams = own["layer_streams"].get(f"tp{context.tp.rank}-pp{context.pp.rank}")
        if streams is not None and own["layout"] == asdict(context.layout):
            context.rng.load_state_dict(streams)

    def module_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a loaded module's state with what this replica goes on with of its metrics."""
        parts = split_metric_states(self._strategy.module, self._strategy.context.dp_cp, state, self._metrics_apart)
        return {**state, **parts}

    def restore_random_state(self) -> None:
        """Draw random numbers as the run that saved the checkpoint would have gone on."""
        if self._random_state is not None:
            self._strategy.runner.rng.set_state(self._random_state)

    @property
    def knows_position(self) -> bool:
        """Whether the run goes on in the middle of a pass over the data, and the checkpoint says where."""
        return bool(self._positions)

    def restore_position(self, samplers: Sequence[ResumableSampler]) -> None:
        """Continue the pass over the data that the checkpoint was saved in; called when training starts."""
        if not self._positions:
            if self._repeats_validation:  # it drew its random numbers before the loaders of the next epoch drew theirs
                self.restore_random_state()
            return
        for sampler, position in zip(samplers, self._positions, strict=False):
            sampler.load_state_dict(position)
        if any(sampler.started for sampler in samplers):  # by workers that fetch ahead, before the position was known
            restart_fetching(self._strategy.module.trainer)
        self._positions = []
        self.restore_random_state()


def _epoch_finished(checkpoint: Mapping[str, Any]) -> bool:
    """Whether Lightning's loops will begin a new pass over the data."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    current = progress.get("current", {})  # an exception may end the last batch before it is trained on
    return bool(progress.get("is_last_batch", False)) and current.get("processed") == current.get("ready")


def _in_validation(checkpoint: Mapping[str, Any]) -> bool:
    """Whether Lightning's loops will go back to a validation."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.val_loop.batch_progress", {})
    total = progress.get("total", {})
    return bool(total.get("started", 0) > total.get("processed", 0))
