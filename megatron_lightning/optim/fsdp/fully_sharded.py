"""ZeRO-3 and ZeRO-2: the parameters of every pipeline unit sharded over the data-parallel ranks by
torch's FSDP2.

FSDP2 (``torch.distributed.fsdp.fully_shard``, https://arxiv.org/abs/2304.11277) gathers a unit's
parameters before forward and before backward. The gradients are reduce-scattered here
(``fully_sharded_reducer``). A rank keeps rows of each parameter's tensor-parallel shard. The rows
are a flat range: optimizers, norms and checkpoints treat the range like a ZeRO-1 shard.

    plan                     all-gathers      reduce-scatters     full copies in memory: parameters
    reshard_after_forward    2 x micro-batch  1 (or micro-batch)  of one unit, all gradients
    not                      1                1 (or micro-batch)  of all units, all gradients

Experts are units inside the pipeline units (``sharded_unit``), sharded over the ranks of the same
experts. Only the group differs.

With a reduce-scatter in each micro-batch, only a single unit has full gradients at a time.

With several instances (hybrid sharding, https://arxiv.org/abs/2304.11277 section 3.2.2) a group of
neighboring ranks shards the parameters. Gathers and reduce-scatters stay inside the group. Only the
reduced shards are all-reduced over the groups.

FSDP2 cannot manage tied parameters, scalars, parameters of another dtype than the unit, and
parameters outside of the units. Such parameters are treated as under ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from megatron_lightning.compat import GradientHooks
from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ShardingError
from megatron_lightning.optim.fsdp.sharded_unit import (
    Division,
    StageRoot,
    Unit,
    allocate,
    callable_modules,
    check_sizes,
    check_stored,
    divisions,
    is_sharded,
    local_shard,
    sharded_dim,
)
from megatron_lightning.optim.fsdp.unit_backward import StageBackward
from megatron_lightning.optim.fsdp.unit_order import UnitOrder
from megatron_lightning.optim.full_parameters import (
    can_be_extended,
    describe_full,
    explain_full,
    shardable,
)
from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.optim.gradients.parameter_shard import main_dtype
from megatron_lightning.optim.gradients.parameter_storage import (
    ParameterStorage,
    PlainUnits,
    StoredUnits,
    UnitShard,
)
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.parallel.shards.stored_weight import StoredWeight
from megatron_lightning.pipeline.stages.structure import sizes

TRAINING = "training_step"
"""The Lightning hook of forwards with a backward."""


class ShardedUnits:
    """The sharded units of this rank's stages. The constructor shards the units in place.

    FSDP2 gathers and reshards, and never reduces gradients. FSDP2 would reduce at the end of a
    unit's backward, before deferred weight gradients and without gradients missing on this rank.

    Args:
        module: The assembled module, on the device. Tensors on ``meta`` are allocated when sharded
            (:attr:`unfilled`).
        stages: Stage -> paths of the stage's units in ``module``.
        root: Path of the module called by the user to run all units. None: :meth:`call` runs the
            units.
        specs: Name -> spec of every parameter of ``module``.
        context: The groups of this rank.
        options: How much stays full, and the sharding ranks.
        micro_batches: Whether a step runs several micro-batches. Parameters are then gathered once
            a step unless the options say otherwise.
        compute_dtype: Dtype of gathered parameters. None: the dtype of the parameter.
        keeps_frozen: Whether frozen parameters keep the dtype. False: frozen parameters may be
            trained later.
        excluded: Names of parameters to leave full, for instance parameters with a copy on another
            pipeline rank.
        full: Name of a parameter outside of the units -> the reason for staying full.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Mapping[int, Sequence[str]],
        *,
        root: str | None,
        excluded: Set[str],
        full: Mapping[str, str],
        specs: Mapping[str, ShardSpec],
        context: ParallelContext,
        options: DataParallelOptions,
        micro_batches: bool,
        compute_dtype: torch.dtype | None,
        keeps_frozen: bool = True,
    ) -> None:
        self.compute_dtype = compute_dtype
        """Dtype of gathered parameters. None: the dtype of the parameter."""
        self._options = options
        self._keeps_frozen = keeps_frozen
        # With several micro-batches a step, units that reshard would be gathered once for each
        # micro-batch, so by default units stay gathered.
        self._reshard = (
            not micro_batches
            if options.reshard_after_forward is None
            else options.reshard_after_forward
        )
        self.groups = DataGroups.by_axes(
            context, sharded=True, num_instances=options.num_distributed_optimizer_instances
        )
        """``ShardSpec.data_axes`` -> data groups of such parameters: the ranks of different shards,
        and the ranks of equal shards."""
        self._meshes = {
            axes: DeviceMesh.from_group(groups.shard.process_group, context.device.type)
            for axes, groups in self.groups.items()
            if groups.shard.process_group is not None
        }
        if not self._meshes:
            raise ShardingError(
                f"units are sharded over data-parallel ranks, and with {context.dp_cp.size} in "
                "groups of one each rank would keep everything. Leave the module as it is."
            )
        # FSDP2 replaces the parameters by new objects: hooks of users on the old objects are moved
        # at the end.
        hooks = {name: GradientHooks(parameter) for name, parameter in module.named_parameters()}
        modules = {
            stage: [
                child for path in paths for child in callable_modules(module.get_submodule(path))
            ]
            for stage, paths in stages.items()
        }
        # Axes without a mesh are groups of a single rank, where sharding would add nothing but
        # copies.
        manageable = {
            key: axes
            for key, axes in shardable(module, modules.values(), specs, excluded).items()
            if axes in self._meshes
        }
        self._paths = {child: path for path, child in module.named_modules()}
        self.units: list[Unit] = []
        """The units of all stages. The position in this list is the unit's index."""
        self._backwards: dict[int, StageBackward] = {}
        self._calls: dict[int, nn.Module] = {}
        unfilled: list[str] = []
        for stage, units in modules.items():
            unfilled += self._shard_stage(stage, units, manageable, context.device)
            self._make_root(stage, units, module, root)
        self.names = frozenset(name for unit in self.units for name in unit.shards)
        """Names of the sharded parameters."""
        self.full = explain_full(module, specs, excluded, self.names, full)
        """Name of a parameter kept in full on every rank -> the reason."""
        self.unfilled = tuple(unfilled)
        """Names of parameters allocated from ``meta`` and not initialized yet."""
        self.stored: StoredUnits = PlainUnits()
        """Parameters of the units, as gathered by FSDP2."""
        for unit in self.units:
            for name, shard in unit.shards.items():
                hooks[name].move(shard)
        # All ranks of the same experts, and of the same other parameters, are among the callers.
        callers = context.axis("tp-dp-cp") if "edp" in manageable.values() else context.dp_cp
        self._order = UnitOrder([str(unit) for unit in self.units], callers, context.device)

    def store(self, storage: ParameterStorage) -> None:
        """Store the parameters of the units by ``storage`` from now on.

        Raises:
            ShardingError: If the units were gathered otherwise before.
        """
        stored = storage.of_units(
            UnitShard(name, shard, unit.groups)
            for unit in self.units
            for name, shard in unit.shards.items()
        )
        if stored.names != self.stored.names and any(unit.gathered for unit in self.units):
            raise ShardingError(
                f"{len(stored.names)} weights are to be gathered as quantized data of 8 bits, and "
                f"an earlier Trainer has gathered {len(self.stored.names)} so. Use the same "
                "recipe, or create a new module and load a checkpoint into it."
            )
        self.stored = stored
        stored.store()

    def _shard_stage(
        self,
        stage: int,
        modules: Sequence[nn.Module],
        manageable: Mapping[int, str],
        device: torch.device,
    ) -> list[str]:
        """Shard the pipeline units of a stage. Return the names of the parameters to be filled."""
        first, unfilled = len(self.units), []
        outer: dict[int, int] = {}
        for module in modules:
            # A unit whose parameters have several data axes (experts) is divided: inner parts
            # first, the module itself last.
            parts = divisions(module, manageable)
            start = len(self.units)
            for index, division in enumerate(parts, start):
                path = self._paths[division.module]
                # Names are taken before FSDP2 replaces the parameters, by which they are found.
                parameter_ids = {id(parameter) for parameter in division.parameters}
                names = {
                    n for n, p in division.module.named_parameters(path) if id(p) in parameter_ids
                }
                self._shard(division, stage, index)
                unfilled += allocate(path, division.module, device)
                groups = self.groups[division.data_axes]
                self.units.append(Unit(path, division.module, names, groups))
                if division.module is not module and parts[-1].module is module:
                    outer[index] = start + len(parts) - 1
        self._backwards[stage] = StageBackward(
            {index: self.units[index].module for index in range(first, len(self.units))},
            partial(self._trained_order, stage),
            outer=outer,
            reshard=self._reshard,
            every=self._options.reduce_every_microbatch,
        )
        return unfilled

    def _shard(self, division: Division, stage: int, index: int) -> None:
        """Shard several parameters of a module."""
        unit, low, axes = division.module, self.compute_dtype, division.data_axes
        # FSDP2 shards the fp32 main params, and casts the gathered parameters. A frozen parameter
        # needs no main param.
        if low is not None:
            for parameter in division.parameters:
                if parameter.requires_grad or not self._keeps_frozen:
                    parameter.data = parameter.data.to(main_dtype(parameter.dtype))
        # FSDP2's hooks gather. Our hooks run before: in backward the first registered hook runs
        # first, in forward the last registered hook.
        unit.register_forward_hook(
            _uncompiled(lambda _, __, output: self._watch_backward(output, stage, index))
        )
        parameter_ids = {id(parameter) for parameter in division.parameters}
        size = self.groups[axes].shard.size
        for parameter in division.parameters:
            check_stored(self._paths[unit], parameter, size, axes)
        sharded = fully_shard(
            unit,
            mesh=self._meshes[axes],
            reshard_after_forward=self._reshard,
            shard_placement_fn=lambda p: Shard(sharded_dim(p.shape, size, axes)),
            mp_policy=MixedPrecisionPolicy(param_dtype=low, cast_forward_inputs=False),
            ignored_params={
                parameter for parameter in unit.parameters() if id(parameter) not in parameter_ids
            },
        )
        sharded.set_requires_gradient_sync(False, recurse=False)
        sharded.set_reshard_after_backward(self._reshard, recurse=False)
        calls: list[list[int]] = []  # of the calls under way

        def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(sizes(args, kwargs))
            self._order.called(index)
            self.units[index].begin_call()
            # In a recomputation, the backward needs the parameters next.
            again = self._backwards[stage].is_running
            sharded.set_reshard_after_forward(self._reshard and not again, recurse=False)

        def returned(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
            check_sizes(str(self.units[index]), calls.pop(), sizes(args, kwargs))

        unit.register_forward_pre_hook(_uncompiled(called), prepend=True, with_kwargs=True)
        unit.register_forward_hook(_uncompiled(returned), with_kwargs=True)

    def _watch_backward(self, output: Any, stage: int, index: int) -> None:
        """Report when a backward pass reaches the outputs of a unit."""
        for tensor in tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._backwards[stage].reached(index))  # type: ignore[no-untyped-call]

    def _make_root(
        self, stage: int, modules: Sequence[nn.Module], module: nn.Module, path: str | None
    ) -> None:
        """Shard a module around the pipeline units of a stage, for FSDP2 to prefetch gathers."""
        units = [child for child in modules if is_sharded(child)]
        # The LightningModule itself is not called: every unit is a separate root.
        if path == "" or not units:
            return
        root = StageRoot(units) if path is None else module.get_submodule(path)
        if not can_be_extended(root):
            return
        fully_shard(
            root,
            mesh=next(iter(self._meshes.values())),
            ignored_params={p for p in root.parameters() if not isinstance(p, DTensor)},
        )
        if path is None:
            self._calls[stage] = root

    def _trained_order(self, stage: int) -> Sequence[int]:
        return self._order.known((TRAINING, stage))

    def in_order(self, hook: str, stage: int = 0) -> AbstractContextManager[None]:
        """Check the order of the unit calls of a stage in Lightning's ``hook``. A collective the
        first time.
        """
        return self._order.forward((hook, stage))

    def apart(self) -> AbstractContextManager[None]:
        """Leave out the unit calls of a text engine in the block."""
        return self._order.apart()

    def describe(self) -> str:
        """Return a sentence about the sharded parameters and the way of sharding."""
        dense, experts = self.groups["dp-cp"], self.groups["edp"]
        has_experts = any(unit.groups is experts for unit in self.units)
        instances = max(dense.replicas.size, experts.replicas.size)
        ranks = f"{dense.shard.size} ranks" + (
            f" (experts: {experts.shard.size})" if has_experts else ""
        )
        timing = "gathered for each use" if self._reshard else "gathered once a step"
        reduced = (
            "after every micro-batch" if self._options.reduce_every_microbatch else "once a step"
        )
        low = f", used as {self.compute_dtype}".replace("torch.", "") if self.compute_dtype else ""
        copies = f", {instances} times" if instances > 1 else ""
        elements = sum(shard.numel() for unit in self.units for shard in unit.shards.values())
        return (
            f"{len(self.names)} parameter tensors ({elements:,} parameters) in {len(self.units)} "
            f"units are shards over "
            f"{ranks}{copies}{low}, {timing}; gradients are reduce-scattered {reduced}. "
            f"{describe_full(self.full)}"
        ).rstrip()

    def call(self, stage: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``run(*args, **kwargs)``, the forward of a stage, with parameters gathered when
        needed.
        """
        root = self._calls.get(stage)
        return run(*args, **kwargs) if root is None else root(run, *args, **kwargs)

    def fill(self, name: str, parameter: DTensor, full: Tensor, spec: ShardSpec) -> None:
        """Copy this rank's shard of an initial value.

        Args:
            name: A name in :attr:`unfilled`.
            parameter: The sharded parameter.
            full: The global value, of ``spec.global_shape``.
            spec: The spec of the parameter before FSDP2's sharding.
        """
        local, box = local_shard(parameter)
        dtype = self.compute_dtype or local.dtype
        if isinstance(local, StoredWeight):
            full, dtype = local.stored(full), local.dtype
        for shard in spec.part(box).shards(local):
            # Main params begin at the rounded values, as for a module built in the low-precision
            # dtype.
            shard.data.copy_(full[shard.box.slices].to(dtype))
        self.unfilled = tuple(
            unfilled_name for unfilled_name in self.unfilled if unfilled_name != name
        )

    def as_used(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with the sharded parameters in the dtype of the gathered parameters.
        Main params are saved separately.
        """
        low = self.compute_dtype
        return {
            name: value.to(low) if low and isinstance(value, DTensor) else value
            for name, value in state.items()
        }

    def reshard(self) -> None:
        """Free the full parameters. The next use gathers the parameters again."""
        for unit in self.units:
            unit.module.reshard()

    def reduce_by(self, reduce: Callable[[int, bool], None]) -> None:
        """Set the function to reduce a unit's gradients, called with the unit's index and whether
        the gradients are the last of a step.
        """
        for backward in self._backwards.values():
            backward.reduce = reduce

    def accumulate(self) -> None:
        """Begin a step: the gradients of the next backward passes are not the last of the step."""
        for backward in self._backwards.values():
            backward.reset()

    @contextmanager
    def completing(self, stages: Iterable[int] | None = None) -> Generator[None, None, None]:
        """Complete the gradients of these stages (None: all) in the block, and reduce the gradients
        as soon as complete.
        """
        chosen = [
            self._backwards[stage] for stage in (self._backwards if stages is None else stages)
        ]
        for backward in chosen:
            backward.begin_last()
        yield
        for backward in chosen:
            backward.end_last()


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook, excluded from compilation."""
    disabled: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled
