"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685), with trained lengths of the rows
(DoRA, https://arxiv.org/abs/2402.09353).

    q_proj.weight                        [out, in], frozen
    q_proj.adapters.all.lora_A.weight    [r, in]
    q_proj.adapters.all.lora_B.weight    [out, r]
    q_proj.adapters.all.lora_magnitude.weight    [out, 1], of DoRA

An adapted layer returns y + scale B A x. With DoRA the rows of W + scale B A have trained lengths:
see :mod:`megatron_lightning.layers.adapters.magnitude`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megatron_lightning.layers.adapters.part import AdapterKind, AdapterPart, Delta

A, B, LENGTHS = "lora_A.weight", "lora_B.weight", "lora_magnitude.weight"


class LowRank(AdapterKind):
    """Tensors A [r, in] and B [out, r], or [E, r, in] and [E, out, r] of stacked experts, and
    lengths [out, 1] of DoRA.
    """

    names = MappingProxyType({A: A, B: B, LENGTHS: "lora_magnitude_vector"})
    marker = ".lora_"
    of_rows = frozenset((B, LENGTHS))
    zeros = frozenset((B,))

    def delta(self, tensors: Mapping[str, Tensor], scale: float) -> Delta:
        """Return A and scale B."""
        return Delta(tensors[A].float(), tensors[B].float() * scale)

    def rank(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the features between the factors."""
        return tensors[A].shape[-2]

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int | None]:
        """Return rows and columns of W."""
        return tensors[B].shape[-2], tensors[A].shape[-1]

    def num_experts(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the experts of stacked factors. 0: not stacked."""
        return len(tensors[A]) if tensors[A].ndim == 3 else 0

    def lengths(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return the trained lengths [out] of DoRA. None: LoRA."""
        lengths = tensors.get(LENGTHS)
        return None if lengths is None else lengths.flatten()


LOW_RANK = LowRank()


class LowRankAdapter(AdapterPart):
    """scale * B A x.

    Args:
        lora_A: Linear layer(s) from the input to r features.
        lora_B: Linear layer(s) from r features to the output.
        scale: Factor of the product.
        dropout: Probability of a zero in the input.
        lora_magnitude: Holds the trained lengths of the weight's rows, as a linear layer from one
            feature. None: no DoRA.
    """

    def __init__(
        self,
        lora_A: nn.Module,
        lora_B: nn.Module,
        *,
        scale: float,
        dropout: float = 0.0,
        lora_magnitude: nn.Module | None = None,
    ) -> None:
        super().__init__(LOW_RANK, scale=scale, dropout=dropout)
        self.lora_A = lora_A
        self.lora_B = lora_B
        if lora_magnitude is not None:
            self.lora_magnitude = lora_magnitude

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        """A."""
        return (self.lora_A,)

    @property
    def outputs(self) -> tuple[nn.Module, ...]:
        """B."""
        return (self.lora_B,)

    @property
    def row_factors(self) -> tuple[nn.Module, ...]:
        """The lengths of DoRA."""
        return () if self.lengths is None else (self.lengths,)

    @property
    def lengths(self) -> nn.Module | None:
        """The lengths of DoRA. None: LoRA."""
        return self._modules.get("lora_magnitude")

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]. ``counts`` [E]: rows of each expert."""
        out: Tensor = self.lora_B(self.lora_A(self.dropout(x), *counts), *counts)
        return out * self.scale

    def initialize(self, name: str, tensor: Tensor, draws: torch.Generator) -> None:
        """Fill A uniformly in ±1/sqrt(in), as ``nn.Linear`` and ``peft``, and B with zeros. Lengths
        of rows are filled when the weight is there (``magnitude``).
        """
        if name != A:
            tensor.zero_()
            return
        bound = 1 / math.sqrt(tensor.shape[-1])
        # Equal draws for all dtypes and devices, also where new tensors are on a GPU or meta.
        values = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        tensor.copy_(values.uniform_(-bound, bound, generator=draws))
