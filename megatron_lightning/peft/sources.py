"""Adapters from a folder of ``peft`` or a checkpoint, and into a model."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.layers.adapters.adapter_layers import (
    ALL_ROWS,
    Adapters,
    adapted_layers,
)
from megatron_lightning.layers.adapters.part import AdapterPart
from megatron_lightning.layers.adapters.stacked_adapters import StackedAdapters
from megatron_lightning.models.plans.hf_plans import transformers_models
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.shards.digest import as_text, digest_of_tensors
from megatron_lightning.parallel.shards.spec import Shard
from megatron_lightning.peft import folder
from megatron_lightning.peft.fitting import check_trainable, fitted
from megatron_lightning.peft.methods.applied import applied_to
from megatron_lightning.peft.methods.method import AdapterMethod
from megatron_lightning.peft.record import EXPECTED_BASE, Record, base_of, read_records
from megatron_lightning.peft.saved import SavedAdapters, SavedPart, adapters_of_module
from megatron_lightning.precision.served.qat import Record as Rounded
from megatron_lightning.precision.served.qat import described, qat_of, read_qat

MODULE = "state_dict."


def read_saved(path: str | os.PathLike[str], model: str | None = None) -> SavedAdapters:
    """Return the adapters in a folder of ``peft``, or in a checkpoint of any layout.

    Args:
        path: Folder or checkpoint.
        model: Path of the adapted model in the checkpoint's LightningModule. None: the first.

    Raises:
        CheckpointError: If there are none.
    """
    if folder.is_folder(path):
        return folder.read_folder(path)
    source = open_checkpoint(path)
    record = record_of(source, str(path), model)
    state = read_tensors(source, record)
    return SavedAdapters.of_state(state, record.applied, record.base, is_gpt=record.is_gpt)


def record_of(source: CheckpointSource, path: str, model: str | None = None) -> Record:
    """Return the entry of the adapted model in a checkpoint.

    Raises:
        CheckpointError: If the checkpoint has no adapters, or none of ``model``.
    """
    records = read_records(source.state(), path)
    matches = [record for record in records if model in (None, record.path)]
    if not matches:
        other_paths = ", ".join(record.path for record in records)
        hint = f" of {model}; those of {other_paths} are there" if records else ""
        raise CheckpointError(
            f"{path} has no adapters{hint}. Name a checkpoint of a module with peft=LoRA(...), or "
            "a folder of peft."
        )
    return matches[0]


def rounding_of(path: str | os.PathLike[str]) -> Rounded | None:
    """Return the rounding in which adapters were trained. None: none, as in folders."""
    if folder.is_folder(path):
        return None
    source = open_checkpoint(path)
    return read_qat(source.state(), str(path)).get(record_of(source, str(path)).path)


def check_apart(rounded: Rounded | None) -> None:
    """Check that adapters may leave their base.

    Raises:
        ConfigError: If they were trained inside of the rounding, where no reader adds them.
    """
    if rounded is not None:
        raise ConfigError(
            f"the adapters were trained with {described(rounded.qat)} inside of the rounding, and "
            "readers of peft's folders add them to other weights. Write the whole model: "
            "megatron-lightning adapters merge CHECKPOINT FOLDER."
        )


def prefix_of(record: Record) -> str:
    """Return the prefix of the adapted model's names in the checkpoint."""
    return f"{MODULE}{record.path}." if record.path else MODULE


def read_tensors(source: CheckpointSource, record: Record) -> dict[str, Tensor]:
    """Return the trained tensors of a checkpoint by their names in the adapted model."""
    prefix, state = prefix_of(record), {}
    for name, info in source.tensors().items():
        own_name = name.removeprefix(prefix)
        if name.startswith(prefix) and (
            ".adapters." in own_name or own_name in record.applied.saved
        ):
            tensor = torch.empty(info.shape, dtype=info.dtype)
            source.read([(name, Shard((0,) * tensor.dim(), tensor))])
            state[own_name] = tensor
    # A checkpoint has a tied weight once. Adapters have it under each of its names.
    for name, owner in record.applied.ties.items():
        state.update({n: state[o] for n, o in ((name, owner), (owner, name)) if o in state})
    missing = [name for name in record.applied.saved if name not in state]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {missing[0]} of modules_to_save. If it is tied to another "
            "weight, and an earlier version saved the checkpoint, resume it and save it again."
        )
    return state


