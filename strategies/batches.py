"""Cut a batch into micro-batches along dim 0, and put the outputs of the micro-batches together again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError


def batch_size_of(batch: Any) -> int | None:
    """Return the size of dim 0 of the first tensor in ``batch`` (None if it holds none)."""
    return next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim), None)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists, tuples and dataclasses, in order."""
    if isinstance(batch, Tensor):
        yield batch
    for item in _children(batch):
        yield from tensors_of(item)


def split_batch(batch: Any, micro_batch_size: int | None) -> list[Any]:
    """Cut ``batch`` into micro-batches.

    Tensors whose dim 0 has the batch size, and lists of that length without tensors in them, are cut; everything else is
    handed to every micro-batch as it is. The last micro-batch is smaller if the size does not divide.

    Args:
        batch: Nested tensors.
        micro_batch_size: Samples of a micro-batch; None: one micro-batch.
    """
    size = batch_size_of(batch)
    if micro_batch_size is None or size is None or size <= micro_batch_size:
        return [batch]
    starts = range(0, size, micro_batch_size)
    return [_map_leaves(batch, _cutter(size, start, start + micro_batch_size)) for start in starts]


def _cutter(size: int, start: int, stop: int) -> Callable[[Any], Any]:
    def cut(leaf: Any) -> Any:
        sized = (isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size) or _is_list_of(leaf, size)
        return leaf[start:stop] if sized else leaf

    return cut


def merge_outputs(outputs: Sequence[Any], weights: Sequence[float | Tensor]) -> Any:  # noqa: PLR0911 (one line a type)
    """Put the outputs of one step's micro-batches together.

    Scalars are averaged with ``weights`` (an entry named ``num_items`` is summed), other tensors are concatenated on dim 0,
    lists of plain values are joined; nested structures are followed.
    """
    present = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if output is not None]
    if not present:
        return None
    outputs, weights = [output for output, _ in present], [weight for _, weight in present]
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return weighted_mean(outputs, weights) if first.ndim == 0 else torch.cat(list(outputs))
    if isinstance(first, Mapping):
        merged = {key: merge_outputs([output[key] for output in outputs], weights) for key in first}
        if "num_items" in first:
            merged["num_items"] = sum(output["num_items"] for output in outputs)
        return merged
    if isinstance(first, bool | int | float):
        return float(weighted_mean([torch.tensor(float(output)) for output in outputs], weights))
    if isinstance(first, list) and not any(isinstance(item, Tensor) for item in first):
        return [item for output in outputs for item in output]
    if isinstance(first, list | tuple):
        parts = [merge_outputs(items, weights) for items in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if _is_dataclass_object(first):
        return _with_fields(
            first, {name: merge_outputs([getattr(o, name) for o in outputs], weights) for name in _names(first)}
        )
    return list(outputs)


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """Return the mean of scalars, weighted; zero where nothing weighs anything."""
    stacked = torch.stack(list(values))
    stacked = stacked if stacked.is_floating_point() else stacked.float()
    if all(isinstance(weight, int | float) for weight in weights) and len(set(weights)) == 1:
        return stacked.mean() if weights[0] else stacked.new_zeros(())
    weight = torch.stack([torch.as_tensor(w, dtype=stacked.dtype, device=stacked.device) for w in weights])
    return (stacked * weight).sum() / weight.sum().clamp(min=torch.finfo(stacked.dtype).tiny)


def _is_list_of(leaf: Any, size: int) -> bool:
    return (
        isinstance(leaf, list) and len(leaf) == size and not any(isinstance(i, Tensor | Mapping | list | tuple) for i in leaf)
    )


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
            "Return a dict from the collate function, or define split_batch(batch, micro_batch_size) on the LightningModule "
            "or LightningDataModule."
        ) from error
