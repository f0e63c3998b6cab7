"""GEMMs of quantized operands on any device: the recipe's quantized data and scales, multiplied in
fp32.

    y = cast(sum_k  (code_x * scale_x) * (code_w * scale_w))        in fp32 until the cast

Quantized data times scales are exact in fp32 for powers of two and for e4m3 scales, and rounded to
24 bits otherwise. GPUs differ in the order of the sum, and Hopper also in the fewer bits of the
accumulator. Gradients follow the straight-through estimator: the gradients of the GEMM of the
quantized operands, with the quantized gradient. Rounding has the derivative 1.

With per-tensor scales one operand serves both GEMMs of a tensor (``two_sided``), and a gather sends
quantized data. Blocks lie along the contracted dim, so inputs and gradients need a second operand
with blocks of tokens. Two gathers of quantized data would send as much as one gather of 16-bit
values. The 16-bit values are therefore gathered, and each rank quantizes like a single rank
(``gathers_quantized = False``).

Grouped GEMMs scale every expert separately. If blocks lie along the tokens, zeros pad the tokens of
an expert to full blocks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.linear.gemm import Gemm, Operand, Role, is_quantized, rows
from megatron_lightning.layers.linear.kept_weight import KeptWeight
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.random.rng import QUANTIZATION, RngStreams
from megatron_lightning.parallel.shards.stored_weight import StoredWeight
from megatron_lightning.precision.delayed_scaling import make_histories
from megatron_lightning.precision.formats import cast
from megatron_lightning.precision.groups import (
    amax_of_experts,
    expert_of_rows,
    pad_experts,
    padded_counts,
)
from megatron_lightning.precision.hadamard import rotate
from megatron_lightning.precision.quantization import TwoLevelScales, block_of, encode
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.precision.scaling import Block, amax_of_matrices, values_of

_Operands = dict[bool, tuple[Operand, Tensor | None]]
"""Whether the operand is the second -> operand and, with delayed scaling, amax."""


class EmulatedGemm(Gemm):
    """GEMMs of a layer by a recipe.

    Args:
        recipe: The recipe.
        dtype: Dtype of the results.
        group: Ranks with shards of the layer's tensors, for the amax all-reduce. None: tensors are
            full.
        streams: Random streams for stochastic rounding. None: torch's default generator.
        one_by_one: See the base class.
    """

    differentiable = False

    def __init__(
        self,
        recipe: FP8Recipe,
        *,
        dtype: torch.dtype = torch.bfloat16,
        group: AxisGroup | None = None,
        streams: RngStreams | None = None,
        one_by_one: bool = False,
    ) -> None:
        super().__init__(one_by_one=one_by_one)
        self.recipe = recipe
        self.dtype = dtype
        self.group = group
        self.streams = streams
        self.two_sided = recipe.is_per_tensor
        self.gathers_quantized = recipe.is_per_tensor
        self.histories = make_histories(recipe)
        self.notes = True
        """Whether amax values enter the history. False in evaluation."""
        self.keeps_weight = False
        """Whether quantized data of the weight is cached for the other micro-batches of a pipeline
        run, until :meth:`forget_weight`.
        """
        self._weight: KeptWeight | None = None
        # Of a weight stored as quantized data.
        self._weight_scales: Tensor | None = None
        self._weight_amax: Tensor | None = None

    def __repr__(self) -> str:
        return f"EmulatedGemm({self.recipe.scaling}, {self.recipe.format})"

    # ------------------------------------------------------------------------------------- operands

    def operand(
        self,
        tensor: Tensor,
        role: Role,
        *,
        transposed: bool = False,
        counts: Tensor | None = None,
    ) -> Operand:
        """Return quantized data and scales. See the base class.

        The second operand of an input or gradient is a matrix of tokens [t, n], possibly padded.
        """
        # Formats with scales by row have a second operand for the GEMM that contracts the other
        # dim, made of the high-precision tensor and not of quantized data.
        first = not transposed
        if role == "weight" and is_quantized(tensor.dtype):
            return self._kept(tensor, first=first)
        with torch.no_grad(), _exact(tensor):
            if role == "weight":
                return self._of_weight(tensor, first=first)
            # Delayed scales are known before the values: quantized in one pass, and the amax noted
            # for later steps.
            if self.recipe.scaling == "delayed":
                operand, amax = self._by_history(tensor, role)
                self._note(amax, role, first=first)
                return operand
            second = transposed and self._has_second(role)
            x, experts = rows(tensor), None
            if counts is not None:
                x, experts = self._by_expert(x, counts, second)
            if second and self._rotates:
                x = rotate(x)
            data, scales = self._encode(x, role, second, experts)
            if second:
                return Operand(data, scales)
            if scales.ndim:
                scales = scales.reshape(*tensor.shape[:-1], scales.shape[-1])
            return Operand(data.reshape(tensor.shape), scales)

    def forget_weight(self) -> None:
        """Drop the weight's cached quantized data before the weight changes."""
        self._weight = None

    def _of_weight(self, weight: Tensor, *, first: bool) -> Operand:
        """Return the operand of a weight, quantized now or for an earlier micro-batch."""
        operands = self._operands_of(weight)
        second = not first and self._has_second("weight")
        if second not in operands:
            operands[second] = self._quantized(weight, second)
        operand, amax = operands[second]
        self._note(amax, "weight", first=first)
        return operand

    def _quantized(self, weight: Tensor, second: bool) -> tuple[Operand, Tensor | None]:
        """Return an operand of a weight and, with delayed scaling, the amax."""
        values = weight.to(self.dtype)  # as autocast does
        if isinstance(values, StoredWeight):
            values = values.dequantized()
        if self.recipe.scaling == "delayed":
            return self._by_history(values, "weight")
        return Operand(*self._encode(values, "weight", second, None)), None

    def _operands_of(self, weight: Tensor) -> _Operands:
        """Return the cached operands of a weight. The caller may add operands.

        Only the layer's parameter is cached, until the parameter changes. A computed weight (by a
        parametrization, for example) may differ in the next micro-batch.
        """
        keeps = self.keeps_weight and self.notes and weight.is_leaf
        keeps = keeps and not isinstance(weight, StoredWeight)  # has data of its own
        if torch.compiler.is_compiling() or not keeps:
            return {}
        if self._weight is None or not self._weight.is_of(weight):
            self._weight = KeptWeight.of(weight)
        return self._weight.values

    def _note(self, amax: Tensor | None, role: Role, *, first: bool) -> None:
        if amax is not None and self.notes and first:
            self.histories[role].note(amax)

    def keep_scales(self, scales: Tensor, amax: Tensor) -> None:
        """Set the scales and amax values of a weight stored as quantized data.

        The tensors stay the same objects, because compiled graphs refer to the objects.
        """
        if self._weight_scales is None or self._weight_amax is None:
            self._weight_scales = scales.clone()
            self._weight_amax = amax.clone()
        else:
            self._weight_scales.copy_(scales)
            self._weight_amax.copy_(amax)

    def _kept(self, data: Tensor, *, first: bool) -> Operand:
        """Return the operand of a weight stored as quantized data."""
        if self._weight_scales is None or self._weight_amax is None:
            raise ConfigError(
                f"a weight of shape {tuple(data.shape)} has quantized data in {data.dtype} and no "
                "scales: the fit that quantized it has ended. Create a new module, and load a "
                "checkpoint into it."
            )
        self._note(self._weight_amax if self.histories else None, "weight", first=first)
        return Operand(data, self._weight_scales)

    def _has_second(self, role: Role) -> bool:
        """Whether the second GEMM of a tensor takes another operand."""
        return not self.recipe.is_per_tensor and not self.recipe.is_square(role)

    @property
    def _rotates(self) -> bool:
        return self.recipe.scaling == "nvfp4" and self.recipe.random_hadamard_transform

    def _block(self, role: Role, second: bool, grouped: bool) -> Block:
        """Return the block of a scale. All rows of an expert have the same scale."""
        block = block_of(self.recipe, role, transposed=second)
        return Block(1, block.columns) if grouped and block.rows is None else block

    def _by_expert(
        self, x: Tensor, counts: Tensor, second: bool
    ) -> tuple[Tensor, tuple[Tensor, int]]:
        """Return rows in full blocks of one expert each, the expert of each row, and the number of
        experts.
        """
        size = self._token_block if second else None
        if size is not None:
            x = pad_experts(x, counts, size)
            counts = padded_counts(counts, size, len(x))
        return x, (expert_of_rows(counts, len(x)), len(counts))

    @property
    def _token_block(self) -> int | None:
        """Tokens per scale in second operands. None: all tokens of an expert."""
        return block_of(self.recipe, "input", transposed=True).rows

    def _encode(
        self, x: Tensor, role: Role, second: bool, experts: tuple[Tensor, int] | None
    ) -> tuple[Tensor, Tensor]:
        """Return quantized data and scales of the matrices [..., R, C]."""
        block = self._block(role, second, experts is not None)
        amax = self._shared_amax(x, role, block, experts)
        random = self._random(x) if role == "output_grad" else None
        data, scales = encode(x, self.recipe, role, block, shared_amax=amax, random=random)
        if isinstance(scales, TwoLevelScales):
            scales = scales.blocks.float() * scales.tensor
        if self.recipe.is_per_tensor and x.ndim == 2 and experts is None:
            scales = scales.reshape(())
        return data, scales

    def _shared_amax(
        self, x: Tensor, role: Role, block: Block, experts: tuple[Tensor, int] | None
    ) -> Tensor | None:
        """Return the amax values that no block on this rank determines alone: amax of the tensor,
        or of an expert's rows, in a shape that expands to the shape of the scales. None: every amax
        is local to a block.
        """
        scaling = self.recipe.scaling
        of_tensor = self.recipe.is_per_tensor or scaling == "nvfp4"
        if experts is None:
            return self._over_ranks(amax_of_matrices(x)) if of_tensor else None
        if not of_tensor and not (scaling == "rowwise" and block.columns == 1):
            return None
        amax = x.abs().float()
        amax = amax.amax(dim=1, keepdim=True) if of_tensor else amax
        index, num_experts = experts
        return self._over_ranks(amax_of_experts(amax, index, num_experts))[index[:: block.rows]]

    def _over_ranks(self, amax: Tensor) -> Tensor:
        return amax if self.group is None else all_reduce(amax, self.group, "max")

    def _random(self, x: Tensor) -> Tensor | None:
        """Return uniform numbers for stochastic rounding. None: round to the nearest."""
        if self.recipe.scaling != "nvfp4" or not self.recipe.stochastic_rounding:
            return None
        with nullcontext() if self.streams is None else self.streams.fork(QUANTIZATION):
            return torch.rand(x.shape, device=x.device)

    def _by_history(self, tensor: Tensor, role: Role) -> tuple[Operand, Tensor]:
        """Return the operand with the scale of the history, and the amax."""
        history, name = self.histories[role], self.recipe.data_format(role)
        amax = amax_of_matrices(tensor.reshape(1, -1)).reshape(())
        factor = history.factor.to(tensor.device)
        scale = factor.reciprocal().where(amax.isfinite(), torch.nan)
        return Operand(cast(tensor.float() * factor, name), scale), amax

    # ---------------------------------------------------------------------------------------- GEMMs

    def _values(
        self, operand: Operand, role: Role, counts: Tensor | None, *, second: bool = False
    ) -> Tensor:
        """Return the fp32 values of an operand. An operand without scales is quantized first."""
        if operand.scales is None:
            operand = self.operand(operand.data, role, transposed=second, counts=counts)
        data, scales = operand.data, operand.scales
        if scales is None or scales.ndim == 0:
            return data.float() * (1.0 if scales is None else scales)
        grouped = counts is not None and role != "weight"
        block = self._block(role, second and self._has_second(role), grouped)
        if role == "weight" or data.ndim == 2:
            return values_of(data, scales, block)
        return values_of(rows(data), rows(scales), block).reshape(data.shape)

    def forward(
        self, x: Operand, weight: Operand, bias: Tensor | None = None, counts: Tensor | None = None
    ) -> Tensor:
        """See the base class."""
        with _exact(x.data):
            inputs = Operand(self._values(x, "input", counts))
            values = Operand(self._values(weight, "weight", counts))
            y = super().forward(inputs, values, bias, counts)
        return y.to(self.dtype)

    def input_grad(self, grad: Operand, weight: Operand, counts: Tensor | None = None) -> Tensor:
        """See the base class."""
        with _exact(grad.data):
            values = self._values(weight, "weight", counts, second=True)
            gradient = Operand(self._values(grad, "output_grad", counts))
            dx = super().input_grad(gradient, Operand(values), counts)
        return dx.to(self.dtype)

    def weight_grad(self, grad: Operand, x: Operand, counts: Tensor | None = None) -> Tensor:
        """See the base class."""
        with _exact(grad.data):
            grad_values = self._values(grad, "output_grad", counts, second=True)
            x_values = self._values(x, "input", counts, second=True)
            size = self._token_block
            if counts is not None and size is not None:
                counts = padded_counts(counts, size, len(grad_values))
            dw = super().weight_grad(Operand(grad_values), Operand(x_values), counts)
        return dw.to(self.dtype)


def _exact(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context with GEMMs in fp32."""
    return torch.autocast(tensor.device.type, enabled=False)
