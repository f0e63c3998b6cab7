"""Chats, texts and tokens as batches for supervised fine-tuning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint.text_record import TextRecord
from megatron_lightning.data.chat.answer_ends import answer_ends
from megatron_lightning.data.chat.template_texts import without_marks
from megatron_lightning.data.images.row_entries import IMAGES, without_unused
from megatron_lightning.data.rows.finetune_data import FinetuneData
from megatron_lightning.data.run_data import Batch
from megatron_lightning.modules.data_modules.data_checks import check_images, check_model
from megatron_lightning.modules.data_modules.run_data_module import RunDataModule
from megatron_lightning.modules.folder_module import FolderModule
from megatron_lightning.modules.taught_texts import apply_text_record
from megatron_lightning.pipeline.batch.microbatches import split_batch


class FinetuneDataModule(RunDataModule, FinetuneData):
    """Batches ``{"tokens": [b, s], "labels": [b, s], "padding": [b, s]}`` from conversations,
    prompts with completions, texts or tokens. Packed batches also have ``document_ids`` and
    ``position_ids`` [b, s]. Batches of data with ``images`` have a list of the entries of each row
    for the model.

    Labels are already shifted. Labels are -100 without a loss: in prompts, in padding, and in
    answers left out by a row (``weight: 0``). A conversation is rendered by the tokenizer's chat
    template and tokenized once a node, into a cache mapped by all ranks. The keys of a row
    determine the schema: ``messages`` (OpenAI, with ``tools``), ``conversations`` (ShareGPT),
    ``instruction`` and ``output`` (Alpaca), ``prompt`` and ``completion``, ``text``, or
    ``input_ids`` with ``labels``.

    The arguments are the fields of :class:`FinetuneOptions`.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If data or tokenizer cannot be read, on ``prepare_data`` and ``setup``.
    """

    def check_files(self, stage: str, module: pl.LightningModule) -> None:
        """Check files, tokenizer and ids before the strategy starts a process, without reading
        rows.

        Args:
            stage: The Trainer's next action.
            module: The module of the action. If no tokenizer is set, the module's is used.

        Raises:
            ConfigError: If the model has no embedding for an id of the tokenizer, or a validation
                has no data.
            DataError: If something is missing.
        """
        self.check_sources(stage)
        self.use_model(module)
        is_packed, num_new = self.packing != "none", len(self.tokenizer.added)
        check_model(module, len(self.tokenizer), packed=is_packed, num_new=num_new)
        if self.images is not None:
            check_images(module)
        _ = self.template

    def split_batch(self, batch: Batch, micro_batch_size: int) -> list[Batch]:
        """Return the micro-batches of a batch. Images go with their rows."""
        rest: dict[str, Any] = dict(batch)
        images = rest.pop(IMAGES, None)
        parts: list[dict[str, Any]] = split_batch(rest, micro_batch_size)
        for number, part in enumerate(parts if images is not None else ()):
            start = number * micro_batch_size
            part[IMAGES] = without_unused(images[start : start + micro_batch_size])
        return parts

    def setup(self, stage: str) -> None:
        """Map the documents into memory, and pack the documents. Tell the model its new tokens."""
        module = self._run_module()
        if self.new_tokens and isinstance(module, FolderModule):
            module.new_tokens = self.tokenizer.added
        super().setup(stage)
        if stage == "fit":
            rank_zero_info(self.describe())

    def text_record(self) -> TextRecord:
        """Return what the data teach a model about texts, to travel with the weights.

        Raises:
            DataError: Before ``setup``, if documents cannot be made.
        """
        sources = [self._documents(path) for path in self.paths]
        is_given = self._tokenizer is not None
        return TextRecord(
            chat_template=(
                None if self._template is None else without_marks(self._templates["default"])
            ),
            end_of_turn=answer_ends(sources, self.tokenizer, self.options),
            ends_before=self._ends,
            date=None if self.date is None else self.date.isoformat(),
            tokenizer=self._model().tokenizer_files(self.tokenizer, is_given=is_given),
            processor_options={} if self.images is None else self.images.processor_options,
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the training loader, without incomplete batches. The model of the run gets the
        record of the texts.
        """
        module = self._run_module()
        if module is not None:
            apply_text_record(module, self.text_record())
        return super().train_dataloader()
