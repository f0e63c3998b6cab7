"""Processes of a command for a trained model: this process, the processes of torchrun or Slurm, or
new processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.load import (
    SavedModel,
    check_model,
    find_codec,
    find_model,
    find_stops,
    load_engine,
)
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.inference.commands.text_codec import Codec, load_codec
from megatron_lightning.inference.engine.speculative import check_drafts
from megatron_lightning.inference.engine.text_model import TextModel
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.resilience import launcher
from megatron_lightning.resilience.launcher import run_on_ranks

Work = Callable[[TextModel, Codec, Any], Any]
"""Function of a rank's engine, the codec and arguments. The arguments travel to other processes.
Rank 0's result is plain data."""


@dataclass(frozen=True)
class ModelJob:
    """A trained model and the processes to run it."""

    model: ModelOptions
    num_replicas: int = 1
    """Number of replicas to start."""
    runs_replicas: bool = False
    """Whether processes beyond one replica have separate work."""

    @cached_property
    def saved(self) -> SavedModel:
        """The model.

        Raises:
            CheckpointError: If the checkpoint cannot be read.
        """
        return find_model(self.model.checkpoint, adapters=self.model.adapters)

    @cached_property
    def codec(self) -> Codec:
        """The tokenizer's codec.

        Raises:
            ConfigError: If there is no tokenizer, or the tokenizer has more ids than the model.
            CheckpointError: If the checkpoint cannot be read.
            DataError: If the tokenizer cannot be loaded.
        """
        saved = self.saved  # first: where no model is, the model is missing, not its tokenizer
        name = self.model.tokenizer_model or self.model.checkpoint
        codec = (
            find_codec(self.model.checkpoint, self.model.adapters)
            if self.model.tokenizer_model is None
            else load_codec(self.model.tokenizer_model, self.model.tokenizer_type)
        )
        if codec.vocab_size > saved.vocab_size:
            raise ConfigError(
                f"{name} has {codec.vocab_size} ids and the model in "
                f"{self.model.checkpoint} has vocab_size={saved.vocab_size}. Set tokenizer_model "
                "to the tokenizer that made the training data."
            )
        return codec

    @property
    def world_size(self) -> int:
        """Number of processes."""
        started = launcher.find()
        if started is not None:
            return started.world_size
        return self.model.layout.tp * self.model.layout.pp * self.num_replicas

    def check(self) -> None:
        """Check the settings as far as possible before processes start.

        Raises:
            ConfigError: If the values cannot work together.
            CheckpointError: If the checkpoint cannot be read.
            DataError: If the tokenizer cannot be loaded.
        """
        layout, world_size = self.model.layout, self.world_size
        options = self.model.engine
        _check_experts(layout)
        resolve(self.model.pipeline_schedule, num_ranks=layout.pp, num_chunks=layout.vpp)
        _ = self.codec
        check_model(self.saved, layout, world_size)
        check_drafts(self.saved.config, options)
        if self.model.adapters is not None:
            self.saved.build()  # on meta: reads the adapters alone
        if layout.data_parallel_size(world_size) > 1 and not self.runs_replicas:
            raise ConfigError(
                f"{world_size} processes were started, and tensor_model_parallel_size={layout.tp} "
                f"x pipeline_model_parallel_size={layout.pp} uses {layout.tp * layout.pp}; the "
                "others would write the same text. Start as many as are used."
            )

    def run(self, work: Work, arguments: Any) -> Any:
        """Return the result of ``work`` on rank 0. None on other ranks of a launcher."""
        # Without cached values: each process reads its own.
        job = self if self.world_size == 1 else replace(self)
        return run_on_ranks(job._work, (work, arguments), self.world_size, self.torch_device)

    @property
    def torch_device(self) -> str:
        """Type of the device."""
        if self.model.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.model.device

    def _work(self, device: torch.device, work: Work, arguments: Any) -> Any:
        if device.type == "cpu" and self.world_size > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
        engine = load_engine(
            self.model.checkpoint,
            self.model.layout,
            adapters=self.model.adapters,
            options=self.model.engine,
            pipeline_schedule=self.model.pipeline_schedule,
            device=str(device),
            dtype=self.model.dtype,
            stops=(*self.codec.stops, *find_stops(self.model.checkpoint, self.model.adapters)),
            decode=self.codec.decode,
        )
        return work(engine, self.codec, arguments)


def _check_experts(layout: ParallelLayout) -> None:
    if layout.tp % (layout.etp * layout.ep):
        raise ConfigError(
            f"expert_tensor_parallel_size={layout.etp} x expert_model_parallel_size={layout.ep} "
            f"does not divide tensor_model_parallel_size={layout.tp}, whose ranks share the "
            "experts. Set expert_tensor_parallel_size to 1 and tensor_model_parallel_size to a "
            f"multiple of {layout.ep}."
        )
