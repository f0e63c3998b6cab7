"""Folders of models that were trained with rounded weights: the values of the trained forward."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

import torch

from megatron_lightning.bridge.folder_model import FolderModel, Owner, Plan
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.low_bit.export import QuantizedFolder, ServedLayers, served_layers
from megatron_lightning.bridge.low_bit.fixed_scales import (
    NONE,
    CalibratedFolder,
    FixedScales,
    cache_scales,
)
from megatron_lightning.bridge.low_bit.reading import dequantized
from megatron_lightning.bridge.low_bit.schemes import Recipe, Scheme
from megatron_lightning.bridge.low_bit.stacks import parts_of, separated, stacked
from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.bridge.tensors.lazy import Fill, Lazy
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import CONFIG
from megatron_lightning.precision.served.inputs import InputName
from megatron_lightning.precision.served.qat import QAT, Record, described
from megatron_lightning.precision.served.selection import Served
from megatron_lightning.precision.served.values import Fit, ServedFormat, ServedName

_T = TypeVar("_T")


class TrainedWeights(NamedTuple):
    """The weights that the forward of a training rounded, by their names in the folder."""

    qat: QAT
    forms: Mapping[str, ServedFormat]
    tensors: Mapping[str, Lazy]
    """Not rounded, in the dtype in which the forward rounds."""
    inputs: Mapping[str, float] = MappingProxyType({})
    """Path of a layer in the folder -> amax of its inputs, if the training fixed their scales."""

    @classmethod
    def of(cls, plan: Plan, fills: Mapping[str, Fill], record: Record) -> TrainedWeights:
        """Return the weights of a model.

        Args:
            plan: Recipe from the model to its folder.
            fills: Name in the model -> function that fills boxes of the parameter.
            record: What the checkpoint says of the rounding.
        """
        forms = {
            name: form
            for name, pieces in plan.pieces.items()
            if pieces and all(_is_rounded(piece.parameter, record.served) for piece in pieces)
            if (form := record.qat.form_of(pieces[0].parameter.rpartition(".")[0]))
        }
        inputs = {}
        if record.qat.fixes_inputs:
            for name, form in forms.items():
                path = plan.pieces[name][0].parameter.rpartition(".")[0]
                if form.name == record.qat.activations:
                    inputs[name.removesuffix(".weight")] = record.input_amax.get(path, 0.0)
        exact = plan.tensors(fills, record.dtype)
        tensors = {name: x for name, x in exact.items() if name in forms}
        return cls(record.qat, forms, tensors, inputs)

    def folder(
        self,
        like: FolderTensors,
        tensors: Mapping[str, Lazy],
        scheme: Scheme = "compressed-tensors",
        *,
        trust_remote_code: bool = False,
        cache: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    ) -> QuantizedFolder:
        """Return the folder with the values of the trained forward.

        Args:
            like: Folder with the other files.
            tensors: All tensors of the folder.
            scheme: Names and settings of the quantized tensors.
            trust_remote_code: Whether code in the folder may run.
            cache: Path of an attention in the folder -> amax of its keys and of its values.

        Raises:
            ConfigError: If the scheme lacks a format, or servers have no form of such experts.
        """
        tensors = {**tensors, **self.tensors}
        layers = served_layers(
            like.files, tensors, self.tensors.keys(), trust_remote_code=trust_remote_code
        )
        written = {*layers.stacks, *(f"{path}.weight" for path in layers.quantized)}
        left = self.tensors.keys() - written
        if left:
            name = min(left)
            raise ConfigError(
                f"{name} of shape {list(self.tensors[name].shape)} was trained with "
                f"{len(left)} such stacks rounded matrix by matrix, and servers load no such "
                "experts in few bits. Write it in bf16: --quantize none."
            )
        inputs = self._by_matrix(self.inputs, layers, "")
        fixed = FixedScales.of_layers(inputs, inputs) if inputs else NONE
        return self._quantized(like, layers, scheme, fixed._replace(cache=cache))

    def values(
        self, like: FolderTensors, tensors: Mapping[str, Lazy], device: torch.device | None = None
    ) -> dict[str, Lazy]:
        """Return all tensors of the folder with the values of the trained forward, in their dtypes.

        Args:
            like: Folder with the other files.
            tensors: All tensors of the folder.
            device: Device on which weights are read and rounded. None: the CPU.
        """
        stacks = [name for name, x in self.tensors.items() if x.ndim == 3]
        own = separated(self.tensors, stacks)
        paths = [name.removesuffix(".weight") for name in own]
        layers = ServedLayers(own, paths, stacks=stacks)
        folder = self._quantized(like, layers, device=device)
        values = stacked(dequantized(folder, folder.settings), stacks)
        return {
            name: _in_dtype(values[name], x.dtype) if name in values else x
            for name, x in tensors.items()
        }

    def _quantized(
        self,
        like: FolderTensors,
        layers: ServedLayers,
        scheme: Scheme = "compressed-tensors",
        fixed: FixedScales = NONE,
        device: torch.device | None = None,
    ) -> QuantizedFolder:
        forms = self._by_matrix(self.forms, layers)
        recipes = {
            name.removesuffix(".weight"): Recipe.of(
                form.name,
                form.group_size,
                scheme,
                activations=form.name if form.name == self.qat.activations else None,
            )
            for name, form in forms.items()
        }
        return QuantizedFolder(like, recipes, layers, fixed, device)

    def _by_matrix(
        self, values: Mapping[str, _T], layers: ServedLayers, suffix: str = ".weight"
    ) -> dict[str, _T]:
        """Return values by name, with those of stacks for each expert's matrices."""
        result = dict(values)
        for name in layers.stacks:
            if name in result:
                value, parts = result.pop(name), parts_of(name, len(self.tensors[name]))
                names = (part.removesuffix(".weight") for own in parts for part in own)
                result |= {f"{path}{suffix}": value for path in names}
        return result


