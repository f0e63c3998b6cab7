"""A command of ``pretrain_gpt.py`` as a configuration file, with a list of what has no counterpart.

The table of names says where an option goes. The other files here give values that are written
otherwise, by the name there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_lightning.config import StrategySettings, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.names.lookup import ALWAYS, CALLBACK, Name
from megatron_lightning.names.lookup import options as known_options
from megatron_lightning.recipe_reading.from_megatron.model import convert_model
from megatron_lightning.recipe_reading.from_megatron.options import (
    Options,
    launch_options,
    value_of,
)
from megatron_lightning.recipe_reading.from_megatron.run import convert_data, convert_files
from megatron_lightning.recipe_reading.from_megatron.shell import read_command
from megatron_lightning.recipe_reading.from_megatron.sizes import (
    convert_parallelism,
    convert_sizes,
    read_sizes,
)
from megatron_lightning.recipe_reading.from_megatron.training import (
    convert_optimizer,
    convert_precision,
)

_CLASSES: Mapping[str, str] = {
    "trainer.strategy": "megatron_lightning.strategies.MegatronStrategy",
    "model": "megatron_lightning.modules.GPTLightningModule",
    "data": "megatron_lightning.modules.PretrainDataModule",
}
_SEED = 1234
_TRAINER = (
    "accelerator", "num_nodes", "devices", "precision", "plugins", "strategy", "max_steps",
    "max_epochs", "max_time",
)  # fmt: skip
_SECTIONS = ("seed_everything", "trainer", "model", "data", "ckpt_path")


class _Dumper(yaml.SafeDumper):
    """Writes a list of numbers or words in one line."""


def _write_list(dumper: _Dumper, values: list[Any]) -> yaml.SequenceNode:
    is_flat = not any(isinstance(value, list | dict) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=is_flat)


_Dumper.add_representer(list, _write_list)


class Converted(NamedTuple):
    """A configuration."""

    sections: Mapping[str, Any]
    """Sections of the file."""
    left_out: Sequence[str]
    """A sentence for each option that is not in the file."""

    def text(self, title: str) -> str:
        """Return the file."""
        lines = [f"# {title}"]
        if self.left_out:
            lines += ["# Not in this file:", *(f"#   {sentence}" for sentence in self.left_out)]
        body = yaml.dump(dict(self.sections), Dumper=_Dumper, sort_keys=False, width=1000)
        return "\n".join(lines) + f"\n{body}"


def convert(words: Sequence[str]) -> Converted:
    """Return the configuration of options of ``pretrain_gpt.py`` and of torchrun.

    Raises:
        ConfigError: If an option needs a value and has none, or the command leaves out a number.
    """
    options = Options(words)
    for name in options.given.keys() & _NEED_A_VALUE:
        if not options.given[name]:
            raise ConfigError(f"--{name.replace('_', '-')} has no value. Write one behind it.")
    sizes = read_sizes(options)
    values = convert_sizes(options, sizes) | convert_parallelism(options)
    values |= convert_model(options) | convert_optimizer(options, sizes)
    values |= convert_precision(options) | convert_data(options) | convert_files(options)
    left_out = [_sentence(name, known_options().get(name)) for name in options.left]
    for name, typed in options.rest().items():
        row = known_options().get(name)
        if row is not None and (row.is_option or row.here.startswith(CALLBACK)):
            values.setdefault(name, value_of(name, [row.value] if row.value else typed))
        elif name in options.given and (row is None or row.here != ALWAYS):
            left_out.append(_sentence(name, row))
    return Converted(_sections(values), left_out)


_NEED_A_VALUE = frozenset(
    {
        "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings",
        "lr", "nproc_per_node", "nnodes", "data_path", "save", "load", "tokenizer_model",
    }
)  # fmt: skip


def _sentence(name: str, row: Name | None) -> str:
    shown = f"--{name.replace('_', '-')}"
    return f"{shown} is unknown here" if row is None else row.answer(shown)


def _sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a file, of values by Megatron's names or by our paths."""
    flat: dict[str, Any] = {"trainer.accelerator": "gpu", "trainer.max_epochs": 1}
    if values["seed"] != _SEED:
        flat |= {"model.config.init_seed": values["seed"], "data.seed": values["seed"]}
    callbacks = list(values.get("save", []))
    for name, value in values.items():
        row = known_options().get(name)
        if row is None:
            flat[name] = value
        elif row.here.startswith(CALLBACK):
            path = f"megatron_lightning.callbacks.{row.here.removeprefix(CALLBACK)}"
            callbacks += [] if {"class_path": path} in callbacks else [{"class_path": path}]
        elif name != "save":
            flat[row.here] = value
    if callbacks:
        flat["trainer.callbacks"] = callbacks
    nested: dict[str, Any] = {name: {} for name in _SECTIONS}
    for path, class_path in _CLASSES.items():
        _put(nested, path.split("."), {"class_path": class_path, "init_args": {}})
    for path, value in flat.items():
        owner = next((owner for owner in _CLASSES if path.startswith(f"{owner}.")), None)
        arguments = path if owner is None else path.replace(owner, f"{owner}.init_args", 1)
        _put(nested, arguments.split("."), value)
    _order(nested["trainer"], _TRAINER)
    _order(nested["trainer"]["strategy"]["init_args"], _names(StrategySettings))
    _order(nested["model"]["init_args"], ("config",))
    _order(nested["model"]["init_args"]["config"], _names(TransformerConfig))
    _order(nested["data"]["init_args"], ("data_prefix", "mock", "sequence_length"))
    return {name: section for name, section in nested.items() if section != {}}


def _names(kind: type) -> Sequence[str]:
    return [field.name for field in fields(kind)]


def _order(section: dict[str, Any], names: Sequence[str]) -> None:
    """Put the keys of these names first, in their order."""
    first = [name for name in names if name in section]
    ordered = {name: section.pop(name) for name in first}
    rest = dict(section)
    section.clear()
    section |= ordered | rest


def _put(nested: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    section = nested
    for key in keys[:-1]:
        section = section.setdefault(key, {})
    section[keys[-1]] = value


def from_megatron(command: list[str], *, extra: str = "", output: str | None = None) -> None:
    """Write a command of Megatron-LM's ``pretrain_gpt.py`` as a configuration file, and list the
    options without a counterpart. Nothing is run.

    Args:
        command: A shell script and its arguments, or the options in quotes.
        extra: Options added behind those of the script, such as "--vocab-size 32000".
        output: File to write. None: print the configuration, with the list as a comment.

    Raises:
        ConfigError: If the script or an option cannot be read, or the file exists already.
    """
    first, *arguments = command
    script = Path(first)
    is_script = len(first.split()) == 1 and (script.is_file() or script.suffix == ".sh")
    if is_script and not script.is_file():
        raise ConfigError(f"there is no script {script}.")
    text = script.read_text(encoding="utf-8") if is_script else first
    found = read_command(text, arguments)
    words = [*launch_options(found.launcher), *found.options, *shlex.split(extra)]
    converted = convert(words)
    title = f"From {script.name if is_script else 'options'} of Megatron-LM."
    if output is None:
        print(converted.text(title), end="")
        return
    target = Path(output)
    if target.exists():
        raise ConfigError(f"{target} exists already. Name another file by --output.")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(converted.text(title), encoding="utf-8")
    print("\n".join([*converted.left_out, str(target)]))
