"""The state of an optimizer in checkpoints: by global parameter name and global offset.

Any layout can read the state of another. Numbers kept on every rank, such as step counters, become
scalar tensors. On one device states other than tensors are saved unchanged.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from megatron_lightning.errors import CheckpointError
from megatron_lightning.optim.gradients.reducer import GradientReducer
from megatron_lightning.optim.stepping.entries import OptimizerEntry
from megatron_lightning.parallel.shards.nested_state import filled, flattened
from megatron_lightning.parallel.shards.spec import Shape, Shard, ShardSpec, is_writer
from megatron_lightning.parallel.shards.tensor_shards import TensorShards

MAIN = "master"
"""State key of the fp32 main params."""


class OptimizerState:
    """The state of an optimizer on this rank."""

    def __init__(self, optimizer: Optimizer, reducer: GradientReducer) -> None:
        self.optimizer = optimizer
        self._reducer = reducer
        self._entries: list[list[OptimizerEntry]] = []  # by group
        self._restored_main: set[str] = set()

    def _all_entries(self) -> Iterator[OptimizerEntry]:
        for entries in self._entries:
            yield from entries

    def param_groups(self) -> list[dict[str, Any]]:
        """Return every group's hyper-parameters, with the global names of this rank's parameters as
        ``params``.
        """
        return [
            {**_hyper_parameters(group), "params": [entry.global_name for entry in entries]}
            for group, entries in zip(self.optimizer.param_groups, self._entries, strict=True)
        ]

    def load_param_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load saved hyper-parameters (learning rates, weight decays, …), group by group."""
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} parameter groups and "
                f"{type(self.optimizer).__name__} has {len(groups)}. Configure the optimizer as it "
                "was when the checkpoint was written."
            )
        for group, values in zip(groups, saved, strict=True):
            group.update(copy.deepcopy(_hyper_parameters(values)))

    def state_tensors(self, prefix: str = "") -> list[TensorShards]:
        """Return this rank's state as ``<prefix><parameter>.<key>``, main params included. Numbers
        become scalars.
        """
        tensors = []
        for entry in self._all_entries():
            states = [self.optimizer.state.get(target.tensor, {}) for target in entry.targets]
            if entry.has_main:
                tensors.append(
                    self._state_tensor(
                        prefix, entry, MAIN, [target.tensor.detach() for target in entry.targets]
                    )
                )
            for key in states[0] if states else ():
                values = [state[key] for state in states]
                if self._is_plain(entry, values[0]):
                    inside = flattened(key, values[0])[0]
                    tensors += [
                        self._state_tensor(prefix, entry, k, [v]) for k, v in inside.items()
                    ]
                elif values[0] is not None:
                    tensors.append(
                        self._state_tensor(
                            prefix, entry, key, [_as_tensor(value) for value in values]
                        )
                    )
        return tensors

    def _is_plain(self, entry: OptimizerEntry, value: object) -> bool:
        """Whether a checkpoint stores a state beside the tensors."""
        is_alone = self._reducer.context.world_size == 1
        return (is_alone or entry.keeps_plain) and not isinstance(value, Tensor)

    def plain_state(self) -> dict[str, dict[str, Any]]:
        """Return the states other than tensors on this rank, by global parameter name and key.
        Tensors inside are left out.
        """
        states: dict[str, dict[str, Any]] = {}
        for entry in self._all_entries():
            state = self.optimizer.state.get(entry.targets[0].tensor, {}) if entry.targets else {}
            values = {
                key: flattened(key, value)[1]
                for key, value in state.items()
                if self._is_plain(entry, value)
            }
            if values:
                states[entry.global_name] = values
        return states

    def load_plain_state(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the result of :meth:`plain_state`, after :meth:`allocate_state`."""
        for entry in self._all_entries():
            for key, value in saved.get(entry.global_name, {}).items():
                is_alone = self._reducer.context.world_size == 1 or entry.keeps_plain
                if isinstance(value, (list, tuple, dict)) and not is_alone:
                    raise CheckpointError(
                        f"state {key!r} of {entry.name} is a {type(value).__name__}, which cannot "
                        f"be sharded over {self._reducer.context.world_size} ranks. Resume on one "
                        "device."
                    )
                for target in entry.targets:
                    state = self.optimizer.state[target.tensor]
                    inside = tree_map_only(Tensor, partial(_copy_to, target.tensor.device), value)
                    state[key] = filled(key, inside, state.pop)

    def allocate_state(
        self, saved: Mapping[tuple[str, str], tuple[Shape, torch.dtype]], prefix: str = ""
    ) -> list[TensorShards]:
        """Replace this rank's state by empty tensors, and return the tensors to be filled. Then
        finish the restore.

        Args:
            saved: (global parameter name, key) -> (global shape, dtype) of all optimizer state in
                the checkpoint. Saved main params are read into the targets, main params or fp32
                parameters.
            prefix: Prefix of the parameters' names in the checkpoint.
        """
        by_name: dict[str, dict[str, tuple[Shape, torch.dtype]]] = defaultdict(dict)
        for (name, key), described in saved.items():
            by_name[name][key] = described
        tensors = []
        for entry in self._all_entries():
            for target in entry.targets:
                # State of a first step or an earlier restore is dropped before memory for the new
                # is taken.
                self.optimizer.state.pop(target.tensor, None)
            for key, (shape, dtype) in by_name[entry.global_name].items() if entry.targets else ():
                if key == MAIN:
                    values = [target.tensor.detach() for target in entry.targets]
                else:
                    values = [
                        _empty_state(entry, target.tensor, shape, dtype) for target in entry.targets
                    ]
                    for target, value in zip(entry.targets, values, strict=True):
                        self.optimizer.state[target.tensor][key] = value
                tensors.append(self._state_tensor(prefix, entry, key, values, all_copies=True))
        # Main params not in the checkpoint follow from the parameters, in finish_restore.
        self._restored_main = {name for name, key in saved if key == MAIN}
        return tensors

    def _state_tensor(
        self,
        prefix: str,
        entry: OptimizerEntry,
        key: str,
        values: Sequence[Tensor],
        *,
        all_copies: bool = False,
    ) -> TensorShards:
        """Return the shards of a state. Of a scalar a single copy is saved, and ``all_copies`` are
        loaded.
        """
        spec, context = entry.spec, self._reducer.context
        groups = self._reducer.groups[spec.data_axes]
        sharers = groups.replicas if entry.sharded else groups.all
        # Of the ranks that hold a parameter, one owns it.
        alone = entry.owned is not None and entry.owned.group.size > 1
        writes = spec.tied_to is None if alone else is_writer(spec, context)
        value = values[0]
        target = entry.targets[0].tensor
        name = f"{prefix}{entry.global_name}.{key}"
        # Shaped like the parameter: sharded like the parameter.
        if value.shape == target.shape:
            shards = [
                shard
                for target, v in zip(entry.targets, values, strict=True)
                for shard in target.shards_of(v)
            ]
            return TensorShards(name, spec.global_shape, value.dtype, shards, writes, sharers)
        if value.dim() == 0:  # every target has a copy, written by the holder of the first element
            if entry.owned is not None:
                first = writes and not any(_offset(entry, 0))
            else:
                first = entry.shard is None or entry.shard.start == 0
                first &= is_writer(_equal_on_shards(spec), context)
            copies = [Shard((), v) for v in (values if all_copies else values[:1])]
            return TensorShards(name, (), value.dtype, copies, sharers.rank == 0 and first)
        if entry.is_full:
            return TensorShards.full(name, value, writes=writes, replicas=sharers)
        if entry.owned is not None and entry.owned.is_whole:  # of experts, stacked along dim 0
            rows, *others = value.shape
            shape = (rows * spec.global_shape[0], *others)
            shards = [
                Shard((rows * _offset(entry, index)[0], *(0 for _ in others)), v)
                for index, v in enumerate(values)
            ]
            return TensorShards(name, shape, value.dtype, shards, writes, sharers)
        raise CheckpointError(
            f"state {key!r} of {entry.name} in {type(self.optimizer).__name__} has shape "
            f"{tuple(value.shape)}, and only a part of the parameter of shape {spec.global_shape} "
            "is here, so its place is unknown. Save with an optimizer whose state is a scalar or "
            "has its parameter's shape, or with tensor_model_parallel_size=1."
        )


def _offset(entry: OptimizerEntry, index: int) -> Shape:
    """Return the first index of a target in the global parameter."""
    target = entry.targets[index]
    return target.shards_of(target.tensor)[0].offset


def _equal_on_shards(spec: ShardSpec) -> ShardSpec:
    """Return the spec of a number present on every rank with a shard of a parameter."""
    return replace(spec, sharded_over=(), partial_over=(*spec.partial_over, *spec.sharded_over))


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        # Exact.
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise CheckpointError(
        f"an optimizer state of type {type(value).__name__} is neither a tensor nor a number, and "
        "cannot be saved."
    )


def _copy_to(device: torch.device, value: Tensor) -> Tensor:
    return value.to(device, copy=True)


def _empty_state(entry: OptimizerEntry, target: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    if tuple(shape) == entry.spec.global_shape:
        return torch.zeros_like(target, dtype=dtype, requires_grad=False)
    if shape and entry.owned is not None and entry.owned.is_whole and not entry.is_full:
        shape = (shape[0] // entry.spec.global_shape[0], *shape[1:])  # of one expert
    # torch keeps step counters on the CPU unless the step itself runs on the device.
    on_device = shape != () or entry.group.get("capturable") or entry.group.get("fused")
    return torch.zeros(shape, dtype=dtype, device=target.device if on_device else "cpu")
