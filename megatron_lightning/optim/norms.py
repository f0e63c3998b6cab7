"""Norms of the reduced gradients over every axis, and clipping by norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning import compat
from megatron_lightning.optim.clipping import (
    clip_grads_by_norm_,
    clip_grads_by_value_,
    global_grad_norms,
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
        # Digests of the keys of every rank -> keys of all ranks.
        self._united_keys: dict[tuple[int, ...], tuple[str, ...]] = {}
        self.last_norm: Tensor | None = None
        """Global norm before the last clipping by norm."""

    def norm(self, optimizer: Optimizer | None = None) -> Tensor:
        """Return the global norm of all gradients, or of an optimizer's gradients. A collective."""
        return self._norms({"": self._read_by(optimizer)})[""]

    def norms(
        self, key: Callable[[str], str | None], *, norm_type: float = 2.0
    ) -> dict[str, Tensor]:
        """Return the global norm of the gradients of every key. A collective of all ranks.

        Args:
            key: Maps the global name of a parameter to a key. None: leaves the parameter out.
            norm_type: p of the p-norm.
        """
        reducer = self._accumulation.reducer
        # A tied copy has a name of its own, and no process without a pipeline has that name.
        names = (name for name in reducer.parameters if reducer.specs[name].tied_to is None)
        keys = {name: own for name in names if (own := key(name)) is not None}
        return self._norms(self._by_key(keys, keys.values()), norm_type)

    def group_norms(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the global norm of every parameter group by name or index. A collective of all
        ranks.
        """
        groups = zip(optimizer.param_groups, self._carriers(optimizer), strict=True)
        ids = {str(group.get("name", index)): ids for index, (group, ids) in enumerate(groups)}
        keys = {
            name: key
            for name, target in self._accumulation.reducer.targets().items()
            for key, own in ids.items()
            if id(target) in own
        }
        return self._norms(self._by_key(keys, ids))

    def zero_count(self) -> Tensor:
        """Return the number of zero elements of the gradients. A collective."""
        reducer = self._accumulation.reducer
        return global_zero_count(reducer.counted(), self._context, sharded=reducer.sharded)

    def meeting_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each collective of :meth:`norm` or :meth:`zero_count`."""
        groups = norm_groups(self._context, self._accumulation.reducer.sharded).values()
        return tuple(dict.fromkeys(group.ranks for group in groups))

    def _norms(
        self, gradients: Mapping[str, Mapping[str, Tensor]], norm_type: float = 2.0
    ) -> dict[str, Tensor]:
        """Return the norm of each key, from key -> parameter name -> gradient."""
        reducer = self._accumulation.reducer
        return global_grad_norms(
            {key: reducer.counted(own) for key, own in gradients.items()},
            self._context,
            sharded=reducer.sharded,
            norm_type=norm_type,
        )

    def _by_key(self, keys: Mapping[str, str], own: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return all ranks' keys -> this rank's gradients by name. A collective of all ranks.

        Args:
            keys: Name of a parameter -> key.
            own: This rank's keys, also without a parameter.
        """
        gradients: dict[str, dict[str, Tensor]] = {
            key: {} for key in self._united(tuple(dict.fromkeys(own)))
        }
        for name, gradient in self._accumulation.reducer.gradients().items():
            if name in keys:
                gradients[keys[name]][name] = gradient
        return gradients

    def _united(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Return the keys of all ranks, such as of all pipeline stages, in an order equal on every
        rank. A collective of all ranks.

        Digests are exchanged in every call: keys may change on a single rank, and all ranks have to
        join the exchange of the keys.
        """
        world = self._context.axis("world")
        if world.process_group is None:
            return keys
        digest = blake2b(repr(keys).encode(), digest_size=8).digest()
        own = torch.tensor(
            [int.from_bytes(digest, "big", signed=True)], device=self._context.device
        )
        gathered = own.new_empty(world.size)
        compat.all_gather(gathered, own, world.process_group)
        digests = tuple(gathered.tolist())
        if digests not in self._united_keys:
            ranks = world.all_gather_object(keys)
            self._united_keys[digests] = tuple(dict.fromkeys(key for rank in ranks for key in rank))
        return self._united_keys[digests]

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
