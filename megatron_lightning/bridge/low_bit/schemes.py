"""The settings and tensors of a format in two schemes: compressed-tensors', and ModelOpt's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from megatron_lightning.config.value_checks import check_choice
from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.formats import pack_e2m1
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.precision.served.checks import check_inputs
from megatron_lightning.precision.served.input_scales import input_scale
from megatron_lightning.precision.served.trained_codes import SCALINGS, default_recipe
from megatron_lightning.precision.served.values import Encoded, Fit, ServedFormat, ServedName

Scheme = Literal["compressed-tensors", "modelopt"]
TensorTable = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name in the layer -> shape and dtype."""

_KINDS: Mapping[ServedName, str] = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "int8": "pack-quantized",
    "int4": "pack-quantized",
}
# TensorRT-LLM knows the scheme by this name. The version is the one whose files these follow.
_PRODUCER: Mapping[str, str] = {"name": "modelopt", "version": "0.47.0"}
_WORD = 32  # bits


class Recipe(NamedTuple):
    """How weights are written."""

    form: ServedFormat
    scheme: Scheme = "compressed-tensors"
    """Names and settings."""
    fit: Fit = "max"
    """How scales are chosen."""
    rounds_inputs: bool = False
    """Whether servers round inputs in the same format."""
    trained_by: FP8Recipe | None = None
    """The recipe in the checkpoint. None: that of a training with the recipe's defaults."""

    @property
    def trained(self) -> FP8Recipe | None:
        """The recipe of a training by ``MegatronFP8Precision``, whose codes are written. None:
        codes are chosen by ``fit``.
        """
        if self.fit != "trained":
            return None
        return default_recipe(self.form) if self.trained_by is None else self.trained_by

    @property
    def fixes_inputs(self) -> bool:
        """Whether the folder holds scales of inputs. Else servers find them at run time."""
        return self.rounds_inputs and self.form.is_of_matrix

    @property
    def algorithm(self) -> str | None:
        """Name in ModelOpt's scheme. None: there is none."""
        if self.form.name == "nvfp4":
            return "NVFP4" if self.rounds_inputs else "W4A16_NVFP4"
        return "FP8" if self.form.name == "fp8_tensor" and self.rounds_inputs else None

    @classmethod
    def of(
        cls,
        name: str,
        group_size: int | None = None,
        scheme: str = "compressed-tensors",
        fit: str = "max",
        activations: str | None = None,
    ) -> Recipe:
        """Return a recipe of checked options.

        Raises:
            ConfigError: If an option is unknown, or the scheme lacks the format.
        """
        form = ServedFormat.of(name, group_size)
        check_choice("scheme", scheme, get_args(Scheme))
        check_choice("scales", fit, get_args(Fit))
        if fit == "4over6" and form.name != "nvfp4":
            raise ConfigError(
                f"scales is 4over6 with {form.name}, and chooses between two codes of nvfp4. Set "
                "scales to mse."
            )
        if fit == "gptq" and form.name != "int4":
            raise ConfigError(
                f"scales is gptq with {form.name}, and finds codes of int4. Set scales to mse, or "
                "quantize to int4."
            )
        if fit == "trained" and form.name not in SCALINGS:
            raise ConfigError(
                f"scales is trained with {form.name}, which no recipe of MegatronFP8Precision has. "
                f"Set scales to max, or quantize to one of {', '.join(SCALINGS)}."
            )
        if activations is not None:
            check_inputs(activations, [form.name])
        recipe = cls(form, cast(Scheme, scheme), cast(Fit, fit), activations is not None)
        if scheme == "modelopt" and recipe.algorithm is None:
            raise ConfigError(
                f"scheme is modelopt with {form.name}, of which it has no algorithm. Set scheme to "
                "compressed-tensors, or quantize to nvfp4 (W4A16_NVFP4; NVFP4 with activations), "
                "or to fp8_tensor with activations (FP8)."
            )
        return recipe


