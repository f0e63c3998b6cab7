"""Split a batch into micro-batches along dim 0, and merge the outputs of the micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.numbers import number_on

_OTHER_BATCHES = (
    "Return a dict from the collate function, or define split_batch(batch, micro_batch_size) on "
    "the LightningModule or LightningDataModule."
)


def batch_size_of(batch: Any) -> int | None:
    """Return the size of dim 0 of the first tensor in ``batch``, or else of the first list of plain
    values (None: neither).
    """
    sizes = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim] or [
        len(values) for values in _lists_of(batch)
    ]
    return sizes[0] if sizes else None


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists, tuples and dataclasses, in order."""
    if isinstance(batch, Tensor):
        yield batch
    for item in _children(batch):
        yield from tensors_of(item)


def kinds_of(batch: Any) -> Hashable:
    """Return the names in a batch, and the dtypes and numbers of dims of the batch's tensors."""
    names = tuple(map(str, batch)) if isinstance(batch, Mapping) else ()
    return names, tuple((tensor.dtype, tensor.ndim) for tensor in tensors_of(batch))


def _lists_of(batch: Any) -> Iterator[Sequence[Any]]:
    """Yield the lists and tuples without further structure in nested mappings, lists, tuples and
    dataclasses, in order.
    """
    if isinstance(batch, list | tuple) and batch and _is_list_of(batch, len(batch)):
        yield batch
    for item in _children(batch):
        yield from _lists_of(item)


def split_batch(batch: Any, micro_batch_size: int | None) -> list[Any]:
    """Split ``batch`` into micro-batches. None: a single micro-batch.

    Split are tensors with the batch size in dim 0, and lists and tuples of as many plain values.
    Everything else goes to every micro-batch unchanged. The last micro-batch is smaller if the size
    does not divide.

    Raises:
        ConfigError: If the batch has nothing to split.
    """
    size = batch_size_of(batch)
    if micro_batch_size is None or (size is not None and size <= micro_batch_size):
        return [batch]
    if size is None:
        raise ConfigError(
            f"a batch of type {type(batch).__name__} holds no tensors with dims and no lists, so "
            f"it cannot be split into micro-batches of {micro_batch_size}. {_OTHER_BATCHES}"
        )
    starts = range(0, size, micro_batch_size)
    return [_select(batch, size, slice(start, start + micro_batch_size)) for start in starts]


