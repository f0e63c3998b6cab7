"""ZeRO-3 and ZeRO-2: the parameters of every pipeline unit sharded over the data-parallel ranks by torch's FSDP2.

FSDP2 (``torch.distributed.fsdp.fully_shard``, https://arxiv.org/abs/2304.11277) gathers a unit's parameters before its forward
and reduce-scatters their gradients after its backward; what a rank keeps is rows of each local parameter: the part that tensor
parallelism left it. That is a flat range, so optimizers, norms and checkpoints see it as they see a ZeRO-1 shard.

    plan                     all-gathers      reduce-scatters      whole copies in memory
    reshard_after_forward    2 x micro-batch  1 (or micro-batch)   one unit's parameters, all gradients (or one unit's)
    not                      1                1 (or micro-batch)   all parameters, all gradients (or one unit's)

Parameters that FSDP2 cannot manage stay whole and are treated as under ZeRO-1: tied ones, scalars, those of another dtype than
their unit, and those outside of the units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_lightning.compat import finish_fsdp_backward, fsdp_parameters, keep_fsdp_gradients_in_reduce_dtype
from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ShardingError
from megatron_lightning.optim.buckets import Fragment, main_dtype
from megatron_lightning.optim.reducer import GradientReducer
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.sharding import ShardSpec


class StageRoot(nn.Module):
    """What FSDP2 sees of one pipeline stage: its units, called through a function that runs them.

    Args:
        units: The stage's units.
    """

    def __init__(self, units: Iterable[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``run(*args, **kwargs)``."""
        return run(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class ShardingPolicy:
    """How units are sharded."""

    reshard_after_forward: bool
    """Whether a unit's whole parameters are let go between its forward and its backward."""
    reduce_every_microbatch: bool
    """Whether gradients are reduced after every micro-batch instead of once a step."""
    compute_dtype: torch.dtype | None
    """Dtype in which parameters are gathered and used; None: their own."""

    @classmethod
    def of(cls, options: DataParallelOptions, *, micro_batches: bool, compute_dtype: torch.dtype | None) -> ShardingPolicy:
        """Return what the options mean: with micro-batches parameters are gathered once a step unless the options say else."""
        chosen = options.reshard_after_forward
        return cls(
            reshard_after_forward=not micro_batches if chosen is None else chosen,
            reduce_every_microbatch=options.reduce_every_microbatch,
            compute_dtype=compute_dtype,
        )


class ShardedUnits:
    """The sharded units of this rank's stages. Creating it shards them, in place.

    Args:
        module: The assembled module, on its device.
        stages: Stage -> paths of its units in ``module``.
        root: Path of the module whose call runs all units, where that is a call the user makes; None: :meth:`call` does.
        specs: Name -> spec of every parameter of ``module``.
        context: The groups of this rank.
        policy: How they are sharded.
        whole: Names of parameters that stay whole, such as those with a copy on another pipeline rank.

    Raises:
        ShardingError: If there is one data-parallel rank.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Mapping[int, Sequence[str]],
        *,
        root: str | None,
        whole: Set[str],
        specs: Mapping[str, ShardSpec],
        context: ParallelContext,
        policy: ShardingPolicy,
    ) -> None:
        self.policy, self._context = policy, context
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        manageable = {
            identity
            for identity, name in names.items()
            if uses[identity] == 1 and name not in whole and specs[name].grid == "dense" and specs[name].global_shape
        }
        if context.dp_cp.process_group is None:
            raise ShardingError("units are sharded over data-parallel ranks, and there is one. Leave the module as it is.")
        mesh = DeviceMesh.from_group(context.dp_cp.process_group, context.device.type)
        self._units: dict[int, list[FSDPModule]] = {}
        self._roots: dict[int, list[FSDPModule]] = {}
        self._calls: dict[int, nn.Module] = {}
        for stage, paths in stages.items():
            units = [unit for path in paths for unit in _callable_modules(module.get_submodule(path))]
            sharded = [unit for unit in units if self._shard(unit, manageable, mesh)]
            self._units[stage] = [unit for unit in sharded if isinstance(unit, FSDPModule)]
            self._roots[stage] = self._root_of(stage, sharded, module, root, mesh)
        self._names = {id(p): name for name, p in module.named_parameters() if isinstance(p, DTensor)}
        self.names = frozenset(self._names.values())
        """Parameters that are sharded here."""
        if policy.compute_dtype is not None:
            for unit in self._all_units():
                keep_fsdp_gradients_in_reduce_dtype(unit)

    def _shard(self, unit: nn.Module, manageable: Set[int], mesh: DeviceMesh) -> bool:
        """Shard one unit; return whether it has anything to shard."""
        parameters = list(unit.parameters())
        dtypes = Counter[torch.dtype]()
        for parameter in parameters:
            dtypes[parameter.dtype] += parameter.numel()
        main = max(dtypes, key=lambda dtype: dtypes[dtype], default=None)
        managed = [p for p in parameters if id(p) in manageable and p.dtype == main and p.is_floating_point()]
        if not managed:
            return False
        low = self.policy.compute_dtype
        if low is not None:  # what is sharded are the fp32 masters; the gathered parameters are cast
            for parameter in managed:
                parameter.data = parameter.data.to(main_dtype(parameter.dtype))
        kept = {id(parameter) for parameter in managed}
        sharded = fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=self.policy.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(low, main_dtype(low) if low else None, cast_forward_inputs=False),
            ignored_params={parameter for parameter in parameters if id(parameter) not in kept},
        )
        sharded.set_gradient_divide_factor(1.0)  # gradients are summed; what they are divided by is known at the end
        sharded.set_force_sum_reduction_for_comms(True)
        return True

    def _root_of(
        self, stage: int, units: Sequence[nn.Module], module: nn.Module, path: str | None, mesh: DeviceMesh
    ) -> list[FSDPModule]:
        """Return what FSDP2 takes for the root of a stage: one module around its units, so that gathers run ahead."""
        root = StageRoot(units) if path is None else module.get_submodule(path)
        if path == "" or not units:  # nobody calls the LightningModule itself: every unit is a root of its own
            return [unit for unit in units if isinstance(unit, FSDPModule)]
        plain = {parameter for parameter in root.parameters() if not isinstance(parameter, DTensor)}
        sharded = fully_shard(root, mesh=mesh, ignored_params=plain)
        if path is None:
            self._calls[stage] = root
        return [sharded]

    def describe(self) -> str:
        """Return one sentence on what is sharded and how."""
        policy, ranks = self.policy, self._context.dp_cp.size
        kept = "gathered for each use" if policy.reshard_after_forward else "gathered once a step"
        reduced = "after every micro-batch" if policy.reduce_every_microbatch else "once a step"
        low = f", used as {policy.compute_dtype}".replace("torch.", "") if policy.compute_dtype else ""
        count = sum(1 for _ in self._all_units())
        return (
            f"Of these, {count} units with {len(self.names)} parameters are shards over {ranks} ranks{low}, {kept}; gradients "
            f"are reduce-scattered {reduced}."
        )

    def _all_units(self) -> Iterator[FSDPModule]:
        for units in self._units.values():
            yield from units

    def call(self, stage: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``run(*args, **kwargs)``, the forward of a stage, with its parameters gathered as they are needed."""
        root = self._calls.get(stage)
        return run(*args, **kwargs) if root is None else root(run, *args, **kwargs)

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters, which autograd sees, by name; a collective."""
        pairs = [pair for unit in self._all_units() for pair in fsdp_parameters(unit)]
        return {self._names[id(sharded)]: whole for sharded, whole in pairs}

    def as_used(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with the sharded parameters in the dtype in which they are used; masters are saved apart."""
        low = self.policy.compute_dtype
        return {name: value.to(low) if low and isinstance(value, DTensor) else value for name, value in state.items()}

    def reshard(self) -> None:
        """Let go of whole parameters, which the next use gathers anew."""
        for unit in self._all_units():
            unit.reshard()

    def accumulate(self) -> None:
        """Gradients that backward passes produce from now on are not the step's last."""
        for stage in self._units:
            self._set_last(stage, last=False)

    @contextmanager
    def completing(self, stages: Iterable[int] | None = None) -> Generator[None, None, None]:
        """Around what completes the gradients of these stages (None: all) in a step: they are reduced as they appear."""
        chosen = list(self._units if stages is None else stages)
        for stage in chosen:
            self._set_last(stage, last=True)
        yield
        for stage in chosen:
            for root in self._roots[stage]:
                if root._get_fsdp_state()._is_root is not None:  # None: it has never run
                    finish_fsdp_backward(root)
            self._set_last(stage, last=False)

    def _set_last(self, stage: int, *, last: bool) -> None:
        for unit in self._units[stage]:
            unit.set_requires_gradient_sync(last or self.policy.reduce_every_microbatch, recurse=False)
            unit.set_reshard_after_backward(last or self.policy.reshard_after_forward, recurse=False)
        for root in self._roots[stage]:
            root.set_is_last_backward(last)


def _callable_modules(unit: nn.Module) -> list[nn.Module]:
    """Return the unit, or the entries of a mere container, which nobody calls."""
    if isinstance(unit, nn.ModuleList | nn.ModuleDict):
        return [child for entry in unit.children() for child in _callable_modules(entry)]
    return [unit]


def local_rows(tensor: DTensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor sharded along dim 0, flattened, and the index of their first element."""
    rows = tensor._local_tensor.detach()
    mesh = tensor.device_mesh
    per_rank = -(-tensor.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * per_rank, tensor.shape[0])
    return rows.reshape(-1), first * (tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0)


class FullyShardedReducer(GradientReducer):
    """Reduces gradients where FSDP2 shards the units: theirs arrive reduced, the rest is reduced in buckets as under ZeRO-1.

    Args:
        parameters: Name -> trainable parameter, sharded ones included, in registration order.
        specs: Name -> shard spec.
        context: The groups of this rank.
        units: The sharded units.
        options: Size of the buckets, and how they travel.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        context: ParallelContext,
        *,
        units: ShardedUnits,
        options: DataParallelOptions | None = None,
    ) -> None:
        rest = {name: parameter for name, parameter in parameters.items() if name not in units.names}
        super().__init__(rest, specs, context, sharded=True, options=options)
        self.units = units
        self._in_units = {name: p for name, p in parameters.items() if name in units.names and isinstance(p, DTensor)}
        self.parameters = dict(parameters)
        for name, parameter in self._in_units.items():
            fragment = _fragment(name, parameter, is_master=units.policy.compute_dtype is not None)
            if fragment is not None:
                self.fragments[name] = fragment
        self._sums: dict[str, Tensor] = {}

    @property
    def exchanges(self) -> bool:
        """Whether optimizers step something else than the parameters themselves."""
        return True

    def is_plain(self, name: str) -> bool:
        """Return whether the optimizer steps the parameter itself."""
        return name not in self._in_units and super().is_plain(name)

    def is_sharded(self, name: str) -> bool:
        """Return whether data-parallel ranks step different parts of the parameter."""
        return name in self._in_units or super().is_sharded(name)

    def start_window(self) -> None:
        """Begin the accumulation of one optimizer step: there is no gradient yet."""
        super().start_window()
        self._sums = {}
        self.units.accumulate()

    def hide(self) -> None:
        """Take the gradients off the parameters; those that the units have reduced are added up here."""
        self._take_over()
        super().hide()

    def launch(self) -> None:
        """Take over what the units have reduced, then launch the rest."""
        self._take_over()
        super().launch()

    def _take_over(self) -> None:
        for name, parameter in self._in_units.items():
            gradient: Any = parameter.grad
            if gradient is not None:
                rows, _ = local_rows(gradient)
                self._sums[name] = rows if name not in self._sums else self._sums[name].add_(rows)
                parameter.grad = None

    def finish(self, scale: float | Tensor = 1.0) -> None:
        """Complete the reduction: the shards are summed over the other axes, scaled, and handed to the optimizers."""
        super().finish(scale)
        self.units.reshard()
        by_group: dict[AxisGroup, list[Tensor]] = {}
        for name, rows in self._sums.items():
            spec = self.specs[name]
            for axis in spec.partial_over:
                group = self.context.axis(axis, spec.grid)
                if group.size > 1:
                    by_group.setdefault(group, []).append(rows)
        for group, shards in by_group.items():
            self._sum_over(group, shards)
        if self._sums and (isinstance(scale, Tensor) or scale != 1.0):
            torch._foreach_mul_(list(self._sums.values()), scale)
        for name, rows in self._sums.items():
            fragment = self.fragments.get(name)
            if fragment is not None:
                fragment.target.grad = rows.view_as(fragment.target)
        self._sums = {}

    def _launch_in_order(self, *, everything: bool = False) -> None:
        """Wait with the buckets until the units are reduced, so that the collectives of all ranks come in one order."""
        if everything:
            super()._launch_in_order(everything=True)

    def _sum_over(self, group: AxisGroup, shards: Sequence[Tensor]) -> None:
        """Sum over ranks that hold the same parameters, in one message; all of them have the same shards."""
        buffer = torch.cat(list(shards))
        self.bytes_communicated["all_reduce"] += buffer.nbytes
        dist.all_reduce(buffer, group=group.process_group)
        for shard, summed in zip(shards, torch.split(buffer, [shard.numel() for shard in shards]), strict=True):
            shard.copy_(summed)


def _fragment(name: str, parameter: DTensor, *, is_master: bool) -> Fragment | None:
    """Return this rank's rows as what an optimizer steps: they share the sharded parameter's memory."""
    rows, start = local_rows(parameter)
    if rows.numel() == 0:
        return None
    whole = rows.numel() == parameter.numel()
    value = rows.view(parameter.shape) if whole else rows
    return Fragment(name, start, whole, value, value, nn.Parameter(value), is_master=is_master)
