"""Ranks and scales of adapters in a checkpoint, beside those of the run that loads them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from megatron_lightning.errors import CheckpointError
from megatron_lightning.layers.adapters.adapter_layers import ALL_ROWS
from megatron_lightning.peft.lora import PARTS, LoRA, applied_to
from megatron_lightning.peft.record import Record

SCALES = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Fields of :class:`LoRA` that determine ranks and scales."""
_FACTOR = re.compile(r"(.+)\.adapters\.([^.]+)\.lora_A\.weight$")
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
        ours, theirs = applied.lora, record.applied.lora
        for layer in _layers(names, record):
            values = [(lora.rank_of(layer), lora.scale_of(layer)) for lora in (theirs, ours)]
            (rank, scale), (own_rank, own_scale) = values
            if rank != own_rank or abs(scale - own_scale) > 1e-6 * abs(scale):
                raise CheckpointError(
                    f"the checkpoint's adapters of {layer} have rank {rank} and are multiplied by "
                    f"{scale:g} ({described(theirs)}). Those of this run have rank {own_rank} and "
                    f"are multiplied by {own_scale:g} ({described(ours)}), which makes another "
                    f"model of the same weights. Set peft as it was: {described(theirs)}."
                )
        if ours.lora_dropout != theirs.lora_dropout:
            rank_zero_warn(
                f"the adapters were trained with lora_dropout={theirs.lora_dropout:g}, and "
                f"this run has {ours.lora_dropout:g}, which is taken."
            )


def imported_scales(own: LoRA, records: Iterable[Record]) -> LoRA | None:
    """Return a configuration with the ranks and scales of a folder of ``peft`` that was imported as
    a checkpoint. None: the checkpoint comes from no folder.

    Args:
        own: The configuration of the run.
        records: Records of the checkpoint.
    """
    for record in records:
        if record.applied.imported:
            return replace(own, **{name: getattr(record.applied.lora, name) for name in SCALES})
    return None


def described(lora: LoRA) -> str:
    """Return the fields of ranks and scales as options."""
    values = {name: getattr(lora, name) for name in SCALES}
    shown = (name for name, value in values.items() if value or name in ("r", "lora_alpha"))
    return ", ".join(f"{name}={_plain(values[name])}" for name in shown)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return f"{value:g}" if isinstance(value, float) else value


def _layers(names: Iterable[str], record: Record) -> Iterator[str]:
    """Yield the paths of the adapted layers and parameters of experts, in the model of a record."""
    prefix = f"{record.path}." if record.path else ""
    for name in names:
        match = _FACTOR.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is not None:
            path, part = match.groups()
            yield path if part in _OF_LAYERS else f"{path}.{part}"
