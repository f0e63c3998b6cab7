"""``megatron-lightning data``: inspect and prepare the data of a configuration file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megatron_lightning.data.indexed.data_inspection import inspect
from megatron_lightning.data.indexed.indexed_merge import merge
from megatron_lightning.data.rows.row_view import new_console
from megatron_lightning.data.text.tokenizers import TokenizerType, load_tokenizer
from megatron_lightning.errors import ConfigError
from megatron_lightning.printed_json import json_text


def show(
    *,
    config: list[str] | None = None,
    overrides: list[str] | None = None,
    prefix: str | None = None,
    tokenizer_model: str | None = None,
    tokenizer_type: TokenizerType = "sentencepiece",
    samples: int = 3,
    json: bool = False,
) -> None:
    """Print training samples of a configuration file, or documents of an indexed data set, as text,
    and the lengths of the documents.

    Of conversations, the trained tokens are in color. In samples of pre-training, the ends of
    documents are marked. Without a tokenizer, ids are printed.

    Args:
        config: Configuration files of ``fit``. Later files win.
        overrides: Options of ``fit``, such as ``data.packing=none``.
        prefix: Prefix of an indexed data set, in the place of configuration files.
        tokenizer_model: Tokenizer of the indexed data set.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.
        samples: Number of samples or documents.
        json: Print JSON: num_samples, samples.

    Raises:
        ConfigError: If the files name no data supported by ``show``.
        DataError: If the data cannot be read.
    """
    from megatron_lightning.data.shown_samples import (
        document_values,
        sample_values,
        show_documents,
        show_samples,
    )

    if samples < 1:
        raise ConfigError(f"samples={samples}: set it to 1 or more")
    if (config is None) == (prefix is None):
        raise ConfigError(
            f"config is {config} and prefix is {prefix}. Set one of the two: configuration files "
            "of `fit`, or the prefix of an indexed data set."
        )
    console = new_console()
    if prefix is not None:
        tokenizer = tokenizer_model and load_tokenizer(tokenizer_model, tokenizer_type)
        if json:
            print(json_text(document_values(prefix, tokenizer or None, samples), indent=None))
            return
        show_documents(console, prefix, tokenizer or None, samples)
        return
    data = _prepared(config or [], overrides or [])
    if json:
        print(json_text(sample_values(data, samples), indent=None))
        return
    show_samples(console, data, samples)


def index(*, config: list[str], overrides: list[str] | None = None) -> None:
    """Build the inputs of a fit beside the data, before the job: sample indices of
    :class:`PretrainDataModule` and :class:`MaskedDataModule`, tokenized documents of
    :class:`FinetuneDataModule`.

    Args:
        config: Configuration files of ``fit``. Later files win.
        overrides: Options of ``fit``, such as ``data.cache_dir=cache``.

    Raises:
        ConfigError: If the files name no data.
        DataError: If the data cannot be read.
    """
    data = _prepared(config, overrides or [])
    print("\n".join(f"{name}: {size} samples" for name, size in _sizes(data)))


def _prepared(config: list[str], overrides: list[str]) -> Any:
    """Return the data of configuration files, ready for a fit."""
    from megatron_lightning.data.rows.finetune_data import FinetuneData
    from megatron_lightning.modules.data_modules.data_sections import data_of

    data = data_of(config, overrides)
    data.prepare_data()
    data.setup("fit")
    if isinstance(data, FinetuneData) and not hasattr(data, "trainer"):  # a data module logs it
        print(data.describe(), file=sys.stderr)
    return data


def _sizes(data: Any) -> list[tuple[str, int]]:
    """Return the sizes of the parts with a loader."""
    loaders: dict[str, Any] = {"train": data.train_dataloader(), "val": data.val_dataloader()}
    loaders_made = [(name, one) for name, one in loaders.items() if not isinstance(one, list)]
    return [(name, len(loader.sampler)) for name, loader in loaders_made]


COMMANDS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {"show": show, "inspect": inspect, "merge": merge, "index": index}
)
"""Name of a tool -> function."""
