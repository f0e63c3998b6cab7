"""Preferences as batches of chosen and rejected answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from megatron_lightning.data.chat.chat_encoding import BadRows, Truncation
from megatron_lightning.data.chat.chat_view import Reasoning
from megatron_lightning.data.order.resume_order import OnChangedData
from megatron_lightning.data.rows.packed_rows import Part, Sources
from megatron_lightning.data.rows.packing import Rows
from megatron_lightning.data.rows.preference import (
    PairDataset,
    PairEncoder,
    Pairs,
    ScoreFile,
)
from megatron_lightning.data.rows.preference_rows import SIDES
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules.finetune_data import FinetuneDataModule, Paths
from megatron_lightning.modules.run_data import Batch


class PreferenceDataModule(FinetuneDataModule):
    """Batches ``{"chosen", "chosen_labels", "chosen_padding", "rejected", "rejected_labels",
    "rejected_padding": [b, s], "pair": [b]}`` from prompts with a chosen and a rejected answer.
    With ``scores`` also ``"scores": [b, 2]``.

    A row has ``chosen`` and ``rejected``, and usually ``prompt``. Each is text, or a list of
    messages rendered by the chat template. Without ``prompt`` the common first messages of the two
    conversations are the prompt. Rows of HH-RLHF and ranking rows of LLaMA-Factory are read, too.
    Both answers of a pair are in the same micro-batch.

    Labels are already shifted, and -100 in prompts and padding.

    Args:
        path: As in :class:`FinetuneDataModule`.
        sequence_length: Positions of an answer with the prompt (s), and the longest document. If
            one answer of a pair is left out as too long, the other is as well.
        batch_size: Pairs of a batch on a data-parallel rank (b).
        scores: File with the log-probabilities of the answers under a reference. ``predict`` writes
            the file, ``fit`` reads the file if the module's reference is "scores". Default: none.
        val_path: As in :class:`FinetuneDataModule`, like the options below.
        val_fraction: Fraction of the rows of ``path`` for validation.
        split: Split of a data set on the Hub.
        subset: Configuration of a data set on the Hub.
        tokenizer: Folder, ``tokenizer.json`` or name of the tokenizer, or the tokenizer. Default:
            the model's.
        chat_template: Jinja template, or a file with a template. Default: the tokenizer's.
        template_options: Further values for the template.
        date: Date that a template with a date writes. Default: the newest modification date of the
            data files.
        truncation: Treatment of a document longer than a row.
        reasoning: Treatment of the reasoning of answers.
        drop_fields: Fields of rows and messages to leave out.
        bad_rows: Treatment of rows that cannot be used.
        new_tokens: Texts to add as new tokens.
        seed: Seed of the order, and of the choice of validation rows.
        num_workers: Worker processes of each loader on each rank.
        reading_thread: Whether a thread of the training process reads the next two batches.
            Replaces ``num_workers``.
        pad_to: As in :class:`FinetuneDataModule`.
        cache_dir: Folder of the tokenized documents.
        on_changed_data: Reaction of a resumed run if the order of training rows has changed.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If data or tokenizer cannot be read, on ``prepare_data`` and ``setup``.
    """

    sequence_dims: Mapping[str, int] = MappingProxyType(
        {f"{side}{entry}": 1 for side in SIDES for entry in ("", "_labels", "_padding")}
    )
    """Sequence dim of each batch entry."""

    def __init__(
        self,
        path: Paths,
        *,
        sequence_length: int,
        batch_size: int,
        scores: str | None = None,
        val_path: str | list[str] | None = None,
        val_fraction: float = 0.0,
        split: str = "train",
        subset: str | None = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        template_options: dict[str, Any] | None = None,
        date: str | None = None,
        truncation: Truncation = "drop",
        reasoning: Reasoning = "keep",
        drop_fields: Sequence[str] = (),
        bad_rows: BadRows = "refuse",
        new_tokens: Sequence[str] = (),
        seed: int = 1234,
        num_workers: int = 0,
        reading_thread: bool = False,
        pad_to: int | None = None,
        cache_dir: str | None = None,
        on_changed_data: OnChangedData = "refuse",
    ) -> None:
        super().__init__(
            path,
            sequence_length=sequence_length,
            batch_size=batch_size,
            val_path=val_path,
            val_fraction=val_fraction,
            split=split,
            subset=subset,
            tokenizer=tokenizer,
            chat_template=chat_template,
            template_options=template_options,
            date=date,
            truncation=truncation,
            reasoning=reasoning,
            drop_fields=drop_fields,
            bad_rows=bad_rows,
            new_tokens=new_tokens,
            seed=seed,
            num_workers=num_workers,
            reading_thread=reading_thread,
            pad_to=pad_to,
            cache_dir=cache_dir,
            on_changed_data=on_changed_data,
        )
        self.scores = scores
        self._reads_scores = False

    def check_files(self, stage: str, module: pl.LightningModule) -> None:
        """Check files, tokenizer and ids before the strategy starts a process.

        Args:
            stage: The Trainer's next action.
            module: The module of the action.

        Raises:
            ConfigError: If the module reads scores and there are none, or the model has no
                embedding for an id of the tokenizer.
            DataError: If something is missing.
        """
        if self.needs_scores(stage, module) and self.scores is None:
            raise ConfigError(
                'the reference of the module is "scores", and PreferenceDataModule has none. Set '
                "scores to a file, which `predict` writes with the same configuration and `fit` "
                'reads, or set the reference to "model", or with adapters to "adapters".'
            )
        super().check_files(stage, module)

    @staticmethod
    def needs_scores(stage: str | None, module: Any) -> bool:
        """Return whether a module reads scores of the data in a fit, a validation or a test."""
        return stage != "predict" and getattr(module, "reference", None) == "scores"

    def setup(self, stage: str) -> None:
        """Map the documents into memory, and read the scores.

        Raises:
            CheckpointError: If scores are needed, and cannot be read.
        """
        self._reads_scores = self.needs_scores(stage, self._run_module())
        if self._reads_scores and self.scores is None:  # started without a strategy of ours
            raise ConfigError(
                'the reference of the module is "scores", and scores of PreferenceDataModule is '
                "not set. Set it to a file written by `predict`."
            )
        super().setup(stage)

    def _encoder(self) -> PairEncoder:
        return PairEncoder(self.tokenizer, self.template, self.options, self._ends)

    def _parts(self) -> Sequence[Part]:
        documents = [self._documents(path) for path in (*self.paths, *self.val_paths)]
        firsts = np.cumsum([0, *(len(part) // 2 for part in documents)])
        scores: npt.NDArray[np.float32] | None = None
        if self._reads_scores:
            scores = self._score_file().read(int(firsts[-1]))
        starts = firsts[:-1].tolist()
        return [Pairs(part, at, scores) for part, at in zip(documents, starts, strict=True)]

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
