"""New weights for a serving engine, from folders that a fit writes.

A folder is a model of ``transformers``, or adapters of ``peft`` for the model that is served. Every
rank reads the boxes of its own part into its parameters. Adapters are added to the base's weights,
which are read again: sums would grow with every folder otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.bridge.hf_models.meta_models import PENDING
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import ADAPTER_CONFIG
from megatron_lightning.inference.commands.load import SavedModel, find_model
from megatron_lightning.inference.engine.text_model import TextModel
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.shards.digest import as_text, digest_of_shards
from megatron_lightning.parallel.shards.spec import Box
from megatron_lightning.peft.fitting import fitted
from megatron_lightning.peft.folder import read_folder
from megatron_lightning.peft.merge import LayerDelta, deltas_of
from megatron_lightning.peft.methods.applied import applied_to
from megatron_lightning.peft.saved import SavedAdapters

Shapes = dict[str, tuple[int, ...]]


class Version(NamedTuple):
    """Weights of a fit."""

    run: str
    """Name of the fit, of its own for each start."""
    step: int
    """Optimizer steps behind the weights."""

    @property
    def folder(self) -> str:
        """Name of the folder with the weights."""
        return f"{self.run}-{self.step:09d}"

    def reaches(self, other: Version) -> bool:
        """Return whether these weights are the other ones, or later ones of the same fit."""
        return self.run == other.run and self.step >= other.step


class NewWeights:
    """Reads new weights into an engine.

    Args:
        engine: The engine.
        checkpoint: The served model, the base of adapters.
        folder: Folder that fits write their folders to.

    Raises:
        ConfigError: If the served model has adapters.
    """

    def __init__(self, engine: TextModel, checkpoint: str, folder: str) -> None:
        if applied_to(engine.model):
            raise ConfigError(
                f"accept_weights is set, and {checkpoint} is served with adapters, which new "
                "weights would be added to. Serve the base alone: a fit with LoRA brings its "
                "adapters, and their base comes from the checkpoint."
            )
        self._engine = engine
        self._checkpoint = checkpoint
        self._folder = Path(folder)
        saved = find_model(checkpoint, engine.context)
        self._shapes = _shapes(saved.build())
        self.vocab_size = saved.vocab_size
        """Number of ids of the model."""
        self.version: Version | None = None
        """Weights of the engine. None: those that the server has started with."""
        self._hashes: dict[str, int] | None = None  # of the served model's weights on this rank

    @property
    def step(self) -> int | None:
        """Optimizer steps behind the weights. None: not known."""
        return None if self.version is None else self.version.step

    def prepare(self, version: Version) -> Callable[[], None]:
        """Return a function that reads weights. A collective, and so is the function.

        Raises:
            CheckpointError: If there is no such folder, or adapters belong to another base.
            ConfigError: If the folder holds another model.
        """
        folder = self._folder / version.folder
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is no folder on this machine. Set weights_folder of RolloutDataModule "
                "and --accept-weights to the same folder, on a file system that both reach."
            )
        has_adapters = (folder / ADAPTER_CONFIG).is_file()
        # The engine's thread is in inference mode, where lazy tensors see other operations.
        with torch.inference_mode(False):
            saved = find_model(self._checkpoint if has_adapters else folder, self._engine.context)
            full = saved.build()
            own = fitted(read_folder(folder), full, str(folder)) if has_adapters else None
            if own is not None:
                self._check_base(own)
        if _shapes(full) != self._shapes:
            raise ConfigError(
                f"{folder} holds another model than {self._checkpoint}, which is served: tensors "
                "have other names or shapes. Serve the model that the fit begins with."
            )

        def read() -> None:
            with torch.inference_mode(False), torch.no_grad():
                self._fill(saved, full)
                if own is not None:
                    self._add(own, full)
            self.version = version

        return read

    def _check_base(self, own: SavedAdapters) -> None:
        """Check that adapters belong to the served model. A collective."""
        if self._hashes is None:
            if self.version is not None:
                return  # the base is not in the engine any more
            model, part = self._engine.model, self._engine.part
            state = ModuleState(model, part, self._engine.context)
            self._hashes = {
                name: digest_of_shards([state.shards(name, name, parameter.detach())])
                for name, parameter in model.named_parameters()
                if name not in part.tied
            }
        total = sum(value for name, value in self._hashes.items() if name not in own.saved)
        total = sum(self._engine.context.axis("world").all_gather_object(total))
        kind = "gpt" if isinstance(self._engine.model, GPTModel) else "own"
        own.base.check(as_text(total, kind), f"{self._checkpoint}, which is served,")

    def _fill(self, saved: SavedModel, full: nn.Module) -> None:
        model, part = self._engine.model, self._engine.part
        if PENDING in vars(full):
            vars(model)[PENDING] = vars(full).pop(PENDING)
        saved.fill(model, part, self._engine.context)

    def _add(self, own: SavedAdapters, full: nn.Module) -> None:
        """Add adapters, with the names of the full model, to the weights of this rank's part."""
        model, part = self._engine.model, self._engine.part
        state, deltas = ModuleState(model, part, self._engine.context), deltas_of(own, full)
        for name, tensor in state.local_tensors().items():
            owner = part.tied.get(name, name)
            replaced, delta = own.saved.get(owner), deltas.get(owner)
            if replaced is None and delta is None:
                continue
            for shard in state.shards(name, name, tensor).shards:
                if replaced is not None:
                    shard.data.copy_(replaced[shard.box.slices])
                if delta is not None:
                    shard.data.copy_(_merged(delta, shard.box, shard.data, name))


def _merged(delta: LayerDelta, box: Box, data: Tensor, name: str) -> Tensor:
    def read(wanted: Box) -> Tensor:
        if wanted != box:
            raise ConfigError(
                f"the adapters have lengths of rows (DoRA), and a rank has a part of the rows of "
                f"{name}. Serve with tensor_model_parallel_size=1, or train without use_dora."
            )
        return data.to(torch.float32, copy=True)

    return delta.merged(box, read)


def _shapes(model: nn.Module) -> Shapes:
    return {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
