"""Checkpoints and models as Hugging Face folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_lightning.assembly.state.left_out import refuse_partial
from megatron_lightning.bridge.auto import AutoBridge, is_checkpoint
from megatron_lightning.bridge.folder_model import Owner, Plan
from megatron_lightning.bridge.folders.export import write_folder
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.folders.new_folder import new_gpt_folder
from megatron_lightning.bridge.folders.remembered_folders import kept_folders
from megatron_lightning.bridge.gpt import gpt_config
from megatron_lightning.bridge.low_bit.trained import TrainedWeights
from megatron_lightning.bridge.megatron_checkpoints.megatron import MegatronBridge
from megatron_lightning.bridge.megatron_checkpoints.torch_dist import is_megatron
from megatron_lightning.bridge.tensors.inverse import assembled
from megatron_lightning.bridge.tensors.lazy import Fill, Lazy
from megatron_lightning.bridge.tensors.values import fills_of_checkpoint, fills_of_model
from megatron_lightning.checkpoint.kept_files import kept_entry
from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
from megatron_lightning.checkpoint.text_record import TextRecord
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import CONFIG
from megatron_lightning.peft.record import read_records
from megatron_lightning.precision.served.qat import qat_of, read_qat
from megatron_lightning.precision.served.trained_layers import TrainedLayer, read_recipes


class SavedTensors(NamedTuple):
    """The tensors of a checkpoint under the names of a folder."""

    folder: FolderTensors
    tensors: dict[str, Lazy]
    trained: TrainedWeights | None = None
    """The weights that the training rounded. None: none."""
    owners: Mapping[str, Owner] = MappingProxyType({})
    """Name of a tensor in the folder -> parameter of the checkpoint that holds it."""
    layers: Mapping[str, TrainedLayer] | None = None
    """Layer of the checkpoint -> how ``MegatronFP8Precision`` quantized it. None: not recorded."""


def tensors_of_checkpoint(
    checkpoint: str | os.PathLike[str],
    *,
    like: str | None = None,
    model: str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    family: str | None = None,
    tokenizer: str | None = None,
) -> SavedTensors:
    """Return the folder to write for a checkpoint, and the tensors, read when needed.

    Args:
        checkpoint: A checkpoint of any layout, or a folder or Hub id, whose tensors are taken.
        like: Folder or Hub id. None: the folder in the checkpoint.
        model: Path of the model in the LightningModule. None: the first model from a folder.
        dtype: Dtype of floating tensors. None: the folder's.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.
        family: Rules for a ``GPTModel``. None: the rules used at import, or the first family
            describing the model.
        tokenizer: Folder or Hub id of a tokenizer, for a ``GPTModel`` trained from scratch.

    Raises:
        CheckpointError: If the checkpoint is not of the folder's model.
        ConfigError: If a ``GPTModel`` is not the folder's model, or no family describes the model.
    """
    if is_megatron(checkpoint):
        megatron = MegatronBridge(
            checkpoint, like, revision=revision, trust_remote_code=trust_remote_code, family=family
        )
        return SavedTensors(megatron.bridge.folder, megatron.tensors(dtype))
    if _is_folder(checkpoint):
        _refuse_options(checkpoint, like=like, model=model, tokenizer=tokenizer)
        bridge = AutoBridge.from_hf_pretrained(
            os.fspath(checkpoint),
            revision=revision,
            trust_remote_code=trust_remote_code,
            family=family,
        )
        return SavedTensors(bridge.folder, assembled(bridge.folder, {}, {}, dtype))
    source = open_checkpoint(checkpoint)
    state = source.state()
    if not read_records(state):
        refuse_partial(state, str(checkpoint))
    entry = kept_entry(state, model)
    config = gpt_config(source, None if entry is None else entry[1])
    # A GPTModel trained from scratch has no folder: names come from a family.
    if like is None and entry is None and config is not None and not _is_started(state):
        stored = source.tensors()
        gpt = new_gpt_folder(
            str(checkpoint),
            config,
            stored,
            family=family,
            tokenizer=tokenizer,
            texts=TextRecord.of_checkpoint(state, str(checkpoint)),
            dtype=dtype,
        )
        parameters = gpt.tensors(config)
        plan = Plan(gpt.folder, parameters, gpt.pieces(config, parameters))
        fills = fills_of_checkpoint(source, parameters, model)
        trained = _trained(plan, fills, state, model)
        layers = read_recipes(state, "model" if model is None else model, str(checkpoint))
        return SavedTensors(plan.folder, plan.tensors(fills), trained, plan.owners, layers)
    if tokenizer is not None:
        raise ConfigError(
            f"tokenizer is {tokenizer!r}, and {checkpoint} is written as a folder with files of "
            "its own. Leave tokenizer out."
        )
    # The folder is named by the user, or kept in the checkpoint, or known by its origin.
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "family": family}
    if like is None and entry is not None:
        bridge = AutoBridge.from_checkpoint(checkpoint, model=model, reads=False, **options)
    else:
        if like is None:
            like, revision = _origin(source, checkpoint)
        bridge = AutoBridge.from_hf_pretrained(like, revision=revision, **options)
    plan = bridge.plan(config)
    place = model if model is not None else None if entry is None else entry[0]
    if read_records(state):
        raise ConfigError(
            f"{checkpoint} has adapters, which a folder of the model would lack. Write them as a "
            "folder of their own, or added to the weights: megatron-lightning adapters "
            "export|merge."
        )
    fills = fills_of_checkpoint(source, plan.parameters, place)
    trained = _trained(plan, fills, state, place)
    layers = read_recipes(state, "model" if place is None else place, str(checkpoint))
    return SavedTensors(plan.folder, plan.tensors(fills, dtype), trained, plan.owners, layers)


def _trained(
    plan: Plan, fills: Mapping[str, Fill], state: Mapping[str, Any], place: str | None
) -> TrainedWeights | None:
    records = read_qat(state)
    record = next(iter(records.values()), None) if place is None else records.get(place)
    return None if record is None else TrainedWeights.of(plan, fills, record)


def _is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a Hugging Face folder, or a Hub id."""
    if is_checkpoint(str(path)):
        return False
    return (Path(path) / CONFIG).exists() or (
        not Path(path).exists() and Path(path).suffix != ".ckpt" and str(path).count("/") == 1
    )


