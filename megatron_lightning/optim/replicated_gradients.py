"""What a sharding table has forgotten: found in the first step, by gradients that should be equal and are not.

A parameter that the table does not mention is whole on every tensor-parallel rank, and stays the same there as long as its
gradients are the same. Where its module sees a part of the activations only (a shard of the sequence, a share of the heads),
they are not, and the ranks' weights would drift apart without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sharding import ShardSpec

_TOLERANCE = 0.05
"""Of a gradient's norm. Kernels without a fixed order of summation differ by less; what two shards give, by about all of it."""

_MOST_ELEMENTS = 1 << 20
"""Of larger gradients, equally spaced ones are looked at, so that no memory to speak of is needed."""


class GradientAgreement:
    """Compares the gradients of replicated parameters between the tensor-parallel ranks, in the first flush that is finite.

    Each rank adds up the gradient's elements with fixed random signs, which tells gradients apart as well as their distance
    does, without sending them.

    Args:
        parameters: The parameters by name, before anything reduces their gradients.
        specs: Spec of every parameter by name.
        group: The tensor-parallel ranks.
    """

    def __init__(self, parameters: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], group: AxisGroup) -> None:
        self._group = group
        self._sums: dict[str, Tensor] = {}  # of the signed elements, and of the squares [2]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for name, parameter in parameters.items():
            spec = specs.get(name)
            if group.size == 1 or spec is None or group.name in (*spec.sharded_over, *spec.partial_over):
                continue
            if parameter.requires_grad and parameter.numel():
                self._sums[name] = torch.zeros(2, dtype=torch.float64, device=parameter.device)
                self._hooks.append(parameter.register_hook(partial(self._add, name)))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._sums.clear()

    def _add(self, name: str, gradient: Tensor) -> None:
        gradient = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).flatten()
        flat = flat[:: 1 + len(flat) // _MOST_ELEMENTS].float()
        position = torch.arange(len(flat), device=flat.device)
        signs = 1 - 2 * ((position * 2654435761 >> 16) & 1)  # Knuth's multiplicative hash
        self._sums[name] += torch.stack([part.sum(dtype=torch.float64) for part in (flat * signs, flat.square())])

    def settle(self) -> None:
        """Compare what the flush gave; all tensor-parallel ranks call this together, after its backward passes.

        Raises:
            ShardingError: On all of them, naming the parameters whose gradients differ.
        """
        if not self._sums:
            return
        names, sums = list(self._sums), torch.stack(list(self._sums.values()))
        squares = sums[:, 1].nan_to_num(nan=torch.inf)
        extremes = torch.cat([sums[:, 0].nan_to_num(), -sums[:, 0].nan_to_num(), squares])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group.process_group)
        highest, negated_lowest, squares = extremes.chunk(3)
        if not squares.isfinite().all():  # a loss scale that is still too high, say
            for total in self._sums.values():
                total.zero_()
            return
        self.detach()
        differing = [names[i] for i in (highest + negated_lowest > _TOLERANCE * squares.sqrt()).nonzero().flatten().tolist()]
        if differing:
            raise ShardingError(
                f"the gradients of {len(differing)} parameter(s) differ between the tensor-parallel ranks "
                f"{list(self._group.ranks)}, and the sharding table leaves these parameters whole on each, where they would "
                f"drift apart: {', '.join(differing[:5])}. Their modules see a part of the activations. Give each a style: "
                "SequenceParallel() where the input is a shard of the sequence or of the heads, else how the module is split."
            )
