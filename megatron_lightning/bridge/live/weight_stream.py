"""Weights of a live model for another engine: names of ``transformers``, full tensors, one at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.bridge.folder_model import Plan
from megatron_lightning.bridge.folders.new_folder import new_gpt_folder
from megatron_lightning.bridge.folders.remembered_folders import kept_folders
from megatron_lightning.bridge.live.live_folder import LiveFolder
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.blueprint import saved_tensors
from megatron_lightning.models.transformer import GPTModel


class WeightMeta(NamedTuple):
    """A tensor of a stream."""

    name: str
    """Name in ``transformers``."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightStream:
    """Current weights at each iteration of the stream, in the form of vLLM's ``WeightSource``.

    Each iteration is a collective: all ranks iterate, and take all tensors. A rank holds at most
    its part and a full tensor.

    Args:
        make: Returns the current folder of the model. A collective.
        weight_format: Names of the tensors, as in :func:`check_format`.
    """

    def __init__(self, make: Callable[[], LiveFolder], weight_format: str) -> None:
        self._make = make
        self._format = weight_format
        self._metadata = [
            WeightMeta(name, lazy.dtype, tuple(lazy.shape))
            for name, lazy in make().stream(weight_format).items()
        ]

    def metadata(self) -> list[WeightMeta]:
        """Return name, dtype and shape of every tensor, in the order of the stream."""
        return list(self._metadata)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor on every rank's device."""
        folder = self._make()
        return folder.values_of(folder.stream(self._format))

    def write(self, path: Path) -> None:
        """Write the current weights as a folder of ``transformers``. A collective of all ranks."""
        self._make().write(path, overwrite=True)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._metadata)


def check_format(weight_format: str) -> None:
    """Check the name of a weight format.

    Raises:
        ConfigError: If the name is neither "transformers" nor "state_dict".
    """
    if weight_format not in ("transformers", "state_dict"):
        raise ConfigError(
            f'weights({weight_format!r}): streams have the names of folders of "transformers", '
            'which vLLM and SGLang read, or of the "state_dict" of its models. Set it to one of '
            "both, or call full_tensors() for the names of this package."
        )


def streamed_model(
    root: nn.Module, model: nn.Module | None
) -> tuple[nn.Module | None, Plan | None]:
    """Return the model to stream, and the recipe for a new folder. None: use the model's source
    folder.

    Raises:
        ConfigError: If no family of ``transformers`` describes a model without a source folder.
    """
    models = [child for child in root.modules() if isinstance(child, GPTModel)]
    if model is None and not kept_folders(root) and len(models) == 1:
        model = models[0]
    if not isinstance(model, GPTModel) or "" in kept_folders(model):
        return model, None
    config = model.config
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    stored = {f"model.{name}": TensorInfo(shape, dtype) for name, shape in saved_tensors(config)}
    folder = new_gpt_folder("the live model", config, stored)
    parameters = folder.tensors(config)
    return model, Plan(folder.folder, parameters, folder.pieces(config, parameters))
