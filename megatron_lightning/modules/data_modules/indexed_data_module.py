"""Base of data modules over indexed files."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from megatron_lightning.checkpoint.kept_files import TOKENIZER, KeptFiles
from megatron_lightning.data.pretraining.indexed_data import IndexedData
from megatron_lightning.data.text.tokenizers import tokenizer_files
from megatron_lightning.modules.data_modules.run_data_module import RunDataModule


class IndexedDataModule(RunDataModule, IndexedData):
    """Face of :class:`IndexedData` for Lightning. A checkpoint keeps the tokenizer beside the order
    of the samples.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the order of training samples and the tokenizer, as plain
        values.
        """
        return {**super().state_dict(), **self._kept_tokenizer}

    @cached_property
    def _kept_tokenizer(self) -> dict[str, Any]:
        """The tokenizer for a checkpoint, so that text needs no other file."""
        tokenizer = self._named
        if tokenizer is None:
            return {}
        files = tokenizer_files(tokenizer.tokenizer, tokenizer.model)
        settings = {"type": tokenizer.type, "model": tokenizer.model}
        return {TOKENIZER: {**settings, "files": KeptFiles(files).to_state()}}
