"""Lightning's precision plugin for layers of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.precision.assignment import Assignment, apply_recipe, remove_recipe
from megatron_lightning.precision.backends import Backend, choose_backend
from megatron_lightning.precision.history import AmaxHistory, advance
from megatron_lightning.precision.native import find_gpu
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.strategies.precision import MegatronMixedPrecision


class MegatronFP8Precision(MegatronMixedPrecision):
    """bf16-mixed, with the products of linear layers and experts quantized by a recipe.

    Weights and optimizer are those of ``bf16-mixed``, so that checkpoints of one resume in the
    other.

    Args:
        recipe: Which layers are quantized, and how.
        backend: Who multiplies: ``native`` runs on the FP8 units of a GPU; ``emulation`` on any
            device, with the same scales and rounding, slower than bf16. ``auto`` is ``native``
            where it can run.

    Raises:
        ConfigError: If the backend cannot run here.
    """

    def __init__(self, recipe: FP8Recipe | None = None, backend: Backend = "auto") -> None:
        self.recipe = FP8Recipe() if recipe is None else recipe
        self.backend = choose_backend(backend, self.recipe, find_gpu())
        self._asked = backend
        super().__init__("bf16-mixed", "cuda" if torch.cuda.is_available() else "cpu")
        self._assigned: Assignment | None = None
        self._context: ParallelContext | None = None
        self._loaded: dict[str, Tensor] = {}  # histories, until the layers are quantized

    def quantize_layers(
        self, module: pl.LightningModule, context: ParallelContext, undo: ExitStack
    ) -> None:
        """Quantize this rank's layers until ``undo`` is closed."""
        self.device = context.device.type
        self._context = context
        # Of this rank's device, which may be a CPU beside GPUs.
        self.backend = choose_backend(self._asked, self.recipe, find_gpu(context.device))
        remove_recipe(module)
        self._assigned = apply_recipe(module, self.recipe, context, backend=self.backend)
        undo.callback(self._release, module)
        self._load_histories()
        rank_zero_info(f"MegatronFP8Precision ({self.backend}): {self._assigned.describe()}")
        if context.device.type == "cuda" and self.backend == "emulation":
            rank_zero_warn(
                "MegatronFP8Precision emulates its products, which is slower than bf16: it shows "
                "what a recipe does to a training, not its speed."
            )

    def _release(self, module: pl.LightningModule) -> None:
        self._loaded = {name: history.entries for name, history in self._histories()}
        remove_recipe(module)
        self._assigned = self._context = None

    # -------------------------------------------------------------------------------------- history

    def _histories(self) -> Iterator[tuple[str, AmaxHistory]]:
        """Yield the histories of this rank's layers, by their names in checkpoints."""
        assigned = {} if self._assigned is None else self._assigned.quantized
        for path, gemm in assigned.items():
            for role, history in gemm.histories.items():
                yield f"{path}.{role}", history

    @override
    @contextmanager
    def val_step_context(self) -> Generator[None, None, None]:
        """Around an evaluation, which leaves the histories as they are."""
        with self.without_notes(), super().val_step_context():
            yield

    @override
    @contextmanager
    def test_step_context(self) -> Generator[None, None, None]:
        """Do as :meth:`val_step_context`."""
        with self.without_notes(), super().test_step_context():
            yield

    @override
    @contextmanager
    def predict_step_context(self) -> Generator[None, None, None]:
        """Do as :meth:`val_step_context`."""
        with self.without_notes(), super().predict_step_context():
            yield

    @contextmanager
    def without_notes(self) -> Iterator[None]:
        """Inside the block nothing enters the histories."""
        gemms = [] if self._assigned is None else list(self._assigned.quantized.values())
        before = [gemm.notes for gemm in gemms]
        for gemm in gemms:
            gemm.notes = False
        try:
            yield
        finally:
            for gemm, notes in zip(gemms, before, strict=True):
                gemm.notes = notes

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """At the end of a pipeline run: append its micro-batches to the histories."""
        if self._context is not None:
            group = self._context.axis("tp-dp-cp")
            advance([history for _, history in self._histories()], group)
        return super().post_backward(tensor, module)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the histories of all pipeline ranks; all ranks call this."""
        own = {name: history.entries for name, history in self._histories()}
        context = self._context
        if context is None or not self.recipe.has_history:
            return {}
        return {"amax_histories": _joined(own, context)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the histories, now or when the layers are quantized."""
        self._loaded = dict(state_dict.get("amax_histories", {}))
        self._load_histories()

    def _load_histories(self) -> None:
        own = dict(self._histories())
        if not own or not self._loaded:
            return
        if missing := sorted(own.keys() - self._loaded):
            raise CheckpointError(
                f"the checkpoint has amax histories of {len(self._loaded)} tensors and none of "
                f"{', '.join(missing[:3])}: it was saved with another recipe. Set the recipe that "
                "it was saved with, or scaling to current."
            )
        for name, history in own.items():
            history.load(self._loaded[name].to(history.entries.device))
        self._loaded = {}


def _joined(own: dict[str, Tensor], context: ParallelContext) -> dict[str, Tensor]:
    """Return the histories of the layers of all pipeline ranks."""
    own = {name: entries.cpu() for name, entries in own.items()}
    if context.pp.size == 1:
        return own
    parts: list[Any] = [None] * context.pp.size
    dist.all_gather_object(parts, own, group=context.pp.process_group)
    return {name: entries for part in parts for name, entries in part.items()}
