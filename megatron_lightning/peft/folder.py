"""Folders of Hugging Face ``peft``: ``adapter_config.json`` and ``adapter_model.safetensors``.

    base_model.model.<path in the model>.<name>    of an adapter: ``names`` of the method's kind
    base_model.model.<name of a parameter>         of modules_to_save

An unsupported field of the configuration is refused unless the field's value has no effect. The
digest of the base is in the header of the tensors' file.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_lightning.checkpoint.format.files import beside, new_identifier
from megatron_lightning.errors import CheckpointError, ConfigError, MissingCheckpointError
from megatron_lightning.file_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PICKLED_ADAPTERS
from megatron_lightning.layers.adapters.adapter_layers import ALL_ROWS
from megatron_lightning.layers.adapters.part import AdapterKind
from megatron_lightning.peft.folder_targets import FolderTargets
from megatron_lightning.peft.matching import is_inside
from megatron_lightning.peft.methods.lora import LoRA
from megatron_lightning.peft.methods.method import AdapterMethod
from megatron_lightning.peft.methods.table import METHODS
from megatron_lightning.peft.saved import Base, SavedAdapters, SavedPart, to_hugging_face

_PREFIX = "base_model.model."
_ORIGINAL = ".original_module."
_DIGEST = "megatron_lightning.base_digest"
_WEIGHT = ".weight"
_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a folder of ``peft``."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def read_folder(path: str | os.PathLike[str]) -> SavedAdapters:
    """Return the adapters in a folder, with the names of the model in ``transformers``.

    Raises:
        MissingCheckpointError: If there is none.
        ConfigError: If the configuration asks for something unsupported.
        CheckpointError: If a file is damaged, or holds other tensors.
    """
    folder = Path(path)
    config = _config(folder)
    tensors, metadata = _tensors(folder)
    method = _method_of(config, folder)
    kind = method.kind_in(tensors, folder)
    found: dict[str, dict[str, Tensor]] = {}
    saved = {}
    for name, tensor in tensors.items():
        if not name.startswith(_PREFIX):
            if name in kind.shared:
                continue
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS} has a tensor {name}, which peft did not write."
            )
        own_name = name.removeprefix(_PREFIX)
        layer, parameter = _split_name(own_name, kind)
        if parameter is not None:
            value = tensor if kind.names[parameter].endswith(_WEIGHT) else tensor[:, None]
            found.setdefault(layer, {})[parameter] = value
        elif _ORIGINAL in own_name:
            continue  # the base's values of a module that is saved as well
        elif kind.marker not in own_name:
            # Beside adapters of a layer peft may write the layer's own weight.
            for part in (".modules_to_save.", ".base_layer."):
                own_name = own_name.replace(part, ".")
            saved[own_name] = tensor
        else:
            raise ConfigError(
                f"{folder / ADAPTER_WEIGHTS} has {own_name}, and adapters of that kind are not "
                f"supported ({method.label} of linear layers is). Merge it into its base by peft "
                "(merge_and_unload)."
            )
    layers: dict[str, dict[str, SavedPart]] = {}
    for key, stored in found.items():
        method.check_stored(key, stored, folder)
        layer, own_tensors = method.from_folder(key, stored, config, found.keys(), folder)
        part_of_layer = SavedPart(kind, own_tensors, method.scale_of(layer))
        if part_of_layer.rank != method.rank_of(layer):
            raise CheckpointError(
                f"{folder}: {layer} has rank {part_of_layer.rank}, and {ADAPTER_CONFIG} says "
                f"{method.rank_of(layer)}."
            )
        layers[layer] = {ALL_ROWS: part_of_layer}
    base = Base(
        origin=config.get("base_model_name_or_path"),
        revision=config.get("revision"),
        digest=metadata.get(_DIGEST),
    )
    targets = tuple(sorted(layers))
    return SavedAdapters(
        layers=layers,
        method=method,
        kind=kind,
        targets=targets,
        saved=saved,
        task=config.get("task_type"),
        base=base,
        described=FolderTargets.of(config),
    )


def _method_of(config: Mapping[str, Any], folder: Path) -> AdapterMethod:
    """Return the method that a configuration describes.

    Raises:
        ConfigError: If there is none of the name, or a field has an effect on our computation.
    """
    name = config.get("peft_type", LoRA.peft_type)
    method = METHODS.get(name)
    if method is None:
        known = ", ".join(known.__name__ for known in METHODS.values())
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG} has peft_type={name!r}, which is not supported: {known} of "
            "linear layers are. Merge it into its base by peft (merge_and_unload)."
        )
    return method.of_folder(config, folder / ADAPTER_CONFIG)


def _split_name(name: str, kind: AdapterKind) -> tuple[str, str | None]:
    """Return the layer and the parameter of an adapter's tensor. None: no tensor of an adapter."""
    for parameter, theirs in kind.names.items():
        if name.endswith(f".{theirs}"):
            return name.removesuffix(f".{theirs}"), parameter
    return name, None


