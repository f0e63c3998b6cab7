"""Preferences as rows of chosen and rejected answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from megatron_lightning.data.flat_options import takes
from megatron_lightning.data.rows.finetune_data import FinetuneData
from megatron_lightning.data.rows.packed_rows import Part, Sources
from megatron_lightning.data.rows.packing import Rows
from megatron_lightning.data.rows.preference import (
    PairDataset,
    PairEncoder,
    Pairs,
    ScoreFile,
)
from megatron_lightning.data.rows.preference_rows import SIDES, margins_of
from megatron_lightning.data.rows.row_options import PreferenceOptions, RowOptions
from megatron_lightning.data.run_data import Batch
from megatron_lightning.errors import ConfigError, DataError


class PreferenceData(FinetuneData):
    """Pairs of ``PreferenceDataModule``, read without a Trainer."""

    sequence_dims: Mapping[str, int] = MappingProxyType(
        {f"{side}{entry}": 1 for side in SIDES for entry in ("", "_labels", "_padding")}
    )
    """Sequence dim of each batch entry."""

    @takes(PreferenceOptions)
    def __init__(self, options: PreferenceOptions) -> None:
        super().__init__(**{one.name: getattr(options, one.name) for one in fields(RowOptions)})
        self.scores = options.scores
        self._reads_scores = False

    def setup(self, stage: str) -> None:
        """Map the documents into memory, and read the scores.

        Raises:
            CheckpointError: If scores are needed, and cannot be read.
        """
        self._reads_scores = self._needs_scores(stage)
        if self._reads_scores and self.scores is None:  # started without a strategy of ours
            raise ConfigError(
                'the reference of the module is "scores", and scores of PreferenceDataModule is '
                "not set. Set it to a file written by `predict`."
            )
        super().setup(stage)

    def _needs_scores(self, stage: str) -> bool:
        """Return whether the model reads scores of the data in a fit, a validation or a test."""
        return stage != "predict" and self._model().reads_scores

    def _encoder(self, path: str) -> PairEncoder:
        return PairEncoder(self.tokenizer, self.template, self.options, self._ends)

    def _parts(self) -> Sequence[Part]:
        documents = [self._documents(path) for path in (*self.paths, *self.val_paths)]
        firsts = np.cumsum([0, *(len(part) // 2 for part in documents)])
        scores: npt.NDArray[np.float32] | None = None
        if self._reads_scores:
            scores = self._score_file().read(int(firsts[-1]))
        starts = firsts[:-1].tolist()
        parts = zip(documents, starts, self._margins(), strict=True)
        return [Pairs(part, at, scores, margins) for part, at, margins in parts]

    def _margins(self) -> Sequence[npt.NDArray[np.float32] | None]:
        """Return the margins of the rows of each source, if the model reads margins.

        Raises:
            DataError: If some rows have a margin, and others have none.
        """
        paths = (*self.paths, *self.val_paths)
        if not self._model().reads_margins:
            return [None] * len(paths)
        found = {
            path: margins_of(self._cache.rows(path), set(self._documents(path).rows.tolist()))
            for path in paths
        }
        without = [path for path, margins in found.items() if margins is None]
        if without and len(without) < len(found):
            raise DataError(
                f"{without[0]}: the rows have no margin, and those of other files have one. Write "
                "a number in all rows, 0 for none, or in no row."
            )
        return [None if one is None else np.array(one, np.float32) for one in map(found.get, paths)]

    def _score_file(self) -> ScoreFile:
        paths = (*self.paths, *self.val_paths)
        return ScoreFile(str(self.scores), [self._documents(path).digest for path in paths])

    def write_scores(self, found: Mapping[int, Sequence[float]]) -> str | None:
        """Write the log-probabilities of all pairs under a reference. Return the path. None: there
        is no file to write.

        Args:
            found: Number of a pair -> log-probabilities of the chosen and the rejected answer.

        Raises:
            ConfigError: If pairs are missing.
        """
        if self.scores is None:
            return None
        self._score_file().write(found, sum(len(part) for part in self._parts()))
        return self.scores

    def _dataset(self, sources: Sources, rows: Rows | None = None) -> PairDataset:
        return PairDataset(sources, self.sequence_length, self.tokenizer.padding)

    def predict_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of all pairs, of validation as well, in order."""
        dataset = self._dataset(Sources(self._parts()))
        return self._loader_of(
            dataset, batch_size=self.batch_size, shuffle=False, collate_fn=self._cuts
        )
