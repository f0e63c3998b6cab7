"""Data of a configuration file, made without a Trainer.

Data of this package are plain objects, and need of the section ``model`` what describes folder and
vocabulary. Lightning is imported for classes of others, and for a model known only as an object.
"""

from __future__ import annotations

import json
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from megatron_lightning.config import TransformerConfig
from megatron_lightning.data.run_data import RunData
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.mistakes import Errors
from megatron_lightning.modules.model_facts import ModelFacts, ModelFolder
from megatron_lightning.recipe_reading.sections import read_sections

_MODULES = "megatron_lightning.modules"
_PLAIN: Mapping[str, str] = MappingProxyType(
    {
        "FinetuneDataModule": "megatron_lightning.data.rows.finetune_data.FinetuneData",
        "MaskedDataModule": "megatron_lightning.data.masked.masked_data.MaskedData",
        "PreferenceDataModule": "megatron_lightning.data.rows.preference_data.PreferenceData",
        "PretrainDataModule": "megatron_lightning.data.pretraining.pretrain_data.PretrainData",
        "RolloutDataModule": "megatron_lightning.data.rollouts.rollout_data.RolloutData",
    }
)
"""LightningDataModule -> plain class with the same options."""
_CLASS_KEYS = ("data", "data.class_path")


def data_of(config: Sequence[str], overrides: Sequence[str] = ()) -> Any:
    """Return the data of configuration files, told of the model if the files name one. No Trainer
    is made.

    Args:
        config: Files. Later files win.
        overrides: Options such as ``data.packing=none``.

    Returns:
        A :class:`RunData`, or a LightningDataModule of another class.

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
    errors = Errors()
    sections = read_sections(config, options, errors) or {}
    kind, _ = _class_and_options(sections.get("data"))
    facts = _model_facts(sections.get("model"), needs_vocabulary=kind == "PretrainDataModule")
    if errors.found or kind not in _PLAIN or facts is None:
        return _lightning_data(merged, options)
    data = _plain_data(kind, merged.get("data"), options)
    data.use_model(facts)
    return data


def _plain_data(kind: str, section: Any, options: Sequence[str]) -> RunData:
    """Return the plain object of a data module of ours."""
    plain = _PLAIN[kind]
    given = {"class_path": plain}
    if isinstance(section, Mapping) and _class_and_options(section)[0] == kind:
        given = {**section, **given}
    words = [
        option
        for option in options
        if option.startswith("data.") and option.partition("=")[0] not in _CLASS_KEYS
    ]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(RunData, "data", required=True)
    import_module(plain.rpartition(".")[0])
    try:
        data: RunData = _instances(parser, {"data": given}, words).data
    except ArgumentError as error:
        raise ConfigError(str(error).replace(plain, f"{_MODULES}.{kind}")) from error
    return data


def _lightning_data(merged: Mapping[str, Any], options: Sequence[str]) -> Any:
    """Return a data module of any class, told of the module."""
    from lightning.pytorch import LightningDataModule, LightningModule

    modules = import_module(_MODULES)
    for name in modules.__all__:  # the parser finds the classes behind short names
        getattr(modules, name)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data", required=True)
    parser.add_subclass_arguments(LightningModule, "model", required=False)
    instances = _instances(parser, merged, options)
    if isinstance(instances.data, RunData):
        instances.data.use_model(instances.get("model"))
    return instances.data


def _instances(parser: ArgumentParser, merged: Mapping[str, Any], options: Sequence[str]) -> Any:
    words = [f"--{name}={json.dumps(merged[name])}" for name in ("data", "model") if name in merged]
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    return instantiate(parser.parse_args([*words, *(f"--{option}" for option in options)]))


def _class_and_options(section: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the class of a section and its arguments. The class is the short name of a module of
    ours, and the full path of another one.
    """
    if isinstance(section, str):
        section = {"class_path": section}
    path = section.get("class_path") if isinstance(section, Mapping) else None
    if not isinstance(path, str):
        return "", {}
    module, _, name = path.rpartition(".")
    is_ours = module in ("", _MODULES) or module.startswith(f"{_MODULES}.")
    arguments = section.get("init_args") or {}
    return name if is_ours else path, arguments if isinstance(arguments, Mapping) else {}


def _model_facts(section: Any, *, needs_vocabulary: bool) -> ModelFacts | None:
    """Return the facts of a section ``model``. None: they are known from the object alone."""
    if section is None:
        return ModelFacts()
    kind, options = _class_and_options(section)
    if kind in ("DPOModule", "DistillationModule", "PolicyModule", "RewardModule"):
        facts = _model_facts(options.get("model"), needs_vocabulary=needs_vocabulary)
        is_scored, is_reward = options.get("reference") == "scores", kind == "RewardModule"
        return facts and replace(facts, reads_scores=is_scored, reads_margins=is_reward)
    folder = options.get("init_from_hf" if kind == "GPTLightningModule" else "path")
    if kind in ("HuggingFaceModule", "MaskedLanguageModule") and isinstance(folder, str):
        return ModelFacts(folder=_folder(folder, options))
    if kind != "GPTLightningModule" or not isinstance(folder, str | None):
        return None
    if options.get("config") is None and (folder is None or needs_vocabulary):
        return None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model.config", type=TransformerConfig | None)
    words = [f"--model.config={json.dumps(options.get('config'))}"]
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    config: TransformerConfig | None = instantiate(parser.parse_args(words)).model.config
    moe = None if config is None else config.moe
    return ModelFacts(
        folder=None if folder is None else _folder(folder, options),
        vocab_size=None if config is None else config.vocab_size,
        fills_experts=moe is not None and moe.pad_expert_input_to_capacity,
    )


def _folder(path: str, options: Mapping[str, Any]) -> ModelFolder:
    return ModelFolder(
        path=path,
        revision=options.get("revision"),
        trust_remote_code=bool(options.get("trust_remote_code")),
    )


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
