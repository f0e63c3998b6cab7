"""Norms of the reduced gradients over every axis, and clipping by norm."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.optim.clipping import (
    clip_grads_by_norm_,
    clip_grads_by_value_,
    global_grad_norm,
    global_zero_count,
    norm_groups,
)
from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.optim.gradients.gradient_proxies import gradient_of
from megatron_lightning.parallel.grid.context import ParallelContext


class GradientNorms:
    """Compute norms of the optimizers' gradients. Most methods are collectives."""

    def __init__(self, accumulation: GradientAccumulation, context: ParallelContext) -> None:
        self._accumulation = accumulation
        self._context = context
        self._group_names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.last_norm: Tensor | None = None
        """Global norm before the last clipping by norm."""

    def norm(self, optimizer: Optimizer | None = None) -> Tensor:
        """Return the global norm of all gradients, or of an optimizer's gradients. A collective."""
        return self._norm_of(self._read_by(optimizer))

    def _norm_of(self, gradients: dict[str, Tensor]) -> Tensor:
        reducer = self._accumulation.reducer
        return global_grad_norm(reducer.counted(gradients), self._context, sharded=reducer.sharded)

    def meeting_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each collective of a norm or count."""
        groups = norm_groups(self._context, self._accumulation.reducer.sharded).values()
        return tuple(dict.fromkeys(group.ranks for group in groups))

    def zero_count(self) -> Tensor:
        """Return the number of zero elements of the gradients. A collective."""
        reducer = self._accumulation.reducer
        return global_zero_count(reducer.counted(), self._context, sharded=reducer.sharded)

    def group_norms(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the global norm of every parameter group by name or index. A collective."""
        reducer = self._accumulation.reducer
        targets = reducer.targets()
        groups = zip(optimizer.param_groups, self._carriers(optimizer), strict=True)
        mine = {str(group.get("name", index)): ids for index, (group, ids) in enumerate(groups)}
        gradients = reducer.gradients()
        norms = {}
        for name in self._names_of_all_ranks(tuple(mine)):
            ids = mine.get(name, set())
            norms[name] = self._norm_of(
                {key: g for key, g in gradients.items() if id(targets[key]) in ids}
            )
        return norms

    def _carriers(self, optimizer: Optimizer) -> list[set[int]]:
        """Return the gradient-carrying tensors of each parameter group, possibly other than the
        group's tensors.
        """
        for view in self._accumulation.views:
            if view.exchanged and view.optimizer is optimizer:
                return view.carriers_of_groups()
        return [
            {id(parameter) for parameter in group["params"]} for group in optimizer.param_groups
        ]

    def _names_of_all_ranks(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the group names of all pipeline ranks. Names are exchanged after a change on this
        rank.
        """
        pipeline = self._context.pp
        if pipeline.process_group is None:
            return names
        if names not in self._group_names:
            ranks = pipeline.all_gather_object(names)
            self._group_names[names] = tuple(dict.fromkeys(name for rank in ranks for name in rank))
        return self._group_names[names]

    def _read_by(self, optimizer: Optimizer | None) -> dict[str, Tensor]:
        """Return the gradients stepped by ``optimizer`` (None: all), by name."""
        reducer = self._accumulation.reducer
        if optimizer is None:
            return reducer.gradients()
        stepped = set().union(*self._carriers(optimizer))
        targets = reducer.targets()
        return {
            name: gradient
            for name, gradient in reducer.gradients().items()
            if id(targets[name]) in stepped
        }

    def gradients_of(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients of ``optimizer``, to be changed in place."""
        gradients = list(self._read_by(optimizer).values())
        target_ids = {id(target) for target in self._accumulation.reducer.targets().values()}
        unknown = [
            gradient_of(p)
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) not in target_ids
        ]
        return gradients + [gradient for gradient in unknown if gradient is not None]

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale the gradients of ``optimizer`` to a global norm of at most ``clip_val``. A
        collective.
        """
        self.last_norm = self.norm(optimizer)
        clip_grads_by_norm_(self._read_by(optimizer).values(), clip_val, self.last_norm)

    def clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp every element of the gradients of ``optimizer`` to [-clip_val, clip_val]."""
        clip_grads_by_value_(self._read_by(optimizer).values(), clip_val)
