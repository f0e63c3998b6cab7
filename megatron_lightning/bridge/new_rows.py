"""Rows of new tokens in a model from a folder: drawn from the tokens' texts, on every layout alike.

A folder's embedding often has spare rows with values of no meaning. Tied weights stay tied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.bridge.lazy import Fill, Lazy
from megatron_lightning.bridge.untouched import pending_tensors
from megatron_lightning.parallel.spec import Box


def draw_new_rows(model: nn.Module, tokens: Mapping[str, int], std: float) -> list[str]:
    """Give the rows of new tokens in trained embeddings and output layers normal values, now or
    when the weights are read.

    Args:
        model: The full model, before it is divided.
        tokens: Text of a new token -> id.
        std: Standard deviation.

    Returns:
        Names of the frozen parameters with rows of these tokens, which keep the folder's values.
    """
    frozen_names, pending = [], pending_tensors(model)
    # The embedding first, which names a tied weight.
    for kind, layer in zip(("input", "output"), _layers(model), strict=True):
        weight = None if layer is None else layer._parameters.get("weight")
        if weight is None or (kind == "output" and weight is _weight_of(_layers(model)[0])):
            continue
        # All names of a tied weight: any of them may be read first.
        everywhere = model.named_parameters(remove_duplicate=False)
        names = [name for name, parameter in everywhere if parameter is weight]
        if not weight.requires_grad:
            frozen_names.append(names[0])
            continue
        rows = {id_: _row(kind, text, weight.shape[1], std) for text, id_ in tokens.items()}
        for name in names:
            if name in pending:
                lazy = pending[name]
                pending[name] = Lazy(lazy.shape, lazy.dtype, _filling(lazy.fill, rows))
        if not weight.is_meta:
            with torch.no_grad():
                for id_, row in rows.items():
                    weight[id_] = row
    return frozen_names


def _layers(model: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Return embedding and output layer of a ``GPTModel`` or a model of ``transformers``."""
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings(), model.get_output_embeddings()
    return model.embedding.word_embeddings, model.output_layer


def _weight_of(layer: nn.Module | None) -> nn.Parameter | None:
    return None if layer is None else layer._parameters.get("weight")


def _row(kind: str, text: str, size: int, std: float) -> Tensor:
    digest = hashlib.sha256(f"{kind}/{text}".encode()).digest()
    draws = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    with torch.device("cpu"):  # also while models are made on meta
        return torch.empty(size, dtype=torch.float32).normal_(0.0, std, generator=draws)


def _filling(fill: Fill, rows: Mapping[int, Tensor]) -> Fill:
    def filled(box: Box, out: Tensor) -> None:
        fill(box, out)
        first, columns = box.offset[0], box.slices[1]
        for id_, row in rows.items():
            if first <= id_ < first + box.shape[0]:
                out[id_ - first].copy_(row[columns])

    return filled