def tensors_of_layer(  # noqa: PLR0911  # a return for each form
    encoded: Encoded, recipe: Recipe
) -> dict[str, Tensor]:
    """Return the tensors of a layer by their names in the layer."""
    form, scheme = recipe.form, recipe.scheme
    codes, scales, outer = encoded
    if outer is not None:
        small = scales.to(torch.float8_e4m3fn)
        if scheme == "modelopt":  # multiplies by the outer scale
            return {
                "weight": pack_e2m1(codes),
                "weight_scale": small,
                "weight_scale_2": outer.reshape(()),
            }
        return {  # divides by it
            "weight_packed": pack_e2m1(codes),
            "weight_scale": small,
            "weight_global_scale": outer.reciprocal().reshape(1),
        }
    if form.name in ("mxfp4", "mxfp8"):
        exponents = scales.to(torch.float8_e8m0fnu).view(torch.uint8)
        if form.name == "mxfp4":
            return {"weight_packed": pack_e2m1(codes), "weight_scale": exponents}
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": exponents}
    if form.is_integer:
        small = scales.bfloat16()
        if recipe.rounds_inputs:
            return {"weight": codes.to(torch.int8), "weight_scale": small}
        return {
            "weight_packed": _packed(codes, form.bits),
            "weight_scale": small,
            "weight_shape": torch.tensor(codes.shape),
        }
    if form.name == "fp8_tensor":
        scales = scales.reshape(_shape_of_number(scheme))
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scales}


def input_tensors(amax: float, recipe: Recipe) -> dict[str, Tensor]:
    """Return the tensors of a layer for inputs up to ``amax``, by their names in the layer."""
    scale = input_scale(torch.tensor(amax), recipe.form).reshape(_shape_of_number(recipe.scheme))
    if recipe.form.name == "nvfp4" and recipe.scheme == "compressed-tensors":  # divides
        return {"input_global_scale": scale.reciprocal()}
    return {"input_scale": scale}


