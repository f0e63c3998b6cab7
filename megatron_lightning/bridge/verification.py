"""Results of ``convert verify`` and ``convert compare``, as values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.folders.folder import HuggingFaceFolder
from megatron_lightning.bridge.tensors.inverse import assembled
from megatron_lightning.bridge.tensors.lazy import Lazy


@dataclass(frozen=True)
class RoundTrip:
    """A folder's tensors after the way into a model and back."""

    num_tensors: int
    differing: tuple[str, ...]
    """Names of tensors with other values, shapes or dtypes."""


def round_trip(bridge: AutoBridge, *, is_gpt: bool) -> RoundTrip:
    """Compare a folder's tensors with those that return from a model, tensor by tensor. A
    comparison of logits alone would miss tensors that do not reach the logits.

    Args:
        bridge: The folder.
        is_gpt: Whether the model is a :class:`GPTModel`, not the untouched model.

    Raises:
        CheckpointError: If the folder does not fit the model, or is damaged.
        ConfigError: If there are no rules for the folder, or ``GPTModel`` cannot represent a
            setting of the folder.
    """
    folder, parameters, pieces = bridge.plan(bridge.to_config() if is_gpt else None)
    fills = {name: lazy.fill for name, lazy in parameters.items()}
    tensors = assembled(folder, pieces, fills)
    differing = [name for name, ours in folder.tensors.items() if not _equal(ours, tensors[name])]
    return RoundTrip(len(tensors), tuple(differing))


@dataclass(frozen=True)
class FolderDifferences:
    """How the tensors of two folders differ."""

    num_equal: int
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    differing: tuple[str, ...]
    """Names in both folders, with other values, shapes or dtypes."""

    @property
    def are_equal(self) -> bool:
        """Whether the folders hold the same tensors."""
        return not (self.only_in_first or self.only_in_second or self.differing)


def compare_folders(first: HuggingFaceFolder, second: HuggingFaceFolder) -> FolderDifferences:
    """Compare the tensors of two folders."""
    a, b = first.tensors, second.tensors
    shared = [name for name in a if name in b]
    differing = tuple(name for name in shared if not _equal(a[name], b[name]))
    return FolderDifferences(
        num_equal=len(shared) - len(differing),
        only_in_first=tuple(name for name in a if name not in b),
        only_in_second=tuple(name for name in b if name not in a),
        differing=differing,
    )


def _equal(first: Lazy, second: Lazy) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    values = (tensor.read().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(*values)