class Asked(NamedTuple):
    """A user's options."""

    name: ServedName | Literal["none"] | None
    """Format of weights."""
    group_size: int | None = None
    scheme: Scheme = "compressed-tensors"
    fit: Fit = "max"
    activations: InputName | None = None
    """Format of inputs."""
    statistics: str | None = None
    """File of ``LayerStatistics``."""
    kv_cache: Literal["fp8"] | None = None
    """Format of keys and values in servers' caches."""

    @property
    def is_plain(self) -> bool:
        """Whether only the format is asked for."""
        return self[1:] == Asked(None)[1:]


def quantized_folder(
    like: FolderTensors,
    tensors: Mapping[str, Lazy],
    trained: TrainedWeights | None,
    asked: Asked,
    *,
    trusts: bool,
    family: str | None = None,
    owners: Mapping[str, Owner] = MappingProxyType({}),
) -> QuantizedFolder | None:
    """Return a folder in few bits: as asked, or as the checkpoint was trained. None: not quantized.

    Args:
        like: Folder with the other files.
        tensors: All tensors of the folder.
        trained: The weights that the training rounded. None: none.
        asked: The options.
        trusts: Whether code in the folder may run.
        family: Rules of ``GPTModel``. None: those of the folder's architecture.
        owners: Name of a tensor in the folder -> parameter of the training that holds it.

    Raises:
        ConfigError: If an option does nothing, or would change the values of the trained forward.
    """
    name, group_size, scheme, fit, activations, _, _ = asked
    if trained is not None and _is_as_trained(trained, asked):
        cache = _cache_of_training(asked, owners)
        return trained.folder(like, tensors, scheme, trust_remote_code=trusts, cache=cache)
    if name is None or name == "none":
        if not asked.is_plain:
            raise ConfigError(
                "group_size, scheme, scales, activations, statistics and kv_cache are settings of "
                f"quantized weights, and quantize is {name}. Set quantize, or leave them out."
            )
        return None
    recipe = Recipe.of(name, group_size, scheme, fit, activations)
    layers = served_layers(like.files, tensors, trust_remote_code=trusts)._replace(owners=owners)
    fixed = _fixed_scales(like, layers, recipe, asked, family=family, trusts=trusts)
    return QuantizedFolder(like, dict.fromkeys(layers.quantized, recipe), layers, fixed)


