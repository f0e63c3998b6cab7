"""Supervised documents as rows of a fixed length, and the order of the rows in training.

The order is a function of the seed and the number of a pass. So the number of consumed rows is the
full state of the data, for any number of ranks. Random numbers come from ``RandomState``, because
streams of ``RandomState`` never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from megatron_lightning.data.chat.documents import Document
from megatron_lightning.data.images.row_entries import RowEntries
from megatron_lightning.data.pretraining.blend_order import blend_index, normalized
from megatron_lightning.data.rows.cut_rows import FULL, FullRow
from megatron_lightning.data.rows.packing import Numbers, Rows, pack, pack_in_windows

Packing = Literal["none", "offline", "online"]
IGNORED = -100
"""Label of a position without a loss."""


class Part(Protocol):
    """Samples of a source: documents, or pairs of documents."""

    @property
    def lengths(self) -> Numbers:
        """Tokens of every sample."""

    rows: Numbers
    """Number of each sample's row in the source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Sources:
    """Documents of several sources, numbered source after source.

    Args:
        parts: The documents of each source.
        chosen: Numbers within each source of the used documents. None: all.
        weights: Share of each source in the training documents. None: each document comes once in a
            pass.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        chosen: Sequence[Numbers] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._parts = parts
        self._chosen = [np.arange(len(part)) for part in parts] if chosen is None else list(chosen)
        self.weights = None if weights is None else normalized(weights)
        self.sizes = [len(numbers) for numbers in self._chosen]
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self.lengths: Numbers = np.concatenate(
            [part.lengths[numbers] for part, numbers in zip(parts, self._chosen, strict=True)]
        )
        """Tokens of every document."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> Any:
        source = int(np.searchsorted(self._starts, number, side="right")) - 1
        row = int(self._chosen[source][number - self._starts[source]])
        return self._parts[source][row]

    def image_tokens(self) -> list[list[int]]:
        """Return the tokens of each image of every document. Empty: there are no images."""
        parts = [getattr(part, "image_tokens", None) for part in self._parts]
        if not any(parts):
            return []
        return [
            [] if tokens is None else tokens[number]
            for tokens, numbers in zip(parts, self._chosen, strict=True)
            for number in numbers.tolist()
        ]

    def order(self, seed: int, number: int) -> Numbers:
        """Return the documents of pass ``number`` over the data, shuffled.

        With weights a pass has as many documents as all sources together, divided by the weights.
        The next pass resumes in each source at the end of this pass.
        """
        if self.weights is None:
            return _permutation(len(self), seed, number)
        begin, end = number * len(self), (number + 1) * len(self)
        index = blend_index(self.weights, end)
        order = np.empty(len(self), np.int64)
        for source, size in enumerate(self.sizes):
            num_before = int(np.count_nonzero(index[:begin] == source))
            at = np.flatnonzero(index[begin:] == source)
            passes, rows = np.divmod(num_before + np.arange(len(at)), size)
            for once in np.unique(passes):
                shuffled = _permutation(size, seed, int(once), source)
                order[at[passes == once]] = self._starts[source] + shuffled[rows[passes == once]]
        return order


def _permutation(size: int, *seeds: int) -> Numbers:
    return np.random.RandomState(list(seeds)).permutation(size).astype(np.int64)


class ImagePlace(NamedTuple):
    """Place of an image in a row."""

    size: tuple[int, int]
    """Height and width, or samples and samples of a second."""
    begin: int
    """First token."""
    end: int
    """Token behind the last."""
    kind: str = "image"
    """``image``, or ``audio`` for a sound."""


