"""Bytes of a frozen :class:`GPTModel` with trained adapters (LoRA, DoRA, VeRA). No torch here.

Of N frozen and T trained parameters on n data-parallel ranks, with weights of w bytes, Adam's two
moments in fp32, and main params of m bytes (4 or 0):

             weights                              gradients    optimizer
    ddp      w (N + T)                            4 T          (8 + m) T
    zero1    w (N + T)                            4 T          (8 + m) T / n
    fsdp     w N / n + (m or w) T / n             4 T          8 T / n
             + gathered units

With ``base``, data and scales of linear layers and experts take b bytes a weight in the
place of w. One such weight at a time has values as well.

             blockwise     mxfp8         nvfp4
    b        1 + 4 / 128   1 + 1 / 32    1/2 + 1 / 16 + 4 / columns

Backward keeps the same inputs, because the inputs of the frozen layers are also the inputs of A.
Tensors with r features are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_lightning.config import DataParallel, DataParallelOptions, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.blueprint import OUTPUT, Weight, unit_names, unit_weights
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


class _Trained(NamedTuple):
    """Trained numbers of the adapter of a matrix."""

    inputs: int
    """Divided like the matrix's columns."""
    outputs: int
    """Divided like the matrix's rows."""
    inner: int = 0
    """On every rank."""


def _low_rank(sizes: AdapterSizes, rows: int, columns: int) -> _Trained:
    return _Trained(sizes.r * columns, (sizes.r + sizes.use_dora) * rows)


def _vectors(sizes: AdapterSizes, rows: int, columns: int) -> _Trained:
    return _Trained(0, rows, sizes.r)


class _Method(NamedTuple):
    default_rank: int
    trained: Callable[[AdapterSizes, int, int], _Trained]
    """Returns the numbers of the adapter of a matrix with rows and columns."""
    shares: bool = False
    """Whether layers share frozen projections of the largest matrices, and experts have none."""


_METHODS: Mapping[str, _Method] = MappingProxyType(
    {"LoRA": _Method(8, _low_rank), "VeRA": _Method(256, _vectors, shares=True)}
)
"""Name of a method's class -> counts."""


@dataclass(frozen=True, kw_only=True)
class AdapterSizes:
    """Adapters of a model, with the names of their method."""

    method: str = "LoRA"
    """Name of the method's class."""
    r: int = 8
    """Rank."""
    use_dora: bool = False
    """Whether rows have trained lengths."""
    target_modules: str | Sequence[str] = "all-linear"
    """Adapted layers: "all-linear", or names and ends of paths."""
    exclude_modules: str | Sequence[str] = ()
    """Layers without adapters."""
    fused: str = "parts"
    """An adapter for each matrix of a fused weight ("parts"), or "one"."""
    base: str | None = None
    """Format of the frozen weights of linear layers and experts. None: values."""

    @classmethod
    def of_options(cls, options: Mapping[str, object], path: str = "") -> AdapterSizes:
        """Return the sizes described by options of a method.

        Args:
            options: The options.
            path: Class path of the method. Empty: ``LoRA``.

        Raises:
            ConfigError: For options with sizes unknown to a plan, an unknown method or base.
        """
        method = path.rpartition(".")[2] or "LoRA"
        if method not in _METHODS:
            raise ConfigError(
                f"model.peft is {path}, whose sizes a plan does not know. It knows those of "
                f"{', '.join(_METHODS)}."
            )
        unknown = [name for name in ("rank_pattern", "modules_to_save") if options.get(name)]
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
        fields: dict[str, Any] = {"method": method, "r": _METHODS[method].default_rank}
        fields |= {key: options[key] for key in cls.__dataclass_fields__ if key in options}
        adapters = cls(**fields)
        check_format(adapters.base)
        return adapters

    def adapts(self, unit: str, weight: Weight) -> bool:
        """Return whether the layer of a weight in a unit gets adapters.

        Raises:
            ConfigError: If it is a layer of experts, and the method has no adapters of experts.
        """
        if weight.kind != "matrix" or unit == OUTPUT:
            return False
        path = ".".join(filter(None, (unit, weight.module)))
        is_adapted = self.adapts_path(path)
        if is_adapted and weight.experts is not None and _METHODS[self.method].shares:
            raise ConfigError(
                f"{path} is a layer of experts, for which {self.method} has no vectors, so a fit "
                "refuses it. Leave the experts out by exclude_modules of model.peft, or use LoRA."
            )
        return is_adapted

    def adapts_path(self, path: str) -> bool:
        """Return whether the linear layer at a path gets adapters."""
        chosen = self.target_modules == "all-linear" or _matches(self.target_modules, path)
        return chosen and not _matches(self.exclude_modules, path)

    def count_unit(
        self, config: TransformerConfig, layout: ParallelLayout, unit: str
    ) -> ParameterCount:
        """Return the parameters of the adapters in a unit on a rank."""
        weights = (w for w in unit_weights(config, unit) if self.adapts(unit, w))
        return sum((self._count(weight, layout, config) for weight in weights), ParameterCount())

    def shared_size(self, config: TransformerConfig) -> int:
        """Return the frozen numbers that all adapted layers share, on every rank."""
        if not _METHODS[self.method].shares:
            return 0
        adapted = [
            weight
            for unit in unit_names(config)
            for weight in unit_weights(config, unit)
            if self.adapts(unit, weight)
        ]
        rows = max((max(self._rows(weight, config)) for weight in adapted), default=0)
        return self.r * (rows + max((weight.shape[-1] for weight in adapted), default=0))

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

    def _rows(self, weight: Weight, config: TransformerConfig) -> list[int]:
        """Return the rows of the matrices in a weight with an adapter each."""
        rows = weight.shape[-2]
        if self.fused != "parts" or weight.experts is not None:
            return [rows]
        if not weight.module.endswith("linear_qkv"):
            return [rows // weight.blocks] * weight.blocks
        queries = config.num_attention_heads * config.head_dim
        shared = config.query_groups * config.head_dim
        return [queries] * (1 + config.attention_output_gate) + [shared, shared]

    def _count(
        self, weight: Weight, layout: ParallelLayout, config: TransformerConfig
    ) -> ParameterCount:
        trained = _METHODS[self.method].trained
        parts = [trained(self, rows, weight.shape[-1]) for rows in self._rows(weight, config)]
        inputs, outputs, inner = (sum(sizes) for sizes in zip(*parts, strict=True))
        ranks = layout.tp if weight.experts is None else layout.etp
        if weight.split == "rows":
            outputs //= ranks
        elif weight.split == "columns":
            inputs //= ranks
        total = inputs + outputs + inner
        if weight.experts is None:
            return ParameterCount(total)
        return ParameterCount(0, total * weight.experts // layout.ep)


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
        shared = weight_bytes * adapters.shared_size(config)
        self.weights_bytes = stored_total.total + weight_bytes * total.total + largest + shared
        if mode == "fsdp" and max(shards) > 1:
            unit_bytes = [
                s.total + weight_bytes * one.total for s, one in zip(stored, trained, strict=True)
            ]
            # While one unit computes, the next is gathered.
            gathered = sorted(unit_bytes, reverse=True)
            at_once = sum(gathered[:2]) if reshards else sum(gathered)
            shard_bytes = stored_total.dense / shards[0] + stored_total.experts / shards[1]
            self.weights_bytes = (
                round(shard_bytes + (main or weight_bytes) * share + at_once) + largest + shared
            )
