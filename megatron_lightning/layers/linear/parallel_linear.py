"""Linear layers with weights split over the tensor-parallel ranks
(https://arxiv.org/abs/1909.08053), with sequence parallelism (https://arxiv.org/abs/2205.05198).

With X the input, rank i computes in a column-parallel layer Y_i = X W_i^T (rows of W are split) and
in a row-parallel layer the partial sum X_i W_i^T (columns of W are split). Under sequence
parallelism the input of the former and the output of the latter are sequence shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from megatron_lightning.layers.change_class import changed_class
from megatron_lightning.layers.linear.column_gemm import ColumnGemm
from megatron_lightning.layers.linear.gemm import Operand, SequenceAxis, autocast
from megatron_lightning.layers.linear.replaceable import (
    Side,
    check_hooks,
    check_parameter_hooks,
    check_replaceable,
)
from megatron_lightning.layers.linear.splittable import Splittable, hide, linear
from megatron_lightning.layers.losses.linear_loss import Awaited, Head, OutputLinear, linear_losses
from megatron_lightning.layers.losses.loss import CrossEntropy
from megatron_lightning.parallel.collectives import (
    gather,
    gather_sequence,
    reduce_from_axis,
    scatter,
)
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.sharding import take_shards
from megatron_lightning.parallel.shards.spec import ShardSpec

Self = TypeVar("Self", bound="_ParallelLinear")


class AdaptableLinear(Splittable, nn.Linear):
    """An ``nn.Linear`` with replaceable GEMMs, engine, backward and output
    (:mod:`megatron_lightning.layers.adapters.adaptable`).
    """

    awaited: Awaited | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        pending = None if self.awaited is None else self.awaited(self, x)
        if pending is not None:
            return pending
        if self.engine is not None and self.engine.takes(x):
            return self.engine(x)
        return linear(x, self, self.bias)


LINEAR: tuple[type[nn.Module], ...] = (nn.Linear, AdaptableLinear, OutputLinear)
"""Classes that only compute x W^T + b."""


class _ParallelLinear(Splittable, nn.Linear, ABC):
    """Base of the parallel linear layers, with global sizes and shards of a plain linear layer's
    weight.

    The weights equal those of ``nn.Linear`` built from the same random state, for any number of
    ranks.
    """

    split: ClassVar[tuple[str, ...]]
    """Names of the split parameters."""
    group: AxisGroup
    sequence_parallel: bool = False
    sequence_dim: int = 0
    shard_specs: dict[str, ShardSpec]

    @classmethod
    def check(cls, linear: nn.Module, **options: Any) -> None:
        """Check that ``linear`` can become a parallel layer without losing behavior.

        ``options`` are keywords of the constructor.

        Raises:
            ShardingError: If ``linear`` is another kind of module, has a custom forward or a
                computed weight, or a hook would see a shard.
        """
        check_replaceable(linear, LINEAR, cls.__name__)
        check_hooks(linear, cls.__name__, list(cls._shards(**options)))
        check_parameter_hooks(linear, *cls.split)

    @classmethod
    @abstractmethod
    def _shards(cls, **options: Any) -> Iterator[Side]:
        """Yield the sides with sharded activations."""

    @classmethod
    def from_linear(cls: type[Self], linear: nn.Linear, **options: Any) -> Self:
        """Reduce ``linear`` to this rank's shard, in place, and return the layer.

        Hooks, attributes and parameter objects stay. ``options`` are keywords of the constructor.

        Raises:
            ShardingError: If the weight cannot be split evenly, or :meth:`check` fails. The layer
                is then unchanged.
        """
        cls.check(linear, **options)
        with changed_class(linear, cls, **options) as layer:
            layer._divide()
        return layer

    def _divide(self) -> None:
        """Keep this rank's shards of the full parameters."""
        self.sequence_parallel = self.sequence_parallel and self.group.size > 1
        take_shards(self, self, self._specs(self.bias is not None))

    @property
    def sequence_axis(self) -> SequenceAxis | None:
        """Ranks and dim of sequence-sharded activations. None: activations are not sharded."""
        return SequenceAxis(self.group, self.sequence_dim) if self.sequence_parallel else None

    @abstractmethod
    def _specs(self, bias: bool) -> dict[str, ShardSpec]:
        """Return the shard specs of the weight and the optional bias."""

    def extra_repr(self) -> str:
        """Return the global sizes."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"{self.group.name}={self.group.size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer with output features split over the ranks: x [..., in] -> this rank's shard of
    [..., out].

    Args:
        in_features: Size of the input.
        out_features: Size of the full output.
        group: The tensor-parallel ranks.
        bias: Whether a bias, split like the output, is added.
        sequence_parallel: The input is a sequence shard, and is gathered.
        sequence_dim: Dim of the sequence.
        gather_output: Return the full output on every rank.
        copy_input: Sum the input's gradient over the ranks. False if the caller sums
            (``copy_to_axis``).
        num_blocks: Equal stacked blocks in the output, each split (2 for a fused gate and up
            projection).
        parts: Features of unequal stacked parts of the output, each split. (): equal blocks.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ShardingError: If the output cannot be split evenly.
    """

    split = ("weight", "bias")
    gather_output: bool = False
    copy_input: bool = True
    num_blocks: int = 1
    parts: tuple[int, ...] = ()
    awaited: Awaited | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: AxisGroup,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        gather_output: bool = False,
        copy_input: bool = True,
        num_blocks: int = 1,
        parts: tuple[int, ...] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.gather_output = gather_output
        self.copy_input = copy_input
        self.num_blocks = num_blocks
        self.parts = parts
        self._divide()

    def _specs(self, bias: bool) -> dict[str, ShardSpec]:
        shapes = {"weight": (self.out_features, self.in_features), "bias": (self.out_features,)}
        return {
            name: self._split(shape) for name, shape in shapes.items() if bias or name == "weight"
        }

    @classmethod
    def _shards(
        cls,
        *,
        copy_input: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        **_: Any,
    ) -> Iterator[Side]:
        if sequence_parallel or not copy_input:
            yield "input"
        if not gather_output:
            yield "output"

    def _split(self, shape: tuple[int, ...]) -> ShardSpec:
        group = self.group
        if self.parts:
            return ShardSpec.split_parts(
                shape, parts=self.parts, size=group.size, rank=group.rank, axis=group.name
            )
        return ShardSpec.split(
            shape, dim=0, size=group.size, rank=group.rank, axis=group.name, blocks=self.num_blocks
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out / ranks], or [..., out] with ``gather_output``."""
        pending = None if self.awaited is None else self.awaited(self, x)
        if pending is not None:
            return pending
        if self.engine is not None and self.engine.takes(x):
            y = self.engine(x)
        elif self.group.size == 1 or not (self.copy_input or self.sequence_parallel):
            y = linear(x, self, self.bias)
        else:
            weight, owner = hide(x, self)
            x, weight = autocast(x, weight, self.gemm, owner)
            axis = self.sequence_axis
            y = ColumnGemm.apply(x, weight, self.bias, self.gemm, owner, self.group, axis)  # type: ignore[no-untyped-call]
        if not self.gather_output or self.group.size == 1:
            return y
        # Contiguous and no view, like the output of a plain layer, because models write into the
        # output.
        return gather(y, self.group, -1, self.out_features).contiguous()

    def full_input(self, kept: Operand) -> Operand:
        """Gather the input again under sequence parallelism, because backward keeps only the rank's
        shard.
        """
        return kept.gather(self.sequence_axis)


class SharedGroupsLinear(ColumnParallelLinear):
    """Projection to keys or values with more ranks than query groups: x [..., in] -> [..., (n + m)
    d].

    Rows, gradients and checkpoints are split evenly, as in every column-parallel layer. The output
    is gathered, and each rank takes n query heads (possibly none) of d channels and the m shared
    heads of the rank's group. A fused projection shares key and value, and a separate projection
    shares only one of the two. In backward, ranks with the same group sum the gradients of the
    shared heads, as Megatron-Core's ``SelfAttention`` does.

    Args:
        in_features: Size of the input.
        out_features: Size of the full output: for each query group the query heads, then the shared
            heads.
        num_groups: Query groups, a divisor of the number of ranks.
        heads_per_group: Query heads of a group that are fused with the shared heads.
        shared_per_group: Shared heads of a group.
        gates: Whether a gate for each query head lies between query heads and shared heads.
        options: As for :class:`ColumnParallelLinear`.
    """

    gates: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        num_groups: int,
        heads_per_group: int,
        shared_per_group: int,
        gates: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.gates = gates
        self.num_groups = num_groups
        self.heads_per_group = heads_per_group
        self.shared_per_group = shared_per_group

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to this rank's query heads and the shared heads of the rank's group."""
        mixed = gather_sequence(super().forward(x), self.group, -1)
        ranks = self.group.size // self.num_groups
        heads, (group, index) = self.heads_per_group // ranks, divmod(self.group.rank, ranks)
        own_parts = [self.heads_per_group] * (1 + self.gates) + [self.shared_per_group]
        group_rows = mixed.view(*mixed.shape[:-1], self.num_groups, sum(own_parts), -1)[
            ..., group, :, :
        ]
        *by_head, shared = torch.split(group_rows, own_parts, dim=-2)
        taken = [part[..., index * heads : (index + 1) * heads, :] for part in by_head]
        return torch.cat((*taken, shared), dim=-2).flatten(-2)


