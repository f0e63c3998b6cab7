"""Lightning's calls before the first batch: process groups, the rank's part of the module, plugins,
optimizers.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch.optim import Optimizer
from typing_extensions import override

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.launch.determinism import set_determinism
from megatron_lightning.launch.stopping import handle_requeue
from megatron_lightning.lightning_internals.processes import optimizers_to_device
from megatron_lightning.lightning_internals.signals import note_sigterm
from megatron_lightning.lightning_internals.trainer import attached_trainer, set_device_mesh
from megatron_lightning.optim.gradients.data_groups import has_replicas
from megatron_lightning.optim.optimizer_checks import check_optimizers, check_stepped_tensors
from megatron_lightning.optim.stepping.chained import members
from megatron_lightning.parallel.grid.gpu_queues import (
    check_connections,
    check_exchange,
    gpu_capability,
)
from megatron_lightning.parallel.shards.other_stages import AbsentListing, drop_absent
from megatron_lightning.strategies.checks import preflight
from megatron_lightning.strategies.checks.attention_kernels import report_attention
from megatron_lightning.strategies.hooks.rank_hooks import RankHooks
from megatron_lightning.strategies.module import compile_module, describe_module
from megatron_lightning.strategies.precision import megatron_plugin
from megatron_lightning.strategies.run import Run


class SetupHooks(RankHooks):
    """Connect the ranks, and set a run up."""

    def describe(self, module: pl.LightningModule) -> str:
        """Return a table of the module's layers under this strategy: stage, style, local shapes and
        axes of each layer.

        Needs no Trainer and no process groups. The module keeps its layers, or builds its layers
        later in ``configure_model``.

        Raises:
            ConfigError: If the module does not fit the layout.
        """
        return describe_module(module, self.options)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        compat.silence_treespec_warning()
        if self.root_device.type == "cpu":
            compat.keep_freed_memory()
        capability = gpu_capability(self.root_device)
        check_connections(self.layout, self.options.data_parallel, capability)
        config = getattr(self.module, "config", None)
        set_determinism(self.root_device.type, getattr(config, "attention_backend", None))
        # Ranks come before the groups, and the groups before everything that compares ranks. The
        # run is last, since it needs all of them.
        self._set_world_ranks()
        is_new = self.ranks.connect(
            self.cluster_environment, self._planned_world_size, self.root_device, self._write_logs
        )
        check_exchange(self.layout, self.root_device)
        if is_new and self.run is not None:
            self.run.partitioned.forget()
        trainer = attached_trainer(self.module)
        # Lightning's own handler broadcasts, and other ranks may be waiting for this rank
        # elsewhere.
        if self.ranks.failure_watch is not None and trainer is not None:
            note_sigterm(trainer)
        if trainer is not None:
            self.starts.open_logs(trainer, self.ranks.broadcast)
        if self.context.world_size > 1:
            set_device_mesh(self.module, self.context.device_mesh())
        self.run = Run(
            self.module,
            self.ranks,
            self.options,
            self.progress,
            ranks_per_node=max(1, self.num_processes),
            layer_sync=self._layer_sync,
            previous=self.run,
        )
        if trainer is not None:
            handle_requeue(trainer, self.run.undo)

    def _set_world_ranks(self) -> None:
        """Set the rank in the cluster environment and in Lightning's rank-zero utilities."""
        if self.cluster_environment is not None and self._planned_world_size > 1:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self._planned_world_size)
        elif dist.is_initialized():
            return  # an earlier Trainer's ranks: silent ranks stay silent
        # One function under two names in Lightning's packages. Loggers and messages of rank 0 ask
        # this function.
        vars(rank_zero_only)["rank"] = vars(utilities_rank_zero_only)["rank"] = self.global_rank

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        run, fitting = self._running, trainer.state.fn == TrainerFn.FITTING
        run.begin_setup(trainer)
        preflight.check_at_setup(self.options, self.context.world_size, self.module, trainer)
        run.partitioned.place(self.precision_plugin)
        run.connect_pipeline(fitting=fitting)
        report_attention(self.module, self.context, self.precision_plugin, training=fitting)
        compile_module(self.module, run.part, self.options, run.undo)
        self.barrier()
        if fitting:
            self._setup_optimizers(trainer)
        self.setup_precision_plugin()  # replaces Lightning's wrappers of the optimizers
        if fitting:
            run.checkpoints.check_folders()
            run.begin_training(self.optimizers, self.lr_scheduler_configs, self.precision_plugin)
        run.begin_steps(self.precision_plugin)
        if fitting:
            run.checkpoints.begin_fit(run.part)
        if fitting and not self.options.data.optimizer_cpu_offload:
            optimizers_to_device(self.optimizers, self.root_device)

    def _setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Create the optimizers, and check the optimizers against the tensors on the ranks."""
        self.progress.begin()
        self.ranks.separate_replicas()
        self._reset_optimizers_and_schedulers()
        self._configure_optimizers(trainer)
        sharded = self.options.data_parallel != "ddp" and has_replicas(self.context)
        sharded = sharded or self.layout.model_parallel_size > 1
        size, world_size = self.options.micro_batch_size, self.context.world_size
        check_optimizers(self.optimizers, size, world_size, self.options.data, sharded=sharded)
        check_stepped_tensors(self.optimizers, self.module)

    def _configure_optimizers(self, trainer: pl.Trainer) -> None:
        """Create the optimizers. Code that goes by positions sees the parameters of all stages.

        Raises:
            ConfigError: If ``configure_optimizers`` computes with parameters of other stages.
        """
        if self.layout.pp == 1:
            self.setup_optimizers(trainer)
            return
        try:
            with AbsentListing(self.module).shown():
                self.setup_optimizers(trainer)
        except ShardingError as error:
            raise ConfigError(
                f"{type(self.module).__name__}.configure_optimizers, or the constructor of an "
                "optimizer, computes with values of parameters on other pipeline ranks, so that "
                "groups or states would differ from those of one device. Choose groups by names "
                "and shapes, make the state in the first step, or set "
                f"pipeline_model_parallel_size=1. ({error})"
            ) from error
        for optimizer in self.optimizers:
            for member in members(optimizer) if isinstance(optimizer, Optimizer) else ():
                drop_absent(member)

    @override
    def model_to_device(self) -> None:
        self.module.to(self.root_device)

    @property
    @override
    def precision_plugin(self) -> Precision:
        """Lightning's precision plugin, or our counterpart for several ranks."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else megatron_plugin(plugin)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if self.run is not None and device is None:
            batch = self.run.copies.copy(batch, self.module)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._running.process_dataloader(dataloader)

    def _write_logs(self) -> None:
        """Finalize the loggers before this process is ended from outside."""
        module = self.lightning_module
        trainer = None if module is None else attached_trainer(module)
        for logger in [] if trainer is None else trainer.loggers:
            with suppress(Exception):  # the original error matters more
                logger.finalize("failed")
