"""A language model from a checkpoint of any layout, in the layout of the processes that generate."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.checkpoint import CheckpointSource, TensorShards, load_sharded, open_checkpoint
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import CheckpointError
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.materialize import materialize
from megatron_lightning.parallel.sharding import named_shard_specs, parallelize, tied_names
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.partition import partition_units
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.pipeline.stage import StagePartition

_PREFIX = "state_dict.model."
"""Where ``GPTLightningModule`` has its model."""


def read_config(checkpoint: str | os.PathLike[str]) -> TransformerConfig:
    """Return the configuration of the model in a checkpoint; one process, no tensor is read.

    Raises:
        CheckpointError: If the checkpoint cannot be read, or no ``GPTLightningModule`` saved it.
    """
    return _config_of(open_checkpoint(checkpoint), checkpoint)


def _config_of(source: CheckpointSource, path: str | os.PathLike[str]) -> TransformerConfig:
    config = source.state().get("hyper_parameters", {}).get("config")
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{path} has no hyper_parameters.config that describes a model: it was not saved by GPTLightningModule. Give the "
            "checkpoint of one, or call megatron_lightning.inference.sample with a model of your own."
        )
    return TransformerConfig(**config)


class LanguageModel:
    """The part of a :class:`GPTModel` that one rank holds, with its weights; gives the next token's logits to every rank.

    Args:
        checkpoint: Checkpoint directory of any layout, or a plain Lightning ``.ckpt`` file.
        context: Groups of this rank; all ranks create the model together.
        pipeline_schedule: As for ``MegatronStrategy``; it decides which rank holds which stage, and in which order they run.

    Raises:
        CheckpointError: On every rank, if the checkpoint cannot be read or holds another model.
        ConfigError: If the model has fewer layers than the layout has pipeline stages, or the schedule is for other numbers.
    """

    def __init__(
        self, checkpoint: str | os.PathLike[str], context: ParallelContext, pipeline_schedule: str | list[str] = "auto"
    ) -> None:
        self.context = context
        choice = resolve(pipeline_schedule, num_coordinates=context.layout.pp, num_chunks=context.layout.vpp)
        self._placement, self._schedule = choice.placement, choice.forward_table(1)
        source = open_checkpoint(checkpoint, group=context.axis("world"))
        self.config = _config_of(source, checkpoint)
        self.model = self._build().eval()
        self._load(source)
        self._executor = PipelineExecutor(context, self._placement)

    def _build(self) -> GPTModel:
        """Return the units of this pipeline rank, sharded, with memory for its own weights only."""
        with torch.device("meta"):
            model = GPTModel(self.config)
        stages = partition_units(model.pipeline_units(), self.context.layout.num_stages)
        self._partition = StagePartition(model, stages, self._placement.stages_of(self.context.pp.rank))
        if self.context.tp.size > 1:
            parallelize(model, self.context, model.sharding_plan())
        materialize(model, self.context.device)
        return model

    def _load(self, source: CheckpointSource) -> None:
        specs, tied, stored = named_shard_specs(self.model), tied_names(self.model), source.tensors()
        shards = []
        for name, parameter in self.model.named_parameters():
            saved_as = name if _PREFIX + name in stored else tied.get(name, name)
            shards.append(TensorShards.local(_PREFIX + saved_as, specs[name], parameter))
        copies = [(copy, stored[copy]) for copy in map(_PREFIX.__add__, tied) if copy in stored]
        shards += [TensorShards(copy, info.shape, info.dtype, []) for copy, info in copies]  # equal to their owners
        load_sharded(source, shards, prefix=_PREFIX, group=self.context.axis("world"))

    @torch.inference_mode()
    def next_logits(self, tokens: Tensor, last: Tensor) -> Tensor:
        """Return the logits [b, v] behind the ``last`` [b] of ``tokens`` [b, s]; equal on every rank, all call it together."""
        program = _Forward(self._partition, tokens.to(self.context.device))
        self._executor.run(self._schedule, program, backward=False)
        pipeline = self.context.pp
        if program.logits is None:
            logits = torch.empty(len(tokens), self.config.vocab_size, device=self.context.device)
        else:
            logits = program.logits[torch.arange(len(tokens)), last.to(self.context.device)].float().contiguous()
        if pipeline.process_group is not None:  # the last stage is on coordinate 0
            dist.broadcast(logits, src=pipeline.ranks[0], group=pipeline.process_group)
        return logits


class _Forward:
    """One forward of the stages on this rank, as the pipeline's executor calls them."""

    def __init__(self, partition: StagePartition, tokens: Tensor) -> None:
        self._partition, self._tokens = partition, tokens
        self.logits: Tensor | None = None
        """[b, s, v], on the last stage."""

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
        """Run the stage on the tokens, or on what the stage before gave."""
        output: Tensor = self._partition.view(stage)(self._tokens if received is None else received[0])
        if stage < len(self._partition.stages) - 1:
            return (output,)
        self.logits = output
        return None

    def signature(self, microbatch: int) -> Hashable:
        """Return what decides the shapes between stages."""
        return tuple(self._tokens.shape)

    def completing(self, stage: int) -> AbstractContextManager[None]:
        """Return nothing to do: there is no backward."""
        return nullcontext()
