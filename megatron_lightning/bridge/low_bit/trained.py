"""Folders of models that were trained with rounded weights: the values of the trained forward."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch

from megatron_lightning.bridge.folder_model import Plan
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.low_bit.export import QuantizedFolder, ServedLayers, served_layers
from megatron_lightning.bridge.low_bit.fixed_scales import NONE, FixedScales
from megatron_lightning.bridge.low_bit.reading import dequantized
from megatron_lightning.bridge.low_bit.schemes import Recipe, Scheme
from megatron_lightning.bridge.low_bit.stacks import parts_of, separated, stacked
from megatron_lightning.bridge.tensors.lazy import Fill, Lazy
from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.served.qat import QAT, Record
from megatron_lightning.precision.served.selection import Served
from megatron_lightning.precision.served.values import ServedFormat

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


def _in_dtype(values: Lazy, dtype: torch.dtype) -> Lazy:
    return Lazy(values.shape, dtype, values.fill)


def _is_rounded(parameter: str, served: Served) -> bool:
    path, _, name = parameter.rpartition(".")
    return (name == "weight" and path in served.layers) or name in served.stacks.get(path, ())
