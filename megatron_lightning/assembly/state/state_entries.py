"""Tensors from callbacks and hooks in a checkpoint, such as averages of the weights. Tensors of the
module's parameters are saved and loaded like the parameters. Other tensors must be equal on the
ranks of a replica.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.checks.replicas import diverged, fingerprint
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.assembly.state.tensor_names import Found, TensorNames
from megatron_lightning.checkpoint import CheckpointSource, TensorShards, load_sharded
from megatron_lightning.checkpoint.entries import (
    Entry,
    Path,
    leaves,
    place,
    read_table,
    without,
    write_table,
)
from megatron_lightning.checkpoint.format.naming import OWN, holds_tensors
from megatron_lightning.checkpoint.reading.memory_source import MemorySource
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.spec import Shape

_APART = ("state_dict", "optimizer_states", "loops", OWN)
"""Keys of a checkpoint with tensors saved in other ways."""


class EntryShards(NamedTuple):
    """Shards of the entries on a rank."""

    shards: list[TensorShards]
    copies: list[TensorShards]
    """Tied copies, under their owners' names."""


class StateEntries:
    """Save and load the tensors beside the module in a checkpoint.

    Args:
        state: The module's state on this rank.
    """

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._part = state.part
        self._context = state.context

    # ----------------------------------------------------------------------------------------- save

    def take(self, checkpoint: dict[str, Any], *, compare: bool) -> EntryShards:
        """Move the tensors of parameters out of ``checkpoint``. All ranks call this.

        Args:
            checkpoint: Lightning's dict on this rank.
            compare: Whether to compare the tensors staying in ``checkpoint``.

        Raises:
            CheckpointError: On every rank, if a tensor stays and differs between the ranks of a
                replica.
        """
        beside = {key: value for key, value in checkpoint.items() if key not in _APART}
        names = TensorNames(self._local_shapes(), self._part.tied, self._orders())
        entries = names.find(beside)
        # Callbacks may hold different entries on different ranks. All ranks must write the same
        # list of names before the first collective of the save.
        entries = self._agreed([*entries, *_of_nobody(beside, entries)], beside)
        mine = [entry for entry, _ in entries]
        # The rest of the dict is saved by rank 0 alone: a tensor in it must not be a rank's own.
        if compare:
            remainder = without(beside, [entry for entry in mine if entry.name])
            self._compare(remainder, names)
        checkpoint.update(without(beside, mine))
        write_table(checkpoint, self._merged(mine))
        shards = [
            (entry, self._state.copy_shards(entry.stored, entry.name, tensor))
            for entry, tensor in entries
        ]
        tied = self._part.tied
        return EntryShards(
            [s for entry, s in shards if entry.name not in tied],
            [s for entry, s in shards if entry.name in tied],
        )

    @cached_property
    def _names(self) -> Mapping[str, Tensor]:
        return self._state.local_tensors()

    def _local_shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._names.items()}

    def _orders(self) -> list[list[str]]:
        parameters = dict(self._state.module.named_parameters())
        return [list(parameters), [name for name, p in parameters.items() if p.requires_grad]]

    def _agreed(self, found: list[Found], beside: Mapping[str, Any]) -> list[Found]:
        """Return the entries present on all ranks with the entries' parameters. Some callbacks keep
        tensors on a single rank, or full copies of the model.
        """
        keys = [(repr(entry.path), entry.name) for entry, _ in found]
        common_keys = set(keys)
        same_stage = self._context.axis("tp-dp-cp")
        if same_stage.process_group is not None:
            mark = torch.tensor([zlib.crc32(repr(sorted(common_keys)).encode())])
            if diverged(mark.to(self._context.device), same_stage):
                common_keys = set.intersection(*same_stage.all_gather_object(common_keys))
        if self._context.pp.size > 1:
            named_paths = {path for path, _ in common_keys}
            plain_paths = {
                repr(path) for path, value in leaves(beside) if isinstance(value, Tensor)
            }
            stages = self._context.pp.all_gather_object(plain_paths - named_paths)
            foreign = set.union(*stages)
            common_keys = {key for key in common_keys if key[0] not in foreign}
        return [each for key, each in zip(keys, found, strict=True) if key in common_keys]

    def _merged(self, mine: Sequence[Entry]) -> list[Entry]:
        """Return the entries of all pipeline ranks, in the full model's order."""
        ranks = self._context.pp.all_gather_object(list(mine))
        entries = list(dict.fromkeys(entry for rank in ranks for entry in rank))
        place = {name: position for position, name in enumerate(self._part.names)}
        return sorted(entries, key=lambda entry: place.get(entry.name, -1))

    def _compare(self, rest: Mapping[str, Any], names: TensorNames) -> None:
        """Check that the tensors saved from a single rank are equal in the rank's replica. Tensors
        named after parameters sharded over data-parallel ranks must be equal on every rank.
        """
        marks: dict[str, int] = {}
        weights: dict[str, int] = {}
        for path, value in leaves(rest):
            if isinstance(value, Tensor | np.ndarray) and value.ndim:
                is_named = next(names.spelled(path), None) is not None
                digest = _digest(path, value)
                marks[_text(path)] = digest
                if is_named:
                    weights[_text(path)] = digest
        context = self._context
        # Two sums of digests a rank instead of all values. Names are gathered only after a
        # difference.
        values = torch.tensor([sum(marks.values()), sum(weights.values())], dtype=torch.int64)
        values = values.to(context.device)
        differs = torch.zeros(1, dtype=torch.int32, device=context.device)
        replicas = [("tp-pp", values), ("cp", values)]
        for group, compared in (
            replicas if self._part.units is None else [*replicas, ("dp-cp", values[1:])]
        ):
            differs |= bool(diverged(compared, context.axis(group)))
        # Every rank refuses, not only the group that differs.
        world = context.axis("world")
        if world.process_group is not None:
            dist.all_reduce(differs, dist.ReduceOp.MAX, group=world.process_group)
        if differs.item():
            weights = weights if self._part.units is not None else {}
            _refuse(world.all_gather_object((context.dp.rank, marks, weights)))

    # ----------------------------------------------------------------------------------------- load

    def load(self, source: CheckpointSource, checkpoint: dict[str, Any]) -> None:
        """Put this rank's part of every entry into ``checkpoint``. All ranks call this.

        Args:
            source: The checkpoint.
            checkpoint: State of the checkpoint without sharded tensors. A plain file's state
                contains full tensors.

        Raises:
            CheckpointError: On every rank, for missing, misshaped or damaged tensors.
        """
        full_tensors: dict[str, Tensor] = {}
        entries = read_table(checkpoint)
        # A checkpoint without a table was written by another strategy: entries are recognized by
        # name and shape, and read from the state itself.
        if entries is None:
            entries, full_tensors = self._recognized(source, checkpoint)
            checkpoint.update(without(checkpoint, [e for e in entries if e.stored in full_tensors]))
        source = MemorySource(source, full_tensors)
        wanted_entries = self._wanted(entries)
        tensors = [self._fresh(source, entry) for entry in wanted_entries]
        shards = [
            self._state.copy_shards(entry.stored, entry.name, tensor)
            for entry, tensor in zip(wanted_entries, tensors, strict=True)
        ]
        report = load_sharded(source, shards, strict=False, group=self._context.axis("world"))
        if report.missing:
            raise CheckpointError(
                f"tensors are missing from the checkpoint: {', '.join(report.missing[:5])}. It is "
                "incomplete; resume from another checkpoint."
            )
        place(checkpoint, wanted_entries, tensors)

    def _recognized(
        self, source: CheckpointSource, checkpoint: Mapping[str, Any]
    ) -> tuple[list[Entry], dict[str, Tensor]]:
        """Return the entries of a checkpoint without a table, and the full tensors in the
        checkpoint's state by name. The checkpoint is a plain file, or of an earlier version.
        """
        names = TensorNames(self._global_shapes(), self._part.tied, [self._full_order()])
        found = names.find({k: v for k, v in checkpoint.items() if k not in _APART})
        full_tensors = {entry.stored: tensor for entry, tensor in found}
        entries = [entry for entry, _ in found]
        tops: dict[str, dict[str, Tensor]] = {}
        for stored, info in source.tensors().items():
            key, _, name = stored.partition(".")
            if key not in _APART:
                empty = torch.empty(info.shape, dtype=info.dtype, device="meta")
                tops.setdefault(key, {})[name] = empty
        known_entries = [entry for entry, _ in names.find(tops)]
        paths = {entry.path for entry in known_entries}
        for key, tensors in tops.items():
            known_entries += [Entry("", "", (key, n), 1) for n in tensors if (key, n) not in paths]
        # Tied copies stand under their own names there.
        known_entries = [entry._replace(stored=_text(entry.path)) for entry in known_entries]
        return [*entries, *known_entries], full_tensors

    def _global_shapes(self) -> dict[str, Shape]:
        """Return the shapes of all stages' tensors."""
        mine = {
            name: self._state.spec(name, tensor).global_shape
            for name, tensor in self._names.items()
        }
        stages = self._context.pp.all_gather_object(mine)
        return {name: shape for stage in stages for name, shape in stage.items()}

    def _full_order(self) -> list[str]:
        """Return the parameters of all stages, in the full model's order."""
        mine = [n for n, _ in self._state.module.named_parameters() if n not in self._part.tied]
        names = {name for stage in self._context.pp.all_gather_object(mine) for name in stage}
        return [name for name in self._part.names if name in names]

    def _wanted(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries for this rank: entries of this rank's parameters, and entries without
        a parameter.
        """
        local_names, tied, elsewhere = self._names, self._part.tied, {*self._part.names}
        entries = list(entries)
        places = {entry.path for entry in entries}
        wanted_entries = [e for e in entries if e.name in local_names or e.name not in elsewhere]
        for copy in (
            copy for copy in tied if copy in local_names and tied[copy] not in local_names
        ):
            for entry in (entry for entry in entries if entry.name == tied[copy]):
                path = _renamed(entry.path, entry.name, copy)
                if entry.in_list or (path is not None and path not in places):
                    path_in_dict = entry.path if entry.in_list else path or ()
                    wanted_entries.append(entry._replace(name=copy, path=path_in_dict))
        order = {name: i for i, (name, _) in enumerate(self._state.module.named_parameters())}
        return sorted(wanted_entries, key=lambda e: order.get(e.name, -1) if e.in_list else -1)

    def _fresh(self, source: CheckpointSource, entry: Entry) -> Tensor:
        """Return a new tensor for this rank's part of an entry, in the saved dtype."""
        info = source.tensors().get(entry.stored)
        like = self._names.get(entry.name)
        if info is None or like is None:
            shape, dtype = ((), torch.float32) if info is None else (info.shape, info.dtype)
            return torch.empty(shape, dtype=dtype, device=self._context.device)
        return torch.empty_like(like, dtype=info.dtype, requires_grad=False).zero_()


def _of_nobody(beside: Mapping[str, Any], found: Sequence[Found]) -> list[Found]:
    """Return the remaining tensors of dicts that hold only tensors. The state file leaves these
    tensors out, since they may be large.
    """
    taken_paths = {entry.path for entry, _ in found}
    return [
        (Entry(f"{key}.{name}", "", (key, name), 1), tensor)
        for key, value in beside.items()
        if isinstance(value, Mapping) and holds_tensors(key, value)
        for name, tensor in value.items()
        if (key, name) not in taken_paths
    ]


def _renamed(path: Path, name: str, other: str) -> Path | None:
    """Return a path with another name at the end of the last key. None: the key spells the name in
    another way.
    """
    key = str(path[-1])
    return (*path[:-1], key.removesuffix(name) + other) if key.endswith(name) else None


def _text(path: Path) -> str:
    return ".".join(map(str, path))


def _digest(path: Path, value: Any) -> int:
    """Return a fingerprint of a tensor and the tensor's path, of 40 bits, so that many fingerprints
    can be added.
    """
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    mark = int(fingerprint(tensor)) if tensor.layout == torch.strided else 0
    where = f"{path!r} {tuple(tensor.shape)} {tensor.dtype} {mark}"
    return zlib.crc32(where.encode()) << 8


def _refuse(ranks: Sequence[tuple[int, dict[str, int], dict[str, int]]]) -> None:
    """Raise an error for differing entries.

    Args:
        ranks: Of every rank: replica, digests compared in the replica, and digests compared on all
            ranks.
    """
    differing = set[str]()
    for replica in {number for number, _, _ in ranks}:
        marks = [marks for number, marks, _ in ranks if number == replica]
        differing |= _unequal(marks)
    everywhere = set.intersection(*(set(weights) for _, _, weights in ranks))
    differing |= _unequal([{n: weights[n] for n in everywhere} for _, _, weights in ranks])
    if differing:
        names = sorted(differing)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise CheckpointError(
            f"{len(names)} tensor(s) of the state to be saved differ between ranks: "
            f"{', '.join(names[:5])}{more}. Each rank holds a part of the model, and a checkpoint "
            "would hold one rank's tensors for all. Name the tensors in a dict by the parameters "
            "that they belong to (module.named_parameters()), with the parameters' shapes, so that "
            "every rank's are saved; or make them equal on all ranks, or keep them out of the "
            "state (state_dict and on_save_checkpoint)."
        )


def _unequal(ranks: Sequence[Mapping[str, int]]) -> set[str]:
    names = {name for marks in ranks for name in marks}
    return {name for name in names if len({marks.get(name) for marks in ranks}) > 1}