def _refuse_options(path: str | os.PathLike[str], **options: str | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value!r}, and {path} is a Hugging Face folder, whose own files and "
                f"names are written. Leave {name} out."
            )


def plan_of_model(model: nn.Module) -> Plan:
    """Return the recipe of a model's original folder, made of the model's parameters.

    Args:
        model: A model of :class:`AutoBridge`, or a part of the model on a rank.

    Raises:
        ConfigError: If the model did not come from a folder.
        CheckpointError: If no way back is known.
    """
    folders = kept_folders(model)
    if "" not in folders:
        raise ConfigError(
            f"{type(model).__name__} did not come from a Hugging Face folder, so its names there "
            "are unknown. Make it by AutoBridge.from_hf_pretrained(path).to_model()."
        )
    return AutoBridge.from_kept(folders[""], trust_remote_code=runs_own_code(model)).plan()


def runs_own_code(model: nn.Module) -> bool:
    """Return whether a model came from code of its folder, which is trusted then."""
    parts = (model, getattr(model, "config", None))
    return any(type(part).__module__.startswith("transformers_modules") for part in parts)


def save_model(
    model: nn.Module, path: Path, *, dtype: torch.dtype | None = None, overwrite: bool = False
) -> None:
    """Write a full model as its original folder, with the model's current values.

    Args:
        model: A model of :class:`AutoBridge`, on one device.
        path: The folder.
        dtype: Dtype of floating tensors. None: the folder's.
        overwrite: Replace an existing target.

    Raises:
        CheckpointError: If the target exists.
        ConfigError: If the model did not come from a folder, was trained with ``qat``, or this rank
            holds only a part of the model.
    """
    if qat_of(model):
        raise ConfigError(
            "the model was trained with qat, and without a strategy the dtype in which its weights "
            "are rounded is unknown. Write the folder from its checkpoint: megatron-lightning "
            "convert export CHECKPOINT FOLDER (--quantize none: weights without rounding)."
        )
    plan = plan_of_model(model)
    tensors = plan.tensors(fills_of_model(model, plan.parameters), dtype)
    write_folder(path, plan.folder, tensors, overwrite=overwrite)


def model_with_folder(module: nn.Module) -> tuple[str, nn.Module]:
    """Return path and model of a module's first model from a folder.

    Raises:
        ConfigError: If there is none.
    """
    for path in kept_folders(module):
        return path, module.get_submodule(path)
    raise ConfigError(
        f"{type(module).__name__} has no model that came from a Hugging Face folder, so no folder "
        "can be written. Make one by AutoBridge.from_hf_pretrained(path).to_model(), or use "
        "HuggingFaceModule."
    )


def _origin(source: CheckpointSource, checkpoint: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Return path and revision of the folder, as recorded by the module in a checkpoint."""
    settings = source.state().get("hyper_parameters", {})
    path = settings.get("path", settings.get("init_from_hf"))
    if not isinstance(path, str):
        raise CheckpointError(
            f"{checkpoint} does not say which folder its model was started from. Name the folder: "
            "--like FOLDER."
        )
    return path, settings.get("revision")


def _is_started(state: Mapping[str, Any]) -> bool:
    """Return whether a ``GPTModel`` was started from a folder."""
    return state.get("hyper_parameters", {}).get("init_from_hf") is not None
