"""Sums over a rank's tokens in layers of :class:`GPTModel`, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.moe.experts import Experts, GroupedLinear
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.spec import ShardSpec


class Division(NamedTuple):
    """How tensor-parallel ranks divide activations and weights."""

    tp: AxisGroup
    divides_sequence: bool
    """Whether blocks get a part of the positions each."""
    specs: Mapping[str, ShardSpec]
    """Parameter -> this rank's part. Empty: all parameters are full."""


class LayerSums:
    """Hooks on a rank's blocks. See ``bridge/pruning/statistics.py`` for the entries.

    Ranks that see the same tokens count a share each, so that the sum over all ranks counts a token
    once.

    Args:
        blocks: Path of a block -> block.
        prefix: Path of the model, left out of the entries.
        division: See the class.
        is_recording: Whether a forward counts.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        prefix: str,
        division: Division,
        is_recording: Callable[[], bool] = lambda: True,
    ) -> None:
        self.entries: dict[str, Tensor] = {}
        """Sums so far."""
        self.takes_moments = False
        """Whether products of two inputs of a linear layer are summed."""
        self._prefix = prefix
        self._is_recording = is_recording
        self._hooks = ExitStack()
        for path, block in blocks.items():
            self._hooks.enter_context(_Block(self, path, block, division))

    def close(self) -> None:
        """Take the hooks away."""
        self._hooks.close()

    def add(self, path: str, quantity: str, value: Tensor) -> None:
        """Add a sum. ``amax``: take the larger value."""
        if not self._is_recording():
            return
        key = f"{path.removeprefix(self._prefix)}/{quantity}"
        value, old = value.detach().cpu().double(), self.entries.get(key)  # a GPU lacks the memory
        if old is not None:
            value = torch.maximum(old, value) if quantity == "amax" else old + value
        self.entries[key] = value


def moments_over(
    group: AxisGroup, moments: Mapping[str, Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Add up the second moments of all ranks, one after the other: all of a model are too large to
    be sent at once. All ranks consume this.

    Args:
        group: The ranks.
        moments: Entry -> moments [inputs, inputs] of this rank's layers.
        device: Device of collectives.

    Yields:
        Entry and sum, in the same order on all ranks.
    """
    parts = group.all_gather_object({key: len(x) for key, x in moments.items()})
    sizes = {key: size for part in parts for key, size in part.items()}
    for key, size in sorted(sizes.items()):
        own = moments.get(key)
        own = torch.zeros(size, size, dtype=torch.float64) if own is None else own
        yield key, all_reduce(own.to(device), group).cpu()


