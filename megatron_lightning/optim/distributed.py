"""The distributed optimizer: the user's own ``torch.optim.Optimizer``, stepping only what this rank owns.

ZeRO stage 1 (https://arxiv.org/abs/1910.02054): every data-parallel rank keeps the optimizer state, and for half-precision
parameters the fp32 masters, of its shard of each bucket; after the step the ranks gather the parameters from one another.
The optimizer object, its groups and their hyper-parameters stay, so learning-rate schedulers and loggers see no difference;
only the tensors in the groups are exchanged, as ``entries`` says.

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
from megatron_lightning.optim import moments
from megatron_lightning.optim.buckets import Bucket, Fragment, main_dtype
from megatron_lightning.optim.chained import members
from megatron_lightning.optim.elementwise import require_elementwise
from megatron_lightning.optim.entries import Entry, Part, Pieces
from megatron_lightning.optim.matrices import MatrixExchange, matrix_groups, require_whole, steps_matrices
from megatron_lightning.optim.param_gather import ParameterGather
from megatron_lightning.optim.reducer import GradientReducer
from megatron_lightning.optim.state import OptimizerState
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sharding import ShardSpec


class DistributedOptimizer(OptimizerState):
    """Makes ``optimizer`` step this rank's share; construct it once, before the first step.

    Args:
        optimizer: What ``configure_optimizers`` returned. Its parameters are exchanged in place, state included.
        reducer: The gradient reduction whose results it steps; its options say where and how the state is kept.
        names: Name -> parameter of the whole module, frozen ones included; None: the reducer's.
        gather: Gathers what was stepped; None: inside the step.

    Raises:
        ConfigError: If gradients are sharded and the optimizer is neither element-wise nor one of whole matrices, or a
            trainable parameter is not part of the module, so that its gradient would not be reduced.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: GradientReducer,
        names: Mapping[str, nn.Parameter] | None = None,
        gather: ParameterGather | None = None,
    ) -> None:
        super().__init__(optimizer, reducer)
        self._options, self._gather = reducer.options, gather or ParameterGather(reducer)
        self._name_of = {id(parameter): name for name, parameter in (names or reducer.parameters).items()}
        self._entries = [
            [self._entry(parameter, group, f"param_groups.{i}.{j}") for j, parameter in enumerate(group["params"])]
            for i, group in enumerate(optimizer.param_groups)
        ]
        self._exchanges = self._exchange_matrices()
        used = {entry.name for entry in self._all_entries()}
        self._buckets: list[Bucket] = [
            bucket for bucket in reversed(reducer.buckets) if bucket.sharded and not used.isdisjoint(bucket.names)
        ]
        if self._buckets or any(entry.sharded for entry in self._all_entries()):
            for member in members(optimizer):
                if not steps_matrices(member):
                    require_elementwise(member)
        for group, entries in zip(optimizer.param_groups, self._entries, strict=True):
            self._replace(group, entries)
        self._copied = [entry for entry in self._all_entries() if entry.copied]
        if self._options.moments_dtype == "bf16":
            moments.warn_if_lost(optimizer)
        if self._exchanges or self._options.moments_dtype == "bf16" or self._options.optimizer_cpu_offload:
            optimizer.register_step_pre_hook(self._prepare_after_closure)
        if self.exchanged:
            optimizer.register_step_post_hook(lambda *_: self._finish_step())

    @property
    def exchanged(self) -> bool:
        """Whether the optimizer steps something else than the module's parameters, or does something around its steps."""
        sharded = any(entry.sharded for entry in self._all_entries())
        return bool(sharded or self._copied or self._exchanges or self._options.moments_dtype == "bf16")

    @property
    def names(self) -> set[str]:
        """Names of the parameters that the optimizer was made for, on this rank or not."""
        return {entry.name for entry in self._all_entries()}

    def carriers_of_groups(self) -> list[set[int]]:
        """Return, for each parameter group, the ids of the tensors that carry the reduced gradients which it reads here."""
        return [{id(entry.carrier) for entry in entries if entry.carrier is not None} for entries in self._entries]

    def _targets(self) -> Iterator[nn.Parameter]:
        return (part.target for entry in self._all_entries() for part in entry.parts)

    def _entry(self, parameter: nn.Parameter, group: dict[str, Any], fallback: str) -> Entry:
        reducer, name = self._reducer, self._name_of.get(id(parameter), fallback)
        spec = reducer.specs.get(name) or ShardSpec.replicated(parameter.shape)
        if reducer.parameters.get(name) is not parameter:
            self._check_unreduced(name, parameter, spec)
            return Entry(name, spec, group, carrier=parameter, value=parameter.detach(), parts=[Part(parameter, spec.pieces)])
        fragment, sharded = reducer.fragments.get(name), reducer.is_sharded(name)
        if fragment is None and not reducer.is_plain(name):
            return Entry(name, spec, group, sharded)
        if fragment is None:
            return self._stepped(Entry(name, spec, group, carrier=parameter, value=parameter.detach()), spec.pieces, None)
        place = spec.pieces if fragment.whole else partial(spec.flat_pieces, start=fragment.start)
        entry = Entry(name, spec, group, sharded, fragment.target, fragment.value, fragment.start, is_master=fragment.is_master)
        return self._stepped(entry, place, fragment)

    def _stepped(self, entry: Entry, place: Callable[[Tensor], Pieces], fragment: Fragment | None) -> Entry:
        """Fill in what is stepped: what carries the gradient, or a copy of the value in another dtype or memory."""
        if entry.carrier is None or entry.value is None:
            return entry
        offload, dtype = self._options.optimizer_cpu_offload, main_dtype(entry.value.dtype)
        target = entry.carrier
        if offload:
            target = nn.Parameter(_host_copy(entry.value, dtype))
        elif fragment is not None and dtype != entry.value.dtype:
            target = entry.carrier = fragment.target = nn.Parameter(entry.value.to(dtype))
        entry.parts = [Part(target, place)]
        return entry

    def _exchange_matrices(self) -> list[MatrixExchange]:
        """Let the matrices that tensor-parallel ranks share, or that consist of several, be stepped whole."""
        context, groups = self._reducer.context, {id(group) for group in matrix_groups(self.optimizer)}
        alone = AxisGroup("self", (context.rank,), 0, None)
        shared: dict[AxisGroup, list[tuple[Entry, ShardSpec]]] = {}
        for entry in self._all_entries():
            if id(entry.group) not in groups or entry.name not in self._reducer.parameters:
                continue
            rows = self._reducer.rows_of(entry.name)
            if rows is not None:
                shared.setdefault(rows[1], []).append((entry, rows[0]))
            elif entry.value is not None:
                require_whole(entry, whole=tuple(entry.value.shape) == entry.spec.local_shape)
                if "tp" in entry.spec.sharded_over:
                    shared.setdefault(context.tp, []).append((entry, entry.spec))
                elif entry.spec.fused_rows:
                    shared.setdefault(alone, []).append((entry, entry.spec))
        device = torch.device("cpu") if self._options.optimizer_cpu_offload else None
        return [MatrixExchange(held, group, device) for group, held in shared.items()]

    def _check_unreduced(self, name: str, parameter: nn.Parameter, spec: ShardSpec) -> None:
        context = self._reducer.context
        groups = [context.data_group(spec.grid), *(context.axis(axis, spec.grid) for axis in spec.partial_over)]
        if parameter.requires_grad and any(group.size > 1 for group in groups):
            raise ConfigError(
                f"{name} of {type(self.optimizer).__name__}, of shape {tuple(parameter.shape)}, is not a trainable parameter "
                "of the module, so its gradient would not be reduced over the ranks. Make it a parameter of the module, or "
                "set requires_grad before the optimizer is set up."
            )

    def _replace(self, group: dict[str, Any], entries: Sequence[Entry]) -> None:
        """Put the targets into the group, and this rank's part of existing state beside them."""
        for parameter, entry in zip(group["params"], entries, strict=True):
            if parameter not in self.optimizer.state or any(part.target is parameter for part in entry.parts):
                continue
            state = self.optimizer.state.pop(parameter)
            for part in entry.parts:
                self.optimizer.state[part.target] = {
                    key: _cut(value, parameter, entry.start, part.target) for key, value in state.items()
                }
        group["params"] = [part.target for entry in entries for part in entry.parts]
        if "param_names" in group:
            names = zip(group["param_names"], entries, strict=True)
            group["param_names"] = [name for name, entry in names for _ in entry.parts]

    def _prepare_after_closure(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare the step when the gradients exist: a closure, which computes them, runs inside the step."""
        itself, *positional = args
        closure = positional[0] if positional else kwargs.get("closure")
        if closure is None:
            self._prepare_step()
            return args, kwargs

        def prepared() -> Any:
            result = closure()
            self._prepare_step()
            return result

        return (itself, prepared), {key: value for key, value in kwargs.items() if key != "closure"}

    @torch.no_grad()
    def _prepare_step(self) -> None:
        if self._options.moments_dtype == "bf16":
            moments.widen(self.optimizer, self._targets())
        for exchange in self._exchanges:
            exchange.collect_gradients()
        if not self._options.optimizer_cpu_offload:
            return
        for entry in self._copied:
            gradient = None if entry.carrier is None else entry.carrier.grad
            for part in entry.parts:
                part.target.grad = None if gradient is None else gradient.to("cpu", part.target.dtype)

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
        """Bring the parameters up to date with what was stepped; runs at the end of every step. A collective."""
        if self._copied:
            values = [entry.value for entry in self._copied if entry.value is not None]
            torch._foreach_copy_(values, [entry.parts[0].target for entry in self._copied])
        for exchange in self._exchanges:
            exchange.distribute()
        self._gather.start(self._buckets)

    @torch.no_grad()
    def finish_restore(self) -> None:
        """After loading: masters that were not saved are made from the parameters, then all ranks agree. A collective."""
        for entry in self._copied:
            if entry.global_name not in self._restored_masters and entry.value is not None:
                entry.parts[0].target.copy_(entry.value)
        for exchange in self._exchanges:
            exchange.refresh(keep=self._restored_masters)
        for target in self._targets():
            state = self.optimizer.state.get(target, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == target.shape and value.is_floating_point():
                    state[key] = value.to(target.dtype)
        if self._options.moments_dtype == "bf16":
            moments.narrow(self.optimizer, self._targets())
        self._restored_masters = set()
        self.synchronize()


def _host_copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy in host memory, page-locked where the value is on a GPU."""
    copied = torch.empty(value.shape, dtype=dtype, pin_memory=value.is_cuda)
    return copied.copy_(value)


def _cut(value: Any, parameter: Tensor, start: int, target: Tensor) -> Any:
    """Return the target's part of one existing state of ``parameter``."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if isinstance(value, DTensor):  # sharded as its parameter is: what this rank has of it belongs to the target
        part = value.to_local().reshape(target.shape)
    else:
        part = value.flatten()[start : start + target.numel()].view(target.shape)
    dtype = target.dtype if value.is_floating_point() else value.dtype
    return part.to(target.device, dtype, copy=True)
