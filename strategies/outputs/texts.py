"""A tokenizer and an engine for callbacks that write and score text, under any strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from megatron_lightning.bridge.folders.remembered_folders import kept_folders, text_record
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.text_codec import (
    Codec,
    codec_of,
    codec_of_files,
    load_codec,
)
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.inference.engine.text_engine import Engine
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.strategies.megatron import MegatronStrategy
from megatron_lightning.strategies.outputs.engines import find_text_model


def find_codec(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    tokenizer_model: str | None,
    tokenizer_type: TokenizerType,
) -> Codec:
    """Return the codec of a tokenizer: named by the user, saved with the model, or used for the
    training data.

    Raises:
        ConfigError: If no tokenizer is found.
    """
    if tokenizer_model is not None:
        return load_codec(tokenizer_model, tokenizer_type)
    for path, folder in kept_folders(module).items():
        codec = codec_of_files(folder.files, path or type(module).__name__)
        if codec is not None:
            return codec
    record = text_record(module)
    if record is not None and record.tokenizer is not None:  # a model without a folder
        codec = codec_of_files(KeptFiles(record.applied_to({})), type(module).__name__)
        if codec is not None:
            return codec
    data: Any = getattr(trainer, "datamodule", None)
    tokenizer = getattr(data, "tokenizer", None)
    if tokenizer is None:
        raise ConfigError(
            f"{type(module).__name__} came without a tokenizer, and the data module has none. Set "
            "tokenizer_model to the tokenizer that made the training data."
        )
    return codec_of(tokenizer, f"the tokenizer of {type(data).__name__}")


def text_engine(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    codec: Codec,
    options: EngineOptions | None = None,
) -> Engine | OwnGenerate:
    """Return an engine for the model of a running Trainer, under any strategy.

    Raises:
        ConfigError: If no model can write text on this layout.
    """
    if isinstance(trainer.strategy, MegatronStrategy):
        return trainer.strategy.engine(options, stops=codec.stops, decode=codec.decode)
    model = find_text_model(module)
    if not isinstance(model, GPTModel):
        raise ConfigError(
            f"{type(model).__name__} writes text under MegatronStrategy only. Set "
            "strategy=MegatronStrategy() (on one device, too)."
        )
    return Engine.of(
        model,
        options=options,
        stops=codec.stops,
        decode=codec.decode,
        keeps_cache=False,
        forward_context=trainer.precision_plugin.val_step_context,
    )
