"""Main params in flat buffers, and the take-over of writes of other code into parameters.

An optimizer steps main params: fp32 copies of parameters in lower precision, or copies in host
memory. Hooks, callbacks and loaders of weights write into the parameters. Before a step, an element
different from the rounded main param was written since the last step, and replaces the main param:

    main = where(value == round(main), main, value)

All other main params keep all bits, even after an average was swapped in and out. Comparing values
needs neither a collective nor the host. (A version counter would miss writes through ``p.data``,
and would report a swap without a changed value.)

An optimizer may write the other side as well, outside of a step (schedule-free optimizers swap an
average in for validation). Column sums of the values at the end of every step tell the two apart:
values unchanged since the step were not written, and leave the main params unchanged. Writes to
both sides between two steps are refused, because the order is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.parameter_shard import ParameterShard
from megatron_lightning.optim.stepping.column_sums import column_sums

_CHUNK = 1 << 24  # elements; bounds the memory of a comparison
_ALIGNMENT = 64


def take_over(main: Tensor, value: Tensor, changed: Tensor | None = None) -> None:
    """Replace in place the elements of ``main`` with a rounded value other than ``value``.

    Args:
        main: Main params.
        value: Values of the parameters, same shape and device.
        changed: Whether anything was written, a bool [] on the same device. None: unknown.
    """
    keep = value == main.to(value.dtype)
    if changed is not None:
        keep |= ~changed
    torch.where(keep, main, value.to(main.dtype), out=main)


@dataclass(eq=False)
class _Chunk:
    """Main params compared together."""

    main: Tensor
    """1-D buffer."""
    shards: Sequence[ParameterShard]
    places: Sequence[slice]
    """Range of each in the buffer."""
    seen: Tensor = field(init=False)
    """Column sums of the values at the end of the last step."""
    seen_main: Tensor = field(init=False)
    """Column sums of the main params then."""

    def values(self) -> Tensor:
        """Return the present values of the parameters, laid out like the main params."""
        like = self.shards[0].value
        values = torch.zeros(self.main.shape, dtype=like.dtype, device=like.device)
        torch._foreach_copy_(
            [values[place] for place in self.places],
            [shard.value.reshape(-1) for shard in self.shards],
        )
        return values

    def main_was_written(self) -> bool:
        """Return whether main params were written since the last step, and values were not.

        Raises:
            ConfigError: If both were written, and differ.
        """
        values = self.values()
        rounded = self.main.to(values.dtype)
        # Conversions give NaN of several bit patterns.
        if torch.allclose(values.to(rounded.device), rounded, rtol=0.0, atol=0.0, equal_nan=True):
            return False
        if torch.equal(column_sums(values), self.seen):
            return True
        if torch.equal(column_sums(self.main), self.seen_main):
            return False
        raise ConfigError(
            "between two optimizer steps, the optimizer wrote its copies of weights, as train() "
            "and eval() of a schedule-free optimizer do, and a hook or callback wrote the weights "
            f"themselves ({values.dtype}). One would overwrite the other. Set "
            'precision="bf16-mixed" or "32-true" without optimizer_cpu_offload, where both write '
            "the same tensors, or let hooks write at another time than between the last batch and "
            "a swap."
        )


class MainParams:
    """The main params of an optimizer on this rank.

    Args:
        copies: Shards of parameters, and the stepped tensor of each shard. The memory of the
            stepped tensors becomes part of flat buffers.
    """

    def __init__(self, copies: Iterable[tuple[ParameterShard, nn.Parameter]]) -> None:
        alike: dict[tuple[object, ...], list[tuple[ParameterShard, nn.Parameter]]]
        alike = defaultdict(list)
        for shard, main in copies:
            value = shard.value
            alike[value.dtype, value.device, main.dtype, main.device].append((shard, main))
        self._chunks = [_make_chunk(some) for copies in alike.values() for some in _sharded(copies)]
        self.record()

    def record(self) -> None:
        """Record the values: a step has just copied the main params into the parameters."""
        for chunk in self._chunks:
            chunk.seen = column_sums(chunk.values())
            chunk.seen_main = column_sums(chunk.main)

    def take_over(self) -> None:
        """Take over writes into the parameters since :meth:`record`."""
        for chunk in self._chunks:
            values = chunk.values()
            changed = (column_sums(values) != chunk.seen).any()
            if chunk.main.device.type != "cpu":
                take_over(chunk.main, values, changed)
            elif bool(changed):  # steps in host memory wait for the device anyway
                take_over(chunk.main, values.to(chunk.main.device))

    def were_written(self) -> bool:
        """Return whether main params, and not their parameters, were written since :meth:`record`.
        Waits for the device.

        Raises:
            ConfigError: If main params and their parameters were both written, and differ.
        """
        return any(chunk.main_was_written() for chunk in self._chunks)


def _sharded(
    copies: Sequence[tuple[ParameterShard, nn.Parameter]],
) -> Iterable[list[tuple[ParameterShard, nn.Parameter]]]:
    """Yield runs of copies of at most a chunk's size, or a single larger tensor."""
    some: list[tuple[ParameterShard, nn.Parameter]] = []
    size = 0
    for shard, main in copies:
        if some and size + main.numel() > _CHUNK:
            yield some
            some, size = [], 0
        some.append((shard, main))
        size += -(-main.numel() // _ALIGNMENT) * _ALIGNMENT
    if some:
        yield some


def _make_chunk(copies: Sequence[tuple[ParameterShard, nn.Parameter]]) -> _Chunk:
    """Move copies into a common buffer, page-locked if the copies were."""
    places, size = [], 0
    for _, main in copies:
        places.append(slice(size, size + main.numel()))
        size += -(-main.numel() // _ALIGNMENT) * _ALIGNMENT
    like = copies[0][1]
    pinned = like.device.type == "cpu" and copies[0][0].value.is_cuda
    buffer = torch.zeros(size, dtype=like.dtype, device=like.device, pin_memory=pinned)
    for (_, main), place in zip(copies, places, strict=True):
        main.data = buffer[place].view(main.shape).copy_(main.data)
    return _Chunk(buffer, [shard for shard, _ in copies], places)
