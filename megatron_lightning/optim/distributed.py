"""The distributed optimizer: the user's own ``torch.optim.Optimizer``, stepping only what this rank owns.

ZeRO stage 1 (https://arxiv.org/abs/1910.02054): every data-parallel rank keeps the optimizer state, and for half-precision
parameters the fp32 masters, of its shard of each bucket; after the step the ranks gather the parameters from one another.
The optimizer object, its groups and their hyper-parameters stay, so learning-rate schedulers and loggers see no difference;
only the tensors in the groups are exchanged:

    fp32, not sharded    the parameter itself
    half, not sharded    an fp32 master of the parameter's shape
    sharded              this rank's fragment of the parameter: a view of it when it is fp32, else an fp32 master

Checkpoints see the state through :meth:`DistributedOptimizer.state_tensors`, by global parameter name and global offset,
so that any layout can read what another has written.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_lightning.compat import all_gather
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.optim.buckets import Bucket, Fragment, main_dtype
from megatron_lightning.optim.clipping import counts_once
from megatron_lightning.optim.elementwise import require_elementwise
from megatron_lightning.optim.reducer import GradientReducer
from megatron_lightning.parallel.sharding import Shape, ShardSpec

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
    """Whether this rank is the one of those holding these pieces that saves them."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the state."""
        return self.pieces[0][1].dtype


@dataclass(eq=False)
class _Entry:
    """One parameter of the user's optimizer and what takes its place on this rank."""

    name: str
    spec: ShardSpec
    group: dict[str, Any]
    sharded: bool
    """Whether data-parallel ranks hold different parts of its state."""
    fragment: Fragment | None
    """This rank's part of a bucketed parameter."""
    target: nn.Parameter | None
    """What the optimizer steps; None: nothing of this parameter is here."""

    @property
    def global_name(self) -> str:
        return self.spec.tied_to or self.name

    @property
    def start(self) -> int:
        return self.fragment.start if self.fragment else 0

    @property
    def whole(self) -> bool:
        return self.fragment.whole if self.fragment else True

    @property
    def master(self) -> Tensor | None:
        """The fp32 master, when the parameter itself has less precision."""
        low = self.fragment is not None and self.fragment.value.dtype != self.fragment.gradient.dtype
        return self.target if low else None


