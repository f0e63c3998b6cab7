"""Parts common to the data of a run: the facts of run and model that data depend on, and loaders.

The classes of data are plain. Without a Trainer they read as one process at the beginning of a fit,
which is what tools need. The LightningDataModules of ``modules`` tell them of the Trainer.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_lightning.data.order.reading_thread import ReadingThreadLoader
from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
    from megatron_lightning.data.images.image_options import ImageOptions
    from megatron_lightning.data.images.image_positions import ImagePositions
    from megatron_lightning.data.images.image_processor import ImageProcessor
    from megatron_lightning.data.rows.row_costs import RowCosts

Batch = dict[str, torch.Tensor]


class RunModel(Protocol):
    """Facts about a run's model, known before the model is built."""

    @property
    def vocab_size(self) -> int | None:
        """Size of the vocabulary, if a ``TransformerConfig`` says it."""

    @property
    def fills_experts(self) -> bool:
        """Whether experts are filled to a capacity, which depends on the length of a row."""

    @property
    def reads_scores(self) -> bool:
        """Whether the loss reads scores of a reference from the data."""

    @property
    def reads_margins(self) -> bool:
        """Whether the loss reads margins of pairs from the data."""

    def tokenizer(self, new_tokens: Sequence[str] = ()) -> ChatTokenizer | None:
        """Return the tokenizer in the model's folder. None: there is no folder."""

    def image_processor(self, tokenizer: ChatTokenizer, options: ImageOptions) -> ImageProcessor:
        """Return the processor of images, or of sounds, in the model's folder."""

    def image_positions(self) -> ImagePositions | None:
        """Return the positions of a model that has several a token. None: it has one."""

    def row_costs(self, longest: int) -> RowCosts | None:
        """Return the operations of documents of up to ``longest`` tokens. None: the model has no
        formulas.
        """

    def generation_ends(self, tokenizer: object = None) -> tuple[int, ...]:
        """Return the ids at which generation stops, of the generation configuration beside the
        data's tokenizer, or of the model.
        """


class RunData:
    """Base of the data of pre-training and fine-tuning.

    Args:
        num_workers: Worker processes of each loader on each rank. 0 reads in the training process.
        reading_thread: Whether a thread of the training process reads the next batches.

    Raises:
        ConfigError: For a reading thread beside worker processes.
    """

    def __init__(self, num_workers: int, *, reading_thread: bool = False) -> None:
        super().__init__()
        if reading_thread and num_workers:
            raise ConfigError(
                f"reading_thread=True beside num_workers={num_workers}: the thread reads in the "
                "place of worker processes. Set one of the two."
            )
        self.num_workers = num_workers
        self.reading_thread = reading_thread
        self._given_model: RunModel | None = None

    def use_model(self, model: Any) -> None:
        """Read missing settings, such as tokenizer or vocabulary, from a model's facts."""
        self._given_model = model

    @property
    def _has_model(self) -> bool:
        """Whether :meth:`use_model` was called with a model."""
        return self._given_model is not None

    def _model(self) -> RunModel:
        """Return the facts about the run's model."""
        if self._given_model is None:
            raise RuntimeError(f"call use_model of {type(self).__name__} first")
        return self._given_model

    def _stage(self) -> str:
        """Return the stage of the run: fit, validate, test or predict."""
        return "fit"

    def _consumed_samples(self) -> int | None:
        """Return the samples consumed by the run. None: there is no run, or no count."""
        return None

    def _num_replicas(self) -> int:
        """Return the number of data-parallel ranks."""
        return 1

    def _num_accumulated(self) -> int:
        """Return the batches of an optimizer step."""
        return 1

    def _row_divisor(self) -> int:
        """Return the number that layout and precision of the run divide rows by."""
        return 1

    def _is_compiled(self) -> bool:
        """Return whether blocks of layers are compiled, anew for each length of a row."""
        return False

    def _warn(self, text: str) -> None:
        """Warn once, not on every rank."""
        warnings.warn(text, stacklevel=2)

    def _loader_of(self, dataset: Dataset[Any], **options: Any) -> DataLoader[Batch]:
        kind = ReadingThreadLoader if self.reading_thread else DataLoader
        return kind(
            dataset,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            **options,
        )
