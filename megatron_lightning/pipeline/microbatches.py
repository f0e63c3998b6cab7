"""Cut a batch into micro-batches along dim 0, and put the outputs of the micro-batches together again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError

_OTHER_BATCHES = (
    "Return a dict from the collate function, or define split_batch(batch, micro_batch_size) on the LightningModule or "
    "LightningDataModule."
)


def batch_size_of(batch: Any) -> int | None:
    """Return the size of dim 0 of the first tensor in ``batch``, or else of its first list of plain values (None: neither)."""
    sizes = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim] or [len(values) for values in _lists_of(batch)]
    return sizes[0] if sizes else None


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists, tuples and dataclasses, in order."""
    if isinstance(batch, Tensor):
        yield batch
    for item in _children(batch):
        yield from tensors_of(item)


def _lists_of(batch: Any) -> Iterator[Sequence[Any]]:
    """Yield the lists and tuples without further structure in nested mappings, lists, tuples and dataclasses, in order."""
    if isinstance(batch, list | tuple) and batch and _is_list_of(batch, len(batch)):
        yield batch
    for item in _children(batch):
        yield from _lists_of(item)


def split_batch(batch: Any, micro_batch_size: int | None) -> list[Any]:
    """Cut ``batch`` into micro-batches.

    Tensors whose dim 0 has the batch size, and lists and tuples of as many plain values, are cut; everything else is
    handed to every micro-batch as it is. The last micro-batch is smaller if the size does not divide.

    Args:
        batch: Nested tensors.
        micro_batch_size: Samples of a micro-batch; None: one micro-batch.

    Raises:
        ConfigError: If the batch has nothing to be cut.
    """
    size = batch_size_of(batch)
    if micro_batch_size is None:
        return [batch]
    if size is None:
        raise ConfigError(
            f"a batch of type {type(batch).__name__} holds no tensors with dims and no lists, so it cannot be cut into "
            f"micro-batches of {micro_batch_size}. {_OTHER_BATCHES}"
        )
    if size <= micro_batch_size:
        return [batch]
    starts = range(0, size, micro_batch_size)
    return [_map_leaves(batch, _cutter(size, start, start + micro_batch_size)) for start in starts]


def _cutter(size: int, start: int, stop: int) -> Callable[[Any], Any]:
    def cut(leaf: Any) -> Any:
        sized = (isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size) or _is_list_of(leaf, size)
        return leaf[start:stop] if sized else leaf

    return cut


def merge_outputs(  # noqa: PLR0911 (one line a type)
    outputs: Sequence[Any], weights: Sequence[float | Tensor], sizes: Sequence[int | None] = ()
) -> Any:
    """Put the outputs of one step's micro-batches together.

    Scalars are averaged with ``weights`` (an entry named ``num_items`` is summed), other tensors and arrays are concatenated
    on dim 0, lists of plain values or with an entry for each sample are joined; nested structures are followed. What is one
    and the same for all stays as it is.

    Args:
        outputs: What the step gave for each micro-batch; None: nothing.
        weights: What each weighs in a mean.
        sizes: Samples of each, if they are known.
    """
    present = [index for index, output in enumerate(outputs) if output is not None]
    if not present:
        return None
    sizes = [sizes[index] if sizes else None for index in present]
    outputs, weights = [outputs[index] for index in present], [weights[index] for index in present]
    first = outputs[0]
    merge = partial(merge_outputs, weights=weights, sizes=sizes)
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return weighted_mean(outputs, weights) if first.ndim == 0 else torch.cat(list(outputs))
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(outputs)
    if isinstance(first, Mapping):
        merged = {key: merge([output[key] for output in outputs]) for key in first}
        if "num_items" in first:
            merged["num_items"] = sum(output["num_items"] for output in outputs)
        return merged
    if isinstance(first, bool | int | float | str) and all(output == first for output in outputs):
        return first
    if isinstance(first, bool | int | float):
        return float(weighted_mean([torch.tensor(float(output)) for output in outputs], weights))
    if isinstance(first, list | tuple) and _are_by_sample(outputs, sizes):
        return type(first)(item for output in outputs for item in output)
    if isinstance(first, list | tuple):
        parts = [merge(items) for items in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if _is_dataclass_object(first):
        return _with_fields(first, {name: merge([getattr(o, name) for o in outputs]) for name in _names(first)})
    return first if all(output is first for output in outputs) else list(outputs)


def _are_by_sample(outputs: Sequence[Any], sizes: Sequence[int | None]) -> bool:
    """Return whether lists hold an entry for each sample: texts, other things, or tensors of one sample each.

    A list may have as many entries as a micro-batch has samples by chance. Scalars and tensors of a whole micro-batch, and
    tensors that are not of one kind, are taken for results of the step at fixed places.
    """
    items = [item for output in outputs for item in output]
    if not any(isinstance(item, Tensor) for item in items):
        return isinstance(outputs[0], list) or (bool(items) and all(isinstance(item, str | bytes) for item in items))
    if not isinstance(outputs[0], list) or [len(output) for output in outputs] != list(sizes):
        return False
    if len(set(sizes)) > 1:
        return True
    kinds = {(item.ndim, item.dtype) if isinstance(item, Tensor) and item.ndim else None for item in items}
    return len(kinds) == 1 and None not in kinds and not all(item.shape[0] == sizes[0] for item in items)


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """Return the mean of scalars, weighted; zero where nothing weighs anything."""
    stacked = torch.stack(list(values))
    stacked = stacked if stacked.is_floating_point() else stacked.float()
    if all(isinstance(weight, int | float) for weight in weights) and len(set(weights)) == 1:
        return stacked.mean() if weights[0] else stacked.new_zeros(())
    weight = torch.stack([torch.as_tensor(w, dtype=stacked.dtype, device=stacked.device) for w in weights])
    return (stacked * weight).sum() / weight.sum().clamp(min=torch.finfo(stacked.dtype).tiny)


def _is_list_of(leaf: Any, size: int) -> bool:
    """Return whether these are plain values, one for each sample; torch's collate function leaves texts as lists or tuples."""
    plain = isinstance(leaf, list | tuple) and not hasattr(leaf, "_fields")
    return plain and len(leaf) == size and not any(isinstance(i, Tensor | Mapping | list | tuple) for i in leaf)


def _children(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return list(batch)
    return [getattr(batch, name) for name in _names(batch)] if _is_dataclass_object(batch) else []


def _is_dataclass_object(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _names(value: Any) -> list[str]:
    return [field.name for field in fields(value)]


def _with_fields(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass object, frozen or not, whose ``__init__`` is not asked: it may compute fields itself."""
    made = copy.copy(value)
    for name, item in values.items():
        object.__setattr__(made, name, item)
    return made


def _map_leaves(batch: Any, cut: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Mapping):
        mapped = {key: _map_leaves(value, cut) for key, value in batch.items()}
        return mapped if type(batch) is dict else _like(batch, mapped)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_leaves(value, cut) for value in batch))
    if isinstance(batch, list | tuple):
        shortened = cut(batch)
        return shortened if shortened is not batch else type(batch)(_map_leaves(value, cut) for value in batch)
    if _is_dataclass_object(batch):
        return _with_fields(batch, {name: _map_leaves(getattr(batch, name), cut) for name in _names(batch)})
    return cut(batch)


def _like(batch: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    try:
        return type(batch)(mapped)  # type: ignore[call-arg]
    except TypeError as error:
        raise ConfigError(
            f"a batch of type {type(batch).__name__} cannot be rebuilt from a dict, so it cannot be cut into micro-batches. "
            f"{_OTHER_BATCHES}"
        ) from error
