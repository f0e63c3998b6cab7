"""LightningDataModule of masked samples for encoders and encoder-decoders."""

from __future__ import annotations

from megatron_lightning.data.masked.masked_data import MaskedData
from megatron_lightning.modules.data_modules.indexed_data_module import IndexedDataModule


class MaskedDataModule(IndexedDataModule, MaskedData):
    """Batches of :class:`BertDataset` or :class:`T5Dataset` from files of ``megatron-lightning
    preprocess --split-sentences``.

    Blends, separate parts, resumes and skipped samples are as in :class:`PretrainDataModule`. The
    arguments are the fields of :class:`MaskedOptions`.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If the data or the tokenizer cannot be read, on ``prepare_data`` and ``setup``.
    """