def _is_as_trained(trained: TrainedWeights, asked: Asked) -> bool:
    """Return whether the folder of the trained forward is asked for.

    Raises:
        ConfigError: If the scales are others than those of the trained forward.
    """
    if asked.name == "none" or asked.activations not in (None, trained.qat.activations):
        return False
    own = {*trained.forms.values()}
    if asked.name is None:
        is_own = asked.group_size is None
    else:
        is_own = own == {ServedFormat.of(asked.name, asked.group_size)}
    if is_own and asked.fit != "max":
        raise ConfigError(
            f"scales is {asked.fit}, and the checkpoint was trained with {described(trained.qat)}, "
            "whose forward multiplied by scales max: the folder would have other values. Leave "
            "scales out, or write another format."
        )
    return is_own


def _cache_of_training(
    asked: Asked, owners: Mapping[str, Owner]
) -> Mapping[str, tuple[float, float]]:
    """Return the largest keys and values, beside what a training has fixed."""
    if not _needs_statistics([], asked):
        return {}
    parameters = {name: owner.parameter for name, owner in owners.items()}
    if not any(name.startswith("decoder.") for name in parameters.values()):
        raise ConfigError(
            f"kv_cache {asked.kv_cache}: statistics are of a GPTModel, and the checkpoint is of an "
            "untouched model. Leave kv_cache out, or train the folder by GPTLightningModule "
            "(init_from_hf)."
        )
    return cache_scales(parameters, Statistics.load(str(asked.statistics)))


def _needs_statistics(inputs: list[str], asked: Asked) -> bool:
    """Return whether scales are those of an evaluation.

    Args:
        inputs: Description of the inputs whose scales it finds. Empty: none.
        asked: The options.

    Raises:
        ConfigError: If the statistics are missing, or nothing needs them.
    """
    needs = inputs + ([f"kv_cache {asked.kv_cache}"] if asked.kv_cache is not None else [])
    if needs and asked.statistics is None:
        raise ConfigError(
            f"{' and '.join(needs)}: the folder holds the scales, which an evaluation finds. "
            "Validate the folder (--model=GPTLightningModule --model.init_from_hf=FOLDER) with the "
            "callback LayerStatistics, and set --statistics FILE."
        )
    if asked.statistics is not None and not needs:
        raise ConfigError(
            "statistics find the scales of activations nvfp4 or fp8_tensor that no training fixed, "
            "and of kv_cache, and none of them is set. Set one, or leave statistics out."
        )
    return bool(needs)


def _fixed_scales(
    like: FolderTensors,
    layers: ServedLayers,
    recipe: Recipe,
    asked: Asked,
    *,
    family: str | None,
    trusts: bool,
) -> FixedScales:
    """Return the scales that a folder holds by the statistics of an evaluation."""
    inputs = [f"activations {recipe.form.name}"] if recipe.fixes_inputs else []
    if not _needs_statistics(inputs, asked):
        return NONE
    if not (like.path / CONFIG).is_file():
        raise ConfigError(
            f"statistics are of a folder, and {like.path} is none. Export the checkpoint with "
            f"--quantize none, and then the folder with --quantize {recipe.form.name}."
        )
    model = FolderModel(like.path, trust_remote_code=trusts, family=family)
    folder = CalibratedFolder(model, Statistics.load(str(asked.statistics)))
    return folder.scales(
        layers.quantized,
        layers.stacks,
        inputs=recipe.fixes_inputs,
        cache=asked.kv_cache is not None,
    )


def _in_dtype(values: Lazy, dtype: torch.dtype) -> Lazy:
    return Lazy(values.shape, dtype, values.fill)


def _is_rounded(parameter: str, served: Served) -> bool:
    path, _, name = parameter.rpartition(".")
    return (name == "weight" and path in served.layers) or name in served.stacks.get(path, ())
