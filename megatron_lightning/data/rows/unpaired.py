"""Single answers with a label: desirable, or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_lightning.data.chat.chat_encoding import Encoder
from megatron_lightning.data.chat.chat_template import ChatOptions
from megatron_lightning.data.chat.conversations import Chat
from megatron_lightning.data.chat.documents import Document, Documents
from megatron_lightning.data.flat_options import takes
from megatron_lightning.data.rows.cut_rows import FULL, FullRow
from megatron_lightning.data.rows.finetune_data import FinetuneData
from megatron_lightning.data.rows.packed_rows import Part, Sources, document_row
from megatron_lightning.data.rows.packing import Numbers, Rows
from megatron_lightning.data.rows.row_options import RowOptions
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import DataError


class UnpairedEncoder(Encoder):
    """Makes a document of each row with a label."""

    @property
    def identity(self) -> dict[str, Any]:
        """All inputs to the documents, beside the rows."""
        return {**super().identity, "unpaired": 1}

    def _pieces(self, row: Row) -> Iterator[Any]:
        label_of(row)
        fields = {key: value for key, value in row.fields.items() if key != "label"}
        yield from super()._pieces(Row(row.where, fields))

    def _options_of(self, chat: Chat) -> ChatOptions:
        """Return the options of a conversation. The last answer is the one with the label, and is
        rendered as in generation, so that any template works.
        """
        return replace(self._options.chat, split_turns=True, train_on="last")


def label_of(row: Row) -> bool:
    """Return whether the answer of a row is desirable.

    Raises:
        DataError: If the row does not say so.
    """
    if row.error is not None:
        raise row.error
    label = row.fields.get("label")
    if isinstance(label, bool) or label in (0, 1):
        return bool(label)
    raise DataError(
        f"{row.where}: label is {label!r}; an answer of the loss kto has label true (desirable) or "
        "false, beside prompt and completion, or messages. Rows with chosen and rejected are "
        "read by PreferenceDataModule."
    )


class Labeled(NamedTuple):
    """An answer behind its prompt."""

    document: Document
    desirable: bool
    number: int
    """Position in all rows of a data module."""


class LabeledDocuments(Sequence[Labeled]):
    """The rows in a source's documents.

    Args:
        documents: One for each row that is used.
        labels: Of all rows of the source.
        first: Number of the first document in all documents of the data module.
    """

    def __init__(self, documents: Documents, labels: npt.NDArray[np.bool_], first: int) -> None:
        self._documents = documents
        self._first = first
        self.lengths: Numbers = documents.lengths
        """Tokens of every document."""
        self.rows: npt.NDArray[np.int64] = documents.rows
        """Number of each document's row in the source."""
        self._labels = labels[documents.rows]

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: Any) -> Any:
        place = int(index)
        return Labeled(self._documents[index], bool(self._labels[place]), self._first + place)


class UnpairedDataset(Dataset[dict[str, Tensor]]):
    """Samples ``{"tokens": [s], "labels": [s], "padding": [s], "desirable": [], "row": []}``.

    Labels are shifted already. Labels are -100 in prompts and padding.

    Args:
        sources: The rows.
        sequence_length: Positions of a row (s).
        padding: Id for filling a row.
    """

    def __init__(self, sources: Sources, sequence_length: int, padding: int) -> None:
        self._sources = sources
        self._length = sequence_length
        self._padding = padding

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, row: int | tuple[int, ...]) -> dict[str, Tensor]:
        """Return a sample, by the number or by a tuple with the number."""
        one: Labeled = self._sources[row if isinstance(row, int) else row[0]]
        sample: dict[str, Any] = {
            **document_row(one.document, self._length, self._padding),
            "desirable": torch.tensor(one.desirable),
            "row": torch.tensor(one.number),
        }
        if isinstance(row, FullRow):
            sample[FULL] = True
        return sample


class UnpairedData(FinetuneData):
    """Rows of ``UnpairedDataModule``, read without a Trainer."""

    sequence_dims: Mapping[str, int] = MappingProxyType(
        dict.fromkeys(("tokens", "labels", "padding"), 1)
    )
    """Sequence dim of each batch entry."""

    @takes(RowOptions)
    def __init__(self, options: RowOptions) -> None:
        super().__init__(**vars(options))

    def _encoder(self, path: str) -> UnpairedEncoder:
        return UnpairedEncoder(self.tokenizer, self.template, self.options, self._ends)

    def _parts(self) -> Sequence[Part]:
        parts, first = [], 0
        for path in (*self.paths, *self.val_paths):
            documents = self._documents(path)
            labels = np.array([label_of(row) for row in self._cache.rows(path)], np.bool_)
            parts.append(LabeledDocuments(documents, labels, first))
            first += len(documents)
        return parts

    def _dataset(self, sources: Sources, rows: Rows | None = None) -> UnpairedDataset:
        return UnpairedDataset(sources, self.sequence_length, self.tokenizer.padding)
