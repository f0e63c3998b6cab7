"""Hand the text record of the training data to the module, its checkpoints and exported folders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule

from megatron_lightning.bridge.folders.folder_record import remember
from megatron_lightning.bridge.folders.remembered_folders import kept_folders, remember_texts
from megatron_lightning.checkpoint.text_record import TextRecord, end_tokens


def apply_text_record(module: LightningModule, record: TextRecord) -> None:
    """Give a module the record of its data. The folders of the module's models get the texts at
    once, so that checkpoints, exports and engines have the same. Models of ``transformers`` stop at
    the new end tokens.

    Call this after ``configure_model``.
    """
    folders = kept_folders(module)
    for path, folder in folders.items():
        contents = record.applied_to(folder.files.contents)
        if contents == folder.files.contents:
            continue
        model: Any = module.get_submodule(path)
        remember(model, folder.with_files(contents))
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.eos_token_id = list(end_tokens(contents)) or None
    # Files of the folder in the same checkpoint have the tokenizer.
    remember_texts(module, replace(record, tokenizer=None) if folders else record)
