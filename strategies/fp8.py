"""Lightning's precision plugin for layers of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from megatron_lightning.assembly.part import Part
from megatron_lightning.config.value_checks import check_kind
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.parameter_storage import ParameterStorage, PlainStorage
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.precision.backends import Backend, Chosen, choose_backend
from megatron_lightning.precision.native import find_gpu
from megatron_lightning.precision.quantized_layers import QuantizedLayers, RecipeLayers
from megatron_lightning.precision.quantized_storage import QuantizedStorage
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.precision.transformer_engine.backend import TransformerEngine
from megatron_lightning.precision.transformer_engine.library import load as load_library
from megatron_lightning.precision.transformer_engine.recipes import check_available, check_recipe
from megatron_lightning.strategies.precision import MegatronMixedPrecision


class MegatronFP8Precision(MegatronMixedPrecision):
    """bf16-mixed, with the GEMMs of linear layers and experts quantized by a recipe.

    Weights and optimizer match ``bf16-mixed``, so checkpoints of either precision resume in the
    other.

    Args:
        recipe: Which layers are quantized, and how.
        backend: Implementation of the GEMMs. ``native`` runs on the FP8 units of a GPU.
            ``emulation`` runs on any device, with the same scales and rounding, slower than bf16.
            ``auto`` is ``native`` on a capable GPU. ``transformer_engine``, by name only, computes
            full layers by NVIDIA's library.

    Raises:
        ConfigError: If ``recipe`` is no recipe, or the backend cannot run here.
    """

    def __init__(self, recipe: FP8Recipe | None = None, backend: Backend = "auto") -> None:
        self.recipe = FP8Recipe() if recipe is None else recipe
        check_kind("recipe", self.recipe, FP8Recipe)
        self.backend = _check_backend(backend, self.recipe)
        self._asked = backend
        super().__init__("bf16-mixed", "cuda" if torch.cuda.is_available() else "cpu")
        self.layers: QuantizedLayers | None = None
        """The quantized layers of a run. None between runs."""
        self._state: dict[str, Any] = {}  # of this rank's layers, between runs
        self._join: Callable[[dict[str, Any]], dict[str, Any]] = dict  # joins all stages' states
        self._record: dict[str, Any] = {}  # of the layers, also behind a fit

    # --------------------------------------------------------------------------------------- layers

    def quantize_layers(
        self,
        module: pl.LightningModule,
        context: ParallelContext,
        undo: ExitStack,
        *,
        caches_weights: bool = True,
    ) -> None:
        """Quantize this rank's layers until ``undo`` is closed.

        ``caches_weights``: Whether full weights exist between micro-batches, so quantized data of
        the weights may be kept.
        """
        self.device = context.device.type
        layers = self._make_layers(context)
        layers.load_state_dict(self._state)
        summary = layers.attach(module, context, caches_weights=caches_weights)
        self.layers, self._join = layers, layers.join
        self._record = layers.record()
        undo.callback(self._release, module)
        rank_zero_info(f"MegatronFP8Precision ({self.backend}): {summary}")
        if context.device.type == "cuda" and self.backend == "emulation":
            rank_zero_warn(
                "MegatronFP8Precision emulates its GEMMs, which is slower than bf16: it shows "
                "what a recipe does to a training, not its speed."
            )

    def _make_layers(self, context: ParallelContext) -> QuantizedLayers:
        # Of this rank's device, which may be a CPU beside GPUs.
        gpu = find_gpu(context.device)
        if self._asked == "transformer_engine":
            library = load_library(has_gpu=gpu is not None)
            check_available(self.recipe, library)
            return TransformerEngine(self.recipe, library)
        self.backend = chosen = choose_backend(self._asked, self.recipe, gpu)
        return RecipeLayers(self.recipe, chosen)

    def _release(self, module: pl.LightningModule) -> None:
        if self.layers is not None:
            self._state = self.layers.detach(module)
        self.layers = None

    # ----------------------------------------------------------------------------------------- step

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Enter around the forward of a micro-batch.

        Raises:
            ConfigError: If no strategy has quantized the layers.
        """
        if self.layers is None:
            raise ConfigError(
                "MegatronFP8Precision computes in bf16 here: its layers are quantized by "
                "MegatronStrategy, and this Trainer has another strategy. Set "
                "strategy=MegatronStrategy() (on one device, too), or precision to bf16-mixed."
            )
        with self.layers.step(), super().forward_context():
            yield

    @override
    @contextmanager
    def val_step_context(self) -> Generator[None, None, None]:
        """Enter around an evaluation. Amax histories stay unchanged."""
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

    def without_notes(self) -> AbstractContextManager[None]:
        """Return the context of forwards without amax recording."""
        return nullcontext() if self.layers is None else self.layers.without_notes()

    def backward_context(self) -> AbstractContextManager[Any]:
        """Return the context of the backward of a micro-batch."""
        return nullcontext() if self.layers is None else self.layers.backward()

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Compute gradients."""
        with self.backward_context():
            super().backward(*args, **kwargs)

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """End a pipeline run. Quantized data of weights are dropped, since their scales change, and
        callbacks may change the weights.
        """
        self.forget_weights()
        if self.layers is not None:
            self.layers.end_run()
        return super().post_backward(tensor, module)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, and mark quantized data of the weights as outdated."""
        result = super().optimizer_step(*args, **kwargs)
        if self.layers is not None:
            self.layers.weights_changed()
        return result

    def forget_weights(self) -> None:
        """Drop the quantized weights of a pipeline run."""
        if self.layers is not None:
            self.layers.forget_weights()

    # ---------------------------------------------------------------------------------- checkpoints

    @property
    def _key(self) -> str:
        """Name of the layers' state in checkpoints."""
        return "transformer_engine" if self._asked == "transformer_engine" else "amax_histories"

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the layers of all pipeline ranks, also behind a run. All ranks call
        this.
        """
        state = self._join(self._state if self.layers is None else self.layers.state_dict())
        return ({self._key: state} if state else {}) | self._record

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, now or when the layers are quantized."""
        self._state = dict(state_dict.get(self._key, {}))
        if self.layers is not None:
            self.layers.load_state_dict(self._state)


