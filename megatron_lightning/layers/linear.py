"""Linear layers whose weight is split over the tensor-parallel ranks
(https://arxiv.org/abs/1909.08053), with sequence parallelism (https://arxiv.org/abs/2205.05198).

With X the input, rank i computes in a column-parallel layer Y_i = X W_i^T (rows of W are split) and
in a row-parallel layer the partial sum X_i W_i^T (columns of W are split). Under sequence
parallelism the input of the former and the output of the latter are sequence shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.layers.gemm import Gemm, Operand, SequenceAxis, WeightOwner, autocast, rows
from megatron_lightning.layers.linear_loss import Head, TakesLoss, linear_losses
from megatron_lightning.layers.loss import CrossEntropy
from megatron_lightning.layers.split_backward import Splittable, hide, linear
from megatron_lightning.parallel.collectives import (
    all_reduce_start,
    finish,
    gather,
    gather_sequence,
    keeps_shard,
    reduce_from_axis,
    reduce_scatter_start,
    scatter,
)
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sharding import take_shards
from megatron_lightning.parallel.spec import ShardSpec

Self = TypeVar("Self", bound="_ParallelLinear")


class _ColumnLinear(torch.autograd.Function):
    """Linear on the copied (or gathered) input forward; the input's gradient all-reduced (or
    reduce-scattered) backward.

    The input is gathered as an operand. Where backward keeps the shard of it, it gathers that again
    while the input's gradient is computed, whose reduction then overlaps with the weight's
    gradient; a deferred weight gradient gathers when it is computed.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemm: Gemm,
        owner: WeightOwner | None,
        group: AxisGroup,
        axis: SequenceAxis | None,
    ) -> Tensor:
        source, left = gemm.gather_first(x, axis)
        operand = gemm.operand(source, "input")
        full = operand.gather(left)
        y = gemm.forward(full, gemm.operand(weight, "weight"), bias)
        ctx.gathers = axis is not None and keeps_shard(x, deferred=owner is not None)
        needed = owner is not None or ctx.needs_input_grad[1]
        if needed and ctx.gathers and not gemm.gathers_codes:
            operand = Operand(x)  # quantized when it has been gathered again
        elif needed and not gemm.two_sided:
            operand = gemm.operand(source, "input", transposed=True)
            full = operand if ctx.gathers else operand.gather(left)
        kept = operand if ctx.gathers else full
        ctx.save_for_backward(*(kept if needed else (None, None)), weight)
        ctx.gemm = gemm
        ctx.owner = owner
        ctx.group = group
        ctx.axis = axis
        return y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        *kept, weight = ctx.saved_tensors
        x, gemm, owner, group, axis = Operand(*kept), ctx.gemm, ctx.owner, ctx.group, ctx.axis
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        if ctx.gathers and need_weight:
            started = x.gather_start(axis)
        operand = gemm.operand(grad, "output_grad")
        if need_x:
            grad_x = gemm.input_grad(operand, gemm.operand(weight, "weight", transposed=True))
            grad_x = (
                all_reduce_start(grad_x, group)
                if axis is None
                else reduce_scatter_start(grad_x, *axis)
            )
        if not gemm.two_sided and (need_weight or owner is not None):
            operand = gemm.operand(grad, "output_grad", transposed=True)
        if need_weight:
            grad_weight = gemm.weight_grad(operand, started.finish(axis) if ctx.gathers else x)
        elif owner is not None:
            owner.deliver(operand, x, None)
        grad_bias = rows(grad).sum(0) if need_bias else None
        if grad_x is not None:
            grad_x = finish(grad_x, group, 0 if axis is None else axis.dim)
        return grad_x, grad_weight, grad_bias, None, None, None, None


