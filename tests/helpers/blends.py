"""Four small indexed files, a data module that blends them, and a model of their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_lightning.data import IndexedDatasetWriter
from megatron_lightning.modules import GPTLightningModule, PretrainDataModule
from tests.helpers.layouts import tiny_config

VOCABULARY, SEQUENCE = 50, 16


def write_blends(folder: Path) -> None:
    random = np.random.default_rng(0)
    for name, begin, count in (("a", 1, 40), ("b", 20, 15), ("c", 1, 9), ("d", 30, 30)):
        with IndexedDatasetWriter(str(folder / name), np.dtype(np.uint16)) as writer:
            for _ in range(count):
                tokens = random.integers(begin, begin + 20, int(random.integers(5, 60)))
                lengths = np.array([len(tokens)], np.int32)
                writer.add_documents(tokens, lengths, np.ones(1, np.int64))
            writer.finish()


def blended_data(
    folder: str, replicas: int = 1, weights: Any = (0.3, 0.7), **options: Any
) -> PretrainDataModule:
    prefix: Any = {
        "train": [[weights[0], f"{folder}/a"], [weights[1], f"{folder}/b"]],
        "validation": {"code": f"{folder}/c", "web": [f"{folder}/d"]},
    }
    settings = {
        "batch_size": 8 // replicas, "num_train_samples": 64, "cache_dir": f"{folder}/cache",
        **options,
    }  # fmt: skip
    return PretrainDataModule(prefix, SEQUENCE, **settings)


def blended_module() -> GPTLightningModule:
    config = tiny_config(vocab_size=VOCABULARY)
    return GPTLightningModule(config, learning_rate=1e-3)
