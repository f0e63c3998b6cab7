"""``megatron-lightning data``: inspect and prepare the data of a configuration file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule

from megatron_lightning.data.show import histogram, new_console, sample_note, sample_text
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules.finetune_data import FinetuneDataModule
from megatron_lightning.modules.pretrain_data import PretrainDataModule


def show(*, config: list[str], overrides: list[str] | None = None, samples: int = 3) -> None:
    """Print training samples of a configuration file with the trained tokens in color, and the
    lengths of the documents.

    Args:
        config: Configuration files of ``fit``. Later files win.
        overrides: Options of ``fit``, such as ``data.packing=none``.
        samples: Number of samples.

    Raises:
        ConfigError: If the files name no data supported by ``show``.
        DataError: If the data cannot be read.
    """
    if samples < 1:
        raise ConfigError(f"samples={samples}: set it to 1 or more")
    console = new_console()
    data, model = data_of(config, overrides or [])
    if not isinstance(data, FinetuneDataModule):
        raise ConfigError(
            f"data is a {type(data).__name__}, and what can be shown is a FinetuneDataModule. Set "
            "data.class_path to megatron_lightning.modules.FinetuneDataModule."
        )
    data.use_model(model)
    data.prepare_data()
    data.setup("fit")
    rows = data.train_dataset()
    order = list(data.row_order())
    for number, row in enumerate(order[:samples]):
        sample = {name: tensor.numpy() for name, tensor in rows[row].items()}
        console.rule(f"row {number + 1} of {len(order)}: {sample_note(sample)}", align="left")
        console.print(sample_text(sample, data.tokenizer.decode))
    console.rule("lengths", align="left")
    console.print(histogram(data.lengths, data.sequence_length))


def index(*, config: list[str], overrides: list[str] | None = None) -> None:
    """Build the inputs of a fit beside the data, before the job: sample indices of
    :class:`PretrainDataModule`, tokenized documents of :class:`FinetuneDataModule`.

    Args:
        config: Configuration files of ``fit``. Later files win.
        overrides: Options of ``fit``, such as ``data.cache_dir=cache``.

    Raises:
        ConfigError: If the files name no data.
        DataError: If the data cannot be read.
    """
    data, model = data_of(config, overrides or [])
    if isinstance(data, FinetuneDataModule | PretrainDataModule):
        data.use_model(model)
    data.prepare_data()
    data.setup("fit")
    print("\n".join(f"{name}: {size} samples" for name, size in _sizes(data)))


def _sizes(data: LightningDataModule) -> list[tuple[str, int]]:
    """Return the sizes of the parts with a loader."""
    loaders: dict[str, Any] = {"train": data.train_dataloader(), "val": data.val_dataloader()}
    made = [(name, one) for name, one in loaders.items() if not isinstance(one, list)]
    return [(name, len(loader.sampler)) for name, loader in made]


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
    named = [option for option in overrides if option.partition(".")[0] in ("data", "model")]
    if "data" not in merged and not any(option.startswith("data") for option in named):
        raise ConfigError(
            f"{', '.join(config)}: there is no section data; add one, as `fit` takes it"
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data", required=True)
    parser.add_subclass_arguments(LightningModule, "model", required=False)
    words = [f"--{name}={json.dumps(merged[name])}" for name in ("data", "model") if name in merged]
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    made = instantiate(parser.parse_args([*words, *(f"--{option}" for option in named)]))
    return made.data, made.get("model")


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
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


COMMANDS = MappingProxyType({"show": show, "index": index})
"""Name of a tool -> function."""
