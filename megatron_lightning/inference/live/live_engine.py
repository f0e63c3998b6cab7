"""An engine for the model in a module that trains, with its current weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from megatron_lightning.assembly.part import Part
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.inference.engine.expert_routes import refuse_routes
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.inference.engine.requests import Decode, RequestMaker
from megatron_lightning.inference.engine.speculative import check_drafts
from megatron_lightning.inference.engine.text_engine import Engine
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.pipeline.executor import PipelineExecutor


def live_engine(
    module: nn.Module,
    part: Part,
    context: ParallelContext,
    executor: PipelineExecutor,
    *,
    model: nn.Module | None,
    options: EngineOptions | None,
    stops: Sequence[int],
    decode: Decode | None,
    forward_context: Callable[[], AbstractContextManager[Any]],
    prepare: Callable[[], object],
) -> Engine | OwnGenerate:
    """Return an engine for a model in the LightningModule. The engine frees its KV cache after each
    call.

    Args:
        module: This rank's part of the LightningModule.
        part: Description of the part.
        context: Groups of this rank.
        executor: Runs the stages.
        model: The model in the module. None: the only one.
        options: Sizes.
        stops: Token ids that end a text.
        decode: Returns the text of token ids.
        forward_context: Returns the context of a forward, such as autocast.
        prepare: Called before the first forward of a call.

    Raises:
        ConfigError: If the module holds no such model or several, or the model cannot write text on
            this layout.
    """
    model = find_text_model(module) if model is None else model
    if isinstance(model, GPTModel):
        partitioned = None if part.partition is None else part.partition.module
        if partitioned is not None and partitioned is not model:
            raise ConfigError(
                f"the {type(model).__name__} is not the module that is partitioned into pipeline "
                "stages. Name the model that is, or set pipeline_model_parallel_size to 1."
            )
        return Engine(
            model,
            part,
            context,
            executor,
            longest=model.config.max_sequence_length,
            options=options,
            stops=stops,
            decode=decode,
            keeps_cache=False,
            forward_context=forward_context,
            prepare=prepare,
        )
    # Models of others write by their own generate, without our cache, routes and drafts.
    refuse_routes(options)
    check_drafts(None, options or EngineOptions())
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    requests = RequestMaker(longest=longest or 1 << 30, stops=frozenset(stops), decode=decode)
    return OwnGenerate(
        model,
        context,
        requests,
        uses_inference_mode=part.units is None,
        forward_context=forward_context,
        prepare=prepare,
    )


def find_text_model(module: nn.Module) -> nn.Module:
    """Return the model in ``module`` for writing text.

    Raises:
        ConfigError: If the module holds no such model, or several.
    """
    models: list[nn.Module] = [child for child in module.modules() if isinstance(child, GPTModel)]
    models = models or _transformers_models(module)
    if len(models) == 1:
        return models[0]
    names = {id(child): name for name, child in module.named_modules()}
    listed = ", ".join(names[id(child)] or "the module itself" for child in models)
    raise ConfigError(
        f"{type(module).__name__} has {len(models)} models that write text"
        f"{f' ({listed})' if models else ': neither a GPTModel nor a model of transformers'}. "
        "Name one: strategy.engine(model=module.model)."
    )


def _transformers_models(module: nn.Module) -> list[nn.Module]:
    """Return the outermost models of ``transformers`` with a ``generate`` of their own."""
    models: list[nn.Module] = []
    inner_ids: set[int] = set()
    for child in module.modules():
        if id(child) in inner_ids:
            continue
        can_generate: Any = getattr(child, "can_generate", None)
        if callable(can_generate) and hasattr(child, "generate") and can_generate():
            models.append(child)
            inner_ids |= {id(inner) for inner in child.modules()}
    return models