class VocabParallelLinear(ColumnParallelLinear, OutputLinear):
    """Column-parallel output layer for any vocabulary.

    If the ranks do not divide the vocabulary, the last ranks hold fewer rows.
    """

    def forward(
        self, x: Tensor, targets: Tensor | None = None, loss: CrossEntropy | None = None
    ) -> Tensor:
        """Map x [..., in] to logits [..., out / ranks], or [..., out] with ``gather_output``.

        With a loss, map x to losses [...] for ``targets`` [...].
        """
        if targets is None or loss is None:
            return super().forward(x)
        if self.gather_output:
            out: Tensor = loss(super().forward(x), targets)
            return out
        vocabulary = loss.vocabulary(self.out_features)
        head = Head(
            self.gemm,
            vocabulary,
            self.sequence_axis,
            self.copy_input,
            compiles=self.compiles_loss,
        )
        return linear_losses(x, self.weight, self.bias, targets, head)

    def _split(self, shape: tuple[int, ...]) -> ShardSpec:
        return ShardSpec.split_rows(
            shape, size=self.group.size, rank=self.group.rank, axis=self.group.name
        )


class RowParallelLinear(_ParallelLinear):
    """Linear layer with input features split over the ranks: this rank's shard of x [..., in] ->
    [..., out].

    Args:
        in_features: Size of the full input.
        out_features: Size of the output.
        group: The tensor-parallel ranks.
        bias: Whether a bias is added, after the reduction.
        sequence_parallel: Return a sequence shard of the output.
        sequence_dim: Dim of the sequence.
        input_is_parallel: The input is this rank's shard. False: the input is full, and is split
            here.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ShardingError: If the input cannot be split evenly.
    """

    split = ("weight",)
    input_is_parallel: bool = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: AxisGroup,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        input_is_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.input_is_parallel = input_is_parallel
        self._divide()

    def _specs(self, bias: bool) -> dict[str, ShardSpec]:
        group, shape = self.group, (self.out_features, self.in_features)
        specs = {
            "weight": ShardSpec.split(
                shape, dim=1, size=group.size, rank=group.rank, axis=group.name
            )
        }
        if bias:  # under sequence parallelism each rank adds the bias only to local tokens
            partial_over = (group.name,) if self.sequence_parallel else ()
            specs["bias"] = ShardSpec.replicated((self.out_features,), partial_over=partial_over)
        return specs

    @classmethod
    def _shards(
        cls, *, input_is_parallel: bool = True, sequence_parallel: bool = False, **_: Any
    ) -> Iterator[Side]:
        if input_is_parallel:
            yield "input"
        if sequence_parallel:
            yield "output"

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in / ranks] to [..., out]."""
        if self.group.size == 1:
            return linear(x, self, self.bias)
        x = x if self.input_is_parallel else scatter(x, self.group, -1)
        if self.engine is not None and self.engine.takes(x):
            return self.engine(x)
        y = linear(x, self, None, scatter=self.sequence_axis)
        if not self.sequence_parallel:
            y = reduce_from_axis(y, self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)
