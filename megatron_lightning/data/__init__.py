"""Real text in, fixed-length samples out: tokenizers, and Megatron's ``.bin``/``.idx`` files and
sample index.
"""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.data.indexed.indexed_files import IndexedDataset, IndexedDatasetWriter
    from megatron_lightning.data.masked.masked_config import BertDatasetConfig, T5DatasetConfig
    from megatron_lightning.data.masked.masked_samples import BertDataset, T5Dataset
    from megatron_lightning.data.order.batch_size import BatchSizeSchedule, ScheduledBatchSampler
    from megatron_lightning.data.pretraining.fim import FillInTheMiddle
    from megatron_lightning.data.pretraining.gpt_samples import GPTDataset, GPTDatasetConfig
    from megatron_lightning.data.text.tokenizer_kinds import (
        ByteTokenizer,
        JsonTokenizer,
        NullTokenizer,
        PlainTokenizer,
        TiktokenTokenizer,
    )
    from megatron_lightning.data.text.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "BatchSizeSchedule",
    "BertDataset",
    "BertDatasetConfig",
    "ByteTokenizer",
    "FillInTheMiddle",
    "GPTDataset",
    "GPTDatasetConfig",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "JsonTokenizer",
    "NullTokenizer",
    "PlainTokenizer",
    "ScheduledBatchSampler",
    "T5Dataset",
    "T5DatasetConfig",
    "TiktokenTokenizer",
    "Tokenizer",
    "load_tokenizer",
]

lazy_attributes(
    __name__,
    {
        "BatchSizeSchedule": "megatron_lightning.data.order.batch_size",
        "ScheduledBatchSampler": "megatron_lightning.data.order.batch_size",
        "FillInTheMiddle": "megatron_lightning.data.pretraining.fim",
        "GPTDataset": "megatron_lightning.data.pretraining.gpt_samples",
        "GPTDatasetConfig": "megatron_lightning.data.pretraining.gpt_samples",
        "IndexedDataset": "megatron_lightning.data.indexed.indexed_files",
        "IndexedDatasetWriter": "megatron_lightning.data.indexed.indexed_files",
        "BertDataset": "megatron_lightning.data.masked.masked_samples",
        "BertDatasetConfig": "megatron_lightning.data.masked.masked_config",
        "T5Dataset": "megatron_lightning.data.masked.masked_samples",
        "T5DatasetConfig": "megatron_lightning.data.masked.masked_config",
        **dict.fromkeys(
            (
                "ByteTokenizer",
                "JsonTokenizer",
                "NullTokenizer",
                "PlainTokenizer",
                "TiktokenTokenizer",
            ),
            "megatron_lightning.data.text.tokenizer_kinds",
        ),
        "Tokenizer": "megatron_lightning.data.text.tokenizers",
        "load_tokenizer": "megatron_lightning.data.text.tokenizers",
    },
)
