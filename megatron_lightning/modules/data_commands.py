"""``megatron-lightning data``: inspect and prepare the data of a configuration file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule

from megatron_lightning.data.indexed.data_inspection import inspect, length_picture
from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.indexed.indexed_merge import merge
from megatron_lightning.data.indexed.remote import written_path
from megatron_lightning.data.rows.preference_rows import SIDES
from megatron_lightning.data.rows.row_view import (
    as_numbers,
    histogram,
    new_console,
    sample_note,
    sample_text,
    stream_text,
)
from megatron_lightning.data.text.tokenizers import Tokenizer, TokenizerType, load_tokenizer
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules.finetune_data import FinetuneDataModule
from megatron_lightning.modules.indexed_data import IndexedDataModule
from megatron_lightning.modules.masked_data import MaskedDataModule
from megatron_lightning.modules.pretrain_data import PretrainDataModule

_INPUTS = (("text", "padding_mask"), ("text_enc", "enc_mask"), ("text_dec", "dec_mask"))
"""Inputs of masked samples with their masks of padding."""


def show(
    *,
    config: list[str] | None = None,
    overrides: list[str] | None = None,
    prefix: str | None = None,
    tokenizer_model: str | None = None,
    tokenizer_type: TokenizerType = "sentencepiece",
    samples: int = 3,
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

    Raises:
        ConfigError: If the files name no data supported by ``show``.
        DataError: If the data cannot be read.
    """
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
        _show_documents(console, prefix, tokenizer or None, samples)
        return
    data, model = data_of(config or [], overrides or [])
    if isinstance(data, FinetuneDataModule | IndexedDataModule):
        data.use_model(model)
        data.prepare_data()
        data.setup("fit")
    if isinstance(data, FinetuneDataModule):
        _show_conversations(console, data, samples)
    elif isinstance(data, PretrainDataModule):
        _show_stream(console, data, samples)
    elif isinstance(data, MaskedDataModule):
        _show_masked(console, data, samples)
    else:
        raise ConfigError(
            f"data is a {type(data).__name__}, and what can be shown is a FinetuneDataModule, a "
            "PretrainDataModule or a MaskedDataModule. Set data.class_path to one of "
            "megatron_lightning.modules."
        )


def _show_conversations(console: Any, data: FinetuneDataModule, samples: int) -> None:
    rows = data.train_dataset()
    order = list(data.row_order())
    for number, row in enumerate(order[:samples]):
        arrays = {name: tensor.numpy() for name, tensor in rows[row].items()}
        for name, sample in _samples(arrays).items():
            note = f"row {number + 1} of {len(order)}{name}: {sample_note(sample)}"
            console.rule(note, align="left")
            console.print(sample_text(sample, data.tokenizer.decode))
    console.rule("lengths", align="left")
    console.print(histogram(data.lengths, data.sequence_length))


def _show_stream(console: Any, data: PretrainDataModule, samples: int) -> None:
    """Print samples of pre-training, and the lengths of the documents of each data set."""
    dataset, tokenizer = data.train_dataset(), data.tokenizer
    decode = as_numbers if tokenizer is None else tokenizer.decode
    for number in range(min(samples, len(dataset))):
        sample = dataset[number]
        source = f", data set {int(sample['dataset_id'])}" if "dataset_id" in sample else ""
        title = f"sample {number + 1} of {len(dataset)}: {data.sequence_length} tokens{source}"
        console.rule(title, align="left")
        end = None if tokenizer is None else tokenizer.eod
        console.print(stream_text(sample["tokens"].tolist(), end, decode))
    _show_lengths(console, data)


