"""Language model loaded from a checkpoint of any layout into the layout of the processes that
generate.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.assembly.assemble import assemble
from megatron_lightning.assembly.state import ModuleState
from megatron_lightning.checkpoint import CheckpointSource, open_checkpoint
from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.errors import CheckpointError
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.pipeline.channel import StageTensors
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.pipeline.stages.crossing import StageCrossing, StageExit
from megatron_lightning.pipeline.stages.taint import Uses
from megatron_lightning.pipeline.stages.visit import CallFacts

_PREFIX = "state_dict.model."
"""Prefix of the model's names in a checkpoint of ``GPTLightningModule``."""


def read_config(checkpoint: str | os.PathLike[str]) -> TransformerConfig:
    """Return the configuration of the model in a checkpoint; reads no tensor.

    Raises:
        CheckpointError: If the checkpoint cannot be read, or no ``GPTLightningModule`` saved it.
    """
    return _config_of(open_checkpoint(checkpoint), checkpoint)


def _config_of(source: CheckpointSource, path: str | os.PathLike[str]) -> TransformerConfig:
    config = source.state().get("hyper_parameters", {}).get("config")
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{path} has no hyper_parameters.config that describes a model: it was not saved by "
            "GPTLightningModule. Give the checkpoint of one, or call "
            "megatron_lightning.inference.sample with a model of your own."
        )
    return TransformerConfig(**config)


class LanguageModel:
    """A rank's part of a :class:`GPTModel` with its weights; returns the next token's logits on
    every rank.

    Args:
        checkpoint: Checkpoint directory of any layout, or a plain Lightning ``.ckpt`` file.
        context: Groups of this rank; all ranks create the model together.
        pipeline_schedule: As for ``MegatronStrategy``; determines the stages of each rank, and
            their order.

    Raises:
        CheckpointError: On every rank, if the checkpoint cannot be read or holds another model.
        ConfigError: If the model has fewer layers than pipeline stages, or the schedule is for
            another layout.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        context: ParallelContext,
        pipeline_schedule: str | list[str] = "auto",
    ) -> None:
        self.context = context
        choice = resolve(
            pipeline_schedule, num_ranks=context.layout.pp, num_chunks=context.layout.vpp
        )
        source = open_checkpoint(checkpoint, group=context.axis("world"))
        self.config = _config_of(source, checkpoint)
        with torch.device("meta"):
            self.model = GPTModel(self.config).eval()
        part = assemble(self.model, context, None, choice.placement, PipelineOptions())
        ModuleState(self.model, part, context).load_module(source, prefix=_PREFIX)
        self._crossing: StageCrossing | None = None
        if part.partition is not None:
            self._crossing = StageCrossing(
                "generate", part.partition, context, CallFacts(Uses()), run_stage=_run_stage
            )
        self._placement = choice.placement
        self._schedule = choice.forward_table(1)
        self._executor = PipelineExecutor(context, self._placement)

    @torch.inference_mode()
    def next_logits(self, tokens: Tensor, last: Tensor) -> Tensor:
        """Return the logits [b, v] after position ``last`` [b] of ``tokens`` [b, s], equal on every
        rank; a collective.
        """
        program = _Forward(self.model, self._crossing, tokens.to(self.context.device))
        with nullcontext() if self._crossing is None else self._crossing.installed():
            self._executor.run(self._schedule, program, backward=False)
        pipeline = self.context.pp
        if program.logits is None:
            logits = torch.empty(len(tokens), self.config.vocab_size, device=self.context.device)
        else:
            logits = (
                program.logits[torch.arange(len(tokens)), last.to(self.context.device)]
                .float()
                .contiguous()
            )
        if pipeline.process_group is not None:  # the last stage is on pp rank 0
            dist.broadcast(logits, src=pipeline.ranks[0], group=pipeline.process_group)
        return logits


def _run_stage(stage: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


class _Forward:
    """Forward of this rank's stages, called by the pipeline executor."""

    def __init__(self, model: nn.Module, crossing: StageCrossing | None, tokens: Tensor) -> None:
        self._model = model
        self._crossing = crossing
        self._tokens = tokens
        self.logits: Tensor | None = None
        """[b, s, v], on the last stage."""

    def forward(
        self, stage: int, microbatch: int, received: StageTensors | None
    ) -> tuple[Tensor, ...] | None:
        """Run the model on the tokens as the stage sees it."""
        if self._crossing is not None:
            self._crossing.enter(stage, microbatch, received, self.signature(microbatch))
        try:
            self.logits = self._model(self._tokens)
        except StageExit as left:
            return left.outputs
        return None

    def signature(self, microbatch: int) -> Hashable:
        """Return a key of the shapes between stages."""
        return tuple(self._tokens.shape)

    def recomputing(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Return an empty context: there is no backward."""
        return nullcontext()

    def completing(self, stage: int) -> AbstractContextManager[None]:
        """Return an empty context: there is no backward."""
        return nullcontext()
