"""Preferences as batches of chosen and rejected answers."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl

from megatron_lightning.checkpoint.text_record import TextRecord
from megatron_lightning.data.rows.preference_data import PreferenceData
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules.finetune_data import FinetuneDataModule


class PreferenceDataModule(FinetuneDataModule, PreferenceData):
    """Batches ``{"chosen", "chosen_labels", "chosen_padding", "rejected", "rejected_labels",
    "rejected_padding": [b, s], "pair": [b]}`` from prompts with a chosen and a rejected answer.
    With ``scores`` also ``"scores": [b, 2]``, and for a :class:`RewardModule` ``"margin": [b]``, if
    the rows have margins.

    A row has ``chosen`` and ``rejected``, and usually ``prompt``. Each is text, or a list of
    messages rendered by the chat template. Without ``prompt`` the common first messages of the two
    conversations are the prompt. Rows of HH-RLHF and ranking rows of LLaMA-Factory are read, too.
    Both answers of a pair are in the same micro-batch.

    Labels are already shifted, and -100 in prompts and padding.

    The arguments are the fields of :class:`PreferenceOptions`.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If data or tokenizer cannot be read, on ``prepare_data`` and ``setup``.
    """

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
        self.use_model(module)
        if self._needs_scores(stage) and self.scores is None:
            raise ConfigError(
                'the reference of the module is "scores", and PreferenceDataModule has none. Set '
                "scores to a file, which `predict` writes with the same configuration and `fit` "
                'reads, or set the reference to "model", or with adapters to "adapters".'
            )
        super().check_files(stage, module)

    def text_record(self) -> TextRecord:
        """Return what the data teach a model about texts. A reward model keeps how they were made,
        so that it scores as it was trained.

        Raises:
            DataError: Before ``setup``, if documents cannot be made.
        """
        record = super().text_record()
        if not self._model().reads_margins:
            return record
        options, chat = self.options, self.options.chat
        scored_as = {
            "sequence_length": options.sequence_length,
            "truncation": options.truncation,
            "reasoning": chat.reasoning,
            "drop_fields": list(chat.drop_fields),
            "template_values": self.template_values,
            "date": record.date,
            "ends": list(self._ends),
        }
        return replace(record, scored_as=scored_as)
