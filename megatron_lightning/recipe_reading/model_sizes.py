"""Sizes of the model in a Hugging Face folder, or in a class of the user's.

Torch is imported by the call: a recipe with the sizes of a model is planned without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.models.measured import MeasuredModel
from megatron_lightning.planning.ledger.tower_memory import TowerSizes


def folder_config(path: str, **options: Any) -> TransformerConfig:
    """Return the configuration of the :class:`GPTModel` with the sizes of a folder.

    Args:
        path: Folder or Hub id.
        options: Options of ``AutoBridge.from_hf_pretrained``.

    Raises:
        ConfigError: If the folder cannot be read, or holds another kind of model.
    """
    from megatron_lightning.bridge.auto import AutoBridge

    try:
        return AutoBridge.from_hf_pretrained(path, **options).to_config()
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def folder_sizes(
    path: str, frozen: Mapping[str, Sequence[str]], **options: Any
) -> tuple[TransformerConfig, TowerSizes | None]:
    """Return the sizes of the text model of a folder, and of a tower of images. None: the model
    reads text alone.

    Args:
        path: Folder or Hub id.
        frozen: ``freeze`` and ``train_only`` of the module.
        options: Options of ``AutoBridge.from_hf_pretrained``.

    Raises:
        ConfigError: If the folder cannot be read, or holds another kind of model.
    """
    from megatron_lightning.bridge.auto import is_checkpoint
    from megatron_lightning.recipe_reading.image_models import image_model

    is_folder = "family" not in options and not is_checkpoint(path)
    try:
        found = image_model(path, **frozen, **options) if is_folder else None
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return (folder_config(path, **options), None) if found is None else found


def measured_model(
    class_path: str,
    init_args: Mapping[str, Any],
    *,
    half: bool,
    pipeline: PipelineOptions | None,
    plan: Any,
) -> TransformerConfig | MeasuredModel:
    """Return the sizes of a user's module: the configuration of its :class:`GPTModel`, or measures
    of a run without values.

    Args:
        class_path: Class of the module.
        init_args: The class's arguments, as in a configuration file.
        half: Whether activations have 2 bytes.
        pipeline: The strategy's options of the pipeline.
        plan: The strategy's ``sharding_plan``.

    Raises:
        ConfigError: If the module cannot be made or run.
    """
    if plan not in (None, "auto"):
        raise ConfigError(
            f"sharding_plan is {plan!r}, and a plan of {class_path} knows plans of the module "
            'itself and "auto". Give the module a sharding_plan().'
        )
    from megatron_lightning.assembly.measure import measure

    return measure(class_path, init_args, half=half, plan=plan, pipeline=pipeline)
