"""The state of an optimizer as checkpoints see it: by global parameter name and global offset.

Any layout can read what another has written. Numbers that every rank keeps for itself, such as step counters, are scalar
tensors here; on one device, where a state is true of the whole, what is no tensor stays as it is.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from megatron_lightning.errors import CheckpointError
from megatron_lightning.optim.clipping import counts_once
from megatron_lightning.optim.entries import Entry, Pieces
from megatron_lightning.optim.reducer import GradientReducer
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sharding import Shape

MASTER = "master"
"""State key under which fp32 masters are saved."""


@dataclass(frozen=True, eq=False)
class StateTensor:
    """One tensor of optimizer state as a checkpoint sees it."""

    name: str
    """Global parameter name; for a tied copy the owner's."""
    key: str
    """Name of the state, such as ``"exp_avg"``, ``"step"`` or ``"master"``."""
    global_shape: Shape
    """The parameter's global shape; () for a scalar."""
    pieces: list[tuple[Shape, Tensor]]
    """(global offset, view of the state) for everything that this rank holds."""
    writes: bool
    """Whether this rank, alone or with its ``replicas``, saves these pieces."""
    replicas: AxisGroup | None = None
    """Data-parallel ranks that hold exactly these pieces; None: this rank is the only one to save them."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the state."""
        return self.pieces[0][1].dtype


