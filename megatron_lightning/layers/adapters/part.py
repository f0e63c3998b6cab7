"""An adapter of one matrix W [out, in], by any method (LoRA, DoRA, VeRA): what a method declares.

A method has a class of modules, :class:`AdapterPart`, and a class of pure functions over the
tensors of such a module, :class:`AdapterKind`. Styles, merges, folders and checks fold over both.

    inputs       layers from the input's features to r features, divided like the columns of W
    between      numbers of the r features
    outputs      layers from r features to the output's, divided like the rows of W
    row_factors  numbers of the rows of W [out, 1], divided like the rows of W

    W x + second (first x),    first [r, in],  second [out, r]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.layers.dropout import Dropout


class Delta(NamedTuple):
    """Two factors, in fp32, whose product is added to a matrix. Stacked factors have experts in
    front.
    """

    first: Tensor
    """[r, in], or wider than the matrix, whose columns are the first."""
    second: Tensor
    """[out, r]."""


class AdapterKind(ABC):
    """Pure functions over the tensors of an adapter, by the names of the part's parameters."""

    names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Name of a parameter -> end of the name in folders of ``peft``. A name without ".weight" is a
    vector there, and [n, 1] here."""
    shared: ClassVar[frozenset[str]] = frozenset()
    """Names of the tensors in folders of ``peft`` that all layers share."""
    marker: ClassVar[str]
    """Text in the name of each of the method's tensors in folders of ``peft``."""
    of_rows: ClassVar[frozenset[str]]
    """Parameters with an entry for each row of W."""
    zeros: ClassVar[frozenset[str]]
    """Parameters that begin at zero. While they all are, an adapter adds nothing."""

    @abstractmethod
    def delta(self, tensors: Mapping[str, Tensor], scale: float) -> Delta:
        """Return the factors of what an adapter adds to W."""

    @abstractmethod
    def rank(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the features between the factors."""

    @abstractmethod
    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int | None]:
        """Return rows and columns of W. None: any number of columns."""

    def num_experts(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the experts of stacked factors. 0: not stacked."""
        return 0

    def fitted(self, largest: tuple[int, int]) -> AdapterKind:
        """Return the kind for a base whose adapted matrices are at most ``largest`` [out, in]."""
        return self

    def is_like(self, other: AdapterKind) -> bool:
        """Return whether the frozen values that layers share are those of another kind."""
        return True

    def described(self) -> str:
        """Return a description of the frozen values that layers share, for messages."""
        return "none"

    @property
    def has_own_values(self) -> bool:
        """Whether it has values that no configuration describes."""
        return False

    def lengths(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return the trained lengths [out] of the rows of W plus delta. None: not trained."""
        return None


class AdapterPart(nn.Module, ABC):
    """An adapter of one matrix.

    Args:
        kind: Functions over the part's tensors.
        scale: Factor of the output.
        dropout: Probability of a zero in the input.
    """

    def __init__(self, kind: AdapterKind, *, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.scale = scale
        self.dropout = Dropout(dropout)

    @property
    @abstractmethod
    def inputs(self) -> tuple[nn.Module, ...]:
        """Layers from the input's features."""

    @property
    def between(self) -> tuple[nn.Module, ...]:
        """Modules with numbers of the r features."""
        return ()

    @property
    @abstractmethod
    def outputs(self) -> tuple[nn.Module, ...]:
        """Layers to the output's features."""

    @property
    def row_factors(self) -> tuple[nn.Module, ...]:
        """Layers with numbers of the rows of W, as linear layers from one feature."""
        return ()

    @property
    def lengths(self) -> nn.Module | None:
        """The row factors that are trained lengths of the rows of W plus delta. None: others."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]. ``counts`` [E]: rows of each expert."""

    @abstractmethod
    def initialize(self, name: str, tensor: Tensor, draws: torch.Generator) -> None:
        """Fill the full parameter ``name`` with its first values."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return dict(self.named_parameters())

    def delta(self) -> Delta:
        """Return the factors of what this rank adds to its part of W."""
        return self.kind.delta(self.tensors(), self.scale)

    def extra_repr(self) -> str:
        """Return the scale, for ``print``."""
        return f"scale={self.scale:g}"