class RowDataset(Dataset[dict[str, Tensor]]):
    """Rows ``{"tokens": int64 [s], "labels": int64 [s], "padding": bool [s]}``. Packed rows also
    have ``"document_ids"`` and ``"position_ids"`` int64 [s], and rows of data with images
    ``"images"``: entries for the model. Packed rows with images of a model that counts time, height
    and width apart have ``"position_rows"`` int64 [4, s].

    ``labels[i]`` follows ``tokens[i]``. ``labels[i]`` is -100 without a loss: in prompts, in
    padding, and at the end of a document. Positions start again with every document. Padding is a
    separate document.

    Args:
        sources: The documents.
        sequence_length: Positions of a row (s).
        padding: Id for filling a row.
        rows: Documents of each row. None: each document is a row.
        packed: Whether rows number their documents.
        entries: Makes entries of images. None: documents have no images.
    """

    def __init__(
        self,
        sources: Sources,
        sequence_length: int,
        padding: int,
        rows: Rows | None = None,
        *,
        packed: bool = False,
        entries: RowEntries | None = None,
    ) -> None:
        self._sources = sources
        self._length = sequence_length
        self._padding = padding
        self._rows = rows
        self._packed = packed
        self._entries = entries

    def __len__(self) -> int:
        return len(self._sources) if self._rows is None else len(self._rows)

    def __getitem__(self, row: int | tuple[int, ...]) -> dict[str, Tensor]:
        """Return a row, by the number of the row or by the documents."""
        if isinstance(row, int):
            if not 0 <= row < len(self):
                raise IndexError(f"row {row} of {len(self)}")
            row = (row,) if self._rows is None else self._rows[row]
        tokens = np.full(self._length, self._padding, np.int64)
        labels = np.full(self._length, IGNORED, np.int64)
        document_ids = np.full(self._length, len(row), np.int64)
        position_ids = np.arange(self._length)
        begin = 0
        documents: list[Document] = [self._sources[number] for number in row]
        for position, (ids, trained, *_) in enumerate(documents):
            end = begin + len(ids)
            tokens[begin:end] = ids
            labels[begin : end - 1] = np.where(trained[1:], ids[1:], IGNORED)
            document_ids[begin:end] = position
            position_ids[begin:] -= position_ids[begin]
            begin = end
        position_ids[begin:] -= position_ids[begin] if begin < self._length else 0
        padding = np.arange(self._length) >= begin
        arrays: dict[str, npt.NDArray[Any]]
        arrays = {"tokens": tokens, "labels": labels, "padding": padding}
        if self._packed:
            arrays |= {"document_ids": document_ids, "position_ids": position_ids}
        sample: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._entries is not None:
            sample |= self._entries.of_row(documents, self._length)
        return sample | ({FULL: True} if isinstance(row, FullRow) else {})

    def image_places(self, row: tuple[int, ...]) -> list[ImagePlace]:
        """Return the size and the tokens of every image in a row, without reading the image."""
        places, begin = [], 0
        kind = "image" if self._entries is None else self._entries.kind
        for document in (self._sources[number] for number in row):
            for image in () if document.images is None else document.images.images:
                first, stop = image.place
                places.append(ImagePlace(image.size, begin + first, begin + stop, kind))
            begin += len(document.ids)
        return places


def document_row(document: Document, length: int, padding: int) -> dict[str, Tensor]:
    """Return ``tokens``, ``labels`` (shifted) and ``padding`` [s] of a row with one document.

    Args:
        document: At most ``length`` ids.
        length: Positions of the row (s).
        padding: Id for filling the row.
    """
    ids, trained = document.ids, document.trained
    tokens = np.full(length, padding, np.int64)
    labels = np.full(length, IGNORED, np.int64)
    tokens[: len(ids)] = ids
    labels[: len(ids) - 1] = np.where(trained[1:], ids[1:], IGNORED)
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "padding": torch.arange(length) >= len(ids),
    }


