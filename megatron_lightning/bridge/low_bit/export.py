"""Write the weights of a folder's linear layers in few bits.

Linear layers in the blocks of the language model are quantized, and every expert that the folder
has as matrices. Output layers, embeddings, routers, towers of other inputs and layers outside of
blocks keep their values, and are in ``ignore`` by path. One matrix is in memory at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.bridge.folder_model import FolderModel, Owner
from megatron_lightning.bridge.folders.configuration import add_rope_schema
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.folders.new_files import new_files
from megatron_lightning.bridge.folders.safetensors_file import StoredTensor
from megatron_lightning.bridge.low_bit.fixed_scales import NONE, FixedScales
from megatron_lightning.bridge.low_bit.schemes import (
    Recipe,
    cache_tensors,
    config_entry,
    input_tensors,
    modelopt_file,
    table_of_layer,
    tensors_of_layer,
)
from megatron_lightning.bridge.low_bit.stacks import (
    STACKED_EXPERTS,
    parts_of,
    separable,
    separated,
)
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import CONFIG, MODELOPT_CONFIG, WEIGHTS_INDEX
from megatron_lightning.parallel.shards.spec import Box
from megatron_lightning.precision.served.gptq import gptq_codes
from megatron_lightning.precision.served.selection import place_in_block, served_in
from megatron_lightning.precision.served.trained_codes import rows_of_block, trained_codes
from megatron_lightning.precision.served.values import (
    Encoded,
    ServedFormat,
    encode,
    fused_paths,
)

_WEIGHT = ".weight"
_OF_EXPERT = re.compile(r"\.experts\.(\d+)\.[^.]+$")


class ServedLayers(NamedTuple):
    """The layers of a folder, by their paths."""

    tensors: Mapping[str, Lazy]
    """The folder's tensors, with a matrix for every expert."""
    quantized: list[str]
    ignored: Sequence[str] = ()
    """Other layers with a matrix."""
    stacks: Sequence[str] = ()
    """Names of the tensors that stacked those experts."""
    stacked: Sequence[str] = ()
    """Names of tensors that stack the matrices of experts, which keep their values."""
    owners: Mapping[str, Owner] = MappingProxyType({})
    """Name of a tensor in the folder -> parameter of the training that holds it."""

    def parameters(self) -> dict[str, str]:
        """Return path of a quantized layer -> parameter of the training that holds its rows."""
        stacks = {
            part: name
            for name in self.stacks
            for parts in parts_of(name, 1 + max(map(_expert, self.quantized)))
            for part in parts
        }
        found = {}
        for path in self.quantized:
            name = f"{path}{_WEIGHT}"
            name = stacks.get(name, name)
            found[path] = self.owners[name].parameter if name in self.owners else name
        return found


def _expert(path: str) -> int:
    match = _OF_EXPERT.search(path)
    return -1 if match is None else int(match[1])


def _listed(names: Sequence[str]) -> str:
    return (", ".join(names[:4]) + (f" and {len(names) - 4} more" * (len(names) > 4))) or "none"