def save_adapters(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write the adapters of a full module as a folder of Hugging Face ``peft``.

    Args:
        module: A module with adapters, on one device.
        path: The folder.
        dtype: Dtype of the tensors. None: the stored dtype.
        overwrite: Whether an existing folder is replaced.

    Raises:
        ConfigError: If the module has no adapters, is a part of the model, or rounds weights.
        CheckpointError: If the folder exists.
    """
    place, adapters = adapters_of_module(module)
    model = module.get_submodule(place)
    check_apart(qat_of(model).get(""))
    base = replace(base_of(model), digest=digest_of_base(model))
    folder.write_folder(path, replace(adapters, base=base), dtype=dtype, overwrite=overwrite)


def load_adapters(module: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load the adapters of a folder of ``peft`` or a checkpoint into a full module, in place.
    Return the module.

    In a module without adapters the saved layers are adapted and all other parameters are frozen. A
    module with adapters must have the same adapted layers. In ``configure_model`` the module may be
    on ``meta``: the values are kept until the module is sharded.

    Args:
        module: The model, or a module with a model inside.
        path: Folder or checkpoint.

    Raises:
        CheckpointError: If layers or ranks differ, or the adapters belong to another base.
        ConfigError: If a layer does not exist, or adapters inside of a rounding (``qat``) are for a
            model without one.
    """
    place = _place_of(module)
    model = module.get_submodule(place)
    if qat_of(model).get("") is None:
        check_apart(rounding_of(path))
    adapters = fitted(read_saved(path), model, str(path))
    check_trainable(adapters, model, str(path))
    if not any(p.is_meta for p in model.parameters()):
        adapters.base.check(digest_of_base(model, adapters), type(model).__name__)
    elif adapters.base.digest is not None:
        # The strategy compares when the weights are read.
        model.__dict__[EXPECTED_BASE] = adapters.base
    if not adapted_layers(model):
        _exactly(adapters).apply(model, adapters.kind)
    _fill(model, adapters, str(path))
    return module


def digest_of_base(
    model: nn.Module, own: SavedAdapters | None = None, *, names: Collection[str] | None = None
) -> str:
    """Return the digest of the weights of a full model, without adapters and ``modules_to_save``.
    With ``names`` only the named parameters count.
    """
    applied = applied_to(model).get("")
    saved: Collection[str] = () if applied is None else applied.saved
    saved = saved if own is None else own.saved
    frozen = (
        (name, p)
        for name, p in model.named_parameters()
        if ".adapters." not in name and (name not in saved if names is None else name in names)
    )
    kind = "gpt" if isinstance(model, GPTModel) else "own"
    return as_text(digest_of_tensors(frozen), kind)


def _place_of(module: nn.Module) -> str:
    """Return the path of the model to load adapters into."""
    paths = [*applied_to(module)]
    paths += [path for path, child in module.named_modules() if isinstance(child, GPTModel)]
    paths += [*transformers_models(module)]
    return paths[0] if paths else ""


def _exactly(own: SavedAdapters) -> AdapterMethod:
    """Return the method for exactly these layers, with the ranks and scales of the adapters."""
    stacked = {
        target
        for target in own.targets
        if not own.is_gpt
        and any(
            parts[ALL_ROWS].num_experts
            for path, parts in own.layers.items()
            if ALL_ROWS in parts and (path == target or path.endswith(f".{target}"))
        )
    }
    options: dict[str, Any] = {"target_parameters": sorted(stacked)} if stacked else {}
    return replace(
        own.method.exactly(own),
        target_modules=[target for target in own.targets if target not in stacked],
        exclude_modules=(),
        modules_to_save=sorted({name.rpartition(".")[0] for name in own.saved}),
        **options,
    )


@torch.no_grad()
def _fill(model: nn.Module, own: SavedAdapters, path: str) -> None:
    """Copy values into the adapters of a model."""
    layers, label = _parts_of(model), own.method.label
    lacking = sorted(own.layers.keys() - layers.keys()) + sorted(layers.keys() - own.layers.keys())
    if lacking:
        raise CheckpointError(
            f"{path} and {type(model).__name__} have adapters of other layers: {len(lacking)} "
            f"differ, the first is {lacking[0]}. Load them into a model without adapters, or set "
            f"target_modules of {label} to {list(own.targets)[:6]}."
        )
    for layer, (adapters, parts) in layers.items():
        for name, part in parts.items():
            stacked = isinstance(adapters, StackedAdapters)
            theirs = own.layers[layer].get(ALL_ROWS if stacked else name)
            where = f"{layer} ({name})"
            _check_like(part, theirs, f"{path} has adapters of {where}", type(model).__name__)
            for parameter, tensor in theirs.tensors.items() if theirs is not None else ():
                _put(adapters, f"{name}.{parameter}", tensor)
    _put_saved(model, own.saved, path)


def _check_like(part: AdapterPart, theirs: SavedPart | None, what: str, model: str) -> None:
    """Check that an adapter has the tensors, the scale and the frozen values of a saved one.

    Raises:
        CheckpointError: If not.
    """
    own = {name: tuple(tensor.shape) for name, tensor in part.tensors().items()}
    saved = {} if theirs is None else {n: tuple(t.shape) for n, t in theirs.tensors.items()}
    if theirs is None or own != saved:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in saved.items()) or "none"
        needed = ", ".join(f"{name} {list(shape)}" for name, shape in own.items())
        raise CheckpointError(
            f"{what} with {listed}, and {model} has {needed}. Set the method and its ranks (r, "
            "rank_pattern, use_dora, fused) as they were, or load them into a model without "
            "adapters."
        )
    if abs(theirs.scale - part.scale) > 1e-6 * abs(theirs.scale):
        raise CheckpointError(
            f"{what} multiplied by {theirs.scale:g}, and {model} multiplies by {part.scale:g}. Set "
            "lora_alpha and use_rslora of LoRA as they were."
        )
    if not part.kind.is_like(theirs.kind):
        raise CheckpointError(
            f"{what} around {theirs.kind.described()}, and {model} has {part.kind.described()}, "
            "with which the same vectors are another model. Set the method's seed as it was, or "
            "load them into a model without adapters."
        )


