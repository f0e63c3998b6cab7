"""Sources of parameter values for a new folder: a checkpoint, a full model, or ranks with parts of
the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from megatron_lightning.assembly.state.full_state import FullState
from megatron_lightning.bridge.tensors.lazy import Fill, Lazy
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.parallel.shards.spec import Box, Shard
from megatron_lightning.peft.merge import deltas_in, merged_fills
from megatron_lightning.precision.qlora.frozen_base import check_values


def fills_of_checkpoint(
    source: CheckpointSource, names: Mapping[str, Lazy], model: str | None = None
) -> dict[str, Fill]:
    """Return fills of the parameters in a checkpoint. Boxes are read when needed.

    Args:
        source: The checkpoint, of any layout.
        names: Parameters by names in the model. A LightningModule may hold the model at any single
            path.
        model: Path of the model in the LightningModule. None: the path is found by the names.

    Raises:
        CheckpointError: If a parameter is missing, or has another shape.
    """
    stored = source.tensors()
    prefix = prefix_of_model(source, names, model)
    for name, lazy in names.items():
        if prefix + name not in stored:
            raise CheckpointError(
                f"the checkpoint has no {prefix}{name}, which the folder's model has. Name the "
                "folder that the checkpoint was trained from."
            )
        if tuple(stored[prefix + name].shape) != tuple(lazy.shape):
            raise CheckpointError(
                f"{prefix}{name} has shape {tuple(stored[prefix + name].shape)} in the checkpoint "
                f"and {tuple(lazy.shape)} in the folder's model. Name the folder that the "
                "checkpoint was trained from."
            )

    def fill_of(name: str) -> Fill:
        def fill(box: Box, out: Tensor) -> None:
            if out.numel():
                source.read([(prefix + name, Shard(box.offset, out))])

        return fill

    return {name: fill_of(name) for name in names}


def prefix_of_model(
    source: CheckpointSource, names: Mapping[str, Lazy], model: str | None = None
) -> str:
    """Return what precedes the parameters' names in a checkpoint, such as ``state_dict.model.``.
    For the arguments see :func:`fills_of_checkpoint`.
    """
    stored = source.tensors()
    place = None if model is None else f"state_dict.{model}." if model else "state_dict."
    # Checkpoints of a renamed attribute are found by the names of the parameters.
    is_there = place is not None and any(name.startswith(place) for name in stored)
    return place if place and is_there else _prefix(stored, names)


def _prefix(stored: Mapping[str, TensorInfo], names: Mapping[str, Lazy]) -> str:
    """Return the prefix of the model's names in a checkpoint."""
    first = next(iter(names))
    prefixes = [
        name.removesuffix(first)
        for name in stored
        if name.startswith("state_dict.") and name.endswith(f".{first}")
    ]
    if not prefixes:
        raise CheckpointError(
            f"the checkpoint has no tensor whose name ends with {first}, so it holds no model of "
            "the folder's class. Name the folder that the checkpoint was trained from."
        )
    return min(prefixes, key=len)


def fills_of_model(model: nn.Module, names: Mapping[str, Lazy]) -> dict[str, Fill]:
    """Return fills of the parameters of a full model, with adapters added.

    Raises:
        ConfigError: If this rank holds a part of the model.
    """
    check_values(model, "writing a folder")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, lazy in names.items():
        if name not in state or state[name].shape != lazy.shape or state[name].is_meta:
            raise ConfigError(
                f"{type(model).__name__} is a part of the model: {name} is not all here. Write on "
                "every rank: trainer.strategy.save_hf_pretrained(path), or .export_hf_weights()."
            )

    def fill_of(tensor: Tensor) -> Fill:
        def fill(box: Box, out: Tensor) -> None:
            out.copy_(tensor.detach()[box.slices])

        return fill

    fills = {name: fill_of(state[name]) for name in names}
    return merged_fills(fills, deltas_in(model, lambda name: state[name].detach()))


def fills_of_ranks(full: FullState, names: Mapping[str, Lazy]) -> dict[str, Fill]:
    """Return fills called by all ranks together, in the same order. The rank with the box sends the
    box.

    Raises:
        ConfigError: If the ranks have no parameter of a name, or of another shape.
    """
    for name, lazy in names.items():
        if full.shape(name) != tuple(lazy.shape):
            raise ConfigError(
                f"the model's {name} has shape {full.shape(name)}, and the folder that the model "
                f"came from makes {tuple(lazy.shape)} of it. Layers that were changed or wrapped "
                "after to_model() cannot be written as that folder."
            )

    def fill_of(name: str) -> Fill:
        return lambda box, out: full.read(name, box, out)

    return {name: fill_of(name) for name in names}


def values_of(
    tensors: Mapping[str, Lazy], device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of a folder's tensors, tensor by tensor.

    Args:
        tensors: Name -> tensor.
        device: Device of the values. None: the CPU.
    """
    for name, lazy in tensors.items():
        values = torch.empty(lazy.shape, dtype=lazy.dtype, device=device)
        lazy.fill(Box.full(lazy.shape), values)
        yield name, values