def _show_masked(console: Any, data: MaskedDataModule, samples: int) -> None:
    """Print inputs of masked samples, of a decoder too, and the lengths of the documents."""
    dataset, tokenizer = data.train_dataset(), data.tokenizer
    decode = as_numbers if tokenizer is None else tokenizer.decode
    for number in range(min(samples, len(dataset))):
        sample = dataset[number]
        for text, mask in _INPUTS:
            if text in sample:
                ids = sample[text][: int(sample[mask].nonzero().max()) + 1].tolist()
                num_counted = int(sample["loss_mask"].sum())
                title = f"sample {number + 1} of {len(dataset)}: {text}, {num_counted} labels"
                console.rule(title, align="left")
                console.print(decode(ids), markup=False)
    _show_lengths(console, data)


def _show_lengths(console: Any, data: IndexedDataModule) -> None:
    for prefix in data.train_prefixes():
        console.rule("lengths", align="left")
        console.print(prefix)
        console.print(length_picture(IndexedDataset(prefix, data.config.block_cache)))


def _show_documents(console: Any, prefix: str, tokenizer: Tokenizer | None, samples: int) -> None:
    indexed = IndexedDataset(written_path(prefix, "prefix"))
    decode = as_numbers if tokenizer is None else tokenizer.decode
    bounds = indexed.document_indices.tolist()
    for number in range(min(samples, indexed.num_documents)):
        sequences = [indexed[i] for i in range(bounds[number], bounds[number + 1])]
        tokens = [token for sequence in sequences for token in sequence.tolist()]
        title = f"document {number + 1} of {indexed.num_documents}: {len(tokens)} tokens"
        console.rule(title, align="left")
        end = None if tokenizer is None else tokenizer.eod
        console.print(stream_text(tokens, end, decode))
    console.rule("lengths", align="left")
    console.print(length_picture(indexed))


def _samples(arrays: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the samples in a row by their names: one, or the answers of a pair."""
    if "tokens" in arrays:
        return {"": arrays}
    return {
        f", {side}": {"tokens": arrays[side], "labels": arrays[f"{side}_labels"]} for side in SIDES
    }


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
    data, model = data_of(config, overrides or [])
    if isinstance(data, FinetuneDataModule | IndexedDataModule):
        data.use_model(model)
    data.prepare_data()
    data.setup("fit")
    print("\n".join(f"{name}: {size} samples" for name, size in _sizes(data)))


def _sizes(data: LightningDataModule) -> list[tuple[str, int]]:
    """Return the sizes of the parts with a loader."""
    loaders: dict[str, Any] = {"train": data.train_dataloader(), "val": data.val_dataloader()}
    loaders_made = [(name, one) for name, one in loaders.items() if not isinstance(one, list)]
    return [(name, len(loader.sampler)) for name, loader in loaders_made]


def data_of(
    config: Sequence[str], overrides: Sequence[str] = ()
) -> tuple[LightningDataModule, LightningModule | None]:
    """Return the data module of configuration files, and the model if the files name a model. No
    Trainer is made.

    Args:
        config: Files. Later files win.
        overrides: Options such as ``data.packing=none``.

    Raises:
        ConfigError: If a file cannot be read, or names no data.
    """
    merged: dict[str, Any] = {}
    for path in config:
        merged = _merged(merged, _read(path))
    # Options of the Trainer and the optimizer are not parsed, so that files with other classes work
    # as well.
    options = [option for option in overrides if option.partition(".")[0] in ("data", "model")]
    if "data" not in merged and not any(option.startswith("data") for option in options):
        raise ConfigError(
            f"{', '.join(config)}: there is no section data; add one, as `fit` takes it"
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data", required=True)
    parser.add_subclass_arguments(LightningModule, "model", required=False)
    words = [f"--{name}={json.dumps(merged[name])}" for name in ("data", "model") if name in merged]
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    instances = instantiate(parser.parse_args([*words, *(f"--{option}" for option in options)]))
    return instances.data, instances.get("model")


def _read(path: str) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise DataError(
            f"{path}: cannot be read as YAML ({error}); set config to a file"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no sections; set config to a file that `fit` takes")
    return content


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(first)
    for key, value in second.items():
        are_mappings = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if are_mappings else value
    return merged


COMMANDS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {"show": show, "inspect": inspect, "merge": merge, "index": index}
)
"""Name of a tool -> function."""
