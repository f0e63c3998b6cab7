"""Folders of Hugging Face ``peft``: ``adapter_config.json`` and ``adapter_model.safetensors``.

    base_model.model.<path in the model>.lora_A.weight    [r, in]
    base_model.model.<path in the model>.lora_B.weight    [out, r]
    base_model.model.<path in the model>.lora_magnitude_vector    [out], of DoRA
    base_model.model.<name of a parameter>                of modules_to_save

An unsupported field of the configuration is refused unless the field's value has no effect. The
digest of the base is in the header of the tensors' file.
"""

from __future__ import annotations

import json
import math
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
from megatron_lightning.peft.folder_targets import FolderTargets
from megatron_lightning.peft.lora import LoRA
from megatron_lightning.peft.matching import is_inside
from megatron_lightning.peft.saved import Base, Factors, SavedAdapters, to_hugging_face

_PREFIX = "base_model.model."
_LENGTHS = ".lora_magnitude_vector"
_ORIGINAL = ".original_module."
_DIGEST = "megatron_lightning.base_digest"
_READ = frozenset((
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "rank_pattern",
    "alpha_pattern", "use_rslora", "modules_to_save", "base_model_name_or_path", "revision",
    "target_parameters", "use_dora", "init_lora_weights",
))  # fmt: skip
_ANY = frozenset((
    "task_type", "auto_mapping", "peft_version", "inference_mode", "megatron_core",
    "fan_in_fan_out", "layers_to_transform", "layers_pattern", "qalora_group_size",
    "ensure_weight_tying", "target_parameters_order",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",
))  # fmt: skip
"""Fields without an effect on existing tensors."""
_SAME_BASE = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Initializations of adapters that leave the base's weights as they are. (``mica`` trains A alone,
so folders of it are read and merged.)"""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "peft_type": ("LORA",),
        "bias": ("none",),
        "runtime_config": ({}, {"ephemeral_gpu_offload": False}),
    }
)
"""Field -> values without an effect. For fields not named here: None, False and empty values."""


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a folder of ``peft``."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def read_folder(path: str | os.PathLike[str]) -> SavedAdapters:
    """Return the adapters in a folder, with the names of the model in ``transformers``.

    Raises:
        MissingCheckpointError: If there is none.
        ConfigError: If the configuration asks for something else than LoRA.
        CheckpointError: If a file is damaged, or holds other tensors.
    """
    folder = Path(path)
    config = _config(folder)
    tensors, metadata = _tensors(folder)
    lora = lora_of_config(config, folder)
    layers: dict[str, dict[str, Factors]] = {}
    saved = {}
    for name, tensor in tensors.items():
        if not name.startswith(_PREFIX):
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS} has a tensor {name}, which peft did not write."
            )
        own_name = name.removeprefix(_PREFIX)
        if own_name.endswith(".lora_A.weight"):
            layer = own_name.removesuffix(".lora_A.weight")
            second = tensors.get(f"{_PREFIX}{layer}.lora_B.weight")
            if second is None or second.shape[-1] != tensor.shape[0]:
                raise CheckpointError(
                    f"{folder / ADAPTER_WEIGHTS}: lora_B of {layer} is missing or misshaped."
                )
            lengths = tensors.get(f"{_PREFIX}{layer}{_LENGTHS}")
            if (lengths is None) == lora.use_dora:
                raise CheckpointError(
                    f"{folder}: {ADAPTER_CONFIG} has use_dora={lora.use_dora}, and "
                    f"{ADAPTER_WEIGHTS} {'no' if lengths is None else 'a'} {layer}{_LENGTHS}. "
                    "Restore the folder."
                )
            # peft stores experts of one parameter flat: [E r, in] and [out, r E].
            stacked = _stacked_name(layer, config, tensors)
            factors = Factors(tensor, second, lora.scale_of(stacked or layer), lengths)
            if stacked is not None:
                layer, factors = stacked, _unflat(factors, lora.rank_of(stacked), folder)
            layers[layer] = {ALL_ROWS: factors}
        elif _ORIGINAL in own_name:
            continue  # the base's values of a module that is saved as well
        elif ".lora_" not in own_name:
            # Beside adapters of a layer peft may write the layer's own weight.
            for part in (".modules_to_save.", ".base_layer."):
                own_name = own_name.replace(part, ".")
            saved[own_name] = tensor
        elif not own_name.endswith((".lora_B.weight", _LENGTHS)):
            raise ConfigError(
                f"{folder / ADAPTER_WEIGHTS} has {own_name}, and adapters of that kind are not "
                "supported (LoRA of linear layers is). Merge it into its base by peft "
                "(merge_and_unload)."
            )
    for layer, parts in layers.items():
        if parts[ALL_ROWS].rank != lora.rank_of(layer):
            raise CheckpointError(
                f"{folder}: {layer} has rank {parts[ALL_ROWS].rank}, and {ADAPTER_CONFIG} says "
                f"{lora.rank_of(layer)}."
            )
    base = Base(
        origin=config.get("base_model_name_or_path"),
        revision=config.get("revision"),
        digest=metadata.get(_DIGEST),
    )
    targets = tuple(sorted(layers))
    return SavedAdapters(
        layers=layers,
        lora=lora,
        targets=targets,
        saved=saved,
        task=config.get("task_type"),
        base=base,
        described=FolderTargets.of(config),
    )


def lora_of_config(config: Mapping[str, Any], folder: Path) -> LoRA:
    """Return the LoRA described by a configuration of ``peft``.

    Raises:
        ConfigError: Naming a field with an effect on our computation.
    """
    # Unknown keys are fine with neutral values: a newer peft writes keys for methods that this
    # folder does not use.
    for key, value in config.items():
        if key in _READ or key in _ANY:
            continue
        neutral = value in _NEUTRAL[key] if key in _NEUTRAL else not value
        if not neutral:
            raise ConfigError(
                f"{folder / ADAPTER_CONFIG} has {key}={value!r}, which is not supported: adapters "
                "are LoRA (rsLoRA, DoRA) of linear layers. Train without that field, or merge it "
                "into its base by peft (merge_and_unload)."
            )
    init = config.get("init_lora_weights", True)
    if (init.lower() if isinstance(init, str) else init) not in _SAME_BASE:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG} has init_lora_weights={init!r}, which changes the base's "
            "weights before the training, so that the adapters are wrong on the base as it is. "
            "Convert them by peft to adapters of the unchanged base: save the model before the "
            "training (save_pretrained(FIRST)), and write the trained one by "
            "save_pretrained(FOLDER, path_initial_model_for_weight_conversion=FIRST)."
        )
    targets = config.get("target_modules") or "all-linear"
    return LoRA(
        r=config.get("r", 8),
        lora_alpha=config.get("lora_alpha", 8),
        lora_dropout=config.get("lora_dropout") or 0.0,
        target_modules=targets,
        exclude_modules=config.get("exclude_modules") or (),
        rank_pattern=config.get("rank_pattern") or {},
        alpha_pattern=config.get("alpha_pattern") or {},
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
        modules_to_save=config.get("modules_to_save") or (),
    )


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
    tensors = {}
    for layer, parts in theirs.layers.items():
        factors, key = _flat(parts[ALL_ROWS]), _PREFIX + _key_of(layer, theirs.layers)
        tensors[f"{key}.lora_A.weight"] = factors.lora_A
        tensors[f"{key}.lora_B.weight"] = factors.lora_B
        if factors.magnitude is not None:
            tensors[f"{key}{_LENGTHS}"] = factors.magnitude
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
    lora = theirs.lora
    # peft has a default rank and alpha. Other values go into the patterns.
    ranks: dict[str, Any] = {}
    alphas: dict[str, Any] = {}
    for layer, parts in theirs.layers.items():
        factors = parts[ALL_ROWS]
        root = math.sqrt(factors.rank) if lora.use_rslora else factors.rank
        ranks[layer], alphas[layer] = factors.rank, _number(factors.scale * root)
    rank, alpha = lora.r, _number(lora.lora_alpha)
    return {
        "peft_type": "LORA",
        "task_type": theirs.task,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": sorted(
            {name for name in theirs.targets if not _is_stacked(theirs, name)}
        ),
        "target_parameters": _parameters(theirs) or None,
        "rank_pattern": _exceptions(ranks, rank),
        "alpha_pattern": _exceptions(alphas, alpha),
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "bias": "none",
        "modules_to_save": sorted(theirs.modules or _modules_of(theirs.saved)) or None,
        "base_model_name_or_path": theirs.base.origin,
        "revision": theirs.base.revision,
        "inference_mode": True,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
    }


_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_STACKED = ("gate_up_proj", "down_proj")
"""Parameters of a module of stacked experts, in the order of wrapping by ``peft``."""


def _is_stacked(theirs: SavedAdapters, name: str) -> bool:
    """Return whether a name means parameters of stacked experts."""
    return any(
        parts[ALL_ROWS].num_experts
        for layer, parts in theirs.layers.items()
        if layer == name or layer.endswith(f".{name}")
    )


def _parameters(theirs: SavedAdapters) -> list[str]:
    """Return ``target_parameters``: the ends of the paths of stacked experts."""
    paths = [path for path, parts in theirs.layers.items() if parts[ALL_ROWS].num_experts]
    ends = {".".join(path.rsplit(".", 2)[1:]) for path in paths}
    return sorted(ends, key=lambda end: _STACKED.index(end.rpartition(".")[2]))


def _key_of(layer: str, layers: Mapping[str, Mapping[str, Factors]]) -> str:
    """Return the name before ".lora_A". With two adapted parameters of experts, the module is
    wrapped twice, and the inner wrapper has the first parameter.
    """
    if not layers[layer][ALL_ROWS].num_experts:
        return layer
    owner, _, name = layer.rpartition(".")
    is_inner = name == _STACKED[0] and f"{owner}.{_STACKED[1]}" in layers
    return f"{owner}.base_layer" if is_inner else owner


def _stacked_name(key: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
    """Return the path of the experts' parameter behind a key. None: the key is a layer's.

    Raises:
        ConfigError: If the parameters are no experts of ``transformers`` 5.
    """
    ends: list[str] = config.get("target_parameters") or []
    unknown = [end for end in ends if end.rpartition(".")[2] not in _STACKED]
    if unknown:
        raise ConfigError(
            f"{ADAPTER_CONFIG} has target_parameters={ends!r}, and stacked experts (gate_up_proj, "
            "down_proj) are the parameters that are supported."
        )
    owner = key.removesuffix(".base_layer")
    for end in ends:
        module, _, name = end.rpartition(".")
        if owner == module or owner.endswith(f".{module}"):
            has_both = f"{_PREFIX}{owner}.base_layer.lora_A.weight" in tensors
            if not has_both or (name == _STACKED[0]) == (owner != key):
                return f"{owner}.{name}"
    return None


def _flat(factors: Factors) -> Factors:
    """Return factors of stacked experts in the form of ``peft``: A [E r, in], B [out, r E] with the
    expert fastest.
    """
    if not factors.num_experts:
        return factors
    first, second = factors.lora_A, factors.lora_B
    return Factors(first.flatten(0, 1), second.permute(1, 2, 0).flatten(1), factors.scale)


def _unflat(factors: Factors, rank: int, folder: Path) -> Factors:
    """Return factors [E, r, in] and [E, out, r] of stacked experts."""
    rows = len(factors.lora_A)
    if rows % rank:
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS}: lora_A of stacked experts has {rows} rows, which are no "
            f"multiple of the rank {rank} in {ADAPTER_CONFIG}."
        )
    second = factors.lora_B.view(len(factors.lora_B), rank, rows // rank)
    return Factors(
        factors.lora_A.view(rows // rank, rank, -1),
        second.permute(2, 0, 1).contiguous(),
        factors.scale,
    )


def _modules_of(names: Collection[str]) -> set[str]:
    """Return the paths of the outermost modules of parameters."""
    paths = {name.rpartition(".")[0] for name in names}
    return {path for path in paths if not is_inside(path, paths - {path})}


def _exceptions(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """Return path -> value for unusual values. The last segment replaces a path if all paths with
    this segment agree.
    """
    names: dict[str, set[Any]] = {}
    for path, value in values.items():
        names.setdefault(path.rpartition(".")[2], set()).add(value)
    single_names = {
        name: next(iter(names_of_value))
        for name, names_of_value in names.items()
        if len(names_of_value) == 1
    }
    single_names |= {
        path: v for path, v in values.items() if len(names[path.rpartition(".")[2]]) > 1
    }
    return {key: value for key, value in single_names.items() if value != usual}


def _number(value: float) -> float | int:
    """Return a whole number as an int, after rounding off the last bits of a division."""
    near = round(value, 9)
    return int(near) if near == int(near) else near


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