def _parts_of(model: nn.Module) -> dict[str, tuple[Adapters, dict[str, AdapterPart]]]:
    """Return path of a layer, or of a parameter of experts -> adapters and the parts of it."""
    parts_of_layers: dict[str, tuple[Adapters, dict[str, AdapterPart]]] = {}
    for path, adapters in adapted_layers(model).items():
        if isinstance(adapters, StackedAdapters):
            for name, part in adapters.parts.items():
                parts_of_layers[f"{path}.{name}"] = (adapters, {name: part})
        else:
            parts_of_layers[path] = (adapters, adapters.parts)
    return parts_of_layers


def _put(adapters: Adapters, name: str, values: Tensor) -> None:
    parameter = adapters.get_parameter(name)
    if parameter.is_meta:
        adapters.initial[name] = values
    else:
        parameter.copy_(values)


def _put_saved(model: nn.Module, saved: Mapping[str, Tensor], path: str) -> None:
    for name, values in saved.items():
        owner, _, last = name.rpartition(".")
        parameter: Tensor = getattr(model.get_submodule(owner), last)
        if parameter.is_meta:
            raise ConfigError(
                f"{path} has values of {name} (modules_to_save), and the model has none yet (it is "
                "on meta). For a fit, import the folder as a checkpoint (megatron-lightning "
                "adapters import) for ckpt_path."
            )
        parameter.copy_(values)