def cache_tensors(path: str, amax: tuple[float, float], scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors of an attention for keys and values up to ``amax`` in a cache, by full
    name.
    """
    form, tensors = ServedFormat.of("fp8_tensor"), {}
    for own, largest in zip("kv", amax, strict=True):
        place = f"{path}.{own}_proj" if scheme == "modelopt" else path
        scale = input_scale(torch.tensor(largest), form)
        tensors[f"{place}.{own}_scale"] = scale.reshape(_shape_of_number(scheme))
    return tensors


def _shape_of_number(scheme: Scheme) -> tuple[int, ...]:
    return () if scheme == "modelopt" else (1,)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return integers [R, C] in words of 32 bits, without a sign, the first in the low bits."""
    in_word = _WORD // bits
    positive = (codes + 2 ** (bits - 1)).to(torch.int64)
    positive = torch.nn.functional.pad(positive, (0, -codes.shape[1] % in_word))
    shifts = bits * torch.arange(in_word)
    words = (positive.view(len(codes), -1, in_word) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def table_of_layer(rows: int, columns: int, recipe: Recipe) -> TensorTable:
    """Return the names, shapes and dtypes of :func:`tensors_of_layer`."""
    block = recipe.form.block
    grid = (_count(rows, block.rows), _count(columns, block.columns))
    outer = torch.ones(1, 1) if recipe.form.name == "nvfp4" else None
    # One row of blocks has the dtypes; shapes follow from the sizes.
    small = Encoded(torch.zeros(1, columns), torch.ones(1, grid[1]), outer)
    table: TensorTable = {}
    for name, x in tensors_of_layer(small, recipe).items():
        is_fixed = x.ndim < 2
        first = grid[0] if name == "weight_scale" else rows
        table[name] = (tuple(x.shape) if is_fixed else (first, x.shape[1]), x.dtype)
    return table


def _count(extent: int, size: int | None) -> int:
    return 1 if size is None else -(-extent // size)


def config_entry(
    recipes: Mapping[str, Recipe], ignore: Sequence[str], *, has_cache: bool = False
) -> dict[str, Any]:
    """Return ``quantization_config`` of config.json.

    Args:
        recipes: Path of a layer -> recipe.
        ignore: Paths of the other layers.
        has_cache: Whether keys and values have scales for a cache in fp8.

    Raises:
        ConfigError: If the scheme has one format a folder, and there are several.
    """
    paths: dict[Recipe, list[str]] = {}
    for path, recipe in recipes.items():
        paths.setdefault(recipe._replace(trained_by=None), []).append(path)
    first = next(iter(paths))
    cache = {"num_bits": 8, "type": "float", "dynamic": False}
    if first.scheme == "modelopt":
        if len(paths) > 1:
            names = " and ".join(recipe.form.name for recipe in paths)
            raise ConfigError(
                f"scheme is modelopt, and layers are in {names}. Set scheme to compressed-tensors."
            )
        numbers = {"dynamic": False, "num_bits": first.form.bits, "type": "float"}
        size = first.form.group_size
        group: dict[str, Any] = {
            "weights": numbers if size is None else {**numbers, "group_size": size}
        }
        if first.rounds_inputs:
            group["input_activations"] = group["weights"]
        settings = {"kv_cache_scheme": cache} if has_cache else {}
        return settings | {
            "quant_method": "modelopt",
            "quant_algo": first.algorithm,
            "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
            "ignore": list(ignore),
            "producer": dict(_PRODUCER),
        }
    # One group is all linear layers but those in ignore. Of several, each lists its layers.
    groups = [
        {
            "targets": ["Linear"] if len(paths) == 1 else own,
            "weights": _weights(recipe.form),
            "input_activations": _inputs(recipe.form) if recipe.rounds_inputs else None,
            "output_activations": None,
            "format": _kind(recipe),
        }
        for recipe, own in paths.items()
    ]
    kinds = {_kind(recipe) for recipe in paths}
    return {
        "quant_method": "compressed-tensors",
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(ignore),
        "kv_cache_scheme": cache | {"strategy": "tensor", "symmetric": True} if has_cache else None,
    }


def _kind(recipe: Recipe) -> str:
    name = recipe.form.name
    if recipe.rounds_inputs and name not in ("nvfp4", "mxfp4", "mxfp8"):
        return "int-quantized" if name == "int8" else "float-quantized"
    return _KINDS.get(name, "naive-quantized")


def modelopt_file(recipe: Recipe, ignore: Sequence[str], *, has_cache: bool) -> dict[str, Any]:
    """Return the content of ModelOpt's own file beside config.json."""
    quantization = {
        "quant_algo": recipe.algorithm,
        "kv_cache_quant_algo": "FP8" if has_cache else None,
        "group_size": recipe.form.group_size,
        "exclude_modules": list(ignore),
    }
    return {"producer": dict(_PRODUCER), "quantization": quantization}


def _inputs(form: ServedFormat) -> dict[str, Any]:
    if form.is_of_matrix:  # local: block scales are found at run time
        return _weights(form) | {"dynamic": "local" if form.name == "nvfp4" else False}
    settings: dict[str, Any] = {
        "num_bits": form.bits,
        "type": "int" if form.is_integer else "float",
        "symmetric": True,
        "dynamic": True,
    }
    if form.group_size is None:
        return settings | {"strategy": "token"}
    scales = {"scale_dtype": "torch.uint8"} if form.name in ("mxfp4", "mxfp8") else {}
    return settings | scales | {"strategy": "group", "group_size": form.group_size}


def _weights(form: ServedFormat) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_bits": form.bits,
        "type": "int" if form.is_integer else "float",
        "symmetric": True,
        "dynamic": False,
    }
    if form.name in ("mxfp4", "mxfp8"):
        scales = {"scale_dtype": "torch.uint8"}
        return settings | scales | {"strategy": "group", "group_size": form.group_size}
    if form.name == "nvfp4":
        scales = {"scale_dtype": "torch.float8_e4m3fn"}
        return settings | scales | {"strategy": "tensor_group", "group_size": form.group_size}
    if form.name == "int4":
        return settings | {"strategy": "group", "group_size": form.group_size}
    if form.name == "fp8_block":
        size = form.group_size
        return settings | {"strategy": "block", "block_structure": [size, size]}
    return settings | {"strategy": "tensor" if form.name == "fp8_tensor" else "channel"}
