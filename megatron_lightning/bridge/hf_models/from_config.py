"""The folder of a model from a configuration, like the output of ``save_pretrained``."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from megatron_lightning.bridge.folders.configuration import config_text
from megatron_lightning.bridge.folders.folder_record import KeptFolder
from megatron_lightning.bridge.folders.new_files import new_files
from megatron_lightning.bridge.hf_models.transformers_model import saved_table
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import CARD, CONFIG, GENERATION_CONFIG, WEIGHTS_INDEX
from megatron_lightning.optional import HF_FOLDER, require

_CARD = """# {name}

A {architecture} of `transformers`, trained with
[megatron_lightning](https://pypi.org/project/megatron-lightning/) from initial weights.
"""


def new_folder(config: Any, max_shard_size: str = "5GB") -> KeptFolder:
    """Return the folder of a configuration, without weights.

    Args:
        config: Configuration of ``transformers``.
        max_shard_size: Largest file of weights.

    Raises:
        ConfigError: If ``transformers`` has no causal language model for the configuration.
    """
    model_class = _class_of(config)
    # transformers writes into the configuration that a model is made of.
    config = copy.deepcopy(config)
    config.architectures = [model_class.__name__]
    with torch.device("meta"):
        model = model_class(config)
    files = new_files(saved_table(model), max_shard_size)
    contents = {
        CONFIG: config_text(config),
        GENERATION_CONFIG: generation_text(config),
        CARD: model_card(model_class.__name__),
    }
    if files.index_file is not None:
        contents[WEIGHTS_INDEX] = files.index_file
    return KeptFolder(
        Path(f"a new {model_class.__name__}"),
        origin="",
        revision=None,
        files=KeptFiles(contents),
        tables=files.headers,
        ignored={},
    )


def generation_text(config: Any) -> bytes:
    """Return the content of generation_config.json: the tokens around generated text."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    values = {name: getattr(config, name, None) for name in names}
    set_values = {name: value for name, value in values.items() if value is not None}
    return json.dumps(set_values, indent=2, sort_keys=True).encode() + b"\n"


def model_card(architecture: str) -> bytes:
    """Return the content of README.md, with metadata for the Hub."""
    require("huggingface_hub", HF_FOLDER)
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation")
    text = _CARD.format(name="Model", architecture=architecture)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")).encode()


def _class_of(config: Any) -> Any:
    require("transformers", HF_FOLDER)
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    names = list(getattr(config, "architectures", None) or ())
    model_class = next((getattr(transformers, name, None) for name in names), None)
    if model_class is None:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ConfigError(
            f"transformers {transformers.__version__} has no causal language model for "
            f"{type(config).__name__} with architectures {names}. Set config.architectures to the "
            "name of a class that it has."
        )
    return model_class
