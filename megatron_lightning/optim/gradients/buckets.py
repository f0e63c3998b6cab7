"""Contiguous gradient buffers of many parameters each, and this rank's shards of the buffers.

A bucket is a 1-D gradient buffer (fp32 for half-precision parameters) with views for many
parameters, reduced by a single collective. The parameters of a bucket share all properties of the
reduction: dtype, device, the axes of replication and the axes of partial sums.

Layout, in elements (Megatron-Core's distributed optimizer; ZeRO, https://arxiv.org/abs/1910.02054,
stage 1):

    | parameter 0 | pad to 64 | parameter 1 | pad to 64 | … | pad to lcm(ranks, 128) |
    |   rank 0's shard    |   rank 1's shard   |  …  |   last rank's shard           |

Shards ignore the edges of parameters: a rank owns at most a single flat range of each, as
:class:`ParameterShard`. For optimizers of full matrices every parameter is assigned to a single
rank instead, and every shard ends with padding:

    | parameter 2 | parameter 0 | pad | parameter 1 |     pad     | …
    |        rank 0's shard           |    rank 1's shard         | …
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.compat import set_grad_dtype
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.optim.gradients.parameter_shard import ParameterShard, main_dtype
from megatron_lightning.optim.gradients.quantized_data import Quantizer, Range, WeightRanges
from megatron_lightning.optim.stepping.column_sums import column_sums
from megatron_lightning.optim.stepping.rebound import check_rebound
from megatron_lightning.optim.write_watch import WriteWatch
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.cpu_exchange import Messages, gather_chunks

PARAMETER_ALIGNMENT = 64  # elements; keeps every view on a 128-byte boundary in 2-byte dtypes
BUCKET_ALIGNMENT = 128
_NO_ROOM = (
    "Such weights are kept as quantized data of 8 bits, which have no room for other weights. "
    "Replace weights before the strategy sets up the fit, or set fp8_param_gather=False."
)


@dataclass(eq=False)
class Bucket:
    """Parameters with gradients in a common buffer, reduced together."""

    names: list[str]
    parameters: list[nn.Parameter]
    sum_groups: tuple[AxisGroup, ...]
    """Groups of the gradients' partial sums, reduced before the data-parallel reduction."""
    data: DataGroups
    """Ranks of the reduction and of the shards."""
    assigned_by: tuple[int, ...] | None = None
    """Weight of each parameter, each assigned to a single shard. None: shards ignore the edges of
    parameters."""
    quantizers: tuple[Quantizer, ...] = ()
    """Quantizers of the parameters. Ranks gather quantized data instead of values. Empty:
    values."""
    gradient: Tensor = field(init=False)
    """1-D buffer of all gradients."""
    value: Tensor | None = field(init=False, default=None)
    """1-D buffer of all parameters, as values or quantized data. Sharded buckets only."""
    main: Tensor | None = field(init=False, default=None)
    """1-D buffer of this rank's shard in the parameters' dtype, with quantizers only."""
    holds_codes: bool = field(init=False, default=False)
    """Whether the parameters are codes now."""
    encoded: Tensor | None = field(init=False, default=None)
    """Column sums of the main params at the last gather of quantized data."""
    gathered: Tensor | None = field(init=False, default=None)
    """Column sums of these codes."""
    watch: WriteWatch = field(init=False, default_factory=WriteWatch)
    """Watches this rank's codes between steps."""
    views: list[Tensor] = field(init=False)
    """The gradient of each parameter, in the parameter's shape."""
    touched: list[bool] = field(init=False)
    """Whether each parameter received a gradient in this step. Views of other parameters are
    stale."""
    versions: list[int] = field(init=False, default_factory=list)
    """Version of each parameter at the last gather."""
    ready: set[int] = field(init=False, default_factory=set)
    """Parameters with the last gradient of this step received."""
    launched: bool = field(init=False, default=False)
    gathering: Messages | dist.Work | None = field(init=False, default=None)
    """The gather of the parameters in progress. Until the gather ends, other ranks' shards are
    stale."""

    def __post_init__(self) -> None:
        numels = [parameter.numel() for parameter in self.parameters]
        num_shards = self.data.shard.size if self.sharded else 1
        if self.assigned_by is None:
            self.offsets, size = flat_layout(numels, num_shards)
        else:
            self.offsets, size = assigned_layout(numels, self.assigned_by, num_shards)
        like = self.parameters[0]
        self.gradient = torch.zeros(size, dtype=main_dtype(like.dtype), device=like.device)
        self.views = [self._view(self.gradient, index) for index in range(len(self.parameters))]
        self.touched = [False] * len(self.parameters)
        for parameter in self.parameters:
            if parameter.dtype != self.gradient.dtype:
                set_grad_dtype(parameter, None)
        if self.sharded:
            self.value = torch.zeros(size, dtype=like.dtype, device=like.device)
            for index, parameter in enumerate(self.parameters):
                parameter.data = self._view(self.value, index).copy_(parameter.data)
        if self.quantizers and self.value is not None:
            self.main = self.value[self.shard].clone()
            self.keep_quantized()
        self.record_versions()

    def record_versions(self) -> None:
        """Record the versions of the parameters as gathered."""
        self.versions = [parameter._version for parameter in self.parameters]

    def names_written(self) -> list[str]:
        """Return the parameters written in place by code outside of the step. An optimizer writes
        only shards, with separate versions.
        """
        rows = zip(self.names, self.parameters, self.versions, strict=True)
        return [name for name, parameter, version in rows if parameter._version != version]

    def keep_quantized(self) -> None:
        """Keep this rank's shard as main params, and store all parameters as quantized data, not
        computed yet. Without quantizers do nothing.
        """
        if self.main is None or self.value is None or self.holds_codes:
            return
        self.main.copy_(self.value[self.shard])
        self.watch.forget()
        self.value = torch.zeros(self.value.shape, dtype=torch.uint8, device=self.value.device)
        for index, (parameter, quantizer) in enumerate(
            zip(self.parameters, self.quantizers, strict=True)
        ):
            parameter.data = self._view(self.value, index).view(quantizer.dtype)
            set_grad_dtype(parameter, None)
        self.holds_codes = True

    def coded_weights(self) -> list[WeightRanges]:
        """Return the parameters stored as quantized data, with this rank's range of each."""
        if self.value is None or self.main is None or not self.holds_codes:
            return []
        codes, coded = self.value[self.shard], []
        for index, quantizer in enumerate(self.quantizers):
            part, start = self._own_part(index)
            own = Range(start, self.main[part], codes[part])
            coded.append(
                WeightRanges(quantizer, [own] if len(own.values) else [], self.main.device)
            )
        return coded

    def drop_quantized(self, group: dist.ProcessGroup) -> None:
        """Gather the main params, and store the parameters as values again. A collective."""
        if self.main is None or not self.holds_codes:
            return
        values = self.main.new_zeros(self.gradient.numel())
        values[self.shard] = self.main
        gathering = gather_chunks(values, group)
        if gathering is not None:
            gathering.wait()
        self.value = values
        self.holds_codes = False
        self.watch.forget()
        for index, parameter in enumerate(self.parameters):
            parameter.data = self._view(values, index)
            set_grad_dtype(parameter, parameter.dtype)

    def record_codes(self) -> None:
        """Record the gathered quantized data, and the main params at the gather."""
        if self.holds_codes and self.main is not None and self.value is not None:
            self.encoded = column_sums(self.main)
            self.gathered = column_sums(self.value)

    def quantized_data_are_stale(self) -> bool:
        """Return whether main params were written since their codes were gathered. Waits for the
        device.

        Raises:
            ConfigError: If the codes themselves were written.
        """
        if not self.holds_codes or self.main is None or self.value is None:
            return False
        if self.gathered is not None and not torch.equal(column_sums(self.value), self.gathered):
            raise ConfigError(f"{self._some_names}: written outside of a step. {_NO_ROOM}")
        return self.encoded is not None and not torch.equal(column_sums(self.main), self.encoded)

    def watch_codes(self) -> None:
        """Record this rank's new quantized data."""
        if self.holds_codes and self.value is not None:
            self.watch.record([self.value[self.shard]])

    def look_for_writes(self) -> None:
        """Look before a step for writes into this rank's quantized data. The step would overwrite
        such writes.

        Raises:
            ConfigError: If quantized data were written. On GPUs a step later.
        """
        if self.holds_codes and self.value is not None:
            self.watch.look([self.value[self.shard]], [self._some_names], _NO_ROOM)

    @property
    def _some_names(self) -> str:
        if len(self.names) == 1:
            return self.names[0]
        return f"some of {', '.join(self.names[:3])}{', …' if len(self.names) > 3 else ''}"

    def bind(self) -> None:
        """Copy rebound parameters (``p.data = ...``) into the buffer, and bind the parameters to
        the buffer again.

        Raises:
            ConfigError: If shape, dtype or device of a parameter have changed.
        """
        if self.value is None:
            return
        first, size = self.value.data_ptr(), self.value.element_size()
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            if parameter.data_ptr() == first + self.offsets[index] * size or not parameter.numel():
                continue
            like = self.views[index] if self.main is not None else self._view(self.value, index)
            check_rebound(name, parameter.data, like, coded=self.holds_codes)
            parameter.data = self._view(self.value, index).copy_(parameter.data)

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        parameter, offset = self.parameters[index], self.offsets[index]
        return buffer[offset : offset + parameter.numel()].view(parameter.shape)

    def _own_part(self, index: int) -> tuple[slice, int]:
        """Return a parameter's elements of this rank's shard, possibly none, and the index in the
        parameter of the first element.
        """
        shard, offset = self.shard, self.offsets[index]
        low = max(offset, shard.start)
        high = max(low, min(offset + self.parameters[index].numel(), shard.stop))
        return slice(low - shard.start, high - shard.start), low - offset

    @property
    def sharded(self) -> bool:
        """Whether every rank of the shard group keeps only a shard of the reduced gradients."""
        return self.data.sharded

    @property
    def shard(self) -> slice:
        """Elements of the buffers owned by this rank after the reduction."""
        return self.data.shard_of(self.gradient.numel())

    def reset(self) -> None:
        """Begin a step: the first gradient of a parameter overwrites the parameter's view."""
        self.touched = [False] * len(self.parameters)
        self.ready.clear()
        self.launched = False

    def complete(self) -> None:
        """Zero the missing gradients, to make the buffer ready for the reduction."""
        untouched = [
            view for view, touched in zip(self.views, self.touched, strict=True) if not touched
        ]
        if untouched:
            torch._foreach_zero_(untouched)

    def shards(self) -> dict[str, ParameterShard]:
        """Return this rank's shard of each parameter, by name. Parameters in other ranks' shards
        are absent.
        """
        if self.value is None:
            return {
                name: ParameterShard.full(parameter, view)
                for name, parameter, view in zip(
                    self.names, self.parameters, self.views, strict=True
                )
            }
        values = self.value[self.shard] if self.main is None else self.main
        gradients = self.gradient[self.shard]
        shards = {}
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            part, start = self._own_part(index)
            numel = part.stop - part.start
            if not numel:
                continue
            is_full = numel == parameter.numel()
            shape = parameter.shape if is_full else (numel,)
            value, gradient = values[part].view(shape), gradients[part].view(shape)
            target = nn.Parameter(value)
            # Stays the target if main params are elsewhere, or if no optimizer steps the shard.
            if value.dtype != gradient.dtype:
                set_grad_dtype(target, None)
            shards[name] = ParameterShard(start, is_full, value, gradient, target)
        return shards


