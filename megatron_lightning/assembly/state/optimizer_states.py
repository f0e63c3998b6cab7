"""Optimizers in Lightning's checkpoint: their states by global name, their groups in the order of
the full model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from megatron_lightning.assembly.part import Part
from megatron_lightning.checkpoint import TensorShards, load_sharded
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.errors import CheckpointError
from megatron_lightning.optim.class_names import CLASSES, check_class, class_names
from megatron_lightning.optim.stepping.distributed import DistributedOptimizer
from megatron_lightning.optim.stepping.group_names import (
    check_regrouping,
    groups_of_rank,
    merge_groups,
)
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext


class OptimizerHandle(dict[str, Any]):
    """Represents an optimizer's state between Lightning's dump and our save.

    Args:
        optimizer: The user's optimizer.
        view: The optimizer in the form of checkpoints.
    """

    def __init__(self, optimizer: Optimizer, view: DistributedOptimizer) -> None:
        super().__init__(optimizer.state_dict())
        self.view = view


def view_of(handle: Any) -> DistributedOptimizer:
    """Return the optimizer behind an entry of ``optimizer_states``.

    Raises:
        CheckpointError: If a hook has replaced the entry.
    """
    if not isinstance(handle, OptimizerHandle):
        raise CheckpointError(
            "optimizer_states of the checkpoint were replaced by a hook; leave them to the "
            "strategy."
        )
    return handle.view


def optimizer_tensors(views: Sequence[DistributedOptimizer]) -> list[TensorShards]:
    """Return this rank's shards of the states of all optimizers."""
    return [
        shards
        for index, view in enumerate(views)
        for shards in view.state_tensors(state_prefix(index))
    ]


def optimizer_states(
    views: Sequence[DistributedOptimizer], part: Part, context: ParallelContext
) -> list[dict[str, Any]]:
    """Return Lightning's ``optimizer_states`` without the states' tensors. A collective."""
    # Every stage has states of its own. Owners of full parameters have them on any rank.
    owned = any(view.has_owners for view in views)
    holders = context.axis("world") if owned else context.pp
    ranks = holders.all_gather_object([view.plain_state() for view in views])
    return [
        {
            "state": {name: values for rank in ranks for name, values in rank[index].items()},
            "param_groups": groups,
            CLASSES: class_names(view.optimizer),
        }
        for index, (view, groups) in enumerate(
            zip(views, merged_groups(views, part, context.pp), strict=True)
        )
    ]


def merged_groups(
    views: Sequence[DistributedOptimizer], part: Part, pp: AxisGroup
) -> list[list[dict[str, Any]]]:
    """Return each optimizer's parameter groups with the names of all pipeline ranks, in the full
    model's order. A collective over ``pp``.
    """
    ranks = pp.all_gather_object([view.param_groups() for view in views])
    place = {name: position for position, name in enumerate(part.names)}
    return [merge_groups([rank[index] for rank in ranks], place) for index in range(len(views))]


def state_prefix(index: int) -> str:
    """Return the begin of the names of an optimizer's tensors in a checkpoint."""
    return f"optimizer_states.{index}.state."


def load_optimizer(
    view: DistributedOptimizer,
    saved: Mapping[str, Any],
    source: CheckpointSource,
    prefix: str,
    world: AxisGroup,
) -> None:
    """Read one optimizer's groups and state from the tensors of ``source`` under ``prefix``. All
    ranks call this.
    """
    described = {}
    for stored_name, info in source.tensors().items():
        if stored_name.startswith(prefix):
            name, _, key = stored_name.removeprefix(prefix).rpartition(".")
            described[name, key] = (info.shape, info.dtype)
    view.load_param_groups(groups_of_rank(view.param_groups(), saved["param_groups"]))
    shards = view.allocate_state(described, prefix)
    view.load_plain_state(saved["state"])
    load_sharded(source, shards, prefix=prefix, strict=True, group=world)
    view.finish_restore()


def check_optimizers(
    views: Sequence[DistributedOptimizer], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Check that no optimizer, and no parameter of an optimizer, would silently begin without
    state.
    """
    if len(views) != len(saved):
        raise CheckpointError(
            f"the checkpoint holds the states of {len(saved)} optimizers, and the model has "
            f"{len(views)}. Return as many from configure_optimizers, or load the weights alone."
        )
    for view, state in zip(views, saved, strict=True):
        check_class(view.optimizer, state.get(CLASSES, ()))
        saved_names = {name for group in state["param_groups"] for name in group["params"]}
        extra = [
            name
            for group in view.param_groups()
            for name in group["params"]
            if name not in saved_names
        ]
        if saved_names and extra:
            more = f" and {len(extra) - 8} more" if len(extra) > 8 else ""
            raise CheckpointError(
                f"{type(view.optimizer).__name__} has parameters of which the checkpoint's "
                f"optimizer knows nothing: {', '.join(extra[:8])}{more}. Resume with the "
                "parameters it was saved with, or load the weights alone."
            )
        check_regrouping(type(view.optimizer).__name__, view.param_groups(), state["param_groups"])


def check_sizes(
    groups: Sequence[Sequence[Mapping[str, Any]]], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Check group sizes against a plain file. A plain file numbers parameters group by group."""
    for mine, state in zip(groups, saved, strict=True):
        lens = [len(group["params"]) for group in mine]
        then = [len(group["params"]) for group in state["param_groups"]]
        if lens != then:
            raise CheckpointError(
                f"the checkpoint's optimizer has parameter groups of {then} parameters, and there "
                f"are groups of {lens} now, so that the states would be those of other parameters. "
                "Group the parameters as they were saved, or load the weights alone."
            )
