"""Bytes of a frozen :class:`GPTModel` with trained adapters (LoRA). No torch here.

Of N frozen and T trained parameters on n data-parallel ranks, with weights of w bytes, Adam's two
moments in fp32, and main params of m bytes (4 or 0):

             weights                              gradients    optimizer
    ddp      w (N + T)                            4 T          (8 + m) T
    zero1    w (N + T)                            4 T          (8 + m) T / n
    fsdp     w N / n + (m or w) T / n             4 T          8 T / n
             + gathered units

With ``base`` of ``LoRA``, data and scales of linear layers and experts take b bytes a weight in the
place of w. One such weight at a time has values as well.

             blockwise     mxfp8         nvfp4
    b        1 + 4 / 128   1 + 1 / 32    1/2 + 1 / 16 + 4 / columns

Backward keeps the same inputs, because the inputs of the frozen layers are also the inputs of A.
Tensors with r features are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_lightning.config import DataParallel, DataParallelOptions, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.blueprint import OUTPUT, Weight, unit_weights
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.planning.ledger.precision_bytes import Precision
from megatron_lightning.planning.ledger.rank_parameters import (
    ParameterCount,
    count_rank,
    local_size,
)
from megatron_lightning.precision.qlora.base_formats import check_format
from megatron_lightning.precision.recipes import BLOCK_SIZES

_MAIN = 4  # bytes of fp32
_MOMENTS = 2  # of Adam


@dataclass(frozen=True, kw_only=True)
class AdapterSizes:
    """Adapters of a model, with the names of ``LoRA``."""

    r: int = 8
    """Rank."""
    target_modules: str | Sequence[str] = "all-linear"
    """Adapted layers: "all-linear", or names and ends of paths."""
    exclude_modules: str | Sequence[str] = ()
    """Layers without adapters."""
    fused: str = "parts"
    """An adapter for each matrix of a fused weight ("parts"), or "one"."""
    base: str | None = None
    """Format of the frozen weights of linear layers and experts. None: values."""

    @classmethod
    def of_options(cls, options: Mapping[str, object]) -> AdapterSizes:
        """Return the sizes described by options of ``LoRA``.

        Raises:
            ConfigError: For options with sizes unknown to a plan, or an unknown base.
        """
        unknown = [
            name for name in ("rank_pattern", "modules_to_save", "use_dora") if options.get(name)
        ]
        texts = [
            name
            for name in ("target_modules", "exclude_modules")
            if isinstance(options.get(name), str) and options[name] != "all-linear"
        ]
        if unknown or texts:
            raise ConfigError(
                f"model.peft sets {', '.join(unknown + texts)}, whose sizes a plan does not know. "
                "Give lists of names, and plan without the others."
            )
        fields = {key: options[key] for key in cls.__dataclass_fields__ if key in options}
        adapters = cls(**fields)  # type: ignore[arg-type]
        check_format(adapters.base)
        return adapters

    def adapts(self, unit: str, weight: Weight) -> bool:
        """Return whether the layer of a weight in a unit gets adapters."""
        if weight.kind != "matrix" or unit == OUTPUT:
            return False
        return self.adapts_path(".".join(filter(None, (unit, weight.module))))

    def adapts_path(self, path: str) -> bool:
        """Return whether the linear layer at a path gets adapters."""
        chosen = self.target_modules == "all-linear" or _matches(self.target_modules, path)
        return chosen and not _matches(self.exclude_modules, path)

    def count_unit(
        self, config: TransformerConfig, layout: ParallelLayout, unit: str
    ) -> ParameterCount:
        """Return the parameters of the adapters in a unit on a rank."""
        weights = (w for w in unit_weights(config, unit) if self.adapts(unit, w))
        num_qkv = 3 + config.attention_output_gate
        return sum((self._count(weight, layout, num_qkv) for weight in weights), ParameterCount())

    def base_bytes(
        self, config: TransformerConfig, layout: ParallelLayout, unit: str, value_bytes: int
    ) -> ParameterCount:
        """Return the bytes of the frozen weights in a unit on a rank, dense and experts'."""
        total = ParameterCount()
        for weight in unit_weights(config, unit):
            size = local_size(weight, layout)
            factor = _bytes_of(self.base, weight) if self._is_stored(unit, weight) else value_bytes
            total += ParameterCount(round(factor * size.dense), round(factor * size.experts))
        return total

    def largest_values(self, config: TransformerConfig, layout: ParallelLayout, unit: str) -> int:
        """Return the elements of the largest weight in a unit that gets values for a GEMM."""
        stored = (w for w in unit_weights(config, unit) if self._is_stored(unit, w))
        return max((local_size(weight, layout).total for weight in stored), default=0)

    def _is_stored(self, unit: str, weight: Weight) -> bool:
        return self.base is not None and weight.kind == "matrix" and unit != OUTPUT

    def _count(self, weight: Weight, layout: ParallelLayout, num_qkv: int) -> ParameterCount:
        *_, rows, columns = weight.shape
        num_parts = 1
        if self.fused == "parts" and weight.experts is None:
            num_parts = num_qkv if weight.module.endswith("linear_qkv") else weight.blocks
        first, second = self.r * columns * num_parts, self.r * rows
        ranks = layout.tp if weight.experts is None else layout.etp
        if weight.split == "rows":
            second //= ranks
        elif weight.split == "columns":
            first //= ranks
        if weight.experts is None:
            return ParameterCount(first + second)
        return ParameterCount(0, (first + second) * weight.experts // layout.ep)


def _matches(names: str | Sequence[str], path: str) -> bool:
    return not isinstance(names, str) and any(
        compile_pattern(form).fullmatch(path) for name in names for form in (name, f"**.{name}")
    )


def _bytes_of(base: str | None, weight: Weight) -> float:
    """Return the bytes of a stored weight's element, with the scales."""
    if base == "nvfp4":
        return 0.5 + 1 / BLOCK_SIZES[base] + _MAIN / weight.shape[-1]
    return 1 + (_MAIN if base == "blockwise" else 1) / BLOCK_SIZES[str(base)]


class AdaptedState:
    """Weights, gradients and optimizer of a rank with a frozen base.

    Args:
        config: The model.
        grid: The ranks.
        own: Units of the rank's stages.
        adapters: Sizes of the adapters.
        precision: Bytes of an element.
        mode: Data-parallel mode.
        options: Options of the data-parallel mode.
        reshards: Whether fsdp gathers a unit for each use, instead of once a step.
    """

    def __init__(
        self,
        config: TransformerConfig,
        grid: RankGrid,
        own: Sequence[Sequence[str]],
        *,
        adapters: AdapterSizes,
        precision: Precision,
        mode: DataParallel,
        options: DataParallelOptions,
        reshards: bool,
    ) -> None:
        layout, units = grid.layout, [unit for stage in own for unit in stage]
        instances = options.num_distributed_optimizer_instances
        shards = max(1, grid.size("dp-cp") // instances), max(1, grid.size("edp") // instances)
        if mode == "ddp":
            shards = (1, 1)
        trained = [adapters.count_unit(config, layout, unit) for unit in units]
        total = sum(trained, ParameterCount())
        base = count_rank(config, layout, own)
        self.parameters = base + total
        moments = _MOMENTS * (2 if options.moments_dtype == "bf16" else _MAIN)
        main, weight_bytes = precision.main_bytes, precision.weight_bytes
        # Only trained parameters have gradients, moments and main params.
        share = total.dense / shards[0] + total.experts / shards[1]
        self.gradients_bytes = _MAIN * total.total
        self.optimizer_bytes = round((moments + (0 if mode == "fsdp" else main)) * share)
        if options.optimizer_cpu_offload:
            self.optimizer_bytes = 0
        stored = [adapters.base_bytes(config, layout, unit, weight_bytes) for unit in units]
        in_use = weight_bytes + (precision.compute_bytes if precision.autocast else 0)
        # The values of one dequantized weight at a time, and their cast under autocast.
        largest = in_use * max(adapters.largest_values(config, layout, unit) for unit in units)
        stored_total = sum(stored, ParameterCount())
        self.weights_bytes = stored_total.total + weight_bytes * total.total + largest
        if mode == "fsdp" and max(shards) > 1:
            unit_bytes = [
                s.total + weight_bytes * one.total for s, one in zip(stored, trained, strict=True)
            ]
            # While one unit computes, the next is gathered.
            gathered = sorted(unit_bytes, reverse=True)
            at_once = sum(gathered[:2]) if reshards else sum(gathered)
            shard_bytes = stored_total.dense / shards[0] + stored_total.experts / shards[1]
            self.weights_bytes = (
                round(shard_bytes + (main or weight_bytes) * share + at_once) + largest
            )
