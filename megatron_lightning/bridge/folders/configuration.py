"""Configurations of ``transformers``: read from a folder, and written into one."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_lightning.errors import ConfigError, MissingCheckpointError
from megatron_lightning.file_names import CONFIG, GENERATION_CONFIG
from megatron_lightning.optional import HF_FOLDER, require

TIE = "tie_word_embeddings"
"""Entry of a configuration: whether embedding and output layer share a weight."""
_SAME_AS = MappingProxyType({"kimi_k2": "deepseek_v3"})
"""Model type unknown to ``transformers`` -> equivalent type known to ``transformers``."""


def config_file(path: Path) -> Path:
    """Return the file with a folder's configuration.

    Raises:
        MissingCheckpointError: If the folder has none.
    """
    file = path / CONFIG
    if not file.is_file():
        raise MissingCheckpointError(
            f"{path} has no config.json, so its model is unknown. Name a folder that "
            "save_pretrained of transformers has written."
        )
    return file


def load_config(path: Path, *, trust_remote_code: bool) -> Any:
    """Return the configuration of a folder.

    Raises:
        MissingCheckpointError: If the folder has none.
        ConfigError: If the configuration is damaged, or ``transformers`` does not know the model.
    """
    require("transformers", HF_FOLDER)
    from transformers import AutoConfig

    file = config_file(path)
    values = _json_of(file)
    try:
        if values.get("model_type") in _SAME_AS:
            other_values = {k: v for k, v in values.items() if k not in ("model_type", "auto_map")}
            return AutoConfig.for_model(_SAME_AS[values["model_type"]], **other_values)
        # False, not None: transformers would ask on the terminal of every rank.
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except ValueError as error:
        advice = "Install a version of transformers that knows it."
        if "auto_map" in values and not trust_remote_code:
            advice = "The folder has code of its own: set trust_remote_code=True if you trust it."
        raise ConfigError(
            f"{file} describes a model of type {values.get('model_type')!r}, which cannot be made "
            f"({str(error).splitlines()[0]}). {advice}"
        ) from error


def with_overrides(config: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a copy of a configuration of ``transformers`` with other values.

    Raises:
        ConfigError: If the configuration has no such entry.
    """
    config = copy.deepcopy(config)
    for key, value in overrides.items():
        if not hasattr(config, key):
            raise ConfigError(
                f"config_overrides has {key!r}, and {type(config).__name__} has no such entry. "
                "Name an entry of config.json, or of the class."
            )
        setattr(config, key, value)
        text = config.get_text_config()
        if key == TIE and text is not config:  # both are read, by different classes
            setattr(text, key, value)
    return config


def check_overrides(config: Any, overrides: Mapping[str, Any], checkpoint: str) -> None:
    """Check that the configuration kept in a checkpoint has these values already.

    Raises:
        ConfigError: If a value is another one, or the configuration has no such entry.
    """
    wanted = with_overrides(config, overrides)
    for key in overrides:
        value, kept = getattr(wanted, key), getattr(config, key)
        if not _says(kept, value):
            raise ConfigError(
                f"config_overrides sets {key} to {value!r}, and the run resumes from {checkpoint}, "
                f"whose model has {kept!r}: a resumed model keeps its configuration. Set {key} to "
                f"{kept!r}, or leave it out. To train with {value!r}, export the checkpoint as a "
                "folder, and begin from the folder: megatron-lightning convert export."
            )


def _says(kept: Any, value: Any) -> bool:
    """Return whether a kept value is this one. ``transformers`` adds entries to nested values."""
    kept = kept.to_dict() if hasattr(kept, "to_dict") else kept
    if isinstance(kept, Mapping) and isinstance(value, Mapping):
        return all(key in kept and _says(kept[key], entry) for key, entry in value.items())
    if isinstance(kept, (list, tuple)) and isinstance(value, (list, tuple)):
        return list(kept) == list(value)
    return bool(kept == value)


def with_vocabulary_size(config: Any, size: int) -> Any:
    """Return a copy of a configuration of ``transformers`` with another size of the vocabulary."""
    config = copy.deepcopy(config)
    for own in (config, config.get_text_config()):
        if hasattr(own, "vocab_size"):
            own.vocab_size = size
    return config


def load_generation_config(path: Path) -> Any:
    """Return the configuration of text generation. None: the folder has none."""
    require("transformers", HF_FOLDER)
    from transformers import GenerationConfig

    file = path / GENERATION_CONFIG
    return GenerationConfig.from_dict(dict(_json_of(file))) if file.is_file() else None


def _json_of(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} is no JSON ({error}). Download or restore the folder."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is no JSON object. Download or restore the folder.")
    return values


def config_text(config: Any) -> bytes:
    """Return the content of a new config.json."""
    values = json.loads(config.to_json_string(use_diff=True))
    add_rope_schema(values)
    for alias, key in config.attribute_map.items():
        if alias == "num_experts" and key in values:  # of Qwen-MoE, before transformers 5
            values.setdefault(alias, values[key])
    if "dtype" in values:
        values.setdefault("torch_dtype", values["dtype"])
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"


def add_rope_schema(plain: dict[str, Any]) -> None:
    """Add rotary settings for versions before 5 to the content of a config.json.

    ``transformers`` 5 keeps rotary settings in ``rope_parameters``. Versions before 5 read
    ``rope_theta`` and ``rope_scaling``, and would silently use default values.
    """
    rope = plain.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        plain.setdefault("rope_theta", rope["rope_theta"])
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        if scaling.get("rope_type", "default") != "default":
            plain.setdefault("rope_scaling", scaling)