class _Block(ExitStack):
    """Hooks on a block and the linear layers and experts inside."""

    def __init__(self, sums: LayerSums, path: str, block: nn.Module, division: Division) -> None:
        super().__init__()
        self._sums, self._path, self._division = sums, path, division
        self._length = 0
        self._mask: Tensor | None = None
        self._rows: tuple[Tensor, Tensor] = torch.empty(0), torch.empty(0)
        self._own(block.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._own(block.register_forward_hook(self._end))
        for name, child in block.named_modules(prefix=path):
            if isinstance(child, nn.Linear):
                self._own(child.register_forward_pre_hook(partial(self._linear, name)))
            elif isinstance(child, MoELayer):
                self._own(child.register_forward_pre_hook(self._clear_padding, with_kwargs=True))
            elif isinstance(child, CoreAttention):
                self._own(child.register_forward_pre_hook(partial(self._cached, name)))
            elif isinstance(child, Experts):
                self._own(child.register_forward_pre_hook(partial(self._count, name)))
                self._own(child.register_forward_hook(partial(self._experts, name)))
            elif isinstance(child, GroupedLinear):
                self._own(child.register_forward_pre_hook(partial(self._expert_inputs, name)))

    def _own(self, handle: Any) -> None:
        self.callback(handle.remove)

    def _begin(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Learn the positions and the padding of the block's tokens."""
        hidden, *others = args
        sequence = kwargs.get("sequence", others[0] if others else None)
        parts = self._division.tp.size if self._division.divides_sequence else 1
        self._length = hidden.shape[0] * parts
        padding = None if sequence is None else sequence.padding
        self._mask = None if padding is None else ~padding.t()  # [s, b]

    def _end(self, block: nn.Module, args: Any, output: Tensor) -> None:
        cosines = F.cosine_similarity(args[0].float(), output.float(), dim=-1)
        mask = self._mask_of(args[0])
        share = self._share(args[0])
        self._sums.add(self._path, "cosines", (cosines.double() * mask).sum() * share)
        self._sums.add(self._path, "tokens", mask.sum() * share)

    def _linear(self, path: str, layer: nn.Module, args: Any) -> None:
        x: Tensor = args[0].detach()
        mask, share = self._mask_of(x), self._share(x)
        x = x.float().masked_fill(~mask[..., None], 0.0)
        if self._sums.takes_moments:
            self._moments(path, x, share)
        squares, spec = x.square().sum((0, 1), dtype=torch.float64), self._spec(path)
        if spec is None or spec.global_shape[1] == len(squares):
            squares = squares * share
        else:
            full, first = squares.new_zeros(spec.global_shape[1]), 0
            for box in spec.boxes:
                start, size = box.offset[1], box.shape[1]
                full[start : start + size] = squares[first : first + size]
                first += size
            squares = full
        self._sums.add(path, "squares", squares)
        self._sums.add(path, "amax", _amax(x))
        self._sums.add(path, "tokens", mask.sum() * share)

    def _moments(self, path: str, x: Tensor, share: float) -> None:
        """Add the products of inputs [s, b, …], gathered where ranks have parts of them."""
        rows, spec = x.flatten(0, 1), self._spec(path)
        if spec is not None and spec.global_shape[1] != rows.shape[1]:
            parts = torch.split(rows, [box.shape[1] for box in spec.boxes], dim=1)
            rows = rows.new_zeros(len(rows), spec.global_shape[1])
            for box, part in zip(spec.boxes, parts, strict=True):
                rows[:, box.slices[1]] = part
            rows, share = all_reduce(rows, self._division.tp), 1 / self._division.tp.size
        with torch.autocast(rows.device.type, enabled=False):  # fp16 overflows
            products = rows.t() @ rows
        self._sums.add(path, "moments", products.mul_(share))

    def _clear_padding(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give experts zeros for padding, which marks the rows on the ranks of the experts."""
        if self._mask is None:
            return None
        hidden, *others = args
        return (hidden.masked_fill(~self._mask_of(hidden)[..., None], 0.0), *others), kwargs

    def _cached(self, path: str, core: nn.Module, args: Any) -> None:
        """Take the amax of a cache's entries: keys behind rotary, and values."""
        attention = path.rpartition(".")[0]
        for kind, x in zip(("keys", "values"), args[1:3], strict=True):
            if x is not None:
                counted = x.detach().masked_fill(~self._mask_of(x)[..., None, None], 0.0)
                self._sums.add(f"{attention}.{kind}", "amax", _amax(counted))

    def _count(self, path: str, layer: nn.Module, args: Any) -> None:
        """Learn the owners of experts' rows, and the rows of padding."""
        rows, counts = args
        expert = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
        self._rows = rows.detach().ne(0).any(-1), expert
        spec = self._spec(f"{path}.linear_fc2")
        if spec is not None and any(box.shape[2] < spec.global_shape[2] for box in spec.boxes):
            raise ConfigError(
                f"{path} is divided over expert_tensor_parallel_size ranks, which hold parts of an "
                "expert's output. Set expert_tensor_parallel_size to 1."
            )

    def _expert_inputs(self, path: str, layer: nn.Module, args: Any) -> None:
        """Take the amax of each expert's inputs."""
        counted, expert = self._rows
        largest = args[0].detach().abs().amax(-1).double() * counted
        spec, first, number = self._spec(path), 0, len(args[1])
        if spec is not None:
            first, number = spec.boxes[0].offset[0], spec.global_shape[0]
        found = largest.new_zeros(number).scatter_reduce_(0, expert + first, largest, "amax")
        self._sums.add(path, "amax", found)

    def _experts(self, path: str, layer: nn.Module, args: Any, output: Tensor) -> None:
        counted, expert = self._rows
        norms = output.detach().float().square().sum(-1, dtype=torch.float64) * counted
        spec, first, number = self._spec(f"{path}.linear_fc2"), 0, len(args[1])
        if spec is not None:
            first, number = spec.boxes[0].offset[0], spec.global_shape[0]
        for quantity, values in (("squares", norms), ("tokens", counted.double())):
            total = norms.new_zeros(number).index_add_(0, expert + first, values)
            self._sums.add(path, quantity, total)

    def _spec(self, path: str) -> ShardSpec | None:
        return self._division.specs.get(f"{path}.weight")

    def _share(self, x: Tensor) -> float:
        """Return the share of a rank in tokens that all tensor-parallel ranks may see."""
        return 1 / self._division.tp.size if x.shape[0] == self._length else 1.0

    def _mask_of(self, x: Tensor) -> Tensor:
        """Return the tokens [s, b] of an activation [s, b, …] without padding."""
        if self._mask is None:
            return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if x.shape[0] == len(self._mask):
            return self._mask
        return self._mask[self._division.tp.rank * x.shape[0] :][: x.shape[0]]


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax() if x.numel() else x.new_zeros(())
