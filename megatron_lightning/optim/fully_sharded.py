"""ZeRO-3 and ZeRO-2: the parameters of every pipeline unit sharded over the data-parallel ranks by torch's FSDP2.

FSDP2 (``torch.distributed.fsdp.fully_shard``, https://arxiv.org/abs/2304.11277) gathers a unit's parameters before its forward
and reduce-scatters their gradients after its backward; what a rank keeps is rows of each local parameter: the part that tensor
parallelism left it. That is a flat range, so optimizers, norms and checkpoints see it as they see a ZeRO-1 shard.

    plan                     all-gathers      reduce-scatters      whole copies in memory
    reshard_after_forward    2 x micro-batch  1 (or micro-batch)   one unit's parameters, all gradients (or one unit's)
    not                      1                1 (or micro-batch)   all parameters, all gradients (or one unit's)

With several instances (hybrid sharding, https://arxiv.org/abs/2304.11277 section 3.2.2) the shards are those of a group of
neighbouring ranks: gathers and reduce-scatters stay inside it, and only the reduced shards are all-reduced over the groups.

Parameters that FSDP2 cannot manage stay whole and are treated as under ZeRO-1: tied ones, scalars, those of another dtype than
their unit, and those outside of the units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_lightning.compat import FsdpUnit, GradientHooks, finish_fsdp_backward
from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ShardingError
from megatron_lightning.optim.buckets import DataGroups, main_dtype
from megatron_lightning.optim.unit_backward import StageBackward
from megatron_lightning.optim.unit_order import UnitOrder
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.sharding import ShardSpec

TRAINING = "training_step"
"""The kind of forward that backward passes follow."""


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
    send_as: torch.dtype | None = None
    """Dtype in which gradients travel; None: that in which they are summed."""
    num_instances: int = 1
    """Groups of ranks that hold all shards each."""

    @classmethod
    def of(cls, options: DataParallelOptions, *, micro_batches: bool, compute_dtype: torch.dtype | None) -> ShardingPolicy:
        """Return what the options mean: with micro-batches parameters are gathered once a step unless the options say else."""
        chosen = options.reshard_after_forward
        return cls(
            reshard_after_forward=not micro_batches if chosen is None else chosen,
            reduce_every_microbatch=options.reduce_every_microbatch,
            compute_dtype=compute_dtype,
            send_as=torch.bfloat16 if options.grad_reduce_in_bf16 else None,
            num_instances=options.num_distributed_optimizer_instances,
        )


class ShardedUnits:
    """The sharded units of this rank's stages. Creating it shards them, in place.

    Args:
        module: The assembled module, on its device; what is on ``meta`` is given memory when it is sharded (:attr:`unfilled`).
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
        hooks = {name: GradientHooks(parameter) for name, parameter in module.named_parameters()}
        uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        manageable = {
            id(parameter)
            for name, parameter in module.named_parameters()
            if uses[id(parameter)] == 1 and name not in whole and specs[name].grid == "dense" and specs[name].global_shape
        }
        self.groups = DataGroups.of(context, "dense", sharded=True, num_instances=policy.num_instances)
        """Who shares the shards, and who keeps the same ones."""
        mesh = _mesh(self.groups, context.device.type)
        paths = {id(child): path for path, child in module.named_modules()}
        self._units: dict[int, list[FsdpUnit]] = {}
        self._roots: dict[int, list[FSDPModule]] = {}
        self._calls: dict[int, nn.Module] = {}
        for stage, names in stages.items():
            units = [unit for path in names for unit in _callable_modules(module.get_submodule(path))]
            sharded = [unit for unit in units if self._shard(unit, manageable, mesh)]
            self._units[stage] = [FsdpUnit(unit) for unit in sharded if isinstance(unit, FSDPModule)]
            self._roots[stage] = self._root_of(stage, sharded, module, root, mesh)
        allocated = {id(p) for unit in self._all_units() for p in unit.allocate(context.device)}
        self._names = {id(p): name for name, p in module.named_parameters() if isinstance(p, DTensor)}
        self.names = frozenset(self._names.values())
        """Parameters that are sharded here."""
        self.unfilled = tuple(name for key, name in self._names.items() if key in allocated)
        """Those that were on ``meta``, whose values are still to come."""
        for unit in self._all_units():
            for shard, gathered in unit.parameters():
                hooks[self._names[id(shard)]].move(gathered, shard)
            if policy.compute_dtype is not None:
                unit.sum_in_reduce_dtype()
            if policy.send_as is not None:
                unit.send_gradients_as(policy.send_as)
        self._watch_order(paths)

    def _watch_order(self, paths: Mapping[int, str]) -> None:
        """Let all ranks use the units in one order, forward and backward."""
        names = []
        for unit in self._all_units():
            own = [self._names[id(shard)] for shard, _ in unit.parameters()]
            names.append(f"{paths[id(unit.module)]} (with the parameters {', '.join(own[:3])}{', …' if len(own) > 3 else ''})")
        self._order = UnitOrder(names, self._context.dp_cp, self._context.device)
        self._backwards: dict[int, StageBackward] = {}
        first = 0
        for stage, units in self._units.items():
            for index, unit in enumerate(units, first):
                # Before FSDP2's own hook, which gathers.
                unit.module.register_forward_pre_hook(self._caller(index), prepend=True)
            self._backwards[stage] = StageBackward(units, partial(self._trained_order, stage, first))
            first += len(units)

    def _caller(self, index: int) -> Callable[..., None]:
        """Return a hook that notes a call of a unit; never a part of what is compiled."""

        def called(*_: Any) -> None:
            self._order.called(index)

        disabled: Callable[..., None] = torch.compiler.disable(called)  # type: ignore[no-untyped-call]
        return disabled

    def _trained_order(self, stage: int, first: int) -> list[int]:
        return [index - first for index in self._order.known((TRAINING, stage))]

    def in_order(self, hook: str, stage: int = 0) -> AbstractContextManager[None]:
        """Around what calls the units of a stage once in a step of Lightning's ``hook``; the first time it is a collective."""
        return self._order.forward((hook, stage))

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
        """Return what FSDP2 may take for the roots of a stage: first a module around its units, so that gathers run ahead."""
        root = StageRoot(units) if path is None else module.get_submodule(path)
        if path == "" or not units:  # nobody calls the LightningModule itself: every unit is a root of its own
            return [unit for unit in units if isinstance(unit, FSDPModule)]
        plain = {parameter for parameter in root.parameters() if not isinstance(parameter, DTensor)}
        sharded = fully_shard(root, mesh=mesh, ignored_params=plain)
        if path is None:
            self._calls[stage] = root
        return [sharded, *(unit for unit in units if isinstance(unit, FSDPModule))]  # the step may call these one by one

    def describe(self) -> str:
        """Return one sentence on what is sharded and how."""
        policy, ranks = self.policy, self.groups.shard.size
        kept = "gathered for each use" if policy.reshard_after_forward else "gathered once a step"
        reduced = "after every micro-batch" if policy.reduce_every_microbatch else "once a step"
        low = f", used as {policy.compute_dtype}".replace("torch.", "") if policy.compute_dtype else ""
        count = sum(1 for _ in self._all_units())
        copies = f", {policy.num_instances} times" if policy.num_instances > 1 else ""
        return (
            f"Of these, {count} units with {len(self.names)} parameters are shards over {ranks} ranks{copies}{low}, {kept}; "
            f"gradients are reduce-scattered {reduced}."
        )

    def _all_units(self) -> Iterator[FsdpUnit]:
        for units in self._units.values():
            yield from units

    def call(self, stage: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``run(*args, **kwargs)``, the forward of a stage, with its parameters gathered as they are needed."""
        root = self._calls.get(stage)
        return run(*args, **kwargs) if root is None else root(run, *args, **kwargs)

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters, which autograd sees, by name."""
        return {self._names[id(shard)]: whole for unit in self._all_units() for shard, whole in unit.parameters()}

    def fill(self, name: str, parameter: DTensor, whole: Tensor, spec: ShardSpec) -> None:
        """Take over this rank's rows of an initial value.

        Args:
            name: One of :attr:`unfilled`.
            parameter: The sharded parameter.
            whole: Its global value, of ``spec.global_shape``.
            spec: The spec of the parameter that was sharded.
        """
        rows, start = local_rows(parameter)
        used = self.policy.compute_dtype or rows.dtype
        for offset, piece in spec.flat_pieces(rows, start):
            part = whole[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))]
            piece.copy_(part.to(used))  # masters begin at what is used, as they do where the module was built in that dtype
        self.unfilled = tuple(other for other in self.unfilled if other != name)

    def as_used(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with the sharded parameters in the dtype in which they are used; masters are saved apart."""
        low = self.policy.compute_dtype
        return {name: value.to(low) if low and isinstance(value, DTensor) else value for name, value in state.items()}

    def reshard(self) -> None:
        """Let go of whole parameters, which the next use gathers anew."""
        for unit in self._all_units():
            unit.module.reshard()

    def accumulate(self) -> None:
        """A step begins: gradients that backward passes produce from now on are not its last."""
        for stage in self._units:
            self._backwards[stage].used.clear()
            self._set_last(stage, last=False)

    def used(self, parameter: Tensor) -> bool:
        """Return whether a sharded parameter has had a gradient on this rank in this step, of those that are reduced."""
        return any(id(parameter) in backward.used for backward in self._backwards.values())

    @contextmanager
    def completing(self, stages: Iterable[int] | None = None) -> Generator[None, None, None]:
        """Around what completes the gradients of these stages (None: all) in a step: they are reduced as they appear."""
        chosen = list(self._units if stages is None else stages)
        for stage in chosen:
            self._set_last(stage, last=True)
            self._backwards[stage].begin()
        yield
        for stage in chosen:
            for root in reversed(self._roots[stage]):
                finish_fsdp_backward(root)
            self._set_last(stage, last=False)

    def _set_last(self, stage: int, *, last: bool) -> None:
        every = self.policy.reduce_every_microbatch
        # In bf16, shards that wait for the other instances would be summed in bf16.
        spread = last or self.policy.send_as is not None
        for unit in self._units[stage]:
            unit.module.set_requires_gradient_sync(last or every, recurse=False)
            if every and self.policy.num_instances > 1:
                unit.module.set_requires_all_reduce(spread, recurse=False)
            unit.module.set_reshard_after_backward(last or self.policy.reshard_after_forward, recurse=False)
        for root in self._roots[stage]:
            root.set_is_last_backward(last)  # FSDP2 keeps it with the root that has run


def _mesh(groups: DataGroups, device_type: str) -> DeviceMesh:
    """Return the ranks among which FSDP2 shards; with several instances (replicas, shards)."""
    shard, replicas = groups.shard.process_group, groups.replicas.process_group
    if shard is None:
        raise ShardingError(
            f"units are sharded over data-parallel ranks, and with {groups.all.size} in groups of one each rank would keep "
            "everything. Leave the module as it is."
        )
    if replicas is None:
        return DeviceMesh.from_group(shard, device_type)
    ranks = torch.tensor(groups.all.ranks).view(groups.replicas.size, groups.shard.size)
    return DeviceMesh.from_group([replicas, shard], device_type, mesh=ranks, mesh_dim_names=("replicas", "shards"))


def _callable_modules(unit: nn.Module) -> list[nn.Module]:
    """Return the unit, or the entries of a mere container, which nobody calls."""
    if isinstance(unit, nn.ModuleList | nn.ModuleDict):
        return [child for entry in unit.children() for child in _callable_modules(entry)]
    return [unit]


def local_rows(tensor: DTensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor sharded along dim 0, flattened, and the index of their first element."""
    rows = tensor._local_tensor.detach()
    mesh, axis = tensor.device_mesh, tensor.device_mesh.ndim - 1  # with replicas, shards are the last axis
    per_rank = -(-tensor.shape[0] // mesh.size(axis))
    first = min(mesh.get_local_rank(axis) * per_rank, tensor.shape[0])
    return rows.reshape(-1), first * (tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0)