def write_folder(
    path: str | os.PathLike[str],
    own: SavedAdapters,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write adapters as a folder of ``peft``. The folder appears in a single rename.

    Args:
        path: The folder.
        own: The adapters, of a model of ``transformers`` or a ``GPTModel``.
        dtype: Dtype of the tensors. None: the stored dtype.
        overwrite: Whether an existing folder is replaced.
        files: Further files by name, such as files of the tokenizer.

    Raises:
        CheckpointError: If the folder exists.
        ConfigError: If a layer has no name in models of ``transformers``.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"{target} exists. Name another folder, or replace this one with --overwrite."
        )
    theirs = to_hugging_face(own)
    _warn_of_dense_layers(theirs)
    tensors = dict(theirs.method.shared_in_folder(theirs.kind))
    for layer in theirs.layers:
        key, own_tensors = theirs.method.to_folder(layer, theirs)
        for parameter, tensor in own_tensors.items():
            name = theirs.kind.names[parameter]
            value = tensor if name.endswith(_WEIGHT) else tensor.flatten()
            tensors[f"{_PREFIX}{key}.{name}"] = value
    tensors |= {_PREFIX + name: tensor for name, tensor in theirs.saved.items()}
    tensors = {
        # Copies, since safetensors refuses tensors that share memory.
        n: t.detach().to("cpu", dtype or t.dtype).contiguous().clone()
        for n, t in tensors.items()
    }
    metadata = {"format": "pt"}
    if theirs.base.digest is not None:
        metadata[_DIGEST] = own.base.digest or ""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the target, so that an interruption leaves no incomplete folder.
    pending = beside(target, f".tmp-{new_identifier()}")
    pending.mkdir()
    try:
        for name, content in files.items():
            (pending / name).parent.mkdir(parents=True, exist_ok=True)
            (pending / name).write_bytes(content)
        save_file(tensors, pending / ADAPTER_WEIGHTS, metadata)
        config = json.dumps(config_of(theirs), indent=2, sort_keys=True)
        (pending / ADAPTER_CONFIG).write_text(config + "\n")
        if target.exists():
            shutil.rmtree(target)
        os.rename(pending, target)
    finally:
        shutil.rmtree(pending, ignore_errors=True)


def _warn_of_dense_layers(theirs: SavedAdapters) -> None:
    """Warn where ``peft`` takes adapters of dense layers for those of experts: it reads each target
    with the name of an expert's projection as the stacked experts (0.19 with transformers 5,
    ``peft/utils/transformers_weight_conversion.py``).
    """
    is_stacked = {
        layer: bool(parts[ALL_ROWS].num_experts) for layer, parts in theirs.layers.items()
    }
    dense = [
        layer
        for layer, stacked in is_stacked.items()
        if not stacked and layer.rpartition(".")[2] in _EXPERT_PROJECTIONS
    ]
    if dense and any(is_stacked.values()):
        warnings.warn(
            f"peft with transformers 5 drops the adapters of {dense[0]} and {len(dense) - 1} "
            "further dense layers when it loads this folder, since it takes their targets for "
            "those of the stacked experts beside them. This package loads all of them. For peft, "
            "vLLM and others, write a full model: megatron-lightning adapters merge.",
            stacklevel=3,
        )


def config_of(theirs: SavedAdapters) -> dict[str, Any]:
    """Return the configuration of adapters with names of ``transformers``."""
    return {
        "peft_type": theirs.method.peft_type,
        "task_type": theirs.task,
        "target_modules": sorted(
            {name for name in theirs.targets if not _is_stacked(theirs, name)}
        ),
        "bias": "none",
        "modules_to_save": sorted(theirs.modules or _modules_of(theirs.saved)) or None,
        "base_model_name_or_path": theirs.base.origin,
        "revision": theirs.base.revision,
        "inference_mode": True,
        "fan_in_fan_out": False,
        **theirs.method.folder_fields(theirs),
    }


def _is_stacked(theirs: SavedAdapters, name: str) -> bool:
    """Return whether a name means parameters of stacked experts."""
    return any(
        parts[ALL_ROWS].num_experts
        for layer, parts in theirs.layers.items()
        if layer == name or layer.endswith(f".{name}")
    )


def _modules_of(names: Collection[str]) -> set[str]:
    """Return the paths of the outermost modules of parameters."""
    paths = {name.rpartition(".")[0] for name in names}
    return {path for path in paths if not is_inside(path, paths - {path})}


def _config(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise MissingCheckpointError(f"{folder} has no {ADAPTER_CONFIG}: it is no folder of peft.")
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON ({error}). Restore the folder.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is no JSON object. Restore the folder.")
    return values


def _tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        files = [name for name in PICKLED_ADAPTERS if (folder / name).exists()]
        pickled = f" ({files[0]} is a pickle, which may run code when it is read)" if files else ""
        raise MissingCheckpointError(
            f"{folder} has no {ADAPTER_WEIGHTS}{pickled}. Save the adapters with safetensors: "
            "model.save_pretrained(folder)."
        )
    try:
        with safe_open(file, "pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            return {name: opened.get_tensor(name) for name in opened.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Restore the folder.") from error