def _check_backend(backend: str, recipe: FP8Recipe) -> Chosen | Literal["transformer_engine"]:
    """Return the backend in use, as far as this process can tell."""
    if backend == "transformer_engine":
        check_recipe(recipe)
        load_library(has_gpu=find_gpu() is not None)
        return "transformer_engine"
    return choose_backend(backend, recipe, find_gpu())


def quantizing(precision: Precision | None) -> MegatronFP8Precision | None:
    """Return the plugin if ``precision`` quantizes layers."""
    return precision if isinstance(precision, MegatronFP8Precision) else None


def check_rerun(precision: Precision) -> None:
    """Check that a step can run again with the same quantized values.

    Raises:
        ConfigError: If scales come from histories.
    """
    plugin = quantizing(precision)
    if plugin is not None and plugin.recipe.has_history:
        raise ConfigError(
            "strategy.rerun_step(): scaling='delayed' takes its scales from histories, which the "
            "first run of a step has advanced, so that a second run has other values. Use a recipe "
            "with another scaling, such as 'current'."
        )


@contextmanager
def forward_outside_steps(precision: Precision) -> Generator[None, None, None]:
    """Enter around a forward between steps, under autocast as in validation. FP8 histories stay
    unchanged. Quantized weights are dropped afterwards, since hooks may write weights before the
    next step.
    """
    with precision.val_step_context():
        try:
            yield
        finally:
            if (plugin := quantizing(precision)) is not None:
                plugin.forget_weights()


def parameter_storage(
    module: pl.LightningModule, part: Part, precision: Precision
) -> ParameterStorage:
    """Return the storage of the parameters. Tied parameters are stored as values, as their copies
    are.
    """
    plugin = quantizing(precision)
    if plugin is None or plugin.layers is None:
        return PlainStorage()
    tied = {*part.tied, *part.tied.values()}
    quantizers = plugin.layers.weight_quantizers(module)
    return QuantizedStorage(module, {n: q for n, q in quantizers.items() if n not in tied})
