"""Folders in few bits by a user's options: as asked, or as a checkpoint was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from megatron_lightning.bridge.export_model import SavedTensors
from megatron_lightning.bridge.folder_model import FolderModel, Owner
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.low_bit.export import QuantizedFolder, ServedLayers, served_layers
from megatron_lightning.bridge.low_bit.fixed_scales import (
    NONE,
    CalibratedFolder,
    FixedScales,
    cache_scales,
)
from megatron_lightning.bridge.low_bit.schemes import Recipe, Scheme
from megatron_lightning.bridge.low_bit.trained import TrainedWeights
from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import CONFIG
from megatron_lightning.precision.served.checks import check_fused
from megatron_lightning.precision.served.inputs import InputName
from megatron_lightning.precision.served.qat import described
from megatron_lightning.precision.served.trained_codes import FORMATS
from megatron_lightning.precision.served.trained_layers import TrainedLayer
from megatron_lightning.precision.served.values import Fit, ServedFormat, ServedName


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

    def recipe(self, name: str) -> Recipe:
        """Return the recipe of layers in a format.

        Raises:
            ConfigError: If an option is unknown, or the scheme lacks the format.
        """
        return Recipe.of(name, self.group_size, self.scheme, self.fit, self.activations)

    @property
    def is_plain(self) -> bool:
        """Whether only the format is asked for."""
        return self[1:] == Asked(None)[1:]


def quantized_folder(
    saved: SavedTensors, asked: Asked, *, trusts: bool, family: str | None = None
) -> QuantizedFolder | None:
    """Return a folder in few bits: as asked, or as the checkpoint was trained. None: not quantized.

    Args:
        saved: The tensors.
        asked: The options.
        trusts: Whether code in the folder may run.
        family: Rules of ``GPTModel``. None: those of the folder's architecture.

    Raises:
        ConfigError: If an option does nothing, or would change the values of the trained forward.
    """
    like, tensors, trained, owners, fp8 = saved
    if trained is not None and _is_as_trained(trained, asked):
        cache = _cache_of_training(asked, owners)
        return trained.folder(like, tensors, asked.scheme, trust_remote_code=trusts, cache=cache)
    takes_codes = asked.fit == "trained" and fp8 is not None and asked.name != "none"
    if not takes_codes and asked.name in (None, "none"):
        if not asked.is_plain:
            raise ConfigError(
                "group_size, scheme, scales, activations, statistics and kv_cache are settings of "
                f"quantized weights, and quantize is {asked.name}. Set quantize, or leave them out."
            )
        return None
    # Before the folder's model is made: the options may be wrong.
    recipe = None if asked.name is None else asked.recipe(asked.name)
    layers = served_layers(like.files, tensors, trust_remote_code=trusts)._replace(owners=owners)
    if takes_codes and fp8 is not None:
        recipes = recipes_of_training(layers, fp8, asked)
        left = {*layers.quantized} - {*recipes}
        layers = layers._replace(quantized=[*recipes], ignored=sorted({*layers.ignored, *left}))
    elif recipe is not None:
        recipes = dict.fromkeys(layers.quantized, recipe)
    fixed = _fixed_scales(like, layers, recipes, asked, family=family, trusts=trusts)
    return QuantizedFolder(like, recipes, layers, fixed)


def recipes_of_training(
    layers: ServedLayers, trained: Mapping[str, TrainedLayer], asked: Asked
) -> dict[str, Recipe]:
    """Return path of a layer in the folder -> the recipe of its training, for all layers that it
    quantized.

    Raises:
        ConfigError: If servers have no such scales, or the user asks for another format.
    """
    if not trained:
        raise ConfigError(
            "scales is trained, and the checkpoint has no quantized layers of this model. Set "
            "model to the path of the model in the LightningModule, such as gpt for self.gpt."
        )
    recipes: dict[str, Recipe] = {}
    for path, owner in layers.parameters().items():
        layer = trained.get(owner.removesuffix(".weight"))
        if layer is None:
            continue
        name = FORMATS.get(layer.recipe.scaling)
        if name is None:
            raise ConfigError(
                f"{path} was trained with scaling={layer.recipe.scaling}, whose scales are of "
                "earlier steps. Set scales to max, and quantize to fp8_tensor."
            )
        if asked.name not in (None, name):
            raise ConfigError(
                f"quantize is {asked.name}, and {path} was trained with "
                f"scaling={layer.recipe.scaling}. Set quantize to {name}, or leave it out; or set "
                "scales to max."
            )
        if layer.is_cut:
            raise ConfigError(
                f"{path} was trained on ranks that had scales of their own for their parts of "
                f"{owner}, which no scale of {name} covers. Set scales to max."
            )
        recipes[path] = asked.recipe(name)._replace(trained_by=layer.recipe)
    if not recipes:
        raise ConfigError(
            "scales is trained, and the training quantized none of the layers that servers hold in "
            "few bits. Set scales to max."
        )

    def form_of(path: str) -> ServedFormat | None:
        return recipes[path].form if path in recipes else None

    check_fused(layers.quantized, form_of, "the training", "Set scales to max.")
    return recipes


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
    needs += ["scales gptq"] if asked.fit == "gptq" else []
    if needs and asked.statistics is None:
        raise ConfigError(
            f"{' and '.join(needs)}: an evaluation finds them. "
            "Validate the folder (--model=GPTLightningModule --model.init_from_hf=FOLDER) with the "
            "callback LayerStatistics, and set --statistics FILE."
        )
    if asked.statistics is not None and not needs:
        raise ConfigError(
            "statistics find the scales of activations nvfp4 or fp8_tensor that no training fixed, "
            "of kv_cache, and the codes of scales gptq, and none of them is set. Set one, or leave "
            "statistics out."
        )
    return bool(needs)


def _fixed_scales(
    like: FolderTensors,
    layers: ServedLayers,
    recipes: Mapping[str, Recipe],
    asked: Asked,
    *,
    family: str | None,
    trusts: bool,
) -> FixedScales:
    """Return the scales that a folder holds by the statistics of an evaluation."""
    fixes = [recipe for recipe in recipes.values() if recipe.fixes_inputs]
    inputs = [f"activations {recipe.form.name}" for recipe in fixes[:1]]
    if not _needs_statistics(inputs, asked):
        return NONE
    if any(recipe.trained_by is not None for recipe in recipes.values()):
        raise ConfigError(
            "scales is trained, and statistics are of a folder, which does not say how it was "
            "trained. Leave activations and kv_cache out; or export the checkpoint with --quantize "
            "none, and then the folder with --scales max."
        )
    if not (like.path / CONFIG).is_file():
        raise ConfigError(
            f"statistics are of a folder, and {like.path} is none. Export the checkpoint with "
            "--quantize none, and then the folder with --quantize and the same options."
        )
    model = FolderModel(like.path, trust_remote_code=trusts, family=family)
    folder = CalibratedFolder(model, Statistics.load(str(asked.statistics)))
    return folder.scales(
        layers.quantized,
        layers.stacks,
        inputs=bool(fixes),
        cache=asked.kv_cache is not None,
        moments=asked.fit == "gptq",
    )
