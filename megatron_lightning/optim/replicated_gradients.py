"""Detect modules that the sharding plan missed: in the first step, gradients that should be equal
differ.

A parameter that the plan does not mention is replicated over the tensor-parallel ranks, and stays
equal as long as its gradients are. If its module sees only a shard of the activations (of the
sequence or the heads), they are not, and the ranks' weights would silently diverge.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.spec import ShardSpec

_TOLERANCE = 0.05
"""Of a gradient's norm. Kernels without a fixed order of summation differ by less; two shards'
gradients by about all of it."""

_MOST_ELEMENTS = 1 << 20
"""Of larger gradients equally spaced elements are compared, which bounds the memory."""


class ReplicatedGradients:
    """Compare the gradients of replicated parameters between the tensor-parallel ranks, in the
    first finite pipeline run.

    Each rank sums the gradient's elements with fixed random signs, which distinguishes gradients as
    well as their distance does, without sending them.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], group: AxisGroup
    ) -> None:
        self._group = group
        self._sums: dict[str, Tensor] = {}  # of the signed elements, and of the squares [2]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for name, parameter in parameters.items():
            spec = specs.get(name)
            if (
                group.size == 1
                or spec is None
                or group.name not in spec.replica_axes
                or group.name in spec.partial_over
            ):
                continue
            if parameter.requires_grad and parameter.numel():
                self._sums[name] = torch.zeros(2, dtype=torch.float64, device=parameter.device)
                self._hooks.append(parameter.register_hook(partial(self._add, name)))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Remove the hooks."""
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
        self._sums[name] += torch.stack(
            [part.sum(dtype=torch.float64) for part in (flat * signs, flat.square())]
        )

    def compare(self) -> None:
        """Compare the gradients of a pipeline run after its backward passes; a collective of the
        tensor-parallel ranks.

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
        if not squares.isfinite().all():  # e.g. a loss scale that is still too high
            for total in self._sums.values():
                total.zero_()
            return
        self.detach()
        differing = [
            names[i]
            for i in (highest + negated_lowest > _TOLERANCE * squares.sqrt())
            .nonzero()
            .flatten()
            .tolist()
        ]
        if differing:
            raise ShardingError(
                f"the gradients of {len(differing)} parameter(s) differ between the "
                f"tensor-parallel ranks {list(self._group.ranks)}, and the sharding plan "
                f"replicates these parameters, which would diverge: {', '.join(differing[:5])}. "
                "Their modules see a part of the activations. Give each a style: "
                "SequenceParallel() where the input is a shard of the sequence or of the heads, "
                "else how the module is split."
            )
