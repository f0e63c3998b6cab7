"""Adapters of trained vectors between frozen projections that all layers share (VeRA,
https://arxiv.org/abs/2310.11454), as ``peft`` has them.

With random A [r, columns] and B [rows, r] of the largest adapted matrices, and trained vectors d
[r] and b [out], a matrix W [out, in] becomes

    W x + b * (B[:out] (d * (A[:, :in] x)))

    q_proj.adapters.all.vera_lambda_d.weight    [r, 1]
    q_proj.adapters.all.vera_lambda_b.weight    [out, 1]

A and B are no parameters. Every rank, also of every pipeline stage, draws them from a seed, once
for a device and dtype, and the layers compute with slices of that memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megatron_lightning.layers.adapters.part import AdapterKind, AdapterPart, Delta
from megatron_lightning.parallel.collectives import gather
from megatron_lightning.parallel.shards.spec import ShardSpec

B_VECTOR, D_VECTOR = "vera_lambda_b.weight", "vera_lambda_d.weight"


class Pair(NamedTuple):
    """The projections of a model."""

    first: Tensor
    """A [r, columns]."""
    second: Tensor
    """B [rows, r]."""


class Projections:
    """The projections of a model, which its layers share. Copies of a model share them, too.

    Args:
        rank: Features between the projections (r).
        largest: Rows of B and columns of A: the most of the adapted matrices.
        key: Seed.
        values: Values in the place of draws, as a folder has them. None: drawn.
    """

    def __init__(
        self, rank: int, largest: tuple[int, int], key: int, values: Pair | None = None
    ) -> None:
        self.rank = rank
        self.largest = largest
        self.key = key
        self.values = values
        self._placed: dict[tuple[torch.device, torch.dtype], Pair] = {}

    def like(self, tensor: Tensor) -> Pair:
        """Return the projections with device and dtype of a tensor. Without values on ``meta``, and
        for a tensor of torch's fake mode, in which layers would seem to read each other's.
        """
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            rows, columns = self.largest
            return Pair(tensor.new_empty(self.rank, columns), tensor.new_empty(rows, self.rank))
        place = tensor.device, tensor.dtype
        if place not in self._placed:
            # Lightning validates in inference mode. Projections made in inference mode could not be
            # used in training afterwards.
            with torch.inference_mode(False), torch.no_grad():
                self._placed[place] = Pair(*(one.to(*place) for one in self.values or self.drawn()))
        return self._placed[place]

    def is_like(self, other: Projections) -> bool:
        """Return whether the values are equal, without drawing them."""
        if (self.rank, self.largest, self.key) != (other.rank, other.largest, other.key):
            return False
        if self.values is None or other.values is None:
            return self.values is other.values
        return all(map(torch.equal, self.values, other.values))

    def drawn(self) -> Pair:
        """Draw the projections as ``peft`` does: A, then B, Kaiming-uniform, in fp32 on the CPU."""
        draws = torch.Generator().manual_seed(self.key)

        def uniform(tensor: Tensor) -> Tensor:
            bound = math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(tensor.shape[1]))
            return tensor.uniform_(-bound, bound, generator=draws)

        rows, columns = self.largest
        first = uniform(torch.empty(self.rank, columns, dtype=torch.float32, device="cpu"))
        return Pair(first, uniform(torch.empty(rows, self.rank, dtype=torch.float32, device="cpu")))

    def __deepcopy__(self, memo: dict[int, Any]) -> Projections:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_placed": {}}


class Vectors(AdapterKind):
    """Vectors d [r, 1] and b [out, 1] around shared projections.

    Args:
        projections: The projections. Without sizes (0, 0) until the base is known.
    """

    names = MappingProxyType({B_VECTOR: "vera_lambda_b", D_VECTOR: "vera_lambda_d"})
    shared = frozenset(("base_model.vera_A", "base_model.vera_B"))
    marker = ".vera_"
    of_rows = frozenset((B_VECTOR,))
    zeros = frozenset((B_VECTOR,))

    def __init__(self, projections: Projections) -> None:
        self.projections = projections

    def delta(self, tensors: Mapping[str, Tensor], scale: float) -> Delta:
        """Return d A, as wide as A, and b B."""
        b, d = tensors[B_VECTOR].float(), tensors[D_VECTOR].float()
        pair = self.projections.like(b)
        return Delta(d * pair.first, b * pair.second[: len(b)])

    def rank(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the features between the projections."""
        return len(tensors[D_VECTOR])

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int | None]:
        """Return the rows of W, and any number of columns."""
        return len(tensors[B_VECTOR]), None

    def fitted(self, largest: tuple[int, int]) -> Vectors:
        """Return the kind with projections of a base's largest matrices, if they have no sizes."""
        own = self.projections
        if any(own.largest):
            return self
        return Vectors(Projections(own.rank, largest, own.key))

    def is_like(self, other: AdapterKind) -> bool:
        """Return whether the projections are equal."""
        return isinstance(other, Vectors) and self.projections.is_like(other.projections)

    def described(self) -> str:
        """Return sizes and seed of the projections."""
        own, (rows, columns) = self.projections, self.projections.largest
        origin = "a folder's values" if self.has_own_values else f"projection_prng_key={own.key}"
        return f"projections [{own.rank}, {columns}] and [{rows}, {own.rank}] of {origin}"

    @property
    def has_own_values(self) -> bool:
        """Whether the projections are others than the seed's."""
        return self.projections.values is not None


