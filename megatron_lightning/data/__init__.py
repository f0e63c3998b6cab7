"""Real text in, fixed-length samples out: tokenizers, and Megatron's ``.bin``/``.idx`` files and
sample index.
"""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.data.batch_size import BatchSizeSchedule, ScheduledBatchSampler
    from megatron_lightning.data.fim import FillInTheMiddle
    from megatron_lightning.data.gpt import GPTDataset, GPTDatasetConfig
    from megatron_lightning.data.indexed import IndexedDataset, IndexedDatasetWriter
    from megatron_lightning.data.masked import BertDataset, T5Dataset
    from megatron_lightning.data.masked_config import BertDatasetConfig, T5DatasetConfig
    from megatron_lightning.data.tokenizer_kinds import (
        ByteTokenizer,
        JsonTokenizer,
        NullTokenizer,
        PlainTokenizer,
        TiktokenTokenizer,
    )
    from megatron_lightning.data.tokenizers import Tokenizer, load_tokenizer

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
        "BatchSizeSchedule": "megatron_lightning.data.batch_size",
        "ScheduledBatchSampler": "megatron_lightning.data.batch_size",
        "FillInTheMiddle": "megatron_lightning.data.fim",
        "GPTDataset": "megatron_lightning.data.gpt",
        "GPTDatasetConfig": "megatron_lightning.data.gpt",
        "IndexedDataset": "megatron_lightning.data.indexed",
        "IndexedDatasetWriter": "megatron_lightning.data.indexed",
        "BertDataset": "megatron_lightning.data.masked",
        "BertDatasetConfig": "megatron_lightning.data.masked_config",
        "T5Dataset": "megatron_lightning.data.masked",
        "T5DatasetConfig": "megatron_lightning.data.masked_config",
        **dict.fromkeys(
            (
                "ByteTokenizer",
                "JsonTokenizer",
                "NullTokenizer",
                "PlainTokenizer",
                "TiktokenTokenizer",
            ),
            "megatron_lightning.data.tokenizer_kinds",
        ),
        "Tokenizer": "megatron_lightning.data.tokenizers",
        "load_tokenizer": "megatron_lightning.data.tokenizers",
    },
)
