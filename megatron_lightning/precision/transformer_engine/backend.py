"""Transformer Engine for the layers of a module: attaches engines, and holds their shared state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adaptable import adapt, restore
from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.other_stages import present_modules
from megatron_lightning.parallel.shards.parameters import num_names
from megatron_lightning.precision.assignment import recipes_of_layers
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.precision.transformer_engine.build import Builder, check_layer
from megatron_lightning.precision.transformer_engine.engines import ModuleEngine, PassedNorm
from megatron_lightning.precision.transformer_engine.fusion import (
    find_fusions,
    has_engine,
    is_untouched,
)
from megatron_lightning.precision.transformer_engine.library import Library
from megatron_lightning.precision.transformer_engine.random import StreamTracker
from megatron_lightning.precision.transformer_engine.recipes import check_recipe, te_recipe
from megatron_lightning.precision.transformer_engine.state import (
    join_states,
    latest_amax,
    load_state,
    read_state,
)
from megatron_lightning.precision.transformer_engine.weights import QuantizedWeight


class TransformerEngine:
    """Computes the quantized layers by Transformer Engine.

    Args:
        recipe: The recipe.
        library: Transformer Engine.

    Raises:
        ConfigError: If Transformer Engine lacks the recipe.
    """

    def __init__(self, recipe: FP8Recipe, library: Library) -> None:
        check_recipe(recipe)
        self.recipe = recipe
        self.library = library
        self.engines: dict[str, ModuleEngine] = {}
        """Engines with quantized GEMMs, by layer path."""
        self._scalings: dict[str, FP8Recipe] = {}
        self._made: list[tuple[FP8Recipe, Any]] = []
        self._context: ParallelContext | None = None
        self._tracker: StreamTracker | None = None
        self._in_step = False
        self._weights_version = 0
        self._caches = True
        self._loaded: dict[str, Any] = {}

    # --------------------------------------------------------------------------------------- layers

    def attach(self, module: nn.Module, context: ParallelContext, *, caches_weights: bool) -> str:
        """Attach engines to this rank's layers. Return a sentence for the log.

        Args:
            module: This rank's part of the module.
            context: Groups of this rank.
            caches_weights: Whether quantized weights are cached between the micro-batches of a
                step. False if full weights exist only while a layer runs.

        Raises:
            ConfigError: If a pattern of the recipe matches nothing, or a layer has no counterpart.
        """
        self._context = context
        self._tracker = StreamTracker(context.rng)
        self._caches = caches_weights
        self._made = []
        _remove_engines(module)
        recipes = recipes_of_layers(module, self.recipe)
        modules = dict(present_modules(module))
        keeps_quantized = caches_weights and self.recipe.fp8_param_gather
        weights_recipe = self._te_recipe(self.recipe) if keeps_quantized else None
        build = Builder(self.library, context, self, weights_recipe)
        own_recipes = {p: r for p, r in recipes.items() if r is not None and p in modules}
        for path, recipe in own_recipes.items():
            check_layer(path, modules[path], recipe.scaling)
        # The largest engines first (norm with MLP), then single layers that are left, then norms
        # and attention.
        fused = self._attach_fused(modules, own_recipes, build)
        self._attach_linears(modules, own_recipes, build)
        norms = self._attach_others(modules, build)
        self._restore()
        return (
            f"{len(own_recipes)} layers of this rank are {len(self.engines)} modules of "
            f"Transformer Engine {self.library.version}, {fused} of them with the norm before; "
            f"{norms} other norms and attention are, too."
        )

    def _attach_linears(
        self, present: dict[str, nn.Module], recipes: dict[str, FP8Recipe], build: Builder
    ) -> None:
        """Attach the linear layers and experts outside of fused modules."""
        for path, recipe in recipes.items():
            if path in self.engines or path.rpartition(".")[0] in self.engines:
                continue
            layer = present[path]
            if type(layer) is nn.Linear and "forward" in vars(layer):
                raise ConfigError(
                    f"recompute_modules or offload_modules name {path}, a linear layer that "
                    "Transformer Engine computes. Name the module around it."
                )
            own_recipe = self._row(recipe)
            engine = (
                build.grouped(layer, own_recipe)
                if isinstance(layer, GroupedLinear)
                else build.linear(layer, own_recipe)
            )
            self._put(path, layer, engine, recipe)

    def _attach_fused(
        self, present: dict[str, nn.Module], recipes: dict[str, FP8Recipe], build: Builder
    ) -> int:
        fusions = find_fusions(present, recipes)
        for fusion in fusions:
            norm: Any = present[fusion.norm]
            target: Any = present[fusion.target]
            if fusion.activation is None:
                recipe = recipes[fusion.target]
                engine = build.norm_linear(norm, target, self._row(recipe))
            else:
                recipe = recipes[f"{fusion.target}.linear_fc1"]
                engine = build.norm_mlp(norm, target, fusion.activation, self._row(recipe))
            self._put(fusion.target, target, engine, recipe)
            adapt(norm, engine=PassedNorm())
        return len(fusions)

    def _attach_others(self, present: dict[str, nn.Module], build: Builder) -> int:
        """Attach norms and attention without quantization. Return the number of norms."""
        norms = 0
        for layer in present.values():
            if isinstance(layer, CoreAttention):
                adapt(layer, engine=build.attention(layer))
            elif has_engine(layer) and is_untouched(layer):
                adapt(layer, engine=build.norm(layer))  # type: ignore[arg-type]
                norms += 1
        return norms

    def _put(self, path: str, layer: nn.Module, engine: ModuleEngine, recipe: FP8Recipe) -> None:
        adapt(layer, engine=engine)
        self.engines[path] = engine
        self._scalings[path] = recipe

    def detach(self, module: nn.Module) -> dict[str, Any]:
        """Remove the engines from the layers, and return this rank's state."""
        state = self.state_dict()
        _remove_engines(module)
        self.engines = {}
        self._scalings = {}
        return state

    def weight_quantizers(self, module: nn.Module) -> dict[str, QuantizedWeight]:
        """Return quantizers of the untied weights, by parameter name."""
        uses = num_names(module)
        paths = {id(layer): path for path, layer in module.named_modules()}
        return {
            f"{paths[id(weight.layer)]}.weight": weight
            for engine in self.engines.values()
            for weight in engine.weights
            if uses[id(weight.layer.weight)] == 1
        }

    # ----------------------------------------------------------------------------------------- step

    def step(self) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's forward.

        The exit of the context reduces the amax values of delayed scaling over the ranks with the
        same layers.
        """
        return nullcontext() if self._context is None else self._quantizing(self._context)

    @contextmanager
    def _quantizing(self, context: ParallelContext) -> Iterator[None]:
        group = _sharing(context)
        with self.library.pytorch.autocast(
            enabled=True, recipe=self._te_recipe(self.recipe), amax_reduction_group=group
        ):
            self._in_step = True
            try:
                yield
            finally:
                self._in_step = False

    def backward(self) -> AbstractContextManager[Any]:
        """Return the context of a backward: an outer context, so that a recomputed forward inside
        reduces nothing.
        """
        if self._context is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self.library.pytorch.autocast(enabled=False)
        return context

    @contextmanager
    def without_notes(self) -> Iterator[None]:
        """Keep amax values of the block out of the histories. The values are removed at the end."""
        rows_before = {path: row.clone() for path, row in latest_amax(self.engines)}
        try:
            yield
        finally:
            for path, row in latest_amax(self.engines):
                row.copy_(rows_before[path]) if path in rows_before else row.zero_()

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """Transformer Engine's ``checkpoint``.

        A recomputed forward uses the scales of the first forward, and draws from our streams.
        """
        get_tracker = None if self._tracker is None else partial(_return, self._tracker)
        return partial(self.library.pytorch.checkpoint, get_rng_state_tracker=get_tracker)

    def scope(self, recipe: Any) -> AbstractContextManager[Any]:
        """See :class:`~.engines.Surroundings`."""
        if recipe is None or not self._in_step or self._context is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self.library.pytorch.autocast(
            enabled=True, recipe=recipe, amax_reduction_group=_sharing(self._context)
        )
        return context

    def weights_changed(self) -> None:
        """Quantize the weights again in the next forward of every layer's first micro-batch."""
        self._weights_version += 1

    def forget_weights(self) -> None:
        """Keep quantized weights: evaluations may swap weights, but do not use quantized
        weights.
        """

    def end_run(self) -> None:
        """Leave the histories to Transformer Engine. :meth:`step` updates the histories."""

    def is_first_microbatch(self, engine: ModuleEngine) -> bool | None:
        """See :class:`~.engines.Surroundings`.

        Evaluation caches nothing, because evaluation may swap weights.
        """
        if not self._caches or not torch.is_grad_enabled():
            return None
        is_first = engine.cached_version != self._weights_version
        engine.cached_version = self._weights_version
        return is_first

    # ---------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's layers."""
        return read_state(self.engines, self.library.version)

    def join(self, own_state: dict[str, Any]) -> dict[str, Any]:
        """Return the states of all pipeline ranks' layers."""
        context = self._context
        if context is None or context.pp.size == 1 or not self.recipe.has_history:
            return own_state
        states: list[Any] = [None] * context.pp.size
        dist.all_gather_object(states, own_state, group=context.pp.process_group)
        return join_states(states)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, now or when engines are attached."""
        self._loaded = dict(state)
        self.weights_changed()
        if self.engines:
            self._restore()

    def record(self) -> dict[str, Any]:
        """Return nothing: the library's own rounding is another one in the last bit."""
        return {}

    def _restore(self) -> None:
        delayed = {
            path: self._te_recipe(recipe)
            for path, recipe in self._scalings.items()
            if recipe.scaling == "delayed"
        }
        load_state(self.engines, self._loaded, delayed)
        self._loaded = {}

    # -------------------------------------------------------------------------------------- recipes

    def _row(self, recipe: FP8Recipe) -> Any:
        """Return the recipe of a layer. None: the recipe of the step."""
        return None if recipe == self.recipe else self._te_recipe(recipe)

    def _te_recipe(self, recipe: FP8Recipe) -> Any:
        """Return Transformer Engine's recipe: one object for equal recipes of ours."""
        for our_recipe, te_own in self._made:
            if our_recipe == recipe:
                return te_own
        reduces = self._context is not None and _sharing(self._context) is not None
        te_own = te_recipe(recipe, self.library, reduces=reduces)
        self._made.append((recipe, te_own))
        return te_own


def _remove_engines(module: nn.Module) -> None:
    for layer in module.modules():
        restore(layer, "engine")


def _sharing(context: ParallelContext) -> Any:
    """Return the process group of the ranks with the same layers. None: only this rank."""
    group = context.axis("tp-dp-cp")
    return group.process_group if group.size > 1 else None


def _return(tracker: StreamTracker) -> StreamTracker:
    return tracker
