"""Adapters added to their weights, in fp32, rounded once, a box at a time. With DoRA
each row of the sum gets its trained length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from megatron_lightning.bridge.tensors.lazy import Fill
from megatron_lightning.layers.adapters.adapter_layers import Adapters, adapted_layers, detach
from megatron_lightning.layers.adapters.part import Delta
from megatron_lightning.layers.adapters.stacked_adapters import StackedAdapters, detach_stacked
from megatron_lightning.parallel.shards.spec import Box
from megatron_lightning.parallel.shards.transposed import is_transposed
from megatron_lightning.peft.methods.applied import APPLIED, FusedRows
from megatron_lightning.peft.saved import SavedAdapters, SavedPart, check_full
from megatron_lightning.precision.qlora.frozen_base import check_values


class LayerDelta:
    """Delta of a layer's weight from adapters.

    Args:
        parts: Returns part -> adapter. Called once, when a value is needed.
        fused: Rows of the parts in the weight. None: a single part.
        transposed: Whether the weight is [in, out].
    """

    def __init__(
        self,
        parts: Callable[[], Mapping[str, SavedPart]],
        fused: FusedRows | None = None,
        *,
        transposed: bool = False,
    ) -> None:
        self._parts = parts
        self._fused = fused
        self._transposed = transposed

    @cached_property
    def _factors(self) -> tuple[Delta, ...]:
        """Factors of the parts with separate rows, in order."""
        return tuple(part.delta() for part in self._parts().values())

    @cached_property
    def _lengths(self) -> Tensor | None:
        """Trained length of every row of the weight, in order. None: no DoRA."""
        lengths = [part.lengths for part in self._parts().values()]
        all_lengths = [part_lengths.float() for part_lengths in lengths if part_lengths is not None]
        if len(all_lengths) < 2:
            return all_lengths[0] if all_lengths else None
        owner, place = _places(self._fused, [len(part_lengths) for part_lengths in all_lengths])
        rows = torch.empty(len(owner))
        for number, part_lengths in enumerate(all_lengths):
            rows[owner == number] = part_lengths[place[owner == number]]
        return rows

    def merged(self, box: Box, read: Callable[[Box], Tensor]) -> Tensor:
        """Return the merged values of a box of the weight, in fp32.

        Args:
            box: The box.
            read: Returns the values of a box of the base's weight, in fp32.
        """
        if self._lengths is None:
            values = read(box)
            return values.add_(self.of_box(box).to(values.device))
        # A row's length needs all of the row. Weights with DoRA are [out, in].
        rows, columns = box.slices
        width = self._factors[0].first.shape[1]
        full_rows = Box((box.offset[0], 0), (box.shape[0], width))
        values = read(full_rows)
        values += self.of_box(full_rows).to(values.device)
        lengths = self._lengths[rows].to(values.device) / values.norm(dim=1)
        merged: Tensor = values[:, columns] * lengths[:, None]
        return merged

    def of_box(self, box: Box) -> Tensor:
        """Return the part of the delta in a box of the weight, in fp32."""
        if len(box.shape) == 3:  # stacked experts
            experts, rows, columns = box.slices
            [(first, second)] = self._factors
            return second[experts, rows] @ first[experts, :, columns]
        if self._transposed:
            box = Box(box.offset[::-1], box.shape[::-1])
        rows, columns = box.slices
        delta = self._of_rows(rows, columns)
        return delta.t() if self._transposed else delta

    def _of_rows(self, rows: slice, columns: slice) -> Tensor:
        if len(self._factors) == 1:
            [(first, second)] = self._factors
            return second[rows] @ first[:, columns]
        owner, place = _places(self._fused, [len(factors.second) for factors in self._factors])
        delta = torch.empty(rows.stop - rows.start, columns.stop - columns.start)
        for number, (first, second) in enumerate(self._factors):
            is_own = owner[rows] == number
            delta[is_own] = second[place[rows][is_own]] @ first[:, columns]
        return delta


def _places(fused: FusedRows | None, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return for every row of a weight the number of the row's part, and the row in the part."""
    num_periods = 1 if fused is None else fused.num_periods
    rows = sizes if fused is None else list(fused.rows)
    owner = torch.cat([torch.full((n,), i) for i, n in enumerate(rows)]).repeat(num_periods)
    place = torch.empty_like(owner)
    for number, size in enumerate(sizes):
        place[owner == number] = torch.arange(size)
    return owner, place


