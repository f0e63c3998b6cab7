"""A folder of a model with fewer units: lazily, over the table of the model's family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.family_rules.family import (
    Family,
    UnwritableError,
    missing_fields,
    to_config,
)
from megatron_lightning.bridge.family_rules.settings import Values, differing, flat
from megatron_lightning.bridge.folder_model import Plan
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.folders.new_folder import NewFolder
from megatron_lightning.bridge.gpt import GPTFolder
from megatron_lightning.bridge.pruning.choice import Choice, Cut, kept_layers
from megatron_lightning.bridge.pruning.sizes import Sizes
from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.bridge.tensors.lazy import Lazy, spliced
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import CONFIG
from megatron_lightning.models.blueprint import LAYER, saved_tensors
from megatron_lightning.parallel.shards.spec import Box

_LAYER_TYPES = "layer_types"
_QUANTIZATION = "quantization_config"
_FREE_SIZES = (
    "Prune other sizes: ffn_hidden_size, num_moe_experts and num_layers are free in most families."
)


class PrunedFolder(NamedTuple):
    """A folder to write."""

    folder: FolderTensors
    """Table of the tensors."""
    tensors: dict[str, Lazy]
    files: dict[str, bytes]
    """All other files."""
    layers: tuple[int, ...]
    """Kept layers."""
    config: TransformerConfig


def pruned_folder(bridge: AutoBridge, sizes: Sizes, statistics: Statistics) -> PrunedFolder:
    """Return the folder of a model with fewer units.

    Raises:
        ConfigError: If the folder has no family, a size cannot be had, or the family's
            configuration cannot say it.
        CheckpointError: If the statistics are of another model.
    """
    family, source = bridge.family, bridge.gpt_folder()
    config = source.config
    sizes.check(config)
    layers = kept_layers(config, sizes, statistics)
    smaller = sizes.kept_config(config, layers)
    _check_family(family, smaller, sizes)
    found = source.tensors(config)
    source.check_copies(config)
    choice = Choice(config, sizes, layers, found, statistics)
    parameters = {}
    for name, shape in saved_tensors(smaller):
        old = _old_name(name, layers)
        tensor = found[old]
        for cut in choice.cuts(old):
            tensor = taken(tensor, cut)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{old} cannot be pruned: {list(tensor.shape)} are left, and the smaller model has "
                f"{list(shape)}. Leave out the size that it depends on."
            )
        parameters[name] = tensor
    dtypes = {name: x.dtype for name, x in parameters.items()}
    table = NewFolder(bridge.path, family, smaller, dtypes, tokenizer=None, texts=None)
    target = GPTFolder(family, table, table.config, bridge.model_class)
    made = target.tensors(smaller)
    plan = Plan(table, made, target.pieces(smaller, made))
    tensors = plan.tensors({name: x.fill for name, x in parameters.items()})
    files = {name: content for name, content in source.folder.files.contents.items() if content}
    files[CONFIG] = _config_file(bridge, config, smaller, layers)
    return PrunedFolder(table, tensors, files, layers, smaller)


def taken(tensor: Lazy, cut: Cut) -> Lazy:
    """Return the kept entries of a lazy tensor. A box is read over the range of its entries."""

    def fill(box: Box, out: Tensor) -> None:
        first = box.offset[cut.dim]
        entries = cut.entries[first : first + box.shape[cut.dim]]
        start, end = int(entries.min()), int(entries.max()) + 1
        values = tensor.read(spliced(box, cut.dim, 1, (start, end - start)))
        out.copy_(values.index_select(cut.dim, entries - start))

    shape = list(tensor.shape)
    shape[cut.dim] = len(cut.entries)
    return Lazy(shape, tensor.dtype, fill)


def _old_name(name: str, layers: tuple[int, ...]) -> str:
    if not name.startswith(LAYER):
        return name
    number, _, path = name.removeprefix(LAYER).partition(".")
    return f"{LAYER}{layers[int(number)]}.{path}"


def _check_family(family: type[Family], smaller: TransformerConfig, sizes: Sizes) -> None:
    """Check that the family's config.json can say what the pruned model is.

    Raises:
        ConfigError: If it cannot, naming the sizes.
    """
    try:
        fields = missing_fields(family, smaller)
    except UnwritableError as error:
        reason = " ".join(str(error.__cause__).split())
        raise ConfigError(
            f"{sizes.asked}: config.json of {family.architecture} has no keys for the pruned model "
            f"({reason}). {_FREE_SIZES}"
        ) from error
    if fields:
        values = flat(smaller)
        said = ", ".join(f"{name}={values.get(name)!r}" for name in fields)
        raise ConfigError(
            f"{sizes.asked}: the pruned model has {said}, for which config.json of "
            f"{family.architecture} has no keys. {_FREE_SIZES}"
        )


def _config_file(
    bridge: AutoBridge, config: TransformerConfig, smaller: TransformerConfig,
    layers: tuple[int, ...],
) -> bytes:  # fmt: skip
    """Return the source's configuration with the new sizes, by the rows of the family.

    Raises:
        ConfigError: If the file would describe another model than the pruned one.
    """
    family = bridge.family
    old, new = _written(family, config), _written(family, smaller)
    values: dict[str, Any] = json.loads((Path(bridge.path) / CONFIG).read_bytes())
    values.pop(_QUANTIZATION, None)
    types = values.get(_LAYER_TYPES)
    if isinstance(types, list) and len(types) == config.num_layers:
        values[_LAYER_TYPES] = [types[layer] for layer in layers]
    config_class = type(bridge.config)
    changed = {key: value for key, value in new.items() if old.get(key) != value}
    values |= {_spelled(key, values, config_class): value for key, value in changed.items()}
    theirs = config_class.from_dict(values)
    # What the class would derive from the new sizes, such as a head's size, is said.
    values |= {key: value for key, value in new.items() if getattr(theirs, key, None) != value}
    again = to_config(family, config_class.from_dict(values), bridge.path)
    fields = differing(flat(smaller), flat(again))
    if fields:
        raise ConfigError(
            f"config.json of the pruned {family.architecture} would have another "
            f"{', '.join(fields)}. Prune other sizes."
        )
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"


def _spelled(key: str, values: Mapping[str, Any], config_class: Any) -> str:
    """Return the name of a key in the source's file: classes know some by two names."""
    pairs = getattr(config_class, "attribute_map", {}).items()
    others = [b if key == a else a for a, b in pairs if key in (a, b)]
    return next((name for name in (key, *others) if name in values), key)


def _written(family: type[Family], config: TransformerConfig) -> Values:
    ours, keys = flat(config), Values()
    for row in family.settings:
        keys |= row.write(ours)
    return keys