def served_layers(
    files: KeptFiles,
    tensors: Mapping[str, Lazy],
    chosen: Collection[str] | None = None,
    *,
    trust_remote_code: bool = False,
) -> ServedLayers:
    """Return the layers that are quantized.

    Args:
        files: The folder's configuration.
        tensors: The folder's tensors.
        chosen: Names of the quantized weights in the folder. None: those that are by default.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        ConfigError: If no layer can be quantized, or ``transformers`` does not know the model.
    """
    with files.unpacked() as unpacked:
        model = FolderModel(unpacked, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            module: nn.Module = model.model_class(model.config)
    found = dict(module.named_modules())
    served = served_in(module)
    linears = {path for path, child in found.items() if isinstance(child, nn.Linear)}
    in_text = [path for path in served.layers if path in linears]
    # From the list of blocks on, since prefixes of folders and models differ.
    tails = {place_in_block(path) for path in in_text}
    blocks = {place_in_block(path)[0] for path in found}
    stacks = separable(tensors, {"".join(place_in_block(path)) for path in served.stacks})
    if chosen is not None:
        stacks = [name for name in stacks if name in chosen]
        chosen = {*separated({name: tensors[name] for name in chosen}, stacks)}
    tensors = separated(tensors, stacks)
    embeddings = {path for path, child in found.items() if isinstance(child, nn.Embedding)}
    matrices = [
        path
        for name, x in tensors.items()
        if name.endswith(_WEIGHT) and x.ndim == 2 and x.dtype.is_floating_point
        if (path := name.removesuffix(_WEIGHT)) not in embeddings
    ]
    quantized = [
        path
        for path in matrices
        if (tail := place_in_block(path))[0]
        and (tail in tails or (_OF_EXPERT.search(path) and tail[0] in blocks))
    ]
    if chosen is not None:
        quantized = [path for path in matrices if f"{path}{_WEIGHT}" in chosen]
    if not quantized:
        raise ConfigError(
            f"{type(module).__name__} has no linear layer in its blocks to quantize. Leave "
            "quantize out."
        )
    done = {place_in_block(path) for path in quantized}
    ignored = {
        path for path in linears if place_in_block(path) not in done or not place_in_block(path)[0]
    }
    ignored |= {*matrices} - {*quantized}
    kept = [
        name
        for name, x in tensors.items()
        if x.ndim == 3 and x.dtype.is_floating_point and min(x.shape) > 1  # a convolution has 1
        if place_in_block(name)[0] in blocks - {""}
    ]
    return ServedLayers(tensors, quantized, sorted(ignored), stacks, kept)


class QuantizedFolder(FolderTensors):
    """A folder with the weights of its linear layers in few bits.

    Args:
        folder: The folder with the other files.
        recipes: Path of a quantized layer -> format, scheme and choice of scales. One scheme.
        layers: The layers, and the folder's tensors.
        fixed: Largest inputs, keys and values, of which the folder holds scales, and second moments
            of inputs.
        device: Device on which weights are read and rounded. None: the CPU.

    Raises:
        ConfigError: If a layer does not fit the format.
    """

    def __init__(
        self,
        folder: FolderTensors,
        recipes: Mapping[str, Recipe],
        layers: ServedLayers,
        fixed: FixedScales = NONE,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(folder.path)
        self._device, self._fixed = device, fixed
        self._tensors, self._recipes, self._layers = layers.tensors, recipes, layers
        self._paths = frozenset(layers.quantized)
        self._scheme = recipes[layers.quantized[0]].scheme
        self._check_sizes()
        self._amax: dict[tuple[str, ...], Tensor] = {}
        self._check_blocks()
        self._latest: tuple[str, dict[str, Tensor]] = ("", {})
        self._made: dict[str, Lazy] = {}
        for name, x in self._tensors.items():
            path = name.removesuffix(_WEIGHT)
            self._made |= self._of_layer(path, x) if path in self._paths else {name: x}
        for path, amax in fixed.cache.items():
            self._made |= _constants(cache_tensors(path, amax, self._scheme))
        files = new_files({name: (tuple(x.shape), x.dtype) for name, x in self._made.items()})
        for file, header in files.headers.items():
            self.add_file(file, header)
        self._files = self._with_settings(folder.files, files.index_file)

    def describe(self) -> str:
        """Return a sentence about what is written."""
        layers = self._layers
        names = sorted({recipe.form.name for recipe in self._recipes.values()})
        count = sum(self._tensors[f"{path}{_WEIGHT}"].numel() for path in layers.quantized)
        made = (x for name, x in self._made.items() if name.rpartition(".")[0] in self._paths)
        size = sum(x.nbytes for x in made)
        stacked = f" Experts stay stacked, as they are: {_listed(layers.stacked)}."
        return (
            f"{len(layers.quantized)} layers in {' and '.join(names)} ({self._scheme}), "
            f"{8 * size / count:.3f} bits a weight. Left as they are: {_listed(layers.ignored)}."
            f"{stacked if layers.stacked else ''}"
            f"{self._about_training()}{self._fixed.describe()}"
        )

    def _about_training(self) -> str:
        recipes = {recipe for recipe in self._recipes.values() if recipe.trained is not None}
        if not recipes:
            return ""
        if all(recipe.trained_by is not None for recipe in recipes):
            return " Codes are those of the training."
        scalings = sorted({recipe.trained.scaling for recipe in recipes if recipe.trained})
        return (
            f" Codes are those of a training by FP8Recipe(scaling={' or '.join(scalings)}) "
            "with its defaults. The checkpoint does not say how it was trained."
        )

    @property
    def settings(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        return config_entry(self._recipes, self._layers.ignored, has_cache=bool(self._fixed.cache))

    @property
    def files(self) -> KeptFiles:
        """All other files, with the quantization in config.json."""
        return self._files

    def _read(self, file: str, stored: StoredTensor, box: Box, out: Tensor) -> None:
        self._made[stored.name].fill(box, out)

    def _check_sizes(self) -> None:
        shapes = {path: self._tensors[f"{path}{_WEIGHT}"].shape for path in sorted(self._paths)}
        reasons = {path: self._recipes[path].form.misfit(x) for path, (_, x) in shapes.items()}
        misfits = {path: reason for path, reason in reasons.items() if reason is not None}
        for path, reason in misfits.items():
            others = f", as in {len(misfits) - 1} other layers" if len(misfits) > 1 else ""
            raise ConfigError(f"{path}{_WEIGHT} of shape {list(shapes[path])}{others}: {reason}.")

    def _check_blocks(self) -> None:
        """Check that the training's blocks are those of the matrices in the folder."""
        for path in sorted(self._paths):
            recipe, owner = self._recipes[path], self._layers.owners.get(f"{path}{_WEIGHT}")
            if recipe.trained is None:
                continue
            size = rows_of_block(recipe.trained)
            self._shared_amax(path)  # before anything is written
            if owner is not None and owner.row_divisor % size:
                raise ConfigError(
                    f"{path} was trained as rows of {owner.parameter}, whose scales are of {size} "
                    f"rows, and its rows lie there in parts of {owner.row_divisor}: scales are of "
                    "rows of several matrices. Set scales to max."
                )

    def _of_layer(self, path: str, weight: Lazy) -> dict[str, Lazy]:
        rows, columns = weight.shape
        recipe = self._recipes[path]
        made = {
            f"{path}.{name}": Lazy(shape, dtype, partial(self._fill_part, path, name))
            for name, (shape, dtype) in table_of_layer(rows, columns, recipe).items()
        }
        if path in self._fixed.inputs:
            tensors = input_tensors(self._fixed.inputs[path], recipe)
            made |= _constants({f"{path}.{name}": x for name, x in tensors.items()})
        return made

    def _fill_part(self, path: str, name: str, box: Box, out: Tensor) -> None:
        if self._latest[0] != path:  # tensors of a layer are written one after the other
            self._latest = (path, tensors_of_layer(self._encoded(path), self._recipes[path]))
        out.copy_(self._latest[1][name][box.slices])

    def _encoded(self, path: str) -> Encoded:
        weight = self._weight(path)
        if not bool(weight.isfinite().all()):
            raise CheckpointError(
                f"{path}{_WEIGHT} has values that are NaN or infinite, for which no scale exists. "
                "Export an earlier checkpoint."
            )
        recipe, amax = self._recipes[path], self._shared_amax(path)
        if recipe.trained is not None:
            return trained_codes(weight, recipe.trained, amax)
        if path in self._fixed.factors:
            return gptq_codes(weight, recipe.form, self._fixed.factors[path]())
        return encode(weight, recipe.form, amax, fit=recipe.fit)

    def _shared_amax(self, path: str) -> Tensor | None:
        """Return the amax of all matrices that servers fuse with a layer's, or of those that the
        training had in one matrix with it.
        """
        form = self._recipes[path].form
        if not form.is_of_matrix:
            return None
        fused = tuple(other for other in fused_paths(path) if other in self._paths)
        if self._recipes[path].trained is None:
            return self._amax_of(fused, form)
        together = self._trained_together
        self._check_trained(fused, [self._amax_of(together[other], form) for other in fused])
        return self._amax_of(together[path], form)

    def _amax_of(self, paths: tuple[str, ...], form: ServedFormat) -> Tensor:
        if paths not in self._amax:
            each = [form.shared_amax(self._weight(path)) for path in paths]
            self._amax[paths] = torch.stack([x for x in each if x is not None]).amax(0)
        return self._amax[paths]

    @cached_property
    def _trained_together(self) -> dict[str, tuple[str, ...]]:
        """Path of a layer -> all layers whose rows the training had in the same matrix."""
        places = {path: (x, _expert(path)) for path, x in self._layers.parameters().items()}
        paths: dict[tuple[str, int], tuple[str, ...]] = {}
        for path, place in places.items():
            paths[place] = (*paths.get(place, ()), path)
        return {path: paths[place] for path, place in places.items()}

    def _check_trained(self, fused: Sequence[str], amax: Sequence[Tensor]) -> None:
        """Check that the training had one scale for the matrices that servers fuse."""
        if len({float(x.bfloat16()) for x in amax}) > 1:  # the training quantized bf16
            found = ", ".join(f"{float(x):.4g}" for x in amax)
            raise ConfigError(
                f"{' and '.join(fused)} were trained with a scale each (largest weights {found}), "
                "and servers multiply them with one. Set scales to max, or train the folder as a "
                "GPTModel, where they are one matrix."
            )

    def _weight(self, path: str) -> Tensor:
        lazy = self._tensors[f"{path}{_WEIGHT}"]
        values = torch.empty(lazy.shape, dtype=lazy.dtype, device=self._device)
        lazy.fill(Box.full(lazy.shape), values)
        return values

    def _dtype_of_others(self) -> torch.dtype:
        """Return the dtype of the first matrix that is not quantized, such as an embedding."""
        others = (
            x.dtype
            for name, x in self._tensors.items()
            if x.ndim > 1 and x.is_floating_point()
            if name.removesuffix(_WEIGHT) not in self._paths
        )
        return next(others, torch.bfloat16)

    def _with_settings(self, files: KeptFiles, index: bytes | None) -> KeptFiles:
        ignore = self._layers.ignored
        contents = {name: c for name, c in files.contents.items() if name != WEIGHTS_INDEX}
        config = json.loads(contents[CONFIG])
        config["quantization_config"] = self.settings
        dtype = str(self._dtype_of_others()).removeprefix("torch.")
        config |= dict.fromkeys({"dtype", "torch_dtype"} & set(config) or {"dtype"}, dtype)
        if self._layers.stacks:
            config[STACKED_EXPERTS] = list(self._layers.stacks)
        add_rope_schema(config)
        contents[CONFIG] = _json(config)
        if self._scheme == "modelopt":
            recipe, has_cache = self._recipes[self._layers.quantized[0]], bool(self._fixed.cache)
            contents[MODELOPT_CONFIG] = _json(modelopt_file(recipe, ignore, has_cache=has_cache))
        return KeptFiles(contents if index is None else {**contents, WEIGHTS_INDEX: index})


def _constants(tensors: Mapping[str, Tensor]) -> dict[str, Lazy]:
    return {
        name: Lazy(x.shape, x.dtype, lambda box, out, x=x: out.copy_(x[box.slices]))  # type: ignore[misc]
        for name, x in tensors.items()
    }


def _json(content: object) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
