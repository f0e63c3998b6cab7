"""Names of files in folders of Hugging Face, in folders of ``peft`` and in checkpoints. No torch
here.

A name is spelled here alone; a test looks for further copies.
"""

from __future__ import annotations

import re

# ---------------------------------------------------------------------- a folder of Hugging Face

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = f"{WEIGHTS}.index.json"
PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = f"{PICKLED_WEIGHTS}.index.json"
CARD = "README.md"
MODELOPT_CONFIG = "hf_quant_config.json"
"""Settings of quantized weights, by ModelOpt."""
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SENTENCEPIECE = "tokenizer.model"
PROCESSOR_CONFIG = "processor_config.json"
IMAGE_PROCESSOR_CONFIG = "preprocessor_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATES = "additional_chat_templates"
"""Folder of further templates."""
REWARD_TEXTS = "reward_texts.json"
"""Options by which pairs became texts of a reward model."""

# ------------------------------------------------------------------------------ a folder of peft

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PICKLED_ADAPTERS = ("adapter_model.bin", "adapter_model.pt")

# ---------------------------------------------------------------------------------- a checkpoint

MANIFEST = "manifest.json"
EXPORT_FOLDER = "hugging_face"
"""Folder in a checkpoint with the weights for ``transformers``, if requested."""
OUR_FILES = re.compile(r"(tensors|state)\.[0-9a-f]{12}\..+")
"""Names of the files of a checkpoint, without the manifest."""


def state_file(identifier: str) -> str:
    """Return the name of the file with everything but tensors.

    Args:
        identifier: Twelve hexadecimal digits of the save.
    """
    return f"state.{identifier}.pt"


def shard_stem(identifier: str, number: int) -> str:
    """Return the beginning of the names of a rank's tensor files.

    Args:
        identifier: Twelve hexadecimal digits of the save.
        number: The rank.
    """
    return f"tensors.{identifier}.{number:05d}"


# ---------------------------------------------------------------------------------- a run's folder

INJECTED_FAULTS = "injected_faults.jsonl"
"""Notes of faults on purpose."""
DUMP = "dump.safetensors"
"""Tensors of one step."""