def merge_outputs(  # noqa: PLR0911 (one line a type)
    outputs: Sequence[Any], weights: Sequence[float | Tensor], sizes: Sequence[int | None] = ()
) -> Any:
    """Merge the outputs of a step's micro-batches.

    Scalars are averaged with ``weights`` (an entry named ``num_items`` is summed). Other tensors
    and arrays are concatenated on dim 0. Lists of plain values, and lists with an entry for each
    sample, are joined. Nested structures are merged entry by entry. A value equal in all outputs
    stays unchanged.

    Args:
        outputs: Output of the step for each micro-batch. None: no output.
        weights: Weight of each in a mean.
        sizes: Samples of each, if known.
    """
    # A user's step may return None for some micro-batches: these have no share in the mean.
    indices = [index for index, output in enumerate(outputs) if output is not None]
    if not indices:
        return None
    sizes = [sizes[index] if sizes else None for index in indices]
    outputs, weights = [outputs[index] for index in indices], [weights[index] for index in indices]
    first = outputs[0]
    merge = partial(merge_outputs, weights=weights, sizes=sizes)
    # Nothing to merge: the object itself, whatever the class.
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
    # Equal values (a name, a learning rate) are settings, not measurements: the type stays, too.
    if isinstance(first, bool | int | float | str) and all(output == first for output in outputs):
        return first
    if isinstance(first, bool | int | float):
        return float(weighted_mean([torch.tensor(float(output)) for output in outputs], weights))
    # Lists by sample grow with the batch. Other lists are structures with one value a place, merged
    # place by place.
    if isinstance(first, list | tuple) and _are_by_sample(outputs, sizes):
        return type(first)(item for output in outputs for item in output)
    if isinstance(first, list | tuple):
        parts = [merge(items) for items in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if names := _field_names(first):
        return _with_fields(
            first, {name: merge([getattr(output, name) for output in outputs]) for name in names}
        )
    # Unknown objects: one shared object stays, else the user gets every micro-batch's.
    return first if all(output is first for output in outputs) else list(outputs)


def _are_by_sample(outputs: Sequence[Any], sizes: Sequence[int | None]) -> bool:
    """Return whether lists hold an entry for each sample: texts, other values, or tensors of a
    single sample each.

    A list may have as many entries as a micro-batch has samples by chance. Scalars, tensors of a
    full micro-batch and tensors of several kinds therefore count as results of the step at fixed
    places.
    """
    items = [item for output in outputs for item in output]
    if not any(isinstance(item, Tensor) for item in items):
        return isinstance(outputs[0], list) or (
            bool(items) and all(isinstance(item, str | bytes) for item in items)
        )
    # A list [loss, logits] is a structure. A list by sample has as many entries as each micro-batch
    # has samples.
    if not isinstance(outputs[0], list) or [len(output) for output in outputs] != list(sizes):
        return False
    # Lengths that follow micro-batches of several sizes are no coincidence.
    if len(set(sizes)) > 1:
        return True
    kinds = {
        (item.ndim, item.dtype) if isinstance(item, Tensor) and item.ndim else None
        for item in items
    }
    return (
        len(kinds) == 1
        and None not in kinds
        and not all(item.shape[0] == sizes[0] for item in items)
    )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """Return the weighted mean of scalars. Zero if all weights are zero."""
    stacked = torch.stack(list(values))
    stacked = stacked if stacked.is_floating_point() else stacked.float()
    if all(isinstance(weight, int | float) for weight in weights) and len(set(weights)) == 1:
        return stacked.mean() if weights[0] else stacked.new_zeros(())
    weight = torch.stack([number_on(stacked.device, w, stacked.dtype) for w in weights])
    stacked = stacked.masked_fill(weight == 0, 0.0)  # a mean of nothing is NaN
    return (stacked * weight).sum() / weight.sum().clamp(min=torch.finfo(stacked.dtype).tiny)


def _is_list_of(leaf: Any, size: int) -> bool:
    """Return whether ``leaf`` holds plain values, one for each sample. torch's collate function
    leaves texts as lists or tuples.
    """
    is_sequence = isinstance(leaf, list | tuple) and not hasattr(leaf, "_fields")
    return (
        is_sequence
        and len(leaf) == size
        and not any(isinstance(i, Tensor | Mapping | list | tuple) for i in leaf)
    )


def _children(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return list(batch)
    return [getattr(batch, name) for name in _field_names(batch)]


def _field_names(value: Any) -> list[str]:
    """Return the fields of a dataclass object. Empty for any other value."""
    return (
        [field.name for field in fields(value)]
        if is_dataclass(value) and not isinstance(value, type)
        else []
    )


def _with_fields(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass object, frozen or not, without calling ``__init__``, which may
    compute fields.
    """
    filled = copy.copy(value)
    for name, item in values.items():
        object.__setattr__(filled, name, item)
    return filled


def _select(batch: Any, size: int, samples: slice) -> Any:
    """Return the samples of a micro-batch from a batch of ``size``."""
    select = partial(_select, size=size, samples=samples)
    if (isinstance(batch, Tensor) and batch.ndim and batch.shape[0] == size) or _is_list_of(
        batch, size
    ):
        return batch[samples]
    if isinstance(batch, Mapping):
        # The class may carry behavior (BatchEncoding, TensorDict): rebuild the user's own.
        selected = {key: select(value) for key, value in batch.items()}
        try:
            return type(batch)(selected)  # type: ignore[call-arg]
        except TypeError as error:
            raise ConfigError(
                f"a batch of type {type(batch).__name__} cannot be rebuilt from a dict, so it "
                f"cannot be split into micro-batches. {_OTHER_BATCHES}"
            ) from error
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(select, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(select, batch))
    names = _field_names(batch)
    return (
        _with_fields(batch, {name: select(getattr(batch, name)) for name in names})
        if names
        else batch
    )