def merged_fills(fills: Mapping[str, Fill], deltas: Mapping[str, LayerDelta]) -> dict[str, Fill]:
    """Return ``fills`` with adapters added.

    Args:
        fills: Name of a parameter -> function to fill boxes of the base's weights.
        deltas: Name of a weight -> delta to add.
    """

    def merged(fill: Fill, delta: LayerDelta) -> Fill:
        def fill_merged(box: Box, out: Tensor) -> None:
            def read(wanted: Box) -> Tensor:
                values = torch.empty(wanted.shape, dtype=torch.float32, device=out.device)
                fill(wanted, values)
                return values

            out.copy_(delta.merged(box, read))

        return fill_merged

    return {
        name: merged(fill, deltas[name]) if name in deltas else fill for name, fill in fills.items()
    }


def deltas_of(saved: SavedAdapters, model: nn.Module) -> dict[str, LayerDelta]:
    """Return name of a weight -> delta from adapters.

    Args:
        saved: The adapters.
        model: The model of the adapters, on any device, without or with attached adapters.
    """
    modules = dict(model.named_modules())
    deltas = {}
    for path, parts in saved.layers.items():
        layer = modules.get(path)  # None: stacked experts of transformers are a parameter
        rows = _rows_of(layer) if layer is not None and len(parts) > 1 else None
        transposed = layer is not None and is_transposed(layer)
        delta = LayerDelta(partial(dict, parts), rows, transposed=transposed)
        deltas[path if layer is None else f"{path}.weight"] = delta
    return deltas


def deltas_in(
    model: nn.Module, read: Callable[[str], Tensor], num_rows: Callable[[str], int] | None = None
) -> dict[str, LayerDelta]:
    """Return name of a weight -> delta from the adapters in ``model``.

    Args:
        model: The adapted model, or a rank's part of the model.
        read: Returns the full tensor of a parameter, by the name in the model.
        num_rows: Returns the rows of a layer's full weight. None: the model is full.
    """

    def parts_of(path: str, adapters: Adapters) -> dict[str, SavedPart]:
        return {
            name: SavedPart(
                part.kind,
                {own: read(f"{path}.adapters.{name}.{own}") for own in part.tensors()},
                part.scale,
            )
            for name, part in adapters.parts.items()
        }

    deltas = {}
    for path, adapters in adapted_layers(model).items():
        layer = model.get_submodule(path)
        if isinstance(adapters, StackedAdapters):
            for name in adapters.parts:
                # Read on use: full factors of one layer at a time.
                own_parts = partial(
                    lambda *of, name: {name: parts_of(*of)[name]}, path, adapters, name=name
                )
                deltas[f"{path}.{name}"] = LayerDelta(own_parts)
            continue
        rows = None
        if len(adapters.parts) > 1:
            rows = _rows_of(layer, None if num_rows is None else num_rows(path))
        deltas[f"{path}.weight"] = LayerDelta(
            partial(parts_of, path, adapters), rows, transposed=is_transposed(layer)
        )
    return deltas


def _in_fp32(weight: Tensor, box: Box) -> Tensor:
    """Return a copy of a box of a weight."""
    return weight[box.slices].to(torch.float32, copy=True)


def _rows_of(layer: nn.Module, num_rows: int | None = None) -> FusedRows:
    """Return the rows of the matrices in the weight of a layer."""
    rows: tuple[int, ...] = tuple(layer.fused_rows)  # type: ignore[arg-type]
    count = len(layer.weight) if num_rows is None else num_rows  # type: ignore[arg-type]
    return FusedRows(rows, count // sum(rows))


@torch.no_grad()
def merge_adapters(module: nn.Module) -> nn.Module:
    """Add the adapters of a full module to the module's weights, in place, and remove the adapters.
    Return the module.

    Sums are in fp32 and rounded once to the weight's dtype. All weights stay frozen.

    Raises:
        ConfigError: If this rank holds a part of the model.
    """
    check_full(module)
    check_values(module, "merge_adapters")
    parameters = dict(module.named_parameters())
    for name, delta in deltas_in(module, parameters.__getitem__).items():
        weight = parameters[name]
        box = Box.full(tuple(weight.shape))
        # Through the same function as merged files, so that both are equal to the bit.
        weight.copy_(delta.merged(box, partial(_in_fp32, weight)))
    for path, adapters in adapted_layers(module).items():
        layer = module.get_submodule(path)
        if isinstance(adapters, StackedAdapters):
            detach_stacked(layer)
        else:
            detach(layer)
    vars(module).pop(APPLIED, None)
    for child in module.modules():
        vars(child).pop(APPLIED, None)
    return module
