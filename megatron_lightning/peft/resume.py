"""Ranks and scales of adapters in a checkpoint, beside those of the run that loads them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from megatron_lightning.errors import CheckpointError
from megatron_lightning.layers.adapters.adapter_layers import ALL_ROWS
from megatron_lightning.peft.methods.applied import PARTS, applied_to
from megatron_lightning.peft.methods.method import AdapterMethod
from megatron_lightning.peft.record import Record

_PARAMETER = re.compile(r"(.+)\.adapters\.([^.]+)\.[^.]+\.weight$")
_OF_LAYERS = frozenset((ALL_ROWS, *(name for names in PARTS.values() for name in names)))


def check_scales(module: nn.Module, records: Iterable[Record], names: Collection[str]) -> None:
    """Check that a module's adapters have the ranks and scales of the adapters in a checkpoint. The
    same weights with another scale are another model. Another dropout is named in a warning.

    Args:
        module: A LightningModule, or a rank's part.
        records: Records of the checkpoint.
        names: Names of the tensors in the checkpoint's ``state_dict``. With the names of all stages
            the check fails on every rank.

    Raises:
        CheckpointError: Naming the first different layer, and the values to set.
    """
    for record in records:
        applied = applied_to(module).get(record.path)
        if applied is None:
            continue
        ours, theirs = applied.method, record.applied.method
        if type(ours) is not type(theirs):
            raise CheckpointError(
                f"the checkpoint's adapters are {theirs.label}, and those of this run "
                f"{ours.label}. Set peft as it was: {theirs.label}({theirs.described()})."
            )
        if ours.seed != theirs.seed:
            raise CheckpointError(
                f"the checkpoint's adapters have the seed {theirs.seed}, and those of this run "
                f"{ours.seed}, which draws other frozen values. Set peft as it was: "
                f"{theirs.described()}."
            )
        for layer in dict.fromkeys(_layers(names, record)):
            values = [(m.rank_of(layer), m.scale_of(layer)) for m in (theirs, ours)]
            (rank, scale), (own_rank, own_scale) = values
            if rank != own_rank or abs(scale - own_scale) > 1e-6 * abs(scale):
                raise CheckpointError(
                    f"the checkpoint's adapters of {layer} have rank {rank} and are multiplied by "
                    f"{scale:g} ({theirs.described()}). Those of this run have rank {own_rank} and "
                    f"are multiplied by {own_scale:g} ({ours.described()}), which makes another "
                    f"model of the same weights. Set peft as it was: {theirs.described()}."
                )
        if ours.dropout != theirs.dropout:
            rank_zero_warn(
                f"the adapters were trained with {theirs.dropout_field}={theirs.dropout:g}, and "
                f"this run has {ours.dropout:g}, which is taken."
            )


def imported_scales(own: AdapterMethod, records: Iterable[Record]) -> AdapterMethod | None:
    """Return a configuration with the ranks and scales of a folder of ``peft`` that was imported as
    a checkpoint. None: the checkpoint comes from no folder.

    Args:
        own: The configuration of the run.
        records: Records of the checkpoint.
    """
    for record in records:
        if record.applied.imported:
            theirs = record.applied.method
            if type(own) is type(theirs):  # loading refuses another method
                return replace(own, **{name: getattr(theirs, name) for name in own.scale_fields})
    return None


def _layers(names: Iterable[str], record: Record) -> Iterator[str]:
    """Yield the paths of the adapted layers and parameters of experts, in the model of a record."""
    prefix = f"{record.path}." if record.path else ""
    for name in names:
        match = _PARAMETER.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is not None:
            path, part = match.groups()
            yield path if part in _OF_LAYERS else f"{path}.{part}"
