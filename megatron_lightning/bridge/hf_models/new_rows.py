"""Rows of new tokens in a model from a folder: the mean of the rows of the folder's own tokens, in
fp32, of embedding and output layer each.

The mean is read from the folder in a fixed order, so that every layout begins alike. A folder
without rows for the tokens grows (:func:`with_vocabulary`). Tied weights stay tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron_lightning.bridge.folder_model import FolderModel
from megatron_lightning.bridge.folders.configuration import config_text, with_vocabulary_size
from megatron_lightning.bridge.folders.folder_record import ChangedTable, KeptFolder, keep
from megatron_lightning.bridge.hf_models.transformers_model import lazy_parameters, pending_tensors
from megatron_lightning.bridge.tensors.inverse import uses_of
from megatron_lightning.bridge.tensors.lazy import Fill, Lazy
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import CONFIG
from megatron_lightning.parallel.shards.spec import Box, Shape

_MULTIPLE = 64
_SLAB_ROWS = 4096
BridgeT = TypeVar("BridgeT", bound=FolderModel)


# -------------------------------------------------------------------------------- rows of a model


def fill_new_rows(model: nn.Module, tokens: Mapping[str, int]) -> list[str]:
    """Give the rows of new tokens in trained embeddings and output layers the mean of the rows
    before, now or when the weights are read.

    Args:
        model: The full model, before it is divided.
        tokens: Text of a new token -> id. Smaller ids belong to the folder's own tokens.

    Returns:
        Names of the frozen weights with rows of these tokens, which keep the folder's values.
    """
    frozen_names, pending = [], pending_tensors(model)
    ids, num_trained = sorted(tokens.values()), min(tokens.values())
    everywhere = list(model.named_parameters(remove_duplicate=False))
    for parameter in _vocabulary_parameters(model):
        # All names of a tied weight: any of them may be read first.
        names = [name for name, other in everywhere if other is parameter]
        if not parameter.requires_grad:
            frozen_names.append(names[0])
            continue
        for name in names:
            if name in pending:
                lazy = pending[name]
                mean = _mean_row(lazy.fill, tuple(lazy.shape), lazy.dtype, num_trained)
                pending[name] = Lazy(lazy.shape, lazy.dtype, _filling(lazy.fill, mean, ids))
        if not parameter.is_meta:
            values = parameter.detach()
            mean = _mean_row(_fill_of(values), tuple(values.shape), values.dtype, num_trained)
            values[ids] = mean().to(values)
    return frozen_names


def _vocabulary_parameters(model: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters with a row for each token, the embedding's first, each once."""
    seen = set[int]()
    for layer in _layers(model):
        for parameter in () if layer is None else layer._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _layers(model: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Return embedding and output layer of a ``GPTModel`` or a model of ``transformers``."""
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings(), model.get_output_embeddings()
    return model.embedding.word_embeddings, model.output_layer


def _mean_row(fill: Fill, shape: Shape, dtype: torch.dtype, num_rows: int) -> Callable[[], Tensor]:
    """Return a function for the mean of the first rows of a tensor, in fp32, computed once."""

    @cache
    def mean() -> Tensor:
        total = torch.zeros(shape[1:], dtype=torch.float64, device="cpu")
        for first in range(0, num_rows, _SLAB_ROWS):
            size = (min(_SLAB_ROWS, num_rows - first), *shape[1:])
            # In the parameter's dtype, so that values read now and later agree.
            rows = torch.empty(size, dtype=dtype, device="cpu")
            fill(Box((first, *(0 for _ in shape[1:])), size), rows)
            total += rows.float().sum(0, dtype=torch.float64)
        return (total / num_rows).float()

    return mean


def _fill_of(values: Tensor) -> Fill:
    def fill(box: Box, out: Tensor) -> None:
        out.copy_(values[box.slices])

    return fill


def _filling(fill: Fill, mean: Callable[[], Tensor], ids: Sequence[int]) -> Fill:
    """Return a fill with the mean in the rows ``ids``."""

    def filled(box: Box, out: Tensor) -> None:
        fill(box, out)
        first = box.offset[0]
        for id_ in ids:
            if first <= id_ < first + box.shape[0]:
                out[id_ - first].copy_(mean()[box.slices[1:]])

    return filled


# ------------------------------------------------------------------------------ folders that grow


def rows_for(num_ids: int) -> int:
    """Return the rows of an embedding that grows for ``num_ids`` ids: a multiple of 64, regardless
    of the layout.
    """
    return -(-num_ids // _MULTIPLE) * _MULTIPLE


def with_vocabulary(bridge: BridgeT, num_rows: int, num_trained: int) -> BridgeT:
    """Return the folder's model with more rows in embedding and output layer: the mean of the rows
    of the folder's own tokens. Checkpoints and exported folders have the rows, and the size in the
    configuration.

    Args:
        bridge: The folder's model.
        num_rows: Rows of the larger embedding.
        num_trained: Ids of the folder's own tokens.

    Raises:
        ConfigError: If the folder has no rows for its own tokens, or the rows are not separate
            tensors of the folder.
    """
    before = int(bridge.config.get_text_config().vocab_size)
    if num_trained > before:
        raise ConfigError(
            f"the tokenizer has {num_trained} ids without new_tokens, and the embedding of "
            f"{bridge.origin} has {before} rows. Use the model's own tokenizer, and name what it "
            "lacks in new_tokens, for which the model grows."
        )
    with torch.device("cpu"):  # also while models are made on meta; nothing is read
        model = bridge.lazy_model("auto")
    record = bridge.keep(model)
    parameters = lazy_parameters(model)
    fills = {name: lazy.fill for name, lazy in bridge.folder.tensors.items()}
    fills |= {name: lazy.fill for name, lazy in parameters.items() if name not in fills}
    larger: dict[str, tuple[Shape, torch.dtype]] = {}
    for name in _vocabulary_tensors(bridge, model, record):
        lazy = record.tensors[name]
        old, shape = fills[name], tuple(lazy.shape)
        mean = _mean_row(old, shape, lazy.dtype, num_trained)
        fills[name] = _extended(old, shape[0], mean)
        larger[name] = ((num_rows, *shape[1:]), lazy.dtype)
    config = with_vocabulary_size(bridge.config, num_rows)
    config.architectures = [bridge.model_class.__name__]
    changed = ChangedTable(larger, set(), {CONFIG: config_text(config)})
    used = record.tensors.keys() - record.ignored.keys()
    grown = keep(record, used, record.origin, record.revision, changed=changed, tied=record.tied)
    grown.grown = (num_rows, num_trained)
    grown.read_from(fills)
    return bridge.of_record(grown)


def _vocabulary_tensors(bridge: FolderModel, model: nn.Module, record: KeptFolder) -> set[str]:
    """Return the names in the folder of the tensors with a row for each token."""
    names = set[str]()
    parameters = {id(p): name for name, p in lazy_parameters(model).items()}
    for parameter in _vocabulary_parameters(model):
        lazy: Any = parameter
        name = parameters.get(id(parameter), "")
        uses = uses_of(bridge.folder, lazy) if isinstance(lazy, Lazy) else []
        used = {use.name for use in uses}
        is_own = name in record.tensors and name not in bridge.folder.tensors  # an untied head
        theirs = name if is_own else next(iter(used), "")
        if not theirs or len(used) != 1 or record.tensors[theirs].shape != lazy.shape:
            raise ConfigError(
                f"new_tokens needs more rows than the embedding of {bridge.origin} has, and "
                f"{name or 'its output layer'} is no tensor of its own in the folder. Let the "
                "model grow by transformers (resize_token_embeddings, save_pretrained), and begin "
                "from that folder."
            )
        names |= {theirs, *(copy for copy, owner in record.tied.items() if owner == theirs)}
    return names


def _extended(fill: Fill, num_rows: int, mean: Callable[[], Tensor]) -> Fill:
    """Return a fill of a tensor with the mean behind ``num_rows`` rows."""

    def filled(box: Box, out: Tensor) -> None:
        first = min(max(num_rows - box.offset[0], 0), box.shape[0])
        if first:
            fill(Box(box.offset, (first, *box.shape[1:])), out[:first])
        if first < box.shape[0]:
            if out.is_meta:
                return  # no part of the original folder
            out[first:] = mean()[box.slices[1:]].to(out)

    return filled