class RowOrder(Sampler[tuple[int, ...]]):
    """Rows of an epoch of training, each as a tuple of documents.

    Every epoch has as many rows as the first pass over the documents. Passes packed in windows
    differ in length. An epoch then resumes in the stream of rows at the end of the previous epoch.

    Args:
        sources: The documents.
        sequence_length: Positions of a row.
        packing: None, the same rows in every epoch, or new rows in every epoch.
        seed: Of the order.
        window: Documents packed together, with ``online``.
        balanced: Rows of a step on all ranks. The rows of a step are ordered by their cost. Ranks
            take every n-th row, and so get similar costs. 0: rows keep the order.
        costs: Cost of each document. None: the square of the length, as attention's.
        num_full: First rows of a run whose batches keep the full length.
    """

    def __init__(
        self,
        sources: Sources,
        sequence_length: int,
        packing: Packing,
        *,
        seed: int,
        window: int,
        balanced: int = 0,
        costs: npt.NDArray[Any] | None = None,
        num_full: int = 0,
    ) -> None:
        self._sources = sources
        self._num_full = num_full
        self._length = sequence_length
        self._packing = packing
        self._seed = seed
        self._window = window
        self._balanced = balanced
        self._costs = sources.lengths**2 if costs is None else costs
        self._epoch, self._ahead = 0, 0
        self.generator = torch.Generator().manual_seed(0)
        """Generator seeded with the next epoch. Checkpoints keep and restore the
        generator's state."""
        self.table = pack(sources.lengths, sequence_length) if packing == "offline" else None
        """Rows equal in every epoch. None: rows differ from epoch to epoch."""
        self._num_rows = len(self.rows(0))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration.

        After a resume the Trainer's number may be off: an epoch cut off by ``max_steps`` counts as
        a full epoch.
        """
        self._epoch = epoch
        self.generator.manual_seed(epoch + self._ahead)

    def rows(self, number: int) -> Rows:
        """Return the rows of pass ``number`` over the documents."""
        if self.table is not None:
            random = np.random.RandomState([self._seed, number])
            return self.table.shuffled(random)
        order = self._sources.order(self._seed, number)
        if self._packing == "none":
            return Rows(order, np.arange(len(order) + 1))
        return pack_in_windows(self._sources.lengths, order, self._length, self._window)

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        num_full = 0 if self.generator.initial_seed() else self._num_full
        rows = self._epoch_rows()
        if self._balanced:
            rows = self._dealt_rows(rows)
        return (FullRow(row) if i < num_full else row for i, row in enumerate(rows))

    def _dealt_rows(self, rows: Iterator[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        steps = iter(lambda: list(islice(rows, self._balanced)), [])
        return (row for step in steps for row in _dealt(step, self._costs))

    def _epoch_rows(self) -> Iterator[tuple[int, ...]]:
        epoch = self.generator.initial_seed()
        self._ahead = epoch - self._epoch
        skipped, num_rows, number = epoch * self._num_rows, self._num_rows, 0
        if self._packing != "online":
            skipped, number = 0, epoch
        while num_rows:
            rows = self.rows(number)
            for row in range(min(skipped, len(rows)), min(skipped + num_rows, len(rows))):
                yield rows[row]
                num_rows -= 1
            skipped, number = max(0, skipped - len(rows)), number + 1


def _dealt(step: list[tuple[int, ...]], costs: npt.NDArray[Any]) -> list[tuple[int, ...]]:
    """Return the rows of a step, the costly half by falling cost and then the cheap half by rising
    cost: where ranks take every n-th row, a cheap row follows a costly one.
    """
    rows = sorted(step, key=lambda row: -float(costs[list(row)].sum()))
    half = (len(rows) + 1) // 2
    return rows[:half] + rows[half:][::-1]


def held_out(
    parts: Sequence[Part], fraction: float, seed: int
) -> tuple[list[Numbers], list[Numbers]]:
    """Return the training documents and the validation documents of each source.

    Rows of the sources are drawn, so that all documents of a conversation are on the same side.
    """
    train, validate = [], []
    for number, part in enumerate(parts):
        rows: npt.NDArray[np.int64] = np.unique(part.rows)
        count = round(fraction * len(rows))
        drawn = rows[_permutation(len(rows), seed, number, 1)[:count]]
        out = np.isin(part.rows, drawn)
        train.append(np.flatnonzero(~out))
        validate.append(np.flatnonzero(out))
    return train, validate
