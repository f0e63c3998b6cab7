"""Folders of models that were trained with rounded weights: the values of the trained forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from megatron_lightning.bridge.folder_model import Plan
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.low_bit.export import QuantizedFolder, ServedLayers, served_layers
from megatron_lightning.bridge.low_bit.reading import dequantized
from megatron_lightning.bridge.low_bit.schemes import Recipe, Scheme
from megatron_lightning.bridge.low_bit.stacks import parts_of, separated, stacked
from megatron_lightning.bridge.tensors.lazy import Fill, Lazy
from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.served.inputs import InputName
from megatron_lightning.precision.served.qat import QAT, Record
from megatron_lightning.precision.served.selection import Served
from megatron_lightning.precision.served.values import Fit, ServedFormat, ServedName


class TrainedWeights(NamedTuple):
    """The weights that the forward of a training rounded, by their names in the folder."""

    qat: QAT
    forms: Mapping[str, ServedFormat]
    tensors: Mapping[str, Lazy]
    """Not rounded, in the dtype in which the forward rounds."""

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
        exact = plan.tensors(fills, record.dtype)
        return cls(record.qat, forms, {name: x for name, x in exact.items() if name in forms})

    def folder(
        self,
        like: FolderTensors,
        tensors: Mapping[str, Lazy],
        scheme: Scheme = "compressed-tensors",
        *,
        trust_remote_code: bool = False,
    ) -> QuantizedFolder:
        """Return the folder with the values of the trained forward.

        Args:
            like: Folder with the other files.
            tensors: All tensors of the folder.
            scheme: Names and settings of the quantized tensors.
            trust_remote_code: Whether code in the folder may run.

        Raises:
            ConfigError: If the scheme lacks a format, or servers have no form of such experts.
        """
        tensors = {**tensors, **self.tensors}
        layers = served_layers(
            like.files, tensors, self.tensors.keys(), trust_remote_code=trust_remote_code
        )
        left = {name for name in layers.stacked if name in self.tensors}
        if left:
            name = min(left)
            raise ConfigError(
                f"{name} of shape {list(self.tensors[name].shape)} was trained with "
                f"{len(left)} such stacks rounded matrix by matrix, and servers load no such "
                "experts in few bits. Write it in bf16: --quantize none."
            )
        return self._quantized(like, layers, scheme)

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
        folder = self._quantized(like, ServedLayers(own, paths, stacks=stacks), device=device)
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
        device: torch.device | None = None,
    ) -> QuantizedFolder:
        forms = dict(self.forms)
        for name in layers.stacks:
            form, count = forms.pop(name), len(self.tensors[name])
            forms |= {part: form for parts in parts_of(name, count) for part in parts}
        recipes = {
            name.removesuffix(".weight"): Recipe.of(
                form.name,
                form.group_size,
                scheme,
                activations=form.name if form.name == self.qat.activations else None,
            )
            for name, form in forms.items()
        }
        return QuantizedFolder(like, recipes, layers, device)


class Asked(NamedTuple):
    """A user's options."""

    name: ServedName | Literal["none"] | None
    """Format of weights."""
    group_size: int | None = None
    scheme: Scheme = "compressed-tensors"
    fit: Fit = "max"
    activations: InputName | None = None
    """Format of inputs."""

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
) -> QuantizedFolder | None:
    """Return a folder in few bits: as asked, or as the checkpoint was trained. None: not quantized.

    Raises:
        ConfigError: If an option does nothing, or would change the values of the trained forward.
    """
    name, group_size, scheme, fit, activations = asked
    if trained is not None and name != "none" and fit == "max":
        own = {*trained.forms.values()}
        wanted = own if name is None else {ServedFormat.of(name, group_size)}
        is_own = wanted == own and (name is not None or group_size is None)
        if is_own and activations in (None, trained.qat.activations):
            return trained.folder(like, tensors, scheme, trust_remote_code=trusts)
    if name is None or name == "none":
        if not asked.is_plain:
            raise ConfigError(
                "group_size, scheme, scales and activations are settings of quantized weights, and "
                f"quantize is {name}. Set quantize, or leave them out."
            )
        return None
    recipe = Recipe.of(name, group_size, scheme, fit, activations)
    layers = served_layers(like.files, tensors, trust_remote_code=trusts)
    return QuantizedFolder(like, dict.fromkeys(layers.quantized, recipe), layers)


def _in_dtype(values: Lazy, dtype: torch.dtype) -> Lazy:
    return Lazy(values.shape, dtype, values.fill)


def _is_rounded(parameter: str, served: Served) -> bool:
    path, _, name = parameter.rpartition(".")
    return (name == "weight" and path in served.layers) or name in served.stacks.get(path, ())
