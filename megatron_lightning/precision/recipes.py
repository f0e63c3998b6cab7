"""Recipes: the quantized layers, the formats, and the values with a common scale. No torch here.

A value is quantized data times a *scale*. Recipes differ in the number of values per scale, along
the dim contracted by the GEMM:

    delayed     the tensor, with a scale from earlier micro-batches
    current     the tensor
    rowwise     a row
    blockwise   128 values; of weights 128 x 128        (DeepSeek-V3, arXiv:2412.19437)
    mxfp8       32 values, a power of two               (OCP Microscaling Formats 1.0)
    nvfp4       16 values; of weights 16 x 16           (arXiv:2509.25149)

The arithmetic is Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from megatron_lightning.config.left_out import LEFT_OUT
from megatron_lightning.config.value_checks import check_choice, check_counts
from megatron_lightning.errors import ConfigError

Format = Literal["e4m3", "hybrid"]
Scaling = Literal["delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4"]
AmaxAlgorithm = Literal["max", "most_recent"]
Role = Literal["input", "weight", "output_grad"]

BLOCK_SIZES: Mapping[str, int] = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Values per scale, for recipes with blocks."""
_PER_TENSOR = ("delayed", "current")
_TWO_SETS = (
    "its scales lie along the dim that a GEMM contracts, so that a weight has two sets of "
    "quantized data, 2 bytes a weight, as many as one of bf16."
)
_NOT_GATHERED: Mapping[str, str] = {
    "rowwise": _TWO_SETS,
    "mxfp8": _TWO_SETS,
    "nvfp4": "quantized data of 4 bits share bytes, which no parameter can have as its elements.",
}


