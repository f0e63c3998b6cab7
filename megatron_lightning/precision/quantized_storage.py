"""Parameters stored as quantized data of 8 bits, with main params on the ranks that step them.

A bucket's buffer has a byte for each weight, and every rank has main params of the rank's shard:

    main params --encode--> data of the shard --all-gather--> data of all parameters

FSDP2 shards the main params, and gathers the quantized data in place of the values by hooks on a
rank's shard ("Extensions" in torch/distributed/fsdp/_fully_shard/_fsdp_param.py):

    main params, fp32 --encode--> data --fsdp_pre_all_gather--> ... --> full weight, data

The gathered weight is a parameter of 8-bit floats with fp32 or bf16 gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.compat import set_gather_hooks, set_grad_dtype
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.fsdp.sharded_unit import local_shard
from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.optim.gradients.parameter_storage import (
    AllReduce,
    BucketLayout,
    PlainBucket,
    StoredBucket,
    StoredUnits,
    UnitShard,
    all_reduce,
)
from megatron_lightning.optim.stepping.column_sums import column_sums
from megatron_lightning.optim.write_watch import WriteWatch
from megatron_lightning.parallel.cpu_exchange import gather_chunks
from megatron_lightning.precision.quantized_data import (
    LibraryQuantizer,
    Quantizer,
    Range,
    WeightRanges,
    encode,
)

_REPLACE_EARLIER = (
    "Replace weights before the strategy sets up the fit, or set fp8_param_gather=False."
)
_NO_ROOM = (
    "Such weights are kept as quantized data of 8 bits, which have no room for other weights. "
    + _REPLACE_EARLIER
)
_OLD_DATA = (
    "Forwards read the quantized data of 8 bits that the last step made of these weights. Write "
    "weights in hooks of the start or end of an epoch or validation, after which the data are "
    "renewed, or set fp8_param_gather=False."
)


class QuantizedStorage:
    """The storage of weights with quantizers.

    Args:
        module: The module of the weights.
        quantizers: Name of a parameter -> the quantizer.
    """

    def __init__(self, module: nn.Module, quantizers: Mapping[str, Quantizer]) -> None:
        self._module = module
        self._quantizers = quantizers

    @property
    def names(self) -> Set[str]:
        """See :class:`~megatron_lightning.optim.gradients.parameter_storage.ParameterStorage`, as
        for all methods.
        """
        return self._quantizers.keys()

    @property
    def opaque_layers(self) -> Mapping[str, nn.Module]:
        """Layers with our GEMMs. Compiled graphs would round gradients to 8 bits."""
        return {
            name: self._module.get_submodule(name.rpartition(".")[0])
            for name, quantizer in self._quantizers.items()
            if not isinstance(quantizer, LibraryQuantizer)
        }

    def of_bucket(self, layout: BucketLayout) -> StoredBucket:
        """Return the storage of a bucket."""
        return QuantizedBucket(layout, [self._quantizers[name] for name in layout.names])

    def of_units(self, shards: Iterable[UnitShard]) -> StoredUnits:
        """Return the storage of FSDP2's units."""
        return QuantizedUnits(shards, self._quantizers)


class QuantizedBucket(PlainBucket):
    """A bucket's parameters as quantized data. The optimizer steps main params of the shard.

    Args:
        layout: Places of the parameters.
        quantizers: Quantizer of each parameter.
    """

    def __init__(self, layout: BucketLayout, quantizers: Iterable[Quantizer]) -> None:
        super().__init__(layout)
        self._quantizers = list(quantizers)
        self._main = super().main.clone()
        self.is_quantized = False
        self._encoded: Tensor | None = None  # column sums of the main params at the last gather
        self._gathered: Tensor | None = None  # column sums of the data at the last gather
        self._watch = WriteWatch()  # of this rank's data between steps
        self.store()

    @property
    def main(self) -> Tensor:
        """Main params in the dtype of the parameters, in memory apart from the data."""
        return self._main

    def store(self) -> None:
        """Store this rank's values as main params, and zeros as the data of all parameters until
        the next gather.
        """
        if self.is_quantized:
            return
        self._main.copy_(self.value[self.layout.shard])
        self._watch.forget()
        # Bytes, since gloo does not know torch's 8-bit floats.
        self.value = torch.zeros(self.value.shape, dtype=torch.uint8, device=self.value.device)
        for index, quantizer in enumerate(self._quantizers):
            parameter = self.layout.parameters[index]
            parameter.data = self.layout.view(self.value, index).view(quantizer.dtype)
            set_grad_dtype(parameter, None)
        self.is_quantized = True

    def restore_values(self) -> None:
        """Gather the main params, and store values."""
        group = self.layout.group.process_group
        if not self.is_quantized or group is None:
            return
        values = self._main.new_zeros(self.layout.size)
        values[self.layout.shard] = self._main
        gathering = gather_chunks(values, group)
        if gathering is not None:
            gathering.wait()
        self.value = values
        self.is_quantized = False
        self._watch.forget()
        for index, parameter in enumerate(self.layout.parameters):
            parameter.data = self.layout.view(values, index)
            set_grad_dtype(parameter, parameter.dtype)

    def encode(self, reduce: AllReduce = all_reduce) -> None:
        """Quantize the main params."""
        if not self.is_quantized:
            return
        data = self.value[self.layout.shard]
        encode(self._ranges(data), self.layout.group, reduce)
        self._watch.record([data])

    def _ranges(self, data: Tensor) -> list[WeightRanges]:
        """Return the parameters with this rank's range of each."""
        weights = []
        for index, quantizer in enumerate(self._quantizers):
            elements, start = self.layout.own_range(index)
            values = self._main[elements]
            ranges = [Range(start, values, data[elements])] if len(values) else []
            weights.append(WeightRanges(quantizer, ranges, self._main.device))
        return weights

    def record(self) -> None:
        """Record the gathered data, and the main params at the gather."""
        if self.is_quantized:
            self._encoded = column_sums(self._main)
            self._gathered = column_sums(self.value)

    def look_for_writes(self) -> None:
        """Look before a step for writes into this rank's data."""
        if self.is_quantized:
            self._watch.look([self.value[self.layout.shard]], [self._some_names], _NO_ROOM)

    def were_written(self) -> bool:
        """Return whether main params were written since their data were gathered."""
        if not self.is_quantized:
            return False
        if self._gathered is not None and not torch.equal(column_sums(self.value), self._gathered):
            raise ConfigError(f"{self._some_names}: written outside of a step. {_NO_ROOM}")
        return self._encoded is not None and not torch.equal(column_sums(self._main), self._encoded)

    def take_over(self) -> None:
        """Refuse values in place of data."""
        if not self.is_quantized:
            super().take_over()
            return
        for index in self.layout.rebound(self.value):
            name, parameter = self.layout.names[index], self.layout.parameters[index]
            raise ConfigError(
                f"{name}.data was replaced by a tensor of shape {tuple(parameter.shape)}, "
                f"{parameter.dtype}, {parameter.device}; the ranks share the parameter as 8-bit "
                f"quantized data. {_REPLACE_EARLIER}"
            )

    @property
    def _some_names(self) -> str:
        names = self.layout.names
        if len(names) == 1:
            return names[0]
        return f"some of {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


