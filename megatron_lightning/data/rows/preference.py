"""Preferences: a prompt with a chosen and a rejected answer, as two documents with the same prompt.

Only answers behind the prompt have a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_lightning.data.chat.chat_encoding import Encoder
from megatron_lightning.data.chat.chat_template import ChatOptions
from megatron_lightning.data.chat.chat_view import Rendered
from megatron_lightning.data.chat.conversations import Chat, Text
from megatron_lightning.data.chat.documents import Document, Documents
from megatron_lightning.data.indexed.atomic_files import atomic_write
from megatron_lightning.data.rows.cut_rows import FULL, FullRow
from megatron_lightning.data.rows.packed_rows import Sources, document_row
from megatron_lightning.data.rows.packing import Numbers
from megatron_lightning.data.rows.preference_rows import SIDES, parse_pair
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import CheckpointError, ConfigError

_VERSION = 3


class PairEncoder(Encoder):
    """Makes two documents of each row, the chosen and the rejected one, or none."""

    @property
    def identity(self) -> dict[str, Any]:
        """All inputs to the documents, beside the rows."""
        return {**super().identity, "pairs": _VERSION}

    def documents(self, rows: Iterable[Row]) -> Iterator[Document]:
        """Yield the documents of rows in order. If a document of a pair is left out, then the other
        is as well.

        Raises:
            DataError: If a row cannot be used, with file and line.
        """
        for _, both in groupby(super().documents(rows), lambda document: document.row):
            pair = list(both)
            if len(pair) == len(SIDES):
                self.counts["pairs"] += 1
                yield from pair
                continue
            self.counts["left out with the other answer"] += 1
            self.counts["documents"] -= 1
            self.counts["tokens"] -= len(pair[0].ids)
            self.counts["trained tokens"] -= int(pair[0].trained.sum())

    def _pieces(self, row: Row) -> Iterator[Rendered | Any]:
        for parsed in parse_pair(row):
            if isinstance(parsed, Text):
                yield self._text(parsed)
            else:
                yield from self._samples(parsed)

    def _options_of(self, chat: Chat) -> ChatOptions:
        """Return the options of a conversation. The last answer is rendered as in generation, so
        that any template works.
        """
        is_last = chat.trained == {len(chat.messages) - 1}
        options = self._options.chat
        return replace(options, split_turns=is_last)


class Pair(NamedTuple):
    """A preference."""

    chosen: Document
    rejected: Document
    number: int
    """Position in all pairs of a data module."""
    scores: npt.NDArray[np.float32] | None
    """Log-probabilities of both answers under the reference [2]. None: unknown."""
    margin: float | None = None
    """Least difference wanted of a reward model's scores. None: the rows have none."""


class Pairs(Sequence[Pair]):
    """The pairs in a source's documents.

    Args:
        documents: Chosen and rejected in turn.
        first: Number of the first pair in all pairs of the data module.
        scores: Log-probabilities of the answers of all pairs of the data module [N, 2].
        margins: Of all rows of the source. None: they have none, or nobody reads them.
    """

    def __init__(
        self,
        documents: Documents,
        first: int,
        scores: npt.NDArray[np.float32] | None,
        margins: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self._documents = documents
        self._first = first
        self._scores = scores
        self.lengths: Numbers = documents.lengths.reshape(-1, len(SIDES)).max(axis=1)
        """Tokens of the longer answer of every pair, with the prompt."""
        self.rows: npt.NDArray[np.int64] = documents.rows[:: len(SIDES)]
        """Number of each pair's row in the source."""
        self._margins = None if margins is None else margins[self.rows]

    def __len__(self) -> int:
        return len(self._documents) // len(SIDES)

    def __getitem__(self, index: Any) -> Any:
        chosen, rejected = (self._documents[len(SIDES) * index + side] for side in (0, 1))
        number = self._first + int(index)
        scores = None if self._scores is None else self._scores[number]
        margin = None if self._margins is None else float(self._margins[int(index)])
        return Pair(chosen, rejected, number, scores, margin)


class PairDataset(Dataset[dict[str, Tensor]]):
    """Samples ``{"chosen": [s], "chosen_labels": [s], "chosen_padding": [s], "rejected": [s],
    "rejected_labels": [s], "rejected_padding": [s], "pair": []}``. With a reference's scores also
    ``"scores": fp32 [2]``, with margins also ``"margin": fp32 []``.

    Labels are shifted already. Labels are -100 in prompts and padding.

    Args:
        sources: The pairs.
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
        pair: Pair = self._sources[row if isinstance(row, int) else row[0]]
        sample: dict[str, Any] = {"pair": torch.tensor(pair.number)}
        if isinstance(row, FullRow):
            sample[FULL] = True
        for name, document in zip(SIDES, (pair.chosen, pair.rejected), strict=True):
            row_of = document_row(document, self._length, self._padding)
            sample |= {
                name: row_of["tokens"],
                f"{name}_labels": row_of["labels"],
                f"{name}_padding": row_of["padding"],
            }
        if pair.scores is not None:
            sample["scores"] = torch.from_numpy(np.array(pair.scores, np.float32))
        if pair.margin is not None:
            sample["margin"] = torch.tensor(pair.margin)
        return sample


class ScoreFile:
    """File with a reference's log-probabilities of all pairs of a data module.

    Args:
        path: The file, in NumPy's format.
        digests: Digest of the documents of each source.
    """

    def __init__(self, path: str, digests: Sequence[str]) -> None:
        self.path = Path(path)
        self._digests = [digest[:16] for digest in digests]

    def read(self, count: int) -> npt.NDArray[np.float32]:
        """Return the scores [``count``, 2].

        Raises:
            CheckpointError: If the file is missing, damaged, or of other documents.
        """
        try:
            # A zip file: np.load returns an array for a file of a single array.
            with ZipFile(self.path), np.load(self.path, allow_pickle=False) as file:
                scores, digests = file["scores"], file["documents"].tolist()
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise CheckpointError(
                f"scores={str(self.path)!r} cannot be read ({error}). Write it by `predict` with "
                "this configuration: megatron-lightning predict --config FILE."
            ) from error
        if digests != self._digests or scores.shape != (count, len(SIDES)):
            raise CheckpointError(
                f"scores={str(self.path)!r} belong to {len(scores)} pairs of other documents than "
                f"the {count} here: data, tokenizer, template or lengths have changed. Write it "
                "again by `predict`."
            )
        return np.asarray(scores, np.float32)

    def write(self, found: Mapping[int, Sequence[float]], count: int) -> None:
        """Write the scores of all ``count`` pairs, by their numbers.

        Raises:
            ConfigError: If pairs are missing.
        """
        num_missing = count - len(found)
        if num_missing:
            raise ConfigError(
                f"{num_missing} of {count} pairs have no scores: the prediction did not see all "
                "batches. Leave out limit_predict_batches."
            )
        scores = np.array([found[number] for number in range(count)], np.float32)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as file:
            np.savez(file, scores=scores, documents=np.array(self._digests))
