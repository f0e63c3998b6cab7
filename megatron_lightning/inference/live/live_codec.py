"""The tokenizer of a model in training, for callbacks that write and score text."""

from __future__ import annotations

from functools import partial

from torch import nn

from megatron_lightning.bridge.folders.remembered_folders import kept_folders, text_record
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.data.images.image_prompts import ImagePrompts, prompts_if_any
from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.text_codec import (
    Codec,
    codec_of,
    codec_of_files,
    load_codec,
)


def find_codec(
    module: nn.Module,
    data: object,
    tokenizer_model: str | None,
    tokenizer_type: TokenizerType,
) -> Codec:
    """Return the codec of a tokenizer: named by the user, saved with the model, or used for the
    training data.

    Args:
        module: The LightningModule.
        data: The data module, or None.
        tokenizer_model: The user's choice, or None.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.

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
    tokenizer = getattr(data, "tokenizer", None)
    if tokenizer is None:
        raise ConfigError(
            f"{type(module).__name__} came without a tokenizer, and the data module has none. Set "
            "tokenizer_model to the tokenizer that made the training data."
        )
    return codec_of(tokenizer, f"the tokenizer of {type(data).__name__}")


def find_image_prompts(module: nn.Module, codec: Codec) -> ImagePrompts | None:
    """Return the maker of prompts with images of a model in training. None: the model reads text
    alone.

    Args:
        module: The LightningModule.
        codec: Codec of the model's tokenizer.
    """
    tokenizer = getattr(codec, "tokenizer", None)
    for kept in kept_folders(module).values() if tokenizer is not None else ():
        with kept.files.unpacked() as folder:
            if found := prompts_if_any(partial(ImagePrompts.load, folder, tokenizer)):
                return found
    return None
