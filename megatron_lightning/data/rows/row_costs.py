"""Costs of documents in a training step: floating-point operations of text and of images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostTable:
    """Operations at rising numbers of tokens. Numbers between are interpolated."""

    tokens: Sequence[int]
    operations: Sequence[float]

    def of(self, tokens: npt.ArrayLike) -> Values:
        """Return the operations at numbers of tokens."""
        return np.interp(np.asarray(tokens, np.float64), self.tokens, self.operations)


@dataclass(frozen=True)
class RowCosts:
    """Operations of a model."""

    text: CostTable
    """Of the tokens of a document."""
    image: CostTable | None = None
    """Of an image with a number of tokens in the tower. None: the model has no tower."""

    @property
    def digest(self) -> str:
        """Name of the costs."""
        tables = [(one.tokens, [f"{x:.6e}" for x in one.operations]) for one in self._tables]
        return hashlib.sha256(repr(tables).encode()).hexdigest()[:16]

    @property
    def _tables(self) -> list[CostTable]:
        return [self.text, *([] if self.image is None else [self.image])]

    def of_documents(self, lengths: npt.ArrayLike, images: Sequence[Sequence[int]]) -> Values:
        """Return the operations of documents [D].

        Args:
            lengths: Tokens of each document [D].
            images: Tokens of the images of each document. Empty: no document has images.
        """
        costs = self.text.of(lengths)
        if self.image is None or not images:
            return costs
        counts = np.array([len(one) for one in images])
        tokens: list[Any] = [number for one in images for number in one]
        owners = np.repeat(np.arange(len(images)), counts)
        return costs + np.bincount(owners, self.image.of(tokens), len(images))
