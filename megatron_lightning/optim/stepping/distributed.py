"""The distributed optimizer: the user's own ``torch.optim.Optimizer``, stepping only this rank's
shards.

ZeRO stage 1 (https://arxiv.org/abs/1910.02054): every data-parallel rank keeps the optimizer state,
and for half-precision parameters the fp32 main params, of a shard of each bucket. After the step
the ranks all-gather the parameters. The optimizer object, the groups and the hyper-parameters stay.
Learning-rate schedulers and loggers see no difference. Only the tensors in the groups are replaced,
as described in ``entries``.

Checkpoints see the state through the base class, ``state.OptimizerState``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.buckets import Bucket
from megatron_lightning.optim.gradients.gradient_proxies import gradient_of
from megatron_lightning.optim.gradients.param_gather import ParameterGather
from megatron_lightning.optim.gradients.parameter_shard import ParameterShard, main_dtype
from megatron_lightning.optim.gradients.reducer import GradientReducer
from megatron_lightning.optim.owners.exchange import Exchange, Held
from megatron_lightning.optim.owners.readers import matrix_units
from megatron_lightning.optim.owners.units import Units, is_several
from megatron_lightning.optim.stepping import moments
from megatron_lightning.optim.stepping.entries import OptimizerEntry, Target
from megatron_lightning.optim.stepping.main_params import MainParams, take_over
from megatron_lightning.optim.stepping.optimizer_state import OptimizerState
from megatron_lightning.optim.stepping.reassigned_data import check_rebound
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup
from megatron_lightning.parallel.shards.spec import ShardSpec


class DistributedOptimizer(OptimizerState):
    """Make ``optimizer`` step this rank's shards. Construct once, before the first step.

    ``elementwise.divide`` tells which groups owners step in full.

    Args:
        optimizer: The optimizer of ``configure_optimizers``. The optimizer's parameters are
            replaced in place, state included.
        reducer: The reduction of the stepped gradients. The reducer's options determine device and
            dtype of the state.
        names: Name -> parameter of the full module, frozen parameters included. None: the
            reducer's.
        gather: Gathers the parameters after a step. None: inside the step.
        owned: Id of a parameter group -> the full tensors that the group's optimizer steps. Groups
            of Muon are known. Other groups are divided.

    Raises:
        ConfigError: If a trainable parameter is not part of the module. The parameter's gradient
            would not be reduced.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: GradientReducer,
        names: Mapping[str, nn.Parameter] | None = None,
        gather: ParameterGather | None = None,
        owned: Mapping[int, Units] | None = None,
    ) -> None:
        super().__init__(optimizer, reducer)
        self._options = reducer.options
        self._gather = gather or ParameterGather(reducer)
        self._name_of = {
            id(parameter): name for name, parameter in (names or reducer.parameters).items()
        }
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._entries = [
            [
                self._entry(parameter, group, f"param_groups.{i}.{j}")
                for j, parameter in enumerate(group["params"])
            ]
            for i, group in enumerate(optimizer.param_groups)
        ]
        # Owners first: they set the targets of their entries, which the groups get below.
        self.has_owners = bool(owned)
        """Whether owners step full tensors, but for Muon's. Equal on all ranks."""
        self.exchanges = self._exchange(matrix_units(optimizer) | dict(owned or {}))
        """Bring full tensors to their owners."""
        for entry in self._all_entries():
            if entry.owned is None and entry.shard is not None and not entry.targets:
                entry.targets = [self._target(entry.shard, entry.spec)]
        used_names = {entry.name for entry in self._all_entries()}
        self._buckets: list[Bucket] = [
            bucket
            # Buckets are in backward order. The forward needs the last bucket's parameters first,
            # so its gather starts first.
            for bucket in reversed(reducer.buckets)
            if bucket.sharded and not used_names.isdisjoint(bucket.names)
        ]
        self._stored = [bucket.stored for bucket in self._buckets if bucket.stored is not None]
        for group, entries in zip(optimizer.param_groups, self._entries, strict=True):
            self._replace(group, entries)
        # Stepped as a copy, while every rank keeps the parameter: changes by the user (EMA, weights
        # loaded in a hook) have to be taken over.
        self._followed = [
            (parameter, entry.shard)
            for parameter, entry in zip(parameters, self._all_entries(), strict=True)
            if entry.shard is not None
            and not entry.sharded
            and (entry.copied or entry.owned is not None)
        ]
        self._copied = [entry for entry in self._all_entries() if entry.copied]
        self._main = MainParams(
            (entry.shard, entry.targets[0].tensor)
            for entry in self._copied
            if entry.shard is not None
        )
        if self._options.moments_dtype == "bf16":
            moments.warn_if_lost(optimizer)
        if self.exchanged:
            optimizer.register_step_pre_hook(self._prepare_after_closure)
            optimizer.register_step_post_hook(lambda *_: self._finish_step())

    @property
    def exchanged(self) -> bool:
        """Whether the optimizer steps tensors other than the module's parameters, or needs work
        around steps.
        """
        sharded = any(entry.sharded for entry in self._all_entries())
        return bool(
            sharded or self._copied or self.exchanges or self._options.moments_dtype == "bf16"
        )

    @property
    def entries(self) -> list[OptimizerEntry]:
        """Parameters of the optimizer, in the order of the groups."""
        return list(self._all_entries())

    @property
    def names(self) -> set[str]:
        """Names of the parameters of the optimizer, on this rank or not."""
        return {entry.name for entry in self._all_entries()}

    def carriers_of_groups(self) -> list[set[int]]:
        """Return, for each parameter group, the ids of the tensors with reduced gradients on this
        rank.
        """
        return [
            {id(entry.shard.target) for entry in entries if entry.shard is not None}
            for entries in self._entries
        ]

    def follow_zero_grad(self, handle: Any) -> Callable[[], object]:
        """Make ``handle.zero_grad`` clear the reduced gradients as well. Return a function to undo
        the change.

        The reduced gradient of a parameter stepped as a copy (in host memory, as full matrix) is on
        another tensor than the copy.

        Args:
            handle: The optimizer, or a wrapper of the optimizer.
        """
        original = handle.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            original(set_to_none)
            for entry in self._all_entries():
                carrier = self._carrier(entry)
                if carrier is not None and all(
                    target.tensor is not carrier for target in entry.targets
                ):
                    carrier.grad = None

        vars(handle)["zero_grad"] = zero_grad
        return lambda: vars(handle).pop("zero_grad", None)

    def _targets(self) -> Iterator[nn.Parameter]:
        return (target.tensor for entry in self._all_entries() for target in entry.targets)

    def _entry(
        self, parameter: nn.Parameter, group: dict[str, Any], fallback: str
    ) -> OptimizerEntry:
        reducer, name = self._reducer, self._name_of.get(id(parameter), fallback)
        spec = reducer.specs.get(name) or ShardSpec.replicated(parameter.shape)
        if reducer.parameters.get(name) is not parameter:
            self._check_unreduced(name, parameter, spec)
            if isinstance(parameter, DTensor):  # frozen, in a unit of FSDP2
                frozen_shard = reducer.frozen_shard(parameter)
                parts = (
                    []
                    if frozen_shard is None
                    else [Target(frozen_shard.target, partial(frozen_shard.shards, spec))]
                )
                return OptimizerEntry(name, spec, group, True, frozen_shard, parts)
            shard = ParameterShard.full(parameter)
            return OptimizerEntry(name, spec, group, False, shard, [Target(parameter, spec.shards)])
        shard_held = (
            ParameterShard.full(parameter) if reducer.is_plain(name) else reducer.shards.get(name)
        )
        return OptimizerEntry(name, spec, group, reducer.is_sharded(name), shard_held)

    def _carrier(self, entry: OptimizerEntry) -> nn.Parameter | None:
        """Return the tensor that tells whether the parameter has a gradient in this step."""
        return entry.shard.target if entry.shard else self._reducer.absent.get(entry.name)

    def _target(self, shard: ParameterShard, spec: ShardSpec) -> Target:
        """Return the gradient-carrying tensor, or a copy of the value in another dtype or
        memory.
        """
        tensor, dtype = shard.target, main_dtype(shard.value.dtype)
        if self._options.optimizer_cpu_offload:
            tensor = nn.Parameter(_host_copy(shard.value, dtype))
        elif dtype != shard.value.dtype:
            tensor = shard.target = nn.Parameter(shard.value.to(dtype))
        return Target(tensor, partial(shard.shards, spec))

    def _exchange(self, owned: Mapping[int, Units]) -> list[Exchange]:
        """Prepare parameters for full steps, if several ranks hold shards or if a weight consists
        of several matrices.
        """
        reducer, context = self._reducer, self._reducer.context
        sharers = context.axis("tp-dp-cp")
        if owned:  # a collective, also of stages without an owned parameter
            instances = self._options.num_distributed_optimizer_instances
            sharers = context.divide(sharers, instances)[0]
        held: dict[AxisGroup, list[Held]] = {}
        for entry in self._all_entries():
            units = owned.get(id(entry.group))
            if units is None or entry.name not in reducer.parameters:
                continue
            divided = entry.sharded or any(
                context.axis(axis).size > 1 for axis in entry.spec.sharded_over
            )
            if not divided:
                group = ALONE
            elif reducer.sharded or entry.sharded:
                group = sharers
            else:
                group = context.axis("etp-ep") if entry.spec.is_expert else context.tp
            if divided or (units is Units.MATRICES and is_several(entry.spec)):
                held.setdefault(group, []).append(Held(entry, units, partial(self._is_used, entry)))
        device = torch.device("cpu") if self._options.optimizer_cpu_offload else None
        # In the same order on all ranks.
        groups = sorted(held, key=lambda group: group.name)
        return [Exchange(held[group], group, context, device) for group in groups]

    def _is_used(self, entry: OptimizerEntry) -> bool:
        carrier = self._carrier(entry)
        return carrier is not None and gradient_of(carrier) is not None

    def _check_unreduced(self, name: str, parameter: nn.Parameter, spec: ShardSpec) -> None:
        context = self._reducer.context
        groups = [context.axis(axis) for axis in (spec.data_axes, *spec.partial_over)]
        if parameter.requires_grad and any(group.size > 1 for group in groups):
            raise ConfigError(
                f"{name} of {type(self.optimizer).__name__}, of shape {tuple(parameter.shape)}, is "
                "not a trainable parameter of the module, so its gradient would not be reduced "
                "over the ranks. Make it a parameter of the module, or set requires_grad before "
                "the optimizer is set up."
            )

    def _replace(self, group: dict[str, Any], entries: Sequence[OptimizerEntry]) -> None:
        """Replace the parameters of the group, and their existing state, by the targets and
        theirs.
        """
        for parameter, entry in zip(group["params"], entries, strict=True):
            if parameter not in self.optimizer.state or any(
                target.tensor is parameter for target in entry.targets
            ):
                continue
            state = self.optimizer.state.pop(parameter)
            self._check_initial_state(entry, state)
            start = 0 if entry.shard is None or entry.owned is not None else entry.shard.start
            for target in entry.targets:
                self.optimizer.state[target.tensor] = {
                    key: _own_state(value, parameter, start, target.tensor)
                    for key, value in state.items()
                }
        group["params"] = [target.tensor for entry in entries for target in entry.targets]
        if "param_names" in group:
            names = zip(group["param_names"], entries, strict=True)
            group["param_names"] = [name for name, entry in names for _ in entry.targets]

    def _check_initial_state(self, entry: OptimizerEntry, state: Mapping[str, Any]) -> None:
        if entry.owned is not None and any(
            isinstance(v, Tensor) and v.dim() for v in state.values()
        ):
            raise ConfigError(
                f"{type(self.optimizer).__name__} made its state of {entry.name} when it was "
                "constructed, for this rank's shard, and a rank that owns the full tensor is to "
                "step it. Use an optimizer that makes its state in the first step, or "
                'data_parallel="ddp" without tensor parallelism.'
            )

    def _prepare_after_closure(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare the step once gradients exist: a closure computes gradients inside the step."""
        itself, *positional = args
        closure = positional[0] if positional else kwargs.get("closure")
        if closure is None:
            self._prepare_step()
            return args, kwargs
        called = False

        def prepared() -> Any:
            nonlocal called
            if called:  # again, for the gradients at moved weights
                self.synchronize()
            called = True
            result = closure()
            self._prepare_step()
            return result

        return (itself, prepared), {key: value for key, value in kwargs.items() if key != "closure"}

    @torch.no_grad()
    def _prepare_step(self) -> None:
        self.bind()
        self._main.take_over()
        for exchange in self.exchanges:
            if exchange.is_local:
                exchange.take_over()
            else:
                exchange.look_for_writes()
        for bucket in self._stored:
            bucket.look_for_writes()
        self._reducer.stored_units.look_for_writes()
        if self._options.moments_dtype == "bf16":
            moments.widen(self.optimizer, self._targets())
        for exchange in self.exchanges:
            exchange.gather_gradients()
        if not self._options.optimizer_cpu_offload:
            return
        for entry in self._copied:
            gradient = None if entry.shard is None else gradient_of(entry.shard.target)
            for target in entry.targets:
                target.tensor.grad = (
                    None if gradient is None else gradient.to("cpu", target.tensor.dtype)
                )

    def bind(self) -> None:
        """Follow parameters with replaced memory.

        Raises:
            ConfigError: If shape, dtype or device of a parameter have changed.
        """
        for bucket in self._stored:
            bucket.take_over()
        for parameter, shard in self._followed:
            if parameter.data_ptr() != shard.value.data_ptr():
                check_rebound(self._name_of[id(parameter)], parameter.data, shard.value)
                shard.value = parameter.detach()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The sharded buckets of the optimizer's parameters."""
        return self._buckets

    def shards_were_written(self) -> bool:
        """Return whether shards of exchanged matrices were written outside of a step. Waits for the
        device.
        """
        return any(exchange.were_written() for exchange in self.exchanges)

    @torch.no_grad()
    def main_was_written(self) -> bool:
        """Return whether main params were written outside of a step. :meth:`synchronize_written`
        updates the parameters from written main params. Waits for the device.

        Raises:
            ConfigError: If the parameters were written as well.
        """
        self.bind()
        return self._main.were_written() or self._reducer.stored_units.were_written()

    @torch.no_grad()
    def take_over(self) -> None:
        """Take over writes into the parameters, also into replaced memory. A collective if the
        optimizer steps full matrices of several ranks.

        Call only before a step: an average swapped in for validation, and out again, leaves main
        params unchanged.

        Raises:
            ConfigError: If main params were written as well.
        """
        self.main_was_written()
        self._main.take_over()
        for exchange in self.exchanges:
            exchange.take_over()

    @torch.no_grad()
    def _finish_step(self) -> None:
        if self._options.moments_dtype == "bf16":
            moments.narrow(self.optimizer, self._targets())
        if self._options.optimizer_cpu_offload:
            for target in self._targets():
                target.grad = None
        self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Update the parameters from the targets at the end of every step. A collective."""
        if self._copied:
            values = [entry.shard.value for entry in self._copied if entry.shard is not None]
            torch._foreach_copy_(values, [entry.targets[0].tensor for entry in self._copied])
            self._main.record()
        for exchange in self.exchanges:
            exchange.scatter_results()
        self._reducer.stored_units.encode(self._reducer.all_reduce)
        self._gather.start(self._buckets)

    @torch.no_grad()
    def synchronize_written(self) -> None:
        """Update the parameters from targets written outside of a step. A collective."""
        self._main.take_over()
        self.synchronize()

    @torch.no_grad()
    def finish_restore(self) -> None:
        """Finish a load: compute unsaved main params from the parameters, then synchronize. A
        collective.
        """
        for entry in self._copied:
            if entry.shard is None:
                continue
            main, value = entry.targets[0].tensor, entry.shard.value
            if entry.global_name not in self._restored_main:
                main.copy_(value)
            else:  # a hook may have replaced the value saved beside the main param
                take_over(main, value.to(main.device))
        for exchange in self.exchanges:
            exchange.refresh(keep=self._restored_main)
        for target in self._targets():
            state = self.optimizer.state.get(target, {})
            # A checkpoint of another precision may hold moments in another dtype.
            for key, value in state.items():
                if (
                    isinstance(value, Tensor)
                    and value.shape == target.shape
                    and value.is_floating_point()
                ):
                    state[key] = value.to(target.dtype)
        if self._options.moments_dtype == "bf16":
            moments.narrow(self.optimizer, self._targets())
        self._restored_main = set()
        self.synchronize()


def _host_copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy in host memory, page-locked if the value is on a GPU."""
    copied = torch.empty(value.shape, dtype=dtype, pin_memory=value.is_cuda)
    return copied.copy_(value)


def _own_state(value: Any, parameter: Tensor, start: int, target: Tensor) -> Any:
    """Return the target's range of an existing state of ``parameter``."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if isinstance(value, DTensor):  # sharded like the parameter
        local_state = value.to_local().reshape(target.shape)
    else:
        local_state = value.flatten()[start : start + target.numel()].view(target.shape)
    dtype = target.dtype if value.is_floating_point() else value.dtype
    return local_state.to(target.device, dtype, copy=True)
