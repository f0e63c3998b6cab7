"""Load the model in a checkpoint into the layout of the processes that run it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_lightning.assembly.assemble import assemble
from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.state import ModuleState
from megatron_lightning.checkpoint import CheckpointSource, open_checkpoint
from megatron_lightning.checkpoint.kept_files import read_kept_files
from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.inference.engine import Engine
from megatron_lightning.inference.options import EngineOptions
from megatron_lightning.inference.requests import Decode
from megatron_lightning.inference.text import Codec, codec_of_files
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.context import ALONE, ParallelContext
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.rules import check_model_layout

Dtype = Literal["float32", "bfloat16", "float16"]
_PREFIX = "state_dict.model."
"""Prefix of the model's names in a checkpoint of ``GPTLightningModule``."""


@dataclass(frozen=True)
class SavedModel:
    """A model in a checkpoint."""

    config: TransformerConfig
    """Its sizes."""
    fill: Callable[[GPTModel, Part, ParallelContext], None]
    """Reads the weights of a rank's part; a collective."""


def read_config(checkpoint: str | os.PathLike[str]) -> TransformerConfig:
    """Return the configuration of the model in a checkpoint; reads no tensor.

    Raises:
        CheckpointError: If the checkpoint cannot be read, or no ``GPTLightningModule`` saved it.
    """
    return find_model(checkpoint).config


def find_model(
    checkpoint: str | os.PathLike[str], context: ParallelContext | None = None
) -> SavedModel:
    """Return the model in a checkpoint; reads no tensor. With a context a collective.

    Raises:
        CheckpointError: If the checkpoint cannot be read, or holds another kind of model.
    """
    group = ALONE if context is None else context.axis("world")
    source = open_checkpoint(checkpoint, group=group)

    def fill(model: GPTModel, part: Part, context: ParallelContext) -> None:
        ModuleState(model, part, context).load_module(source, prefix=_PREFIX)

    return SavedModel(_config_of(source, checkpoint), fill)


def _config_of(source: CheckpointSource, path: str | os.PathLike[str]) -> TransformerConfig:
    config = source.state().get("hyper_parameters", {}).get("config")
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{path} has no hyper_parameters.config that describes a model: it was not saved by "
            "GPTLightningModule. Give the checkpoint of one, or call "
            "megatron_lightning.inference.sample with a model of your own."
        )
    return TransformerConfig(**config)


def find_codec(checkpoint: str | os.PathLike[str]) -> Codec:
    """Return the codec of the tokenizer that travels in a checkpoint.

    Raises:
        ConfigError: If there is none.
        CheckpointError: If the checkpoint cannot be read.
    """
    files = read_kept_files(checkpoint)
    codec = None if files is None else codec_of_files(files, str(checkpoint))
    if codec is None:
        raise ConfigError(
            f"{checkpoint} has no tokenizer of its own. Set tokenizer_model to the tokenizer that "
            "made the training data."
        )
    return codec


def load_engine(
    checkpoint: str | os.PathLike[str],
    layout: ParallelLayout | None = None,
    *,
    options: EngineOptions | None = None,
    pipeline_schedule: str | list[str] = "auto",
    device: torch.device | str = "cpu",
    dtype: Dtype | None = None,
    stops: Sequence[int] = (),
    decode: Decode | None = None,
) -> Engine:
    """Return an engine for the model in a checkpoint; see :meth:`Engine.load`."""
    layout = layout or ParallelLayout()
    choice = resolve(pipeline_schedule, num_ranks=layout.pp, num_chunks=layout.vpp)
    context = ParallelContext(layout, device=device)
    saved = find_model(checkpoint, context)
    check_model_layout(saved.config, layout, context.world_size)
    check_generating(layout)
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("meta"):
            model = GPTModel(saved.config).eval()
        part = assemble(model, context, None, choice.placement, PipelineOptions())
    finally:
        torch.set_default_dtype(before)
    saved.fill(model, part, context)
    executor = PipelineExecutor(context, choice.placement)
    return Engine(
        model,
        part,
        context,
        executor,
        longest=saved.config.max_sequence_length,
        options=options,
        stops=stops,
        decode=decode,
    )


def check_generating(layout: ParallelLayout) -> None:
    """Check that a layout makes sense for ranks that generate.

    Raises:
        ConfigError: If ranks would share sequences.
    """
    if layout.cp > 1:
        raise ConfigError(
            f"context_parallel_size={layout.cp}: a text grows by one token at a time, which ranks "
            "cannot share. Set it to 1, and tensor_model_parallel_size or "
            "pipeline_model_parallel_size above 1 to divide a model."
        )