class Borrowing(nn.Linear):
    """A linear layer whose weight is a slice of memory that others share. It has no parameter.

    A style divides the layer as any linear layer: the weight is the rank's boxes of the full one.

    Args:
        in_features: Features of the input.
        out_features: Features of the output.
    """

    borrows_weight = True

    def __init__(self, in_features: int, out_features: int) -> None:
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.register_parameter("bias", None)
        self._slice: Tensor | None = None

    def lend(self, full: Tensor) -> None:
        """Take the weight from the full one [out, in]."""
        spec: ShardSpec | None = vars(self).get("shard_specs", {}).get("weight")
        if spec is None:
            self._slice = full
        elif len(spec.boxes) == 1:
            self._slice = full[spec.boxes[0].slices]
        else:
            self._slice = spec.shard(full)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Slice of this rank."""
        if self._slice is None:
            raise AttributeError("the weight of a borrowing layer is lent in the forward")
        return self._slice

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_slice": None}


class VectorAdapter(AdapterPart):
    """b * (B (d * (A x))).

    Args:
        kind: Kind, with the model's projections.
        shape: Rows and columns of the matrix [out, in].
        vectors: Layers with b [out, 1] and d [r, 1] as weights.
        d_initial: First value of d.
        dropout: Probability of a zero in the input.
    """

    kind: Vectors

    def __init__(
        self,
        kind: Vectors,
        shape: tuple[int, int],
        vectors: tuple[nn.Module, nn.Module],
        *,
        d_initial: float,
        dropout: float,
    ) -> None:
        super().__init__(kind, dropout=dropout)
        rank = kind.projections.rank
        self.d_initial = d_initial
        self.vera_A = Borrowing(shape[1], rank)
        self.vera_B = Borrowing(rank, shape[0])
        self.vera_lambda_b, self.vera_lambda_d = vectors
        self._lent: tuple[Any, ...] = ()

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        """A."""
        return (self.vera_A,)

    @property
    def between(self) -> tuple[nn.Module, ...]:
        """D."""
        return (self.vera_lambda_d,)

    @property
    def outputs(self) -> tuple[nn.Module, ...]:
        """B."""
        return (self.vera_B,)

    @property
    def row_factors(self) -> tuple[nn.Module, ...]:
        """B."""
        return (self.vera_lambda_b,)

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        d = cast(Tensor, self.vera_lambda_d.weight)
        layers = (self.vera_A, self.vera_B)
        # A division sets specs.
        place = (d.device, d.dtype, *("shard_specs" in vars(layer) for layer in layers))
        if self._lent != place:
            self._lend(d, place)
        out = self.vera_B(d.flatten() * self.vera_A(self.dropout(x)))
        return cast(Tensor, out * self._rows())

    def _rows(self) -> Tensor:
        """Return b of the rows of the output on this rank."""
        layer: Any = self.vera_lambda_b
        b: Tensor = layer.weight.flatten()
        if getattr(layer, "gather_output", False):  # of a column-parallel layer
            return gather(b, layer.group, -1, layer.out_features)
        return b

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _lend(self, like: Tensor, place: tuple[Any, ...]) -> None:
        pair = self.kind.projections.like(like)
        with torch.inference_mode(False), torch.no_grad():  # a slice in it is an inference tensor
            self.vera_A.lend(pair.first[:, : self.vera_A.in_features])
            self.vera_B.lend(pair.second[: self.vera_B.out_features])
        self._lent = place

    def initialize(self, name: str, tensor: Tensor, draws: torch.Generator) -> None:
        """Fill d with ``d_initial``, and b with zeros."""
        tensor.fill_(self.d_initial if name == D_VECTOR else 0.0)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lent": ()}
