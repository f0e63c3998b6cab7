"""Full tensors of a sharded module, collected one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.spec import Box, Shape
from megatron_lightning.parallel.shards.tensor_shards import TensorShards


class _Stored(NamedTuple):
    """Description of a global tensor, with the sending rank of each box."""

    shape: Shape
    dtype: torch.dtype
    boxes: list[tuple[int, Box]]
    """Rank, and a box on the rank."""


class CollectedTensors:
    """Full tensors, collected from their shards on all ranks. All ranks create the object together.

    Args:
        context: Groups of this rank.
        own: Shards of this rank by global name.
        note: Plain data for all other ranks.
    """

    def __init__(
        self, context: ParallelContext, own: Mapping[str, TensorShards], note: Any = None
    ) -> None:
        self._context = context
        self._own = own
        shapes = {name: _sent(shards) for name, shards in own.items()}
        # One exchange tells every rank who holds which box. Values are sent only when a tensor is
        # read.
        world = context.axis("world")
        ranks = world.all_gather_object((shapes, note))
        self.notes = [note for _, note in ranks]
        """Notes of all ranks, in order."""
        self._stored: dict[str, _Stored] = {}
        self._disputed: set[str] = set()  # ranks describe other shapes
        for rank, (described, _) in zip(world.ranks, ranks, strict=True):
            for name, (shape, dtype, boxes) in described.items():
                stored = self._stored.setdefault(name, _Stored(shape, dtype, []))
                if stored.shape != shape:
                    self._disputed.add(name)
                stored.boxes.extend((rank, box) for box in boxes)

    @property
    def collected(self) -> list[str]:
        """Names of all tensors, of any rank."""
        return list(self._stored)

    @property
    def incomplete(self) -> list[str]:
        """Names of tensors that the ranks' shards do not make up: ranks describe other shapes, or
        nobody sends a part. Boxes overlap only if they are equal.
        """
        return [
            name
            for name, (shape, _, boxes) in self._stored.items()
            if name in self._disputed
            or sum(prod(box.shape) for box in {box for _, box in boxes}) < prod(shape)
        ]

    def tensor(self, name: str) -> Tensor:
        """Return a full tensor, newly allocated, on every rank. All ranks call this."""
        shape, dtype, _ = self._stored[name]
        buffer = torch.empty(shape, dtype=dtype, device=self._context.device)
        self._read(name, Box.full(shape), buffer)
        return buffer

    def _read(self, name: str, wanted: Box, out: Tensor) -> None:
        """Fill ``out`` with a box. Each rank sends the overlaps with the rank's own boxes."""
        _, dtype, boxes = self._stored[name]
        context = self._context
        shards = self._own[name].shards if name in self._own else []
        data_of_boxes = {shard.box: shard.data for shard in shards}
        world = context.axis("world")
        # All ranks walk through the same boxes, so that broadcasts pair up. The holder of a box is
        # its source.
        for rank, box in boxes:
            common = wanted.overlap(box)
            if common is None:
                continue
            target = out[common.relative_to(wanted.offset).slices]
            mine = (
                data_of_boxes[box][common.relative_to(box.offset).slices]
                if rank == context.rank
                else None
            )
            if world.process_group is None:
                if mine is not None:
                    target.copy_(mine)
                continue
            part = torch.empty(common.shape, dtype=dtype, device=context.device)
            if mine is not None:
                part.copy_(mine)
            # As bytes: communicators do not know every dtype.
            data = part.reshape(-1).view(torch.uint8)
            dist.broadcast(data, src=rank, group=world.process_group)
            target.copy_(part)


class FullState(CollectedTensors):
    """The full module's state, collected from the ranks. All ranks create the object together.

    Args:
        state: The module's state on this rank.
        local: State dict of this rank's part.
        path: Path of the wanted sub-module. "": the full module.
    """

    def __init__(self, state: ModuleState, local: Mapping[str, Any], path: str = "") -> None:
        self._prefix = f"{path}." if path else ""
        tied = state.part.tied
        own = {
            name: state.shards(name, name, value)
            for name, value in local.items()
            if isinstance(value, Tensor) and name not in tied
        }
        other_values = {n: v for n, v in local.items() if not isinstance(v, Tensor)}
        super().__init__(state.context, own, (other_values, dict(tied)))
        self.others: dict[str, Any] = {}
        """Entries other than tensors, such as extra states of layers."""
        self.owners: dict[str, str] = {}
        """Name of a tied copy -> name of the owner, over all ranks."""
        for values, copies in self.notes:
            self.others = {**values, **self.others}
            self.owners |= copies
        self._names = [*state.part.names, *(n for n in self._stored if n not in state.part.names)]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor, newly allocated, on every rank, in the full module's order.
        All ranks take all tensors.
        """
        for name in self._names:
            owner = self.owners.get(name, name)
            if owner in self._stored and name.startswith(self._prefix):
                yield name.removeprefix(self._prefix), self.tensor(owner)

    def collect(self, *, keeps: bool) -> dict[str, Any]:
        """Return the state as on a single device, on the CPU. All ranks call this.

        Args:
            keeps: Whether this rank wants the state. Otherwise the result is empty.
        """
        full_tensors: dict[str, Any] = {}
        tensors_of_owners: dict[str, Tensor] = {}  # tied copies share a tensor
        for name, tensor in self.tensors():
            if keeps:
                owner = self.owners.get(self._prefix + name, self._prefix + name)
                full_tensors[name] = tensors_of_owners.pop(owner, None)
                if full_tensors[name] is None:
                    full_tensors[name] = tensor.cpu()
                if owner in self.owners.values():
                    tensors_of_owners[owner] = full_tensors[name]
        if keeps:
            for name, value in self.others.items():
                if name.startswith(self._prefix):
                    full_tensors[name.removeprefix(self._prefix)] = value
        return full_tensors

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a full tensor of the sub-module, or of a tied copy. None: no such
        tensor.
        """
        full_name = self._prefix + name
        stored = self._stored.get(self.owners.get(full_name, full_name))
        return None if stored is None else stored.shape

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Fill ``out`` with a box of a tensor of the sub-module. All ranks call this with equal
        arguments.

        Args:
            name: Name in the sub-module, also of a tied copy.
            box: Range of the full tensor.
            out: Tensor of the box's shape, of any strides, dtype and device.
        """
        full_name = self._prefix + name
        self._read(self.owners.get(full_name, full_name), box, out)


def _sent(shards: TensorShards) -> tuple[Shape, torch.dtype, list[Box]]:
    """Return shape, dtype and the boxes sent by this rank. The first replica sends."""
    sends = shards.writes and shards.replicas.rank <= 0
    boxes = [shard.box for shard in shards.shards if shard.data.numel() or not shard.data.dim()]
    return shards.global_shape, shards.dtype, boxes if sends else []


def path_of(root: nn.Module, module: nn.Module | None) -> str:
    """Return the path of a sub-module. None: ``root`` itself.

    Raises:
        ConfigError: If ``module`` is no sub-module of ``root``.
    """
    if module is None:
        return ""
    for path, child in root.named_modules():
        if child is module:
            return str(path)
    raise ConfigError(
        f"{type(module).__name__} is no sub-module of the {type(root).__name__} that this strategy "
        "has run. Pass a sub-module of it, such as module.model, or nothing for all of it."
    )