class DistributedOptimizer:
    """Makes ``optimizer`` step this rank's share; construct it once, before the first step.

    Args:
        optimizer: What ``configure_optimizers`` returned. Its parameters are exchanged in place, state included.
        reducer: The gradient reduction whose results it steps.
        names: Name -> parameter of the whole module, frozen ones included; None: the reducer's.

    Raises:
        ConfigError: If gradients are sharded and the optimizer is not element-wise, or a trainable parameter is not part
            of the module, so that its gradient would not be reduced.
    """

    def __init__(self, optimizer: Optimizer, reducer: GradientReducer, names: Mapping[str, nn.Parameter] | None = None) -> None:
        self.optimizer, self._reducer = optimizer, reducer
        self._name_of = {id(parameter): name for name, parameter in (names or reducer.parameters).items()}
        self._entries = [
            [self._entry(parameter, group, f"param_groups.{i}.{j}") for j, parameter in enumerate(group["params"])]
            for i, group in enumerate(optimizer.param_groups)
        ]
        used = {entry.name for entry in self._all_entries()}
        self._buckets: list[Bucket] = [
            bucket for bucket in reversed(reducer.buckets) if bucket.sharded and not used.isdisjoint(bucket.names)
        ]
        if self._buckets:
            require_elementwise(optimizer)
        for group, entries in zip(optimizer.param_groups, self._entries, strict=True):
            self._exchange(group, entries)
        self._masters = [entry.fragment for entry in self._all_entries() if entry.fragment and entry.master is not None]
        self._restored_masters: set[str] = set()
        if self._buckets or self._masters:
            optimizer.register_step_post_hook(lambda *_: self.synchronize())

    def _all_entries(self) -> Iterator[_Entry]:
        for entries in self._entries:
            yield from entries

    def _entry(self, parameter: nn.Parameter, group: dict[str, Any], fallback: str) -> _Entry:
        reducer, name = self._reducer, self._name_of.get(id(parameter), fallback)
        if reducer.parameters.get(name) is parameter:
            fragment = reducer.fragments.get(name)
            if fragment is not None and main_dtype(parameter.dtype) != parameter.dtype:
                fragment.target = nn.Parameter(fragment.value.to(fragment.gradient.dtype))
            bucket = reducer.bucket_of.get(name)
            target = parameter if bucket is None else fragment.target if fragment is not None else None
            sharded = bucket is not None and bucket.sharded
            return _Entry(name, reducer.specs[name], group, sharded, fragment, target)
        spec = reducer.specs.get(name) or ShardSpec.replicated(parameter.shape)
        groups = [reducer.context.data_group(spec.grid), *(reducer.context.axis(a, spec.grid) for a in spec.partial_over)]
        if parameter.requires_grad and any(group.size > 1 for group in groups):
            raise ConfigError(
                f"{name} of {type(self.optimizer).__name__}, of shape {tuple(parameter.shape)}, is not a trainable parameter "
                "of the module, so its gradient would not be reduced over the ranks. Make it a parameter of the module, or "
                "set requires_grad before the optimizer is set up."
            )
        return _Entry(name, spec, group, False, None, parameter)

    def _exchange(self, group: dict[str, Any], entries: Sequence[_Entry]) -> None:
        """Put the targets into the group, and this rank's part of existing state beside them."""
        kept = [index for index, entry in enumerate(entries) if entry.target is not None]
        for parameter, entry in zip(group["params"], entries, strict=True):
            if entry.target is parameter or parameter not in self.optimizer.state:
                continue
            state = self.optimizer.state.pop(parameter)
            if entry.fragment is not None and entry.target is not None:
                self.optimizer.state[entry.target] = {
                    key: _cut(value, parameter, entry.fragment) for key, value in state.items()
                }
        group["params"] = [entries[index].target for index in kept]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][index] for index in kept]

    @torch.no_grad()
    def synchronize(self) -> None:
        """Bring the parameters up to date with what was stepped; runs at the end of every step. A collective."""
        if self._masters:
            torch._foreach_copy_([fragment.value for fragment in self._masters], [f.target for f in self._masters])
        for work in [self._gather(bucket) for bucket in self._buckets]:
            if work is not None:
                work.wait()

    def _gather(self, bucket: Bucket) -> dist.Work | None:
        group = bucket.data.shard.process_group
        if bucket.value is None or group is None:
            return None
        self._reducer.bytes_communicated["all_gather"] += bucket.value.nbytes
        return all_gather(bucket.value, bucket.value[bucket.shard], group, async_op=True)

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
            if entry.target is None:
                continue
            if entry.master is not None:
                tensors.append(self._state_tensor(entry, MASTER, entry.master.detach()))
            for key, value in self.optimizer.state.get(entry.target, {}).items():
                if isinstance(value, (bool, int, float)):
                    value = torch.tensor(value)  # noqa: PLW2901
                if value is not None:
                    tensors.append(self._state_tensor(entry, key, value))
        return tensors

    def allocate_state(self, saved: Mapping[tuple[str, str], tuple[Shape, torch.dtype]]) -> list[StateTensor]:
        """Replace this rank's state by empty tensors for what a checkpoint has; fill them, then call :meth:`finish_restore`.

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
            target = entry.target
            if target is None:
                continue
            self.optimizer.state.pop(target, None)
            for key, (shape, dtype) in by_name[entry.global_name].items():
                if key == MASTER:
                    value = target.detach()
                else:
                    value = _empty_state(entry, target, shape, dtype)
                    self.optimizer.state[target][key] = value
                tensors.append(self._state_tensor(entry, key, value))
        self._restored_masters = {name for name, key in saved if key == MASTER}
        return tensors

    @torch.no_grad()
    def finish_restore(self) -> None:
        """After loading: masters that were not saved are made from the parameters, then all ranks agree. A collective."""
        for entry in self._all_entries():
            if entry.target is None:
                continue
            if entry.fragment and entry.master is not None and entry.global_name not in self._restored_masters:
                entry.master.copy_(entry.fragment.value)
            state = self.optimizer.state.get(entry.target, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == entry.target.shape and value.is_floating_point():
                    state[key] = value.to(entry.target.dtype)
        self._restored_masters = set()
        self.synchronize()

    def _state_tensor(self, entry: _Entry, key: str, value: Any) -> StateTensor:
        spec, context = entry.spec, self._reducer.context
        groups = self._reducer.groups[spec.grid]
        here = groups.replicas.rank == 0 if entry.sharded else groups.all.rank == 0
        writes = here and counts_once(spec, context)
        if isinstance(value, Tensor) and entry.target is not None and value.shape == entry.target.shape:
            pieces = spec.pieces(value) if entry.whole else spec.flat_pieces(value, entry.start)
            return StateTensor(entry.global_name, key, spec.global_shape, pieces, writes)
        if isinstance(value, Tensor) and value.dim() == 0:  # every part has a copy; the holder of the first element writes
            first = entry.start == 0 and counts_once(replace(spec, sharded_over=()), context)
            return StateTensor(entry.global_name, key, (), [((), value)], here and first)
        if isinstance(value, Tensor) and entry.whole and not spec.sharded_over:
            return StateTensor(entry.global_name, key, tuple(value.shape), [((0,) * value.dim(), value)], writes)
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise CheckpointError(
            f"state {key!r} of {entry.name} in {type(self.optimizer).__name__} has {found}, and only a part of the parameter "
            f"of shape {spec.global_shape} is here, so its place in the whole is unknown. Save with an optimizer whose state "
            "is a scalar or has its parameter's shape, or with tensor_model_parallel_size=1."
        )


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _cut(value: Any, parameter: Tensor, fragment: Fragment) -> Any:
    """Return the fragment's part of one existing state of ``parameter``."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    part = value.flatten()[fragment.start : fragment.start + fragment.value.numel()].view(fragment.value.shape)
    return part.to(fragment.gradient.dtype, copy=True) if value.is_floating_point() else part.clone()


def _empty_state(entry: _Entry, target: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    if tuple(shape) == entry.spec.global_shape:
        return torch.zeros_like(target, dtype=dtype, requires_grad=False)
    # torch keeps step counters on the CPU unless the step itself runs on the device.
    on_device = shape != () or entry.group.get("capturable") or entry.group.get("fused")
    return torch.zeros(shape, dtype=dtype, device=target.device if on_device else "cpu")
