"""Lightning's precision plugin for layers of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from megatron_lightning.assembly.part import Part
from megatron_lightning.config.checks import check_kind
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.optim.gradients.codes import Coder
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.precision.assignment import Assignment, apply_recipe, remove_recipe
from megatron_lightning.precision.backends import Backend, Chosen, choose_backend
from megatron_lightning.precision.history import AmaxHistory, advance
from megatron_lightning.precision.native import find_gpu
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.precision.transformer_engine.backend import TransformerEngine
from megatron_lightning.precision.transformer_engine.library import load as load_library
from megatron_lightning.precision.transformer_engine.recipes import check_available, check_recipe
from megatron_lightning.precision.weights import weight_coders
from megatron_lightning.strategies.precision import MegatronMixedPrecision


class MegatronFP8Precision(MegatronMixedPrecision):
    """bf16-mixed, with the products of linear layers and experts quantized by a recipe.

    Weights and optimizer are those of ``bf16-mixed``, so that checkpoints of one resume in the
    other.

    Args:
        recipe: Which layers are quantized, and how.
        backend: Who multiplies: ``native`` runs on the FP8 units of a GPU; ``emulation`` on any
            device, with the same scales and rounding, slower than bf16. ``auto`` is ``native``
            where it can run. ``transformer_engine``, by name only, computes whole layers by
            NVIDIA's library.

    Raises:
        ConfigError: If ``recipe`` is none, or the backend cannot run here.
    """

    def __init__(self, recipe: FP8Recipe | None = None, backend: Backend = "auto") -> None:
        self.recipe = FP8Recipe() if recipe is None else recipe
        check_kind("recipe", self.recipe, FP8Recipe)
        self.backend = _check_backend(backend, self.recipe)
        self._asked = backend
        super().__init__("bf16-mixed", "cuda" if torch.cuda.is_available() else "cpu")
        self._assigned: Assignment | None = None
        self._context: ParallelContext | None = None
        self._loaded: dict[str, Tensor] = {}  # histories, until the layers are quantized
        self._engines: TransformerEngine | None = None
        self._engine_state: dict[str, Any] = {}  # until the layers have engines

    def quantize_layers(
        self,
        module: pl.LightningModule,
        context: ParallelContext,
        undo: ExitStack,
        *,
        caches_weights: bool = True,
    ) -> None:
        """Quantize this rank's layers until ``undo`` is closed.

        ``caches_weights``: whether full weights exist between micro-batches, so that their codes
        may be kept.
        """
        self.device = context.device.type
        if self._asked == "transformer_engine":
            self._attach_engines(module, context, undo, caches_weights)
            return
        self._context = context
        # Of this rank's device, which may be a CPU beside GPUs.
        self.backend = choose_backend(self._asked, self.recipe, find_gpu(context.device))
        remove_recipe(module)
        self._assigned = apply_recipe(module, self.recipe, context, backend=self.backend)
        for gemm in self._assigned.quantized.values():
            gemm.keeps_weight = caches_weights
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

    def weight_coders(self, module: pl.LightningModule) -> Mapping[str, Coder]:
        """Return the coders of this rank's weights that are kept as codes, by parameter name."""
        if self._engines is not None:
            return self._engines.weight_coders(module)
        if self._assigned is None or not self.recipe.fp8_param_gather:
            return {}
        return weight_coders(module, self._assigned.quantized)

    # --------------------------------------------------------------------------- Transformer Engine

    def _attach_engines(
        self,
        module: pl.LightningModule,
        context: ParallelContext,
        undo: ExitStack,
        caches_weights: bool,
    ) -> None:
        library = load_library(has_gpu=find_gpu(context.device) is not None)
        check_available(self.recipe, library)
        self._engines = engines = TransformerEngine(self.recipe, library)
        engines.load_state_dict(self._engine_state)
        summary = engines.attach(module, context, caches_weights=caches_weights)
        undo.callback(self._detach_engines, module, engines)
        rank_zero_info(f"MegatronFP8Precision: {summary}")

    def _detach_engines(self, module: pl.LightningModule, engines: TransformerEngine) -> None:
        self._engine_state = engines.detach(module)
        self._engines = None

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Around the forward of one micro-batch.

        Raises:
            ConfigError: If no strategy has quantized the layers.
        """
        if self._assigned is None and self._engines is None:
            raise ConfigError(
                "MegatronFP8Precision computes in bf16 here: its layers are quantized by "
                "MegatronStrategy, and this Trainer has another strategy. Set "
                "strategy=MegatronStrategy() (on one device, too), or precision to bf16-mixed."
            )
        quantizing = nullcontext() if self._engines is None else self._engines.step()
        with quantizing, super().forward_context():
            yield

    def backward_context(self) -> AbstractContextManager[Any]:
        """Return the context of the backward of one micro-batch."""
        return nullcontext() if self._engines is None else self._engines.backward()

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Compute gradients."""
        with self.backward_context():
            super().backward(*args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step; codes of weights that were kept are those of the step before."""
        result = super().optimizer_step(*args, **kwargs)
        if self._engines is not None:
            self._engines.weights_changed()
        self.forget_weights()
        return result

    def forget_weights(self) -> None:
        """Drop the codes that a pipeline run keeps of weights: hooks before and after it may change
        them, and call the model.
        """
        for gemm in () if self._assigned is None else self._assigned.quantized.values():
            gemm.forget_weight()

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
        engines = nullcontext() if self._engines is None else self._engines.without_notes()
        try:
            with engines:
                yield
        finally:
            for gemm, notes in zip(gemms, before, strict=True):
                gemm.notes = notes

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """At the end of a pipeline run: append its micro-batches to the histories, and forget the
        codes of weights, whose scales then change, or which callbacks may change.
        """
        self.forget_weights()
        if self._context is not None:
            group = self._context.axis("tp-dp-cp")
            advance([history for _, history in self._histories()], group)
        return super().post_backward(tensor, module)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the histories of all pipeline ranks; all ranks call this."""
        if self._engines is not None:
            state = self._engines.state_dict()
            return {"transformer_engine": state} if state else {}
        own = {name: history.entries for name, history in self._histories()}
        context = self._context
        if context is None or not self.recipe.has_history:
            return {}
        return {"amax_histories": _joined(own, context)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the histories, now or when the layers are quantized."""
        self._loaded = dict(state_dict.get("amax_histories", {}))
        self._engine_state = dict(state_dict.get("transformer_engine", {}))
        if self._engines is not None:
            self._engines.load_state_dict(self._engine_state)
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


def _check_backend(backend: str, recipe: FP8Recipe) -> Chosen | Literal["transformer_engine"]:
    """Return the backend that computes, as far as this process can tell."""
    if backend == "transformer_engine":
        check_recipe(recipe)
        load_library(has_gpu=find_gpu() is not None)
        return "transformer_engine"
    return choose_backend(backend, recipe, find_gpu())


def kept_as_codes(module: pl.LightningModule, part: Part, precision: Precision) -> dict[str, Coder]:
    """Return the coders of the parameters that are kept as codes, by name; tied ones have copies
    that are not.
    """
    if not isinstance(precision, MegatronFP8Precision):
        return {}
    tied = {*part.tied, *part.tied.values()}
    return {name: c for name, c in precision.weight_coders(module).items() if name not in tied}
