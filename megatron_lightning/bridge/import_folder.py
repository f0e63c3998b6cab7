"""A Hugging Face folder as a checkpoint, readable in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from megatron_lightning.bridge.auto import AutoBridge, ModelKind
from megatron_lightning.bridge.folders.folder_record import KeptFolder
from megatron_lightning.bridge.gpt import tied_names_of
from megatron_lightning.bridge.hf_models.transformers_model import lazy_parameters
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.format.streaming import (
    CHUNK_BYTES,
    slabs,
    spread_evenly,
    write_checkpoint,
)
from megatron_lightning.checkpoint.kept_files import KEPT
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.errors import CheckpointError
from megatron_lightning.optim.param_groups import DEFAULT_GROUP, NO_DECAY
from megatron_lightning.parallel.shards.spec import Box

_MODEL = "model"  # path of the model in HuggingFaceModule
_FILE_BYTES = 4 << 30


def import_folder(
    bridge: AutoBridge,
    target: Path,
    *,
    kind: ModelKind = "transformers",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    advance: Advance = silent,
    optimizer: Mapping[str, Lazy] = MappingProxyType({}),
    origin: str | None = None,
) -> int:
    """Write the folder's model as a checkpoint of an unstarted ``HuggingFaceModule`` or
    ``GPTLightningModule``.

    Tensors are written in turn. The checkpoint appears in a single rename.

    Args:
        bridge: The folder.
        target: The checkpoint directory.
        kind: The model: "transformers" or "gpt".
        dtype: Dtype of floating parameters. None: the folder's.
        overwrite: Whether an existing checkpoint is replaced. False: an existing checkpoint is
            refused.
        advance: Called with the number of written bytes.
        optimizer: State of AdamW by ``<parameter>.<key>``. Empty: the optimizer begins without
            state.
        origin: Where the weights are from, for the checkpoint's description. None: the folder.

    Returns:
        Number of parameters and buffers.

    Raises:
        CheckpointError: If the target exists, or the folder is damaged or does not fit the model.
    """
    if isinstance(bridge.folder, KeptFolder) and not bridge.folder.has_values:
        raise CheckpointError(
            "a configuration has no weights to import. Train the model first: fit saves "
            "checkpoints."
        )
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"{target} exists. Name another checkpoint, or replace this one with --overwrite."
        )
    parts = _gpt_parts if kind == "gpt" else _parts
    model_tensors, tied_to, settings, record = parts(bridge, dtype)
    lazies = {f"state_dict.{_MODEL}.{name}": x for name, x in model_tensors.items()}
    lazies |= {f"optimizer_states.0.state.{_MODEL}.{name}": x for name, x in optimizer.items()}
    infos = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in lazies.items()}
    tied = {f"{_MODEL}.{name}": f"{_MODEL}.{owner}" for name, owner in tied_to.items()}

    # A box at a time on its way from the folder to the checkpoint, whatever the size of the model.
    def fetch(name: str, box: Box) -> Tensor:
        values = lazies[name].read(box)
        advance(values.nbytes)
        return values

    total = sum(info.num_bytes() for info in infos.values())
    num_files = 1 + total // _FILE_BYTES
    write_checkpoint(
        target,
        infos,
        fetch,
        state_before_training(tied)
        | ({"optimizer_states": [_groups(optimizer, model_tensors)]} if optimizer else {})
        | {
            KEPT: {_MODEL: record.entry},
            "hparams_name": "kwargs",
            "hyper_parameters": settings,
        },
        {"imported_from": origin or bridge.origin, "tied": tied, "global_step": 0, "epoch": 0},
        files=spread_evenly(infos, lambda info: slabs(info, CHUNK_BYTES), num_files),
    )
    return len(model_tensors)


def _groups(optimizer: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the entry of an optimizer with the default parameter groups of our modules. Their
    options stay those of the module that loads the entry.
    """
    known = dict.fromkeys(name.rpartition(".")[0] for name in optimizer)
    groups: dict[str, list[str]] = {DEFAULT_GROUP: [], NO_DECAY.name: []}
    for name in known:
        is_matrix = parameters[name].ndim > (NO_DECAY.max_dims or 0)
        groups[DEFAULT_GROUP if is_matrix else NO_DECAY.name].append(f"{_MODEL}.{name}")
    return {
        "state": {},
        "param_groups": [{"params": names, "name": name} for name, names in groups.items()],
    }


_Parts = tuple[dict[str, Lazy], dict[str, str], dict[str, Any], KeptFolder]


def _parts(bridge: AutoBridge, dtype: torch.dtype | None) -> _Parts:
    """Return the tensors of the untouched model, tied name -> name, hyperparameters of the module,
    and the folder for checkpoints.
    """
    model = bridge.lazy_model(dtype="auto" if dtype is None else dtype)
    lazies = lazy_parameters(model)
    names = {id(lazy): name for name, lazy in lazies.items()}
    tied = {
        name: names[id(value)]
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Lazy) and names.get(id(value)) not in (None, name)
    }
    settings = {"path": bridge.origin, "revision": bridge.revision}
    return lazies, tied, settings, bridge.keep(model)


def _gpt_parts(bridge: AutoBridge, dtype: torch.dtype | None) -> _Parts:
    """Return the same for a ``GPTModel``."""
    config, tensors, record = bridge.gpt_parts()
    if dtype is not None:
        tensors = {name: cast("Lazy", lazy.to(dtype)) for name, lazy in tensors.items()}
    settings = {
        "config": config.to_dict(),
        "init_from_hf": bridge.origin,
        "revision": bridge.revision,
        "family": None if record.gpt is None else record.gpt["family"],
    }
    return tensors, tied_names_of(config), settings, record


def state_before_training(tied: dict[str, str]) -> dict[str, Any]:
    """Return the state of a run before the first step.

    Args:
        tied: Name of a tied copy -> name of the owner.
    """
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        "state_dict": {},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        OWN: {
            "consumed_samples": 0,
            "skipped_steps": 0,
            "samplers": [],
            "layout": {},
            "tied": tied,
            "random_states": {},
            "loaders": {},
            "layer_streams": {},
        },
    }
