"""Compare two dumps of tensors, entry by entry, in the order in which a step makes them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.errors import CheckpointError
from megatron_lightning.optional import require


@dataclass(frozen=True)
class EntryDifference:
    """How an entry of two dumps differs."""

    name: str
    """File of a folder with several, kind and module or parameter."""
    relative: float
    """Largest difference, of the largest absolute value of the first. Infinite: another shape, or
    values that are no numbers on one side."""
    text: str
    """The difference in words."""


@dataclass(frozen=True)
class DumpDifferences:
    """How two dumps differ."""

    num_entries: int
    """Entries in both."""
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    differing: tuple[EntryDifference, ...]
    """Beyond the tolerance, in the order of a step: weights, forward, backward."""

    def lines(self, first: str, second: str, num_listed: int = 10) -> list[str]:
        """Return the comparison in words, with the first entries that differ."""
        lines = []
        for path, names in ((first, self.only_in_first), (second, self.only_in_second)):
            if names:
                lines.append(f"only in {path}: {len(names)} entries, such as {names[0]}")
        if not self.differing:
            return [*lines, f"{self.num_entries} entries are equal within the tolerance."]
        differing = self.differing
        lines.append(f"{len(differing)} of {self.num_entries} entries differ.")
        lines.append(f"first: {differing[0].name}: {differing[0].text}")
        lines += [f"then:  {one.name}: {one.text}" for one in differing[1:num_listed]]
        more = len(differing) - num_listed
        return [*lines, f"and {more} more"] if more > 0 else lines


def compare_dumps(first: Path, second: Path, tolerance: float) -> DumpDifferences:
    """Compare two dumps.

    Args:
        first: A file of safetensors, or a folder of such files.
        second: Another one. Files of folders are compared with those of the same path.
        tolerance: Largest difference that counts as equal, relative to the largest value of an
            entry.

    Raises:
        CheckpointError: If a path holds no dump, or the dumps share no entry.
    """
    with ExitStack() as files:
        ours, theirs = (_entries(path, files) for path in (first, second))
        shared = [name for name in ours if name in theirs]
        if not shared:
            raise CheckpointError(
                f"{first} and {second} share no entry: {next(iter(ours), 'nothing')}, … and "
                f"{next(iter(theirs), 'nothing')}, …. Dump the same modules and steps in both."
            )
        found = [_difference(name, ours[name](), theirs[name]()) for name in shared]
        return DumpDifferences(
            num_entries=len(shared),
            only_in_first=tuple(name for name in ours if name not in theirs),
            only_in_second=tuple(name for name in theirs if name not in ours),
            differing=tuple(one for one in found if not one.relative <= tolerance),
        )


def _entries(path: Path, files: ExitStack) -> dict[str, Any]:
    """Return entry -> function that reads the tensor, in the order of the step."""
    paths = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
    if not paths or not paths[0].is_file():
        raise CheckpointError(f"{path} is no file and no folder of safetensors files.")
    entries = {}
    for file in sorted(paths, key=_numbers):
        prefix = "" if len(paths) == 1 else f"{file.relative_to(path).parent}/"
        opened = files.enter_context(
            require("safetensors", "convert compare-dumps").safe_open(file, framework="pt")
        )
        order = json.loads((opened.metadata() or {}).get("order", "null")) or opened.keys()
        for name in order:
            entries[prefix + name] = _reader(opened, name)
    return entries


def _reader(opened: Any, name: str) -> Any:
    return lambda: opened.get_tensor(name)


def _numbers(path: Path) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, path.parent.name))
    return int(digits or 0), str(path)


def _difference(name: str, first: Tensor, second: Tensor) -> EntryDifference:
    if first.shape != second.shape:
        shapes = f"shape {list(first.shape)} and {list(second.shape)}"
        return EntryDifference(name, float("inf"), shapes)
    if first.numel() == 0 or torch.equal(first, second):
        return EntryDifference(name, 0.0, "equal")
    a, b = first.double(), second.double()
    gap = (a - b).abs()
    gap[(a == b) | (torch.isnan(a) & torch.isnan(b))] = 0.0  # also of equal infinities
    gap[torch.isnan(gap)] = float("inf")
    largest = a.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item() or 1.0
    relative = gap.max().item() / largest
    place = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)]
    at = f"at {place}" if place else ""
    return EntryDifference(
        name, relative, f"{relative:.1e} of the largest value, {_share(gap, largest)} {at}".strip()
    )


def _share(gap: Tensor, largest: float) -> str:
    count = int((gap > 1e-6 * largest).sum())
    return f"{count} of {gap.numel()} values differ, most"
