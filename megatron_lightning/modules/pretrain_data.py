"""LightningDataModule of a pre-training run: an indexed dataset served as fixed-length samples."""

from __future__ import annotations

from megatron_lightning.data.pretraining.pretrain_data import PretrainData
from megatron_lightning.modules.data_modules.indexed_data_module import IndexedDataModule


class PretrainDataModule(IndexedDataModule, PretrainData):
    """Batches ``{"tokens": [b, s], "labels": [b, s], "loss_mask": [b, s]}`` from files of
    ``megatron-lightning preprocess``.

    The datasets are shuffled already and read in order, so that the number of consumed samples is
    the position in the data. Labels are already shifted. With ``reset_attention_mask`` a batch also
    has ``document_ids`` [b, s]. With ``reset_attention_mask`` or ``reset_position_ids`` a batch has
    ``position_ids`` [b, s].

    The arguments are the fields of :class:`PretrainOptions`.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If the data or the tokenizer cannot be read, on ``prepare_data`` and ``setup``.
    """