class OptimizerState:
    """What this rank holds of an optimizer's state.

    Args:
        optimizer: The optimizer.
        reducer: The gradient reduction whose results it steps.
    """

    def __init__(self, optimizer: Optimizer, reducer: GradientReducer) -> None:
        self.optimizer, self._reducer = optimizer, reducer
        self._entries: list[list[Entry]] = []  # what this rank has of each parameter, by group
        self._restored_masters: set[str] = set()

    def _all_entries(self) -> Iterator[Entry]:
        for entries in self._entries:
            yield from entries

    def param_groups(self) -> list[dict[str, Any]]:
        """Return every group's hyper-parameters, with the global names of this rank's parameters as ``params``."""
        return [
            {**_hyper_parameters(group), "params": [entry.global_name for entry in entries]}
            for group, entries in zip(self.optimizer.param_groups, self._entries, strict=True)
        ]

    def load_param_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over saved hyper-parameters (learning rates, weight decays, …), group by group.

        Raises:
            CheckpointError: If the number of groups differs.
        """
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} parameter groups and {type(self.optimizer).__name__} has {len(groups)}. "
                "Configure the optimizer as it was when the checkpoint was written."
            )
        for group, values in zip(groups, saved, strict=True):
            group.update(copy.deepcopy(_hyper_parameters(values)))

    def state_tensors(self) -> list[StateTensor]:
        """Return the state that this rank holds, masters included; numbers appear as scalar tensors.

        Raises:
            CheckpointError: If a state is neither a number, nor a scalar, nor of its parameter's shape, and cannot be
                placed in a global tensor.
        """
        tensors = []
        for entry in self._all_entries():
            states = [self.optimizer.state.get(part.target, {}) for part in entry.parts]
            if entry.has_master:
                tensors.append(self._state_tensor(entry, MASTER, [part.target.detach() for part in entry.parts]))
            for key in states[0] if states else ():
                values = [state[key] for state in states]
                if values[0] is not None and not self._is_plain(values[0]):
                    tensors.append(self._state_tensor(entry, key, [_as_tensor(value) for value in values]))
        return tensors

    def _is_plain(self, value: object) -> bool:
        """Whether a checkpoint stores a state as it is, beside the tensors: on one device, where it is true of the whole."""
        return self._reducer.context.world_size == 1 and not isinstance(value, Tensor)

    def plain_state(self) -> dict[str, dict[str, Any]]:
        """Return numbers, lists and whatever else is no tensor of the state, by global parameter name and key.

        Several ranks keep numbers as scalar tensors (:meth:`state_tensors`), and have nothing here.
        """
        plain: dict[str, dict[str, Any]] = {}
        for entry in self._all_entries():
            state = self.optimizer.state.get(entry.parts[0].target, {}) if entry.parts else {}
            values = {key: value for key, value in state.items() if self._is_plain(value)}
            if values:
                plain[entry.global_name] = values
        return plain

    def load_plain_state(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what :meth:`plain_state` returned; call it after :meth:`allocate_state`.

        Raises:
            CheckpointError: If there are several ranks, and a state is a collection: it cannot be divided.
        """
        for entry in self._all_entries():
            for key, value in saved.get(entry.global_name, {}).items():
                if isinstance(value, (list, tuple, dict)) and self._reducer.context.world_size > 1:
                    raise CheckpointError(
                        f"state {key!r} of {entry.name} is a {type(value).__name__}, which cannot be divided over "
                        f"{self._reducer.context.world_size} ranks. Resume on one device."
                    )
                for part in entry.parts:
                    self.optimizer.state[part.target][key] = tree_map_only(Tensor, partial(_copy_to, part.target.device), value)

    def allocate_state(self, saved: Mapping[tuple[str, str], tuple[Shape, torch.dtype]]) -> list[StateTensor]:
        """Replace this rank's state by empty tensors for what a checkpoint has; fill them, then finish the restore.

        Args:
            saved: (global parameter name, key) -> (global shape, dtype) of all optimizer state in the checkpoint. Saved
                masters are read into whatever the optimizer steps, masters or fp32 parameters.

        Returns:
            What there is to fill on this rank.
        """
        by_name: dict[str, dict[str, tuple[Shape, torch.dtype]]] = defaultdict(dict)
        for (name, key), described in saved.items():
            by_name[name][key] = described
        tensors = []
        for entry in self._all_entries():
            for part in entry.parts:
                self.optimizer.state.pop(part.target, None)
            for key, (shape, dtype) in by_name[entry.global_name].items() if entry.parts else ():
                if key == MASTER:
                    values = [part.target.detach() for part in entry.parts]
                else:
                    values = [_empty_state(entry, part.target, shape, dtype) for part in entry.parts]
                    for part, value in zip(entry.parts, values, strict=True):
                        self.optimizer.state[part.target][key] = value
                tensors.append(self._state_tensor(entry, key, values, all_copies=True))
        self._restored_masters = {name for name, key in saved if key == MASTER}
        return tensors

    def _state_tensor(self, entry: Entry, key: str, values: Sequence[Tensor], *, all_copies: bool = False) -> StateTensor:
        """Describe one state; ``all_copies`` of a scalar are filled, and one of them is saved."""
        spec, context = entry.spec, self._reducer.context
        groups = self._reducer.groups[spec.grid]
        sharers = groups.replicas if entry.sharded else groups.all
        writes = counts_once(spec, context)
        value, target = values[0], entry.parts[0].target
        if value.shape == target.shape:
            pieces = [piece for part, v in zip(entry.parts, values, strict=True) for piece in part.place(v)]
            return StateTensor(entry.global_name, key, spec.global_shape, pieces, writes, sharers)
        if value.dim() == 0:  # every part has a copy; the holder of the first element writes
            first = entry.start == 0 and counts_once(spec if entry.exchanged else replace(spec, sharded_over=()), context)
            copies: Pieces = [((), v) for v in (values if all_copies else values[:1])]
            return StateTensor(entry.global_name, key, (), copies, sharers.rank == 0 and first)
        whole = entry.value is not None and entry.value.shape == spec.global_shape
        if whole and len(entry.parts) == 1 and not spec.sharded_over:
            return StateTensor(entry.global_name, key, tuple(value.shape), [((0,) * value.dim(), value)], writes, sharers)
        raise CheckpointError(
            f"state {key!r} of {entry.name} in {type(self.optimizer).__name__} has shape {tuple(value.shape)}, and only a part "
            f"of the parameter of shape {spec.global_shape} is here, so its place in the whole is unknown. Save with an "
            "optimizer whose state is a scalar or has its parameter's shape, or with tensor_model_parallel_size=1."
        )


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)  # exact
    raise CheckpointError(
        f"an optimizer state of type {type(value).__name__} is neither a tensor nor a number, and cannot be saved."
    )


def _copy_to(device: torch.device, value: Tensor) -> Tensor:
    return value.to(device, copy=True)


def _empty_state(entry: Entry, target: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    if tuple(shape) == entry.spec.global_shape:
        return torch.zeros_like(target, dtype=dtype, requires_grad=False)
    # torch keeps step counters on the CPU unless the step itself runs on the device.
    on_device = shape != () or entry.group.get("capturable") or entry.group.get("fused")
    return torch.zeros(shape, dtype=dtype, device=target.device if on_device else "cpu")