@dataclass(frozen=True, kw_only=True)
class FP8Recipe:
    """How linear layers and experts are quantized.

    Output layers and routers stay in bf16 unless ``modules`` names them.

    Raises:
        ConfigError: If values are unknown or contradict each other.
    """

    format: Format = "e4m3"
    """8-bit format: ``hybrid`` takes e5m2 for gradients and e4m3 otherwise (only delayed and
    current scaling). ``nvfp4`` has a separate format.
    """
    scaling: Scaling = "blockwise"
    """Values per scale. See the table above."""
    power_of_two_scales: bool | None = None
    """Whether scales are powers of two, rounded up. None: for blocks of 8-bit data.

    Scales of ``mxfp8`` always are powers of two, scales of ``nvfp4`` never.
    """
    margin: int = 0
    """Binary places left free above the expected amax (delayed scaling)."""
    amax_history_len: int = 1024
    """Micro-batches in the amax history (delayed scaling)."""
    amax_compute_algo: AmaxAlgorithm = "max"
    """Source of the scale: the largest or the latest amax (delayed scaling)."""
    num_layers_at_start_in_bf16: int = 0
    """Layers at the start of the model that stay in bf16 (not with delayed scaling)."""
    num_layers_at_end_in_bf16: int = 0
    """Layers at the end of the model that stay in bf16."""
    weight_2d_scaling: bool = True
    """Whether a scale of weights covers 16 x 16 values instead of 16 (nvfp4)."""
    random_hadamard_transform: bool = True
    """Whether both operands of weight gradients are rotated.

    Rotation spreads outliers over 16 tokens (nvfp4).
    """
    stochastic_rounding: bool = True
    """Whether gradients are rounded at random, without bias.

    Checkpoints save the random stream (nvfp4).
    """
    modules: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Pattern of module paths -> another recipe, or "bf16". The first match wins.

    ``*`` matches one path segment, ``**`` any number.
    """
    fp8_param_gather: bool = False
    """Store and gather the weights of quantized layers as quantized data: one byte a weight.

    The optimizer steps main params in fp32 (delayed, current and blockwise scaling, ``zero1`` and
    ``fsdp``). Also applies to the recipes of ``modules``.
    """
    fp8_param: bool = False
    """Megatron's other name of ``fp8_param_gather``. Both options have to agree."""

    def __post_init__(self) -> None:
        for name, choices in (("scaling", Scaling), ("format", Format)):
            value = getattr(self, name)
            if reason := LEFT_OUT.get((name, str(value))):
                raise ConfigError(f"{name} is {value!r}. {reason}")
            check_choice(name, value, get_args(choices))
        check_choice("amax_compute_algo", self.amax_compute_algo, get_args(AmaxAlgorithm))
        check_counts(self, "amax_history_len")
        self._check_switches()
        self._check_layers()
        self._check_scaling()
        self._check_rows()
        self._check_parameters()

    def _check_switches(self) -> None:
        of_nvfp4 = ("weight_2d_scaling", "random_hadamard_transform", "stochastic_rounding")
        for name in (*of_nvfp4, "fp8_param_gather", "fp8_param"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be true or false.")
        if not isinstance(self.power_of_two_scales, bool | None):
            raise ConfigError(
                f"power_of_two_scales is {self.power_of_two_scales!r}; it must be true, false or "
                "null."
            )
        if self.scaling == "blockwise" and not self.weight_2d_scaling:
            raise ConfigError(
                "weight_2d_scaling is False with scaling=blockwise, whose weights always have "
                "blocks of 128 x 128. Remove it, or set scaling to nvfp4."
            )

    def _check_layers(self) -> None:
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "margin"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of 0 or more.")
        if self.num_layers_in_bf16 and self.scaling == "delayed":
            raise ConfigError(
                f"{self.num_layers_in_bf16} layers at the start and end are to stay in bf16 with "
                "scaling=delayed, whose histories cover all layers. Set scaling to current, or the "
                "numbers to 0."
            )

    def _check_scaling(self) -> None:
        scaling = self.scaling
        if self.format == "hybrid" and scaling not in _PER_TENSOR:
            raise ConfigError(
                f"format is hybrid with scaling={scaling}: with scales for rows or blocks, e4m3 "
                'has the range that gradients need. Set format to "e4m3", or scaling to '
                f"{' or '.join(_PER_TENSOR)}."
            )
        if scaling != "delayed":
            defaults = {f.name: f.default for f in fields(self)}
            for name in ("margin", "amax_history_len", "amax_compute_algo"):
                if getattr(self, name) != defaults[name]:
                    raise ConfigError(
                        f"{name} is {getattr(self, name)!r} with scaling={scaling}, which has no "
                        "history. Set scaling to delayed, or remove it."
                    )
        fixed = {"mxfp8": True, "nvfp4": False}.get(scaling)
        if fixed is not None and self.power_of_two_scales not in (None, fixed):
            raise ConfigError(
                f"power_of_two_scales is {self.power_of_two_scales} with scaling={scaling}, whose "
                f"format says {fixed}. Remove it, or set scaling to blockwise."
            )

    def _check_parameters(self) -> None:
        if self.fp8_param and not self.fp8_param_gather:
            raise ConfigError(
                "fp8_param is True and fp8_param_gather is False; parameters that are kept as "
                "quantized data are gathered as quantized data. Set fp8_param_gather to "
                "True, or fp8_param to False."
            )
        if not self.fp8_param_gather:
            return
        recipes = {"scaling": self}
        recipes |= {f"modules[{key!r}]": row for key, row in self.rows.items() if row is not None}
        for where, recipe in recipes.items():
            if reason := _NOT_GATHERED.get(recipe.scaling):
                raise ConfigError(
                    f"fp8_param_gather is True and {where} is {recipe.scaling}: {reason} Set it to "
                    "blockwise or current, or fp8_param_gather to False."
                )

    def _check_rows(self) -> None:
        if not isinstance(self.modules, Mapping) or not all(
            isinstance(pattern, str) and pattern for pattern in self.modules
        ):
            raise ConfigError(
                f"modules is {self.modules!r}; it must map patterns of module paths to recipes or "
                "the word bf16."
            )
        for pattern, row in self.rows.items():
            if row is not None and row.num_layers_in_bf16:
                raise ConfigError(
                    f"the recipe of modules[{pattern!r}] keeps first or last layers in bf16, and a "
                    "row is about the modules that it matches. Set num_layers_at_start_in_bf16 and "
                    "num_layers_at_end_in_bf16 in the outer recipe."
                )

    def _row(self, pattern: str) -> FP8Recipe | None:
        """Return the recipe of a pattern, or None for bf16."""
        value = self.modules[pattern]
        if value == "bf16":
            return None
        if isinstance(value, Mapping):
            known_names = {f.name for f in fields(self)}
            if unknown := sorted(map(str, value.keys() - known_names)):
                raise ConfigError(
                    f"modules[{pattern!r}] sets {', '.join(unknown)}, which no recipe has. The "
                    f"names are {', '.join(sorted(known_names))}."
                )
            value = FP8Recipe(**value)
        if not isinstance(value, FP8Recipe):
            raise ConfigError(
                f"modules[{pattern!r}] is {value!r}; it must be a recipe or the word bf16."
            )
        if value.fp8_param_gather or value.fp8_param:
            raise ConfigError(
                f"the recipe of modules[{pattern!r}] sets fp8_param_gather, which holds for all "
                "layers. Set it in the outer recipe."
            )
        if value.modules:
            raise ConfigError(
                f"the recipe of modules[{pattern!r}] has patterns of its own. Write them as rows "
                "of the outer recipe, the narrower ones first."
            )
        return value

    @property
    def rows(self) -> dict[str, FP8Recipe | None]:
        """Pattern -> recipe, or None for bf16."""
        return {pattern: self._row(pattern) for pattern in self.modules}

    @property
    def num_layers_in_bf16(self) -> int:
        """First and last layers in bf16."""
        return self.num_layers_at_start_in_bf16 + self.num_layers_at_end_in_bf16

    @property
    def has_history(self) -> bool:
        """Whether a scale, of any row, comes from earlier micro-batches."""
        rows = [row for row in self.rows.values() if row is not None]
        return any(recipe.scaling == "delayed" for recipe in (self, *rows))

    @property
    def is_per_tensor(self) -> bool:
        """Whether a tensor has a single scale, so that one operand serves both GEMMs."""
        return self.scaling in _PER_TENSOR

    @property
    def rounds_scales(self) -> bool:
        """Whether scales are powers of two."""
        if self.power_of_two_scales is None:
            return self.scaling in ("blockwise", "mxfp8")
        return self.power_of_two_scales

    def data_format(self, role: Role) -> Literal["e4m3", "e5m2", "e2m1"]:
        """Return the number format of a tensor in this role."""
        if self.scaling == "nvfp4":
            return "e2m1"
        return "e5m2" if self.format == "hybrid" and role == "output_grad" else "e4m3"

    def is_square(self, role: Role) -> bool:
        """Whether blocks extend over both dims, so that one operand serves both GEMMs."""
        square = self.scaling == "blockwise" or (self.scaling == "nvfp4" and self.weight_2d_scaling)
        return square and role == "weight"
