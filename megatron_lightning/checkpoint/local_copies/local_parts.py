"""The parts of a local copy.

Each part is an ordinary checkpoint of a rank's shards. The tensors are named by number. The state
maps each number to a global tensor name and a box.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lightning.checkpoint.format.manifest import TensorInfo, dtype_of
from megatron_lightning.checkpoint.format.structure import check_structure
from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
from megatron_lightning.checkpoint.writing.commit import is_committed
from megatron_lightning.checkpoint.writing.saving import Snapshot, take_snapshot
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.spec import Box, Shape, Shard
from megatron_lightning.parallel.shards.tensor_shards import TensorShards


class LocalPart(NamedTuple):
    """The part of a copy written by a rank."""

    source: CheckpointSource
    boxes: Mapping[str, Sequence[tuple[str, Box]]]
    """Global name -> (name in ``source``, box) of each shard on the rank."""
    tensors: Mapping[str, TensorInfo]
    """Every tensor with shards on the rank."""
    state: dict[str, Any]
    """The rest of the state, on the first rank only."""


def part_snapshot(
    path: Path, tensors: Iterable[TensorShards], state: Mapping[str, Any]
) -> Snapshot:
    """Collect the shards and the rest of the state of this rank, to be written to ``path``."""
    tensors_of_rank: list[TensorShards] = []
    boxes: dict[str, list[tuple[str, Shape, Shape]]] = {}
    shapes: dict[str, tuple[Shape, str]] = {}
    for number, shards in enumerate(tensors):
        shapes[shards.name] = (shards.global_shape, str(shards.dtype).removeprefix("torch."))
        for shard in shards.shards:
            stored = f"{number}.{len(tensors_of_rank)}"
            tensors_of_rank.append(TensorShards.full(stored, shard.data))
            boxes.setdefault(shards.name, []).append((stored, *shard.box))
    return take_snapshot(path, tensors_of_rank, {"tensors": shapes, "boxes": boxes, "state": state})


def open_part(path: Path) -> LocalPart:
    """Open a part, and check the outer form of the part's state."""
    source = open_checkpoint(path)
    content = source.state()
    check_structure(content["state"], str(path))
    boxes = {
        name: [(stored, Box(tuple(o), tuple(n))) for stored, o, n in found]
        for name, found in content["boxes"].items()
    }
    shapes = {
        name: TensorInfo(tuple(shape), dtype_of(dtype))
        for name, (shape, dtype) in content["tensors"].items()
    }
    return LocalPart(source, boxes, shapes, content["state"])


class PartsSource:
    """The parts of a copy on this node as a single :class:`CheckpointSource`.

    Args:
        opened: Parts opened already.
        others: Further parts, opened on demand if present on this node.
        tensors: Every tensor of the copy.
        state: Everything else.
    """

    def __init__(
        self,
        opened: Sequence[LocalPart],
        others: Iterable[Path],
        tensors: Mapping[str, TensorInfo],
        state: dict[str, Any],
    ) -> None:
        self._opened = list(opened)
        self._others = [path for path in others if is_committed(path)]
        self._tensors = tensors
        self._state = state

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor of the copy."""
        return self._tensors

    def state(self) -> dict[str, Any]:
        """Return a fresh copy of everything else."""
        return dict(self._state)

    def read(self, shards: Iterable[tuple[str, Shard]]) -> None:
        """Fill (tensor name, shard) with the copy's values.

        Raises:
            CheckpointError: If the parts on this node do not cover a shard.
        """
        requests: dict[int, list[tuple[str, Shard]]] = {}
        for name, shard in shards:
            for number, part in self._found(name, shard):
                requests.setdefault(number, []).append(part)
        for number, reads in requests.items():
            self._opened[number].source.read(reads)

    def _found(self, name: str, shard: Shard) -> Iterator[tuple[int, tuple[str, Shard]]]:
        """Yield (number of a part, read from the part) until every element of the shard is
        covered.
        """
        num_missing, seen_parts = shard.data.numel(), set()
        for number, part in enumerate(self._parts()):
            if not num_missing:
                return
            for stored, box in part.boxes.get(name, ()):
                common = box.overlap(shard.box)
                if common is None or box in seen_parts:  # replicas hold the same boxes
                    continue
                seen_parts.add(box)
                num_missing -= prod(common.shape)
                target = shard.data[common.relative_to(shard.offset).slices]
                yield number, (stored, Shard(common.relative_to(box.offset).offset, target))
        if num_missing:
            raise CheckpointError(
                f"{name}: the local copies on this node lack elements of this rank's shard. Resume "
                "from a checkpoint of the shared file system."
            )

    def _parts(self) -> Iterator[LocalPart]:
        yield from self._opened
        while self._others:
            self._opened.append(open_part(self._others.pop(0)))
            yield self._opened[-1]
