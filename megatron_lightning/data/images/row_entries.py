"""Entries of rows and micro-batches for a model: pixels, sizes, types of tokens.

Entries of documents are joined to entries of a row, and entries of rows to those of a micro-batch,
along the dims found by the processor's probe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from megatron_lightning.data.chat.documents import Document
from megatron_lightning.data.images.image_positions import POSITION_ROWS, ImagePositions
from megatron_lightning.data.images.image_processor import Dims, Entries, ImageProcessor
from megatron_lightning.errors import DataError

IMAGES = "images"
"""Key of the entries in samples and batches."""
Collate = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


class RowEntries:
    """Entries of rows.

    Args:
        processor: Of the model.
        positions: Positions of the model in packed rows. None: flat positions suffice.
    """

    def __init__(self, processor: ImageProcessor, positions: ImagePositions | None = None) -> None:
        self._processor = processor
        self._positions = positions

    @property
    def kind(self) -> str:
        """Kind of the media: ``image`` or ``audio``."""
        return self._processor.kind

    def of_row(self, documents: Sequence[Document], length: int) -> dict[str, Any]:
        """Return the entries of a row of documents, and the rows of positions [4, s] of a model
        that has some. Entries along tokens have the row's length. Padding is a document of text.

        Raises:
            DataError: If an image cannot be read, or the processor makes other ids than before.
        """
        parts = [self._of_document(document) for document in documents]
        ids = [torch.from_numpy(document.ids.astype("int64")) for document in documents]
        ids.append(torch.zeros(length - sum(map(len, ids)), dtype=torch.int64))
        parts.append(self._processor.entries_of_text(len(ids[-1])))
        entries = {
            name: joined([part[name] for part in parts], dims or (0,))
            for name, dims in self._processor.dims.items()
        }
        if self._positions is None:
            return {IMAGES: entries}
        positions = map(self._positions.of_document, ids, parts)
        return {IMAGES: entries, POSITION_ROWS: torch.cat(list(positions), 1)}

    def cut(self, entries: Entries, length: int) -> Entries:
        """Return the entries of a row cut to its first tokens."""
        dims = self._processor.dims
        return {name: _cut(value, dims[name], length) for name, value in entries.items()}

    def _of_document(self, document: Document) -> Entries:
        images = document.images
        if images is None:
            return self._processor.entries_of_text(len(document.ids))
        made, entries = self._processor.document(
            images.text, images.decoded(self._processor.medium.decoded)
        )
        kept = torch.from_numpy(images.kept_positions())
        ids = torch.tensor(made)
        is_equal = len(ids) > int(kept[-1]) and torch.equal(
            ids[kept], torch.from_numpy(document.ids.astype("int64"))
        )
        if not is_equal:
            raise DataError(
                f"{images.images[0].where}: the processor makes {len(made)} tokens of the "
                f"conversation with its images, which are others than those of blank images of the "
                f"same sizes ({len(document.ids)} tokens); take another processor"
            )
        dims = self._processor.dims
        if missing := dims.keys() ^ entries.keys():
            raise DataError(
                f"{images.images[0].where}: the processor makes the entry {min(missing)} for some "
                "images and not for others; take another processor"
            )
        return {name: _selected(value, dims[name], kept) for name, value in entries.items()}


@dataclass(frozen=True)
class CollateImages:
    """Collate samples with entries of images: ``images`` is a list with those of each row."""

    entries: RowEntries
    collate: Collate | None = None
    """Collates everything else. None: as torch does."""

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch."""
        rows = [sample.pop(IMAGES) for sample in samples]
        batch: dict[str, Any] = (self.collate or default_collate)(list(samples))
        length = batch["tokens"].shape[1]
        return batch | {IMAGES: without_unused([self.entries.cut(row, length) for row in rows])}


def without_unused(rows: Sequence[Entries]) -> list[Entries]:
    """Return the entries of rows without those that are empty in all rows, so that a batch without
    an image looks like text.
    """
    used = {name for row in rows for name, value in row.items() if value.numel()}
    return [{name: value for name, value in row.items() if name in used} for row in rows]


def batch_entries(rows: Sequence[Mapping[str, Tensor]]) -> Entries:
    """Return the entries of a micro-batch for the model. The first dim is rows, images or parts of
    images.
    """
    return {name: joined([row[name] for row in rows], (0,)) for name in (rows[0] if rows else ())}


def joined(parts: Sequence[Tensor], dims: Collection[int]) -> Tensor:
    """Return tensors behind one another along ``dims``: blocks on the diagonal where two dims grow.
    Along other dims all are padded with zeros to the largest that has values.
    """
    filled = [part for part in parts if part.numel()] or parts
    sizes = [
        sum(part.shape[dim] for part in parts)
        if dim in dims
        else max(part.shape[dim] for part in filled)
        for dim in range(parts[0].ndim)
    ]
    if len(filled) == 1 and list(filled[0].shape) == sizes:
        return filled[0]  # pixels of the only image are not copied
    whole, begins = parts[0].new_zeros(sizes), dict.fromkeys(dims, 0)
    for part in parts:
        if part.numel():
            place = [
                slice(begin := begins.get(dim, 0), begin + size)
                for dim, size in enumerate(part.shape)
            ]
            whole[tuple(place)] = part
        for dim in dims:
            begins[dim] += part.shape[dim]
    return whole


def _selected(value: Tensor, dims: Dims, kept: Tensor) -> Tensor:
    for dim, kind in dims.items():
        if kind == "token":
            value = value.index_select(dim, kept)
    return value


def _cut(value: Tensor, dims: Dims, length: int) -> Tensor:
    for dim, kind in dims.items():
        if kind == "token":
            value = value.narrow(dim, 0, length)
    return value
