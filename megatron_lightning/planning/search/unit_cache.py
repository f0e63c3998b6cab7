"""Stages with equal layers have equal bytes, and are counted once. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar, cast

from megatron_lightning.config import RecomputeOptions, TransformerConfig
from megatron_lightning.planning.ledger.adapter_memory import AdapterSizes
from megatron_lightning.planning.ledger.quantized_weights import recipe_of
from megatron_lightning.planning.ledger.rank_parameters import config_of, layer_of
from megatron_lightning.precision.recipes import FP8Recipe

T = TypeVar("T")
Stage = TypeVar("Stage", bound=Hashable)


class LikeUnits:
    """Keys of the units of a model. Units of equal bytes have equal keys.

    Args:
        config: The model.
        recompute: Recomputed activations. Patterns may name single layers.
        fp8_recipe: Recipe of quantized layers. Some layers may stay in bf16.
        adapters: Adapters of all layers or of some layers.
    """

    def __init__(
        self,
        config: TransformerConfig,
        recompute: RecomputeOptions,
        fp8_recipe: FP8Recipe | None = None,
        adapters: AdapterSizes | None = None,
    ) -> None:
        self._config = config
        self._kinds = config.layer_kinds
        self._fp8_recipe = fp8_recipe
        patterns = [*recompute.recompute_modules, *recompute.offload_modules]
        patterns += [] if fp8_recipe is None else fp8_recipe.rows
        # A pattern with a number distinguishes layers of the same kind.
        self._differ = adapters is not None or any(re.search(r"\d", one) for one in patterns)
        self._keys: dict[str, Hashable] = {}
        self._nested: dict[Hashable, Hashable] = {}

    def key(self, unit: str) -> Hashable:
        """Return a value equal for units with equal bytes."""
        if unit not in self._keys:
            self._keys[unit] = self._key(unit)
        return self._keys[unit]

    def once_each(self, stages: Sequence[Stage], function: Callable[[Stage], T]) -> list[T]:
        """Return the function's result for every stage. Like stages share a result.

        Args:
            stages: Tuples of units, or tuples of tuples of units.
            function: Called once for like stages.
        """
        results: dict[Hashable, T] = {}
        keys = [self._nested_key(stage) for stage in stages]
        for key, stage in zip(keys, stages, strict=True):
            if key not in results:
                results[key] = function(stage)
        return [results[key] for key in keys]

    def _nested_key(self, units: Hashable) -> Hashable:
        """Return the keys of a unit, or of a tuple of units or of stages. Each tuple is read once,
        since a search asks for the same stages thousands of times.
        """
        if isinstance(units, str):
            return self.key(units)
        if units not in self._nested:
            self._nested[units] = tuple(map(self._nested_key, cast(Iterable[Hashable], units)))
        return self._nested[units]

    def _key(self, unit: str) -> Hashable:
        layer_number = layer_of(unit)
        if layer_number is None or self._differ:
            return unit
        quantized = recipe_of(self._config, self._fp8_recipe, f"{unit}.mlp.linear_fc1")
        layer = config_of(self._config, unit)
        positions = layer.window_size, layer.position_embedding_type
        return self._kinds[layer_number], quantized is None, positions
