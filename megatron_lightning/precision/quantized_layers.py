"""Quantized layers of a module: the protocol, and the implementation by our GEMMs.

:class:`~megatron_lightning.precision.transformer_engine.backend.TransformerEngine` implements the
protocol by NVIDIA's library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.precision.assignment import Assignment, apply_recipe, remove_recipe
from megatron_lightning.precision.backends import Chosen
from megatron_lightning.precision.delayed_scaling import AmaxHistory, advance
from megatron_lightning.precision.quantized_data import Quantizer
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.precision.served.trained_layers import LAYERS, trained_layer
from megatron_lightning.precision.weights import weight_quantizers


class QuantizedLayers(Protocol):
    """The quantized layers of a module, from :meth:`attach` to :meth:`detach`."""

    def attach(self, module: nn.Module, context: ParallelContext, *, caches_weights: bool) -> str:
        """Quantize this rank's layers. Return a sentence for the log.

        Args:
            module: This rank's part of the module.
            context: Groups of this rank.
            caches_weights: Whether full weights exist between the micro-batches of a step, so that
                quantized data may be cached.

        Raises:
            ConfigError: If a pattern of the recipe matches nothing, or a layer cannot be quantized.
        """
        ...

    def detach(self, module: nn.Module) -> dict[str, Any]:
        """Give the layers their own computation back, and return this rank's state, for
        :meth:`load_state_dict`.
        """
        ...

    def step(self) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's forward."""
        ...

    def backward(self) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's backward."""
        ...

    def end_run(self) -> None:
        """End the backwards of a pipeline run: append to the amax histories.

        A collective of the ranks with the same layers.
        """
        ...

    def without_notes(self) -> AbstractContextManager[None]:
        """Return the context of forwards whose amax values enter no history."""
        ...

    def weights_changed(self) -> None:
        """React to an optimizer step: quantized data of weights are out of date."""
        ...

    def forget_weights(self) -> None:
        """Drop quantized weights cached by a pipeline run.

        Hooks before and after the run may change the weights and call the model.
        """
        ...

    def weight_quantizers(self, module: nn.Module) -> Mapping[str, Quantizer]:
        """Return quantizers of this rank's weights stored as quantized data, by parameter name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's layers."""
        ...

    def join(self, own_state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the layers of all pipeline ranks, also after :meth:`detach`. All
        ranks call the method.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, now or when the layers are attached."""
        ...

    def record(self) -> dict[str, Any]:
        """Return what exports of a checkpoint know of the layers. All ranks call the method."""
        ...


class RecipeLayers:
    """Layers with GEMMs over quantized operands, by the FP8 units of a GPU or emulated.

    Args:
        recipe: The recipe.
        backend: The multiplying backend.
    """

    def __init__(self, recipe: FP8Recipe, backend: Chosen) -> None:
        self._recipe = recipe
        self._backend: Chosen = backend
        self._assigned = Assignment({}, [], [])
        self._context: ParallelContext | None = None
        self._loaded: dict[str, Tensor] = {}  # histories, until the layers are attached
        self._record: dict[str, Any] = {}

    def attach(self, module: nn.Module, context: ParallelContext, *, caches_weights: bool) -> str:
        """See :class:`QuantizedLayers`, as for all methods."""
        self._context = context
        remove_recipe(module)
        self._assigned = apply_recipe(module, self._recipe, context, backend=self._backend)
        for gemm in self._assigned.quantized.values():
            gemm.keeps_weight = caches_weights
        self._record = {
            path: trained_layer(module.get_submodule(path), gemm.recipe).entry()
            for path, gemm in self._assigned.quantized.items()
        }
        self._load_histories()
        return self._assigned.describe()

    def detach(self, module: nn.Module) -> dict[str, Any]:
        """Return the histories of this rank's layers."""
        state: dict[str, Any] = self.state_dict()
        remove_recipe(module)
        self._assigned = Assignment({}, [], [])
        return state

    def step(self) -> AbstractContextManager[Any]:
        """Return no context: every GEMM quantizes by itself."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[Any]:
        """Return no context."""
        return nullcontext()

    def end_run(self) -> None:
        """Append the micro-batches of the run to the histories, and update the scales."""
        if self._context is not None:
            group = self._context.axis("tp-dp-cp")
            advance([history for _, history in self._histories()], group)

    @contextmanager
    def without_notes(self) -> Iterator[None]:
        """Keep amax values of the block out of the histories."""
        gemms = list(self._assigned.quantized.values())
        notes_before = [gemm.notes for gemm in gemms]
        for gemm in gemms:
            gemm.notes = False
        try:
            yield
        finally:
            for gemm, notes in zip(gemms, notes_before, strict=True):
                gemm.notes = notes

    def weights_changed(self) -> None:
        """Drop quantized weights."""
        self.forget_weights()

    def forget_weights(self) -> None:
        """Drop quantized weights."""
        for gemm in self._assigned.quantized.values():
            gemm.forget_weight()

    def weight_quantizers(self, module: nn.Module) -> Mapping[str, Quantizer]:
        """Return quantizers with ``fp8_param_gather``."""
        if not self._recipe.fp8_param_gather:
            return {}
        return weight_quantizers(module, self._assigned.quantized)

    def state_dict(self) -> dict[str, Any]:
        """Return the amax histories by layer and operand."""
        return {name: history.entries for name, history in self._histories()}

    def join(self, own_state: dict[str, Any]) -> dict[str, Any]:
        """Return the histories of all pipeline ranks' layers."""
        if self._context is None or not self._recipe.has_history:
            return own_state
        return _of_stages({name: x.cpu() for name, x in own_state.items()}, self._context)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the histories.

        Raises:
            CheckpointError: If a layer's history is missing.
        """
        self._loaded = dict(state)
        self._load_histories()

    def record(self) -> dict[str, Any]:
        """See ``served/trained_layers.py``."""
        if self._context is None:
            return {}
        return {LAYERS: _of_stages(self._record, self._context)}

    def _histories(self) -> Iterator[tuple[str, AmaxHistory]]:
        """Yield the histories of this rank's layers, by their names in checkpoints."""
        for path, gemm in self._assigned.quantized.items():
            for role, history in gemm.histories.items():
                yield f"{path}.{role}", history

    def _load_histories(self) -> None:
        histories = dict(self._histories())
        if not histories or not self._loaded:
            return
        if missing_names := sorted(histories.keys() - self._loaded):
            raise CheckpointError(
                f"the checkpoint has amax histories of {len(self._loaded)} tensors and none of "
                f"{', '.join(missing_names[:3])}: it was saved with another recipe. Set the recipe "
                "that it was saved with, or scaling to current."
            )
        for name, history in histories.items():
            history.load(self._loaded[name].to(history.entries.device))
        self._loaded = {}


def _of_stages(own: dict[str, Any], context: ParallelContext) -> dict[str, Any]:
    """Return the entries of all pipeline ranks. A collective of them."""
    if context.pp.size == 1:
        return own
    stages: list[Any] = [None] * context.pp.size
    dist.all_gather_object(stages, own, group=context.pp.process_group)
    return {name: entries for stage in stages for name, entries in stage.items()}
