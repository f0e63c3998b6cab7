"""The layers that ``MegatronFP8Precision`` quantized, as its state in a checkpoint describes them:
path of a layer in the LightningModule -> the fields of its recipe that codes depend on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.precision.quantization import block_of
from megatron_lightning.precision.recipes import FP8Recipe

PLUGIN = "MegatronFP8Precision"
"""Lightning's name of the plugin's state in a checkpoint."""
LAYERS = "layers"
_FIELDS = ("scaling", "weight_2d_scaling", "power_of_two_scales")


class TrainedLayer(NamedTuple):
    """A quantized layer of a training."""

    recipe: FP8Recipe
    """The fields that codes of weights depend on. Others are defaults."""
    is_cut: bool
    """Whether the weight's scales were of parts of the matrix that ranks held."""

    def entry(self) -> dict[str, Any]:
        """Return plain values."""
        fields = {name: getattr(self.recipe, name) for name in _FIELDS}
        return {**fields, "is_cut": self.is_cut}


def trained_layer(layer: nn.Module, recipe: FP8Recipe) -> TrainedLayer:
    """Return the description of a layer that a recipe quantizes."""
    specs: Mapping[str, ShardSpec] = getattr(layer, "shard_specs", {})
    kept = FP8Recipe(**{name: getattr(recipe, name) for name in _FIELDS})
    return TrainedLayer(kept, "weight" in specs and _is_cut(specs["weight"], recipe))


def _is_cut(spec: ShardSpec, recipe: FP8Recipe) -> bool:
    """Return whether scales of a rank's part are not those of the full matrix."""
    if recipe.is_per_tensor:  # ranks share the amax
        return False
    block = block_of(recipe, "weight")
    for dim, size in ((-1, block.columns), (-2, block.rows)):
        # Gate and up rows of a rank are two boxes with the same columns.
        own = sum(shape for _, shape in {(box.offset[dim], box.shape[dim]) for box in spec.boxes})
        edges = (n for box in spec.boxes for n in (box.offset[dim], box.shape[dim]))
        if own != spec.global_shape[dim] and (size is None or any(n % size for n in edges)):
            return True
    return False


def read_recipes(
    state: Mapping[str, Any], place: str, where: str = "the checkpoint"
) -> dict[str, TrainedLayer] | None:
    """Return path of a layer in a model -> how it was quantized. None: the checkpoint is of another
    precision, of Transformer Engine, or of an earlier version.

    Args:
        state: The checkpoint's state.
        place: Path of the model in the LightningModule.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: If an entry is damaged.
    """
    entries = (state.get(PLUGIN) or {}).get(LAYERS)
    prefix = f"{place}." if place else ""
    if entries is None:
        return None
    try:
        return {
            path.removeprefix(prefix): TrainedLayer(
                FP8Recipe(**{name: entry[name] for name in _FIELDS}), entry["is_cut"]
            )
            for path, entry in entries.items()
            if path.startswith(prefix)
        }
    except (AttributeError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{where}: what it says of FP8 is damaged ({error!r}).") from error