def flat_layout(numels: Sequence[int], num_shards: int) -> tuple[list[int], int]:
    """Return the offset of each parameter and the size of the buffer, for parameters in
    sequence.
    """
    offsets, size = [], 0
    for numel in numels:
        offsets.append(size)
        size += _round_up(numel, PARAMETER_ALIGNMENT)
    if num_shards > 1:
        size = _round_up(size, math.lcm(num_shards, BUCKET_ALIGNMENT))
    return offsets, size


def assigned_layout(
    numels: Sequence[int], weights: Sequence[int], num_shards: int
) -> tuple[list[int], int]:
    """Return the offset of each parameter and the size of the buffer, for parameters assigned to a
    single shard each: the heaviest first, into the least loaded shard.
    """
    loads, filled, places = [0] * num_shards, [0] * num_shards, {}
    for index in sorted(range(len(numels)), key=lambda i: -weights[i]):
        shard = loads.index(min(loads))
        places[index] = (shard, filled[shard])
        loads[shard] += weights[index]
        filled[shard] += _round_up(numels[index], PARAMETER_ALIGNMENT)
    size = _round_up(max(filled), BUCKET_ALIGNMENT)
    offsets = [places[index][0] * size + places[index][1] for index in range(len(numels))]
    return offsets, size * num_shards


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