class QuantizedUnits:
    """Weights of a rank's units, gathered by FSDP2 as quantized data.

    Args:
        shards: All sharded parameters of the units.
        quantizers: Name of a parameter -> the quantizer.
    """

    def __init__(self, shards: Iterable[UnitShard], quantizers: Mapping[str, Quantizer]) -> None:
        self._quantizers = quantizers
        self._shards = [
            shard
            for shard in shards
            if shard.name in quantizers and _dim(shard.tensor) < max(1, shard.tensor.dim() - 1)
        ]
        self._weights: dict[DataGroups, list[WeightRanges]] = {}
        self._main: dict[str, Tensor] = {}
        self._watch = WriteWatch()

    @property
    def names(self) -> Set[str]:
        """Weights gathered as quantized data."""
        return {shard.name for shard in self._shards}

    def store(self) -> None:
        """Make FSDP2 gather the data of the weights, computed by :meth:`encode`."""
        for name, shard, groups in self._shards:
            weight = _gather_quantized(shard, self._quantizers[name], groups.shard.size)
            self._weights.setdefault(groups, []).append(weight)
            self._main[name] = local_shard(shard)[0]

    def encode(self, reduce: AllReduce = all_reduce) -> None:
        """Quantize the main params."""
        for groups in sorted(self._weights, key=lambda groups: groups.all.name):
            encode(self._weights[groups], groups.shard, reduce)
        self._watch.record(list(self._main.values()))

    def look_for_writes(self) -> None:
        """Look before a step for writes into main params since the last :meth:`encode`."""
        self._watch.look(list(self._main.values()), list(self._main), _OLD_DATA)

    def were_written(self) -> bool:
        """Return whether main params were written since the last :meth:`encode`."""
        return self._watch.was_written(list(self._main.values()))


def _dim(shard: DTensor) -> int:
    return getattr(shard.placements[0], "dim", 0)


def _gather_quantized(shard: DTensor, quantizer: Quantizer, num_ranks: int) -> WeightRanges:
    """Make FSDP2 gather the quantized data of a parameter."""
    main, box = local_shard(shard)
    shape = list(main.shape)
    shape[0] = -(-shard.shape[0] // num_ranks) if _dim(shard) == 0 else shape[0]
    # As many on every rank; as bytes, since gloo does not know torch's 8-bit floats.
    data = torch.zeros(shape, dtype=torch.uint8, device=main.device)

    def pre_all_gather(
        mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        return (data,), None

    def post_all_gather(
        outputs: tuple[Tensor, ...], metadata: Any, param_dtype: Any, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        # Later gathers write into the same memory.
        return None if out is not None else (outputs[0].view(quantizer.dtype), ())

    set_gather_hooks(shard, pre_all_gather, post_all_gather)
    return WeightRanges(quantizer, _unit_ranges(shard, main, box.offset, data), main.device)


def _unit_ranges(
    shard: DTensor, main: Tensor, offset: tuple[int, ...], data: Tensor
) -> list[Range]:
    """Return the ranges of a shard in the full parameter: a single range of rows, or a range of
    each expert's rows.
    """
    if not main.numel():
        return []
    row = math.prod(shard.shape[1:])
    if _dim(shard) == 0:
        return [Range(offset[0] * row, main.view(-1), data[: len(main)].view(-1))]
    first = offset[1] * shard.shape[2]
    return [
        Range(expert * row + first, rows.view(-1), data[expert].view(-1))
        for expert, rows in enumerate(main)
    ]
