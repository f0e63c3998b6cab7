"""Gather weights of FSDP2 units as quantized data of 8 bits.

FSDP2 shards the main params. The main params are quantized once a step (``quantized_data``). FSDP2
then gathers the quantized data in place of the values, by hooks on a rank's shard ("Extensions" in
torch/distributed/fsdp/_fully_shard/_fsdp_param.py):

    main params, fp32 --encode--> codes --fsdp_pre_all_gather--> ... --> full weight, codes

The gathered weight is a parameter of 8-bit floats with fp32 or bf16 gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.compat import set_gather_hooks
from megatron_lightning.errors import ShardingError
from megatron_lightning.optim.fsdp.sharded_unit import Unit, local_part
from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.optim.gradients.quantized_data import (
    AllReduce,
    Quantizer,
    Range,
    WeightRanges,
    all_reduce,
    encode,
)
from megatron_lightning.optim.write_watch import WriteWatch

_OLD_CODES = (
    "Forwards read the quantized data of 8 bits that the last step made of these weights. Write "
    "weights in hooks of the start or end of an epoch or validation, after which the data are "
    "renewed, or set fp8_param_gather=False."
)


class UnitCodes:
    """The codes of the weights of a rank's units."""

    def __init__(self) -> None:
        self._weights: dict[DataGroups, list[WeightRanges]] = {}
        self._names: set[str] = set()
        self._main: dict[str, Tensor] = {}
        self._watch = WriteWatch()

    @property
    def num_weights(self) -> int:
        """How many weights are gathered as codes."""
        return len(self._names)

    def keep(self, units: Iterable[Unit], quantizers: Mapping[str, Quantizer]) -> None:
        """From now on gather the weights with quantizers as quantized data, made by :meth:`encode`.

        Args:
            units: All units of this rank.
            quantizers: Name of a parameter -> the quantizer.

        Raises:
            ShardingError: If the units were gathered otherwise before.
        """
        units = list(units)
        found = [
            (unit, name, shard)
            for unit in units
            for name, shard in unit.shards.items()
            if name in quantizers and _dim(shard) < max(1, shard.dim() - 1)
        ]
        names = {name for _, name, _ in found}
        if names != self._names and any(unit.gathered for unit in units):
            raise ShardingError(
                f"{len(names)} weights are to be gathered as codes of 8 bits, and an earlier "
                f"Trainer has gathered {len(self._names)} so. Use the same recipe, or create a new "
                "module and load a checkpoint into it."
            )
        self._names = names
        self._weights.clear()
        self._main.clear()
        self._watch.forget()
        for unit, name, shard in found:
            weight = _keep(shard, quantizers[name], unit.groups.shard.size)
            self._weights.setdefault(unit.groups, []).append(weight)
            self._main[name] = local_part(shard)[0]

    def encode(self, reduce: AllReduce = all_reduce) -> None:
        """Renew the codes from the main params. A collective."""
        for groups in sorted(self._weights, key=lambda groups: groups.all.name):
            weights = self._weights[groups]
            encode(weights, groups.shard, reduce)
        self._watch.record(list(self._main.values()))

    def look_for_writes(self) -> None:
        """Look before a step for writes into main params since the last :meth:`encode`.

        Raises:
            ConfigError: If main params were written. On GPUs a step later.
        """
        self._watch.look(list(self._main.values()), list(self._main), _OLD_CODES)

    def were_written(self) -> bool:
        """Return the same. Waits for the device."""
        return self._watch.was_written(list(self._main.values()))


def _dim(shard: DTensor) -> int:
    return getattr(shard.placements[0], "dim", 0)


def _keep(shard: DTensor, quantizer: Quantizer, num_ranks: int) -> WeightRanges:
    """Make FSDP2 gather the quantized data of a parameter."""
    own, box = local_part(shard)
    shape = list(own.shape)
    shape[0] = -(-shard.shape[0] // num_ranks) if _dim(shard) == 0 else shape[0]
    # As many on every rank; as bytes, since gloo does not know torch's 8-bit floats.
    codes = torch.zeros(shape, dtype=torch.uint8, device=own.device)

    def pre_all_gather(
        mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        return (codes,), None

    def post_all_gather(
        outputs: tuple[Tensor, ...], metadata: Any, param_dtype: Any, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        # Later gathers write into the same memory.
        return None if out is not None else (outputs[0].view(quantizer.dtype), ())

    set_gather_hooks(shard, pre_all_gather, post_all_gather)
    return WeightRanges(quantizer, _ranges(shard, own, box.offset, codes), own.device)


def _ranges(shard: DTensor, own: Tensor, offset: tuple[int, ...], codes: Tensor) -> list[Range]:
    """Return the ranges of a shard in the full parameter: a single range of rows, or a range of
    each expert's rows.
    """
    if not own.numel():
        return []
    row = math.prod(shard.shape[1:])
    if _dim(shard) == 0:
        return [Range(offset[0] * row, own.view(-1), codes[: len(own)].view(-1))]
    first = offset[1] * shard.shape[2]
    return [
        Range(expert * row + first, part.view(-1), codes[expert].view(-1))
        for expert, part in enumerate(own)
    ]