class _ParallelLinear(Splittable, nn.Module, ABC):
    """Base of the parallel linear layers, with global sizes and shards of a plain linear layer's
    weight.

    The weights equal those of ``nn.Linear`` built from the same random state, for any number of
    ranks.
    """

    bias: nn.Parameter | None
    shard_specs: dict[str, ShardSpec]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: AxisGroup,
        sequence_parallel: bool,
        sequence_dim: int,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.group = group
        self.sequence_parallel = sequence_parallel and group.size > 1
        self.sequence_dim = sequence_dim

    @classmethod
    def from_linear(cls: type[Self], linear: nn.Linear, **options: Any) -> Self:
        """Return this rank's shard of ``linear``; ``options`` are keywords of the constructor.

        Raises:
            ShardingError: If the weight cannot be split evenly.
        """
        bias = linear.bias is not None
        options |= {"bias": bias, "device": "meta", "dtype": linear.weight.dtype}
        module = cls(linear.in_features, linear.out_features, **options)
        take_shards(module, linear, module._specs(bias))
        return module.train(linear.training)

    @property
    def sequence_axis(self) -> SequenceAxis | None:
        """Ranks and dim along which activations are sequence shards; None: they are not."""
        return SequenceAxis(self.group, self.sequence_dim) if self.sequence_parallel else None

    @abstractmethod
    def _specs(self, bias: bool) -> dict[str, ShardSpec]:
        """Return the shard specs of the weight and, if there is one, the bias."""

    def extra_repr(self) -> str:
        """Return the global sizes."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"{self.group.name}={self.group.size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer whose output features are split over the ranks: x [..., in] -> this rank's shard
    of [..., out].

    Args:
        in_features: Size of the input.
        out_features: Size of the full output.
        group: The tensor-parallel ranks.
        bias: Whether a bias, split like the output, is added.
        sequence_parallel: The input is a sequence shard, and is gathered.
        sequence_dim: Dim of the sequence.
        gather_output: Return the full output on every rank.
        copy_input: Sum the input's gradient over the ranks; False where the caller has done it
            (``copy_to_axis``).
        num_blocks: Equal blocks stacked in the output that are each split (2 for a fused gate and
            up projection).
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ShardingError: If the output cannot be split evenly.
    """

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
        )
        self.gather_output = gather_output
        self.copy_input = copy_input
        self.num_blocks = num_blocks
        take_shards(
            self,
            nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype),
            self._specs(bias),
        )

    def _specs(self, bias: bool) -> dict[str, ShardSpec]:
        shapes = {"weight": (self.out_features, self.in_features), "bias": (self.out_features,)}
        return {
            name: self._split(shape) for name, shape in shapes.items() if bias or name == "weight"
        }

    def _split(self, shape: tuple[int, ...]) -> ShardSpec:
        group = self.group
        return ShardSpec.split(
            shape, dim=0, size=group.size, rank=group.rank, axis=group.name, blocks=self.num_blocks
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out / ranks], or [..., out] with ``gather_output``."""
        if self.engine is not None and self.engine.takes(x):
            y = self.engine(x)
        elif self.group.size == 1 or not (self.copy_input or self.sequence_parallel):
            y = linear(x, self, self.bias)
        else:
            weight, owner = hide(x, self)
            x, weight = autocast(x, weight, self.gemm, owner)
            axis = self.sequence_axis
            y = _ColumnLinear.apply(x, weight, self.bias, self.gemm, owner, self.group, axis)  # type: ignore[no-untyped-call]
        if not self.gather_output or self.group.size == 1:
            return y
        # Contiguous and no view, as from a plain layer: models write into it.
        return gather(y, self.group, -1, self.out_features).contiguous()

    def full_input(self, kept: Operand) -> Operand:
        """Gather the input again under sequence parallelism, where each rank keeps its shard."""
        return kept.gather(self.sequence_axis)


class SharedGroupsLinear(ColumnParallelLinear):
    """Projection to keys or values where ranks outnumber the query groups: x [..., in] -> [..., (n
    + m) d].

    The rows are split evenly, as in every column-parallel layer, and so are gradients and
    checkpoints; the result is gathered, and each rank takes n query heads of d channels, if there
    are any, and the m heads that its group shares: key and value of a fused projection, one of them
    of a separate one. Backward, the ranks that share a group sum these heads' gradients, as
    Megatron-Core's ``SelfAttention`` does.

    Args:
        in_features: Size of the input.
        out_features: Size of the full output: of each query group its query heads, then its shared
            heads.
        num_groups: Query groups; a divisor of the number of ranks.
        heads_per_group: Query heads of a group that are fused with the shared ones.
        shared_per_group: Shared heads of a group.
        options: As for :class:`ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        num_groups: int,
        heads_per_group: int,
        shared_per_group: int,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.num_groups = num_groups
        self.heads_per_group = heads_per_group
        self.shared_per_group = shared_per_group

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to this rank's query heads and the heads that its group shares."""
        mixed = gather_sequence(super().forward(x), self.group, -1)
        ranks = self.group.size // self.num_groups
        heads, (group, index) = self.heads_per_group // ranks, divmod(self.group.rank, ranks)
        per_group = self.heads_per_group + self.shared_per_group
        own = mixed.view(*mixed.shape[:-1], self.num_groups, per_group, -1)[..., group, :, :]
        q = own[..., index * heads : (index + 1) * heads, :]
        return torch.cat((q, own[..., self.heads_per_group :, :]), dim=-2).flatten(-2)


class VocabParallelLinear(TakesLoss, ColumnParallelLinear):
    """Column-parallel output layer for any vocabulary; if the ranks do not divide it, the last ones
    hold fewer rows.
    """

    def forward(
        self, x: Tensor, targets: Tensor | None = None, loss: CrossEntropy | None = None
    ) -> Tensor:
        """Map x [..., in] to logits [..., out / ranks], or [..., out] with ``gather_output``; with
        a loss of such logits, to losses [...] for ``targets`` [...].
        """
        if targets is None or loss is None:
            return super().forward(x)
        if self.gather_output:
            out: Tensor = loss(super().forward(x), targets)
            return out
        vocabulary = loss.vocabulary(self.out_features)
        head = Head(self.gemm, vocabulary, self.sequence_axis, self.copy_input)
        return linear_losses(x, self.weight, self.bias, targets, head)

    def _split(self, shape: tuple[int, ...]) -> ShardSpec:
        return ShardSpec.split_rows(
            shape, size=self.group.size, rank=self.group.rank, axis=self.group.name
        )


class RowParallelLinear(_ParallelLinear):
    """Linear layer whose input features are split over the ranks: this rank's shard of x [..., in]
    -> [..., out].

    Args:
        in_features: Size of the full input.
        out_features: Size of the output.
        group: The tensor-parallel ranks.
        bias: Whether a bias is added, after the reduction.
        sequence_parallel: Return a sequence shard of the output.
        sequence_dim: Dim of the sequence.
        input_is_parallel: The input is this rank's shard already; False: it is full, and is split
            here.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ShardingError: If the input cannot be split evenly.
    """

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
        super().__init__(
            in_features,
            out_features,
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
        )
        self.input_is_parallel = input_is_parallel
        take_shards(
            self,
            nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype),
            self._specs(bias),
        )

    def _specs(self, bias: bool) -> dict[str, ShardSpec]:
        group, shape = self.group, (self.out_features, self.in_features)
        specs = {
            "weight": ShardSpec.split(
                shape, dim=1, size=group.size, rank=group.rank, axis=group.name
            )
        }
        if bias:  # under sequence parallelism each rank adds it to its own tokens only
            partial_over = (group.name,) if self.sequence_parallel else ()
            specs["bias"] = ShardSpec.replicated((self.out_features,), partial_over=partial_over)
        return specs

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
