"""Units of a model to keep: those that add most to what the next layer computes.

The importance of an input of a linear layer is the sum over tokens of the square of what it adds to
the output: the sum of its squares, from the statistics, times the squares of its weights. That of
an expert is the sum of the squares of its outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.bridge.pruning.sizes import Sizes, with_width
from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.config import TransformerConfig
from megatron_lightning.models.blueprint import LAYER, layer_weights, saved_tensors
from megatron_lightning.parallel.shards.spec import Shape


@dataclass(frozen=True)
class Cut:
    """Entries of a parameter to keep along a dim."""

    dim: int
    entries: Tensor


def kept_layers(config: TransformerConfig, sizes: Sizes, statistics: Statistics) -> tuple[int, ...]:
    """Return the layers to keep: without those named, or those that turn their input the most."""
    layers = range(config.num_layers)
    if sizes.num_layers is None:
        return tuple(layer for layer in layers if layer not in sizes.drop_layers)
    found = [(statistics.of(f"{LAYER}{i}", "cosines"), statistics.of(f"{LAYER}{i}", "tokens"))
             for i in layers]  # fmt: skip
    return tuple(_largest(torch.stack([1 - c / n for c, n in found]), sizes.num_layers).tolist())


class Choice:
    """The entries of every parameter that a smaller model keeps.

    Dims are found by the blueprint: those whose size follows from a width.

    Args:
        config: The model.
        sizes: The widths to keep.
        layers: Kept layers.
        parameters: Name in the model -> tensor.
        statistics: Importance of the units.
    """

    def __init__(
        self,
        config: TransformerConfig,
        sizes: Sizes,
        layers: Iterable[int],
        parameters: Mapping[str, Lazy],
        statistics: Statistics,
    ) -> None:
        self._config, self._layers = config, tuple(layers)
        self._parameters, self._statistics = parameters, statistics
        self._shapes: Mapping[str, Shape] = dict(saved_tensors(config))
        self._smaller: dict[str, Mapping[str, Shape]] = {}
        for name, size in sizes.widths.items():
            self._smaller[name] = dict(saved_tensors(with_width(config, name, size)))
        self._sizes = sizes.widths
        self._kept: dict[tuple[str, str], Tensor] = {}

    def cuts(self, parameter: str) -> list[Cut]:
        """Return what is kept of a parameter."""
        found, shape = [], self._shapes[parameter]
        for width, shapes in self._smaller.items():
            for dim, (size, smaller) in enumerate(zip(shape, shapes[parameter], strict=True)):
                if size != smaller:
                    found.append(Cut(dim, self._entries(width, parameter, size)))
        return found

    def _entries(self, width: str, parameter: str, size: int) -> Tensor:
        """Return the kept entries of a dim of ``size`` that is cut by a width."""
        config, kept = self._config, self._units(width, parameter)
        if width == "ffn_hidden_size":  # gate and up, one behind the other
            starts = torch.arange(0, size, config.ffn_size)
            return (starts[:, None] + kept).flatten()
        if width != "num_attention_heads":
            return kept
        heads, groups = config.num_attention_heads, config.query_groups
        if groups == heads or ".linear_qkv." not in parameter:
            return _blocks(kept, size // heads)
        # Rows of a group are queries, key and value.
        queries = heads // groups
        group_of, place = kept // queries, kept % queries
        rows = [group_of * (queries + 2) + place]
        rows += [torch.arange(groups) * (queries + 2) + queries + i for i in (0, 1)]
        return _blocks(torch.cat(rows).sort().values, config.head_dim)

    def _units(self, width: str, parameter: str) -> Tensor:
        """Return the units of a width that are kept, in the layer of a parameter."""
        layer = "" if width == "hidden_size" else ".".join(parameter.split(".")[:3])
        if (width, layer) not in self._kept:
            scores = self._scores(width, layer)
            groups = self._config.query_groups if width == "num_attention_heads" else 1
            groups = 1 if groups == len(scores) else groups
            size = self._sizes[width] // groups
            parts = scores.view(groups, -1)
            each = [_largest(part, size) + i * parts.shape[1] for i, part in enumerate(parts)]
            self._kept[width, layer] = torch.cat(each)
        return self._kept[width, layer]

    def _scores(self, width: str, layer: str) -> Tensor:
        """Return the importance of each unit of a width."""
        config, statistics = self._config, self._statistics
        if width == "ffn_hidden_size":
            return self._added(statistics, f"{layer}.mlp.linear_fc2")
        if width == "num_moe_experts":
            number = 0 if config.moe is None else config.moe.num_experts
            return statistics.of(f"{layer}.mlp.experts", "squares", number)
        if width == "num_attention_heads":
            added = self._added(statistics, f"{layer}.self_attention.linear_proj")
            return added.view(config.num_attention_heads, -1).sum(1)
        return torch.stack([self._added(statistics, path) for path in self._readers()]).sum(0)

    def _readers(self) -> Iterator[str]:
        """Yield the linear layers of the kept layers whose inputs are the residual stream."""
        smaller = self._smaller["hidden_size"]
        for layer in self._layers:
            for weight in layer_weights(self._config, layer):
                inside = weight.inside(f"{LAYER}{layer}")
                if weight.kind == "matrix" and smaller[inside.path][-1] < weight.shape[-1]:
                    yield inside.module

    def _added(self, statistics: Statistics, path: str) -> Tensor:
        """Return for each input of a linear layer what it adds to the output, squared and summed
        over tokens.
        """
        weight = self._parameters[f"{path}.weight"]
        squares = statistics.of(path, "squares", weight.shape[1])
        return squares * weight.read().float().square().sum(0, dtype=torch.float64)


def _largest(scores: Tensor, number: int) -> Tensor:
    """Return the places of the largest scores, in order. Of equal scores the first stay."""
    return scores.sort(descending=True, stable=True).indices[:number].sort().values


def _blocks(units: Tensor, size: int) -> Tensor:
    return (units[:, None] * size + torch.arange(size)).flatten()
