"""Hugging Face folders of a run's module, and of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from megatron_lightning.assembly.state.full_state import FullState
from megatron_lightning.bridge.export_model import model_with_folder, plan_of_model, runs_own_code
from megatron_lightning.bridge.folder_model import Plan
from megatron_lightning.bridge.folders.export import write_folder
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.folders.remembered_folders import kept_folders
from megatron_lightning.bridge.hf_models.state_names import state_tensors, tied_tensors
from megatron_lightning.bridge.low_bit.trained import TrainedWeights
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.bridge.tensors.values import fills_of_checkpoint, fills_of_ranks, values_of
from megatron_lightning.checkpoint import open_checkpoint
from megatron_lightning.checkpoint.agreement import on_first_rank
from megatron_lightning.checkpoint.format.storage import is_remote, local_path
from megatron_lightning.checkpoint.writing.commit import is_committed
from megatron_lightning.errors import CheckpointError
from megatron_lightning.file_names import EXPORT_FOLDER
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.spec import Box
from megatron_lightning.peft.merge import LayerDelta, deltas_in, merged_fills
from megatron_lightning.peft.methods.applied import applied_to
from megatron_lightning.peft.sources import read_tensors, record_of
from megatron_lightning.precision.qlora.frozen_base import check_values
from megatron_lightning.precision.served.qat import read_qat, trained_qat


class LiveFolder:
    """The Hugging Face folder of a model spread over the ranks. All ranks construct this together.

    Args:
        root: The LightningModule.
        model: The model in ``root``. None: the first model loaded from a folder.
        full_state: Collects the state of a sub-module.
        context: Groups of this rank.
        dtype: Dtype of floating tensors. None: the folder's.
        plan: Recipe from model to folder. None: the recipe of the model's source folder.

    Raises:
        ConfigError: If no model was loaded from a folder.
    """

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module | None,
        full_state: Callable[[nn.Module], FullState],
        context: ParallelContext,
        *,
        dtype: torch.dtype | None,
        plan: Plan | None = None,
    ) -> None:
        chosen = model_with_folder(root)[1] if model is None else model
        check_values(chosen, "writing weights of transformers")
        plan = plan_of_model(chosen) if plan is None else plan
        self._context = context
        self._like = plan.folder
        self._dtype = dtype
        self._trusts = runs_own_code(chosen)
        module_state = full_state(chosen)
        fills = merged_fills(
            fills_of_ranks(module_state, plan.parameters), _deltas(chosen, module_state)
        )
        self.tensors: dict[str, Lazy] = plan.tensors(fills, dtype)
        """Name in the folder -> tensor. All ranks read the values together."""

        record = trained_qat(root, chosen)
        if record is not None:
            trained = TrainedWeights.of(plan, fills, record)
            self.tensors = trained.values(plan.folder, self.tensors, context.device)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of the folder's tensors on every rank. All ranks take all."""
        return self.values_of(self.tensors)

    def stream(self, weight_format: str) -> dict[str, Lazy]:
        """Return name -> tensor: of the folder, with tied names as well, or of the ``state_dict()``
        of a model of the installed ``transformers``.
        """
        if weight_format == "state_dict":
            return state_tensors(
                self._like, self.tensors, self._dtype, trust_remote_code=self._trusts
            )
        return self.tensors | tied_tensors(self._like, self.tensors, trust_remote_code=self._trusts)

    def values_of(self, tensors: dict[str, Lazy]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values on every rank. All ranks take all."""
        return values_of(tensors, self._context.device)

    def write(self, path: Path, *, overwrite: bool) -> None:
        """Write the folder. All ranks call this."""
        write_folder(
            path,
            self._like,
            self.tensors,
            overwrite=overwrite,
            group=self._context.axis("world"),
            reads_together=self._context.device,
        )


def _deltas(model: nn.Module, full: FullState) -> dict[str, LayerDelta]:
    """Return the weight changes by adapters, read from all ranks together."""

    def read(name: str) -> Tensor:
        shape = full.shape(name) or ()
        values = torch.empty(shape)
        full.read(name, Box.full(shape), values)
        return values

    return deltas_in(model, read, lambda path: (full.shape(f"{path}.weight") or (0,))[0])


def _rows(plan: Plan) -> Callable[[str], int]:
    return lambda path: plan.parameters[f"{path}.weight"].shape[0]


class FoldersOfCheckpoints:
    """Writes a Hugging Face folder into checkpoints, from their files.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._plan: tuple[str, Plan] | None = None
        self._saved: list[str] = []

    def prepare(self) -> None:
        """Find out how parameters become a folder before a thread has to. Loading code of
        ``transformers`` changes settings of the process.

        Raises:
            ConfigError: If no model was loaded from a folder.
        """
        if self._plan is None:
            path, model = model_with_folder(self._module)
            self._plan = path, plan_of_model(model)

    def note(self, path: str) -> None:
        """Record a committed checkpoint."""
        self._saved = [
            *(earlier_path for earlier_path in self._saved if earlier_path != path),
            path,
        ]

    def write(self, path: str, group: AxisGroup) -> None:
        """Write the folder into a committed checkpoint. All ranks call this.

        Raises:
            CheckpointError: On every rank, if any rank failed. The checkpoint is intact.
        """
        self.prepare()
        if is_remote(path):
            raise CheckpointError(
                f"{path} is in an object store, and also_save_hf writes to file systems only. Save "
                "to a path, or write a folder later: megatron-lightning convert export."
            )
        place, plan = self._plan or ("", None)
        if plan is None:
            return
        source = open_checkpoint(path)
        fills = fills_of_checkpoint(source, plan.parameters, place)
        model = self._module.get_submodule(place)
        if applied_to(model):
            trained = read_tensors(source, record_of(source, path, place))
            fills = merged_fills(fills, deltas_in(model, trained.__getitem__, _rows(plan)))
        tensors = plan.tensors(fills)
        target = local_path(path) / EXPORT_FOLDER
        # The data of the fit may have changed the folder's texts since the plan was made.
        like: FolderTensors = kept_folders(self._module)[place]
        record = read_qat(source.state(), path).get(place)
        if record is not None:
            rounded = TrainedWeights.of(plan, fills, record)
            folder = rounded.folder(like, tensors, trust_remote_code=runs_own_code(model))
            like, tensors = folder, folder.tensors
        write_folder(target, like, tensors, overwrite=True, group=group)

    def write_last(self, group: AxisGroup) -> None:
        """Write the folder into the last existing checkpoint of the fit."""
        paths = on_first_rank(group, lambda: [p for p in self._saved if is_committed(p)])
        self._saved = []
        if paths:
            self.write(paths[-1], group)
        else:
            rank_zero_warn(
                'also_save_hf="end" found no checkpoint of this fit to write a folder into. Add a '
                "ModelCheckpoint, or call trainer.strategy.save_hf_pretrained(path) after fit."
            )
