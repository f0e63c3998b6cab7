"""The module under a strategy: checked before anything starts, cut and sharded when it exists, given back after the run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly import checks
from megatron_lightning.assembly.assemble import Assembly, assemble, can_be_cut, check_replicas, is_assembled
from megatron_lightning.assembly.fsdp import check_unsharded, is_sharded, shard_units
from megatron_lightning.config import DataParallel, DataParallelOptions, PipelineOptions, RecomputeOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.recompute import apply_recompute
from megatron_lightning.modules.pretrain_data import PretrainDataModule
from megatron_lightning.optim.fully_sharded import ShardedUnits
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.parallel.sharding import ShardingPlan
from megatron_lightning.pipeline.schedules import ScheduleChoice
from megatron_lightning.strategies import preflight
from megatron_lightning.strategies.buffers import synchronise_layers
from megatron_lightning.strategies.checks.module import check_param_groups, is_built_later, planned_module
from megatron_lightning.strategies.counting import MegatronCounts
from megatron_lightning.strategies.launchers import StartMethod


class MegatronModules(MegatronCounts):
    """Checks the module before the run, and leaves of it what this rank holds.

    Args:
        layout: Sizes of the parallel axes.
        micro_batch_size: Samples of a micro-batch on one data-parallel rank; None: the whole batch is one micro-batch.
        schedule: Order of work in the pipeline.
        pipeline_options: How the model is cut into stages.
        data_parallel: What the data-parallel ranks share of gradients and optimizer state.
        data_parallel_options: How they lie on those ranks and travel; None: the defaults.
        recompute: What the forward pass does not keep for the backward pass; None: it keeps everything.
        sharding_plan: Tensor-parallel table of a model that has no ``sharding_plan()`` of its own.
        start_method: See :class:`MegatronEnvironment`.
        process_group_backend: See :class:`MegatronEnvironment`.
        timeout_s: See :class:`MegatronEnvironment`.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        micro_batch_size: int | None,
        schedule: ScheduleChoice,
        pipeline_options: PipelineOptions,
        data_parallel: DataParallel,
        data_parallel_options: DataParallelOptions | None,
        recompute: RecomputeOptions | None,
        sharding_plan: ShardingPlan | None,
        start_method: StartMethod,
        process_group_backend: str | None,
        timeout_s: float,
    ) -> None:
        super().__init__(layout, start_method=start_method, process_group_backend=process_group_backend, timeout_s=timeout_s)
        self.micro_batch_size, self.data_parallel, self.sharding_plan = micro_batch_size, data_parallel, sharding_plan
        self.data_parallel_options = data_parallel_options or DataParallelOptions()
        self.recompute = recompute or RecomputeOptions()
        self.pipeline_schedule, self.pipeline_options = schedule, pipeline_options
        self._assembly: Assembly | None = None
        self._units: ShardedUnits | None = None
        self._example: Any = None  # the module's example_input_array
        self._configure_model: Callable[[], None] | None = None  # an attribute of the module's own, not of its class

    def _configure_launcher(self) -> None:
        world_size = self._planned_world_size
        preflight.check_data_parallel(self.layout, self.data_parallel, self.data_parallel_options, world_size)
        preflight.check_layer_sync(self._layer_sync, self.root_device, self.layout.data_parallel_size(world_size))
        super()._configure_launcher()

    def check_before_launch(self, trainer: pl.Trainer | None, data: pl.LightningDataModule | None = None) -> None:
        """Check what is known of the module and the data before any process is started or group created."""
        super().check_before_launch(trainer, data)
        module, options = self.lightning_module, self.pipeline_options
        if module is not None:
            explicit = options.pipeline_model_parallel_layout is not None
            preflight.check_config(module, self.layout, self._planned_world_size, data, explicit_stages=explicit)
            if not is_assembled(module):  # by an earlier Trainer: its units were checked then, and some are gone
                checks.check_cut(module, self.pipeline_schedule.placement, options, is_built=not is_built_later(module))
                planned = planned_module(module)
                if planned is not None:
                    self._check_layers(planned, trainer)
        stage = None if trainer is None else trainer.state.fn
        if stage is not None and stage != TrainerFn.PREDICTING and isinstance(data, PretrainDataModule):
            data.check_files(stage)
        if stage == TrainerFn.FITTING:
            data_parallel_size = self.layout.data_parallel_size(self._planned_world_size)
            preflight.check_batches(self.pipeline_schedule, self.micro_batch_size, data_parallel_size, data)

    def setup_environment(self) -> None:
        """Create the process groups, then make sharding part of ``configure_model``.

        Callbacks copy the module in their ``setup`` hook, and some call ``configure_model`` there; so the module must be cut
        when that call returns, or here if it exists already.
        """
        super().setup_environment()
        module, self._assembly = self.module, None
        if not is_overridden("configure_model", module):
            if can_be_cut(module):  # else it is built in a setup hook, and cut after it
                self._assemble()
            return
        original, self._configure_model = module.configure_model, module.__dict__.get("configure_model")

        @functools.wraps(original)
        def configure_model() -> None:
            original()
            self._assemble()

        module.__dict__["configure_model"] = configure_model

    def _restore_configure_model(self) -> None:
        attributes = self.module.__dict__
        if hasattr(attributes.get("configure_model"), "__wrapped__"):
            del attributes["configure_model"]
            if self._configure_model is not None:
                attributes["configure_model"] = self._configure_model

    def forget_connections(self) -> None:
        """See the base class."""
        super().forget_connections()
        self._units = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_assembly": None, "_units": None}

    def _check_layers(self, module: pl.LightningModule, trainer: pl.Trainer | None) -> None:
        """Check all layers of the module: on every rank alike, since none has taken its part yet."""
        tensor_size = self.layout.tp if self.sharding_plan is None else 1
        checks.check_layers(module, self.recompute, tensor_size=tensor_size)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            num_replicas = self.layout.data_parallel_size(self._planned_world_size)
            sharded = self.data_parallel == "fsdp"
            check_param_groups(module)
            checks.check_trained_layers(module, self.pipeline_schedule, num_replicas, sharded=sharded)

    def _assemble(self) -> None:
        placement, options = self.pipeline_schedule.placement, self.pipeline_options
        if not is_assembled(self.module):
            self._check_layers(self.module, self.module.trainer)
        if self._layer_sync is not None and self.module.trainer.state.fn == TrainerFn.FITTING:
            synchronise_layers(self.module, self._layer_sync, self.context.dp)
        whole = self.data_parallel != "fsdp" or self.context.dp_cp.size == 1
        self._assembly = assemble(self.module, self.context, self.sharding_plan, placement, options, allocates=whole)
        apply_recompute(self.module, self.recompute, stages=self._assembly.own_stages)

    @property
    def _is_native(self) -> bool:
        """Whether Lightning's own steps do the work: one stage, whole batches; the same for every batch and rank."""
        return self.num_stages == 1 and self.micro_batch_size is None

    def _place(self) -> None:
        """Bring the module into its dtype, onto this rank's device and, with ``fsdp``, into this rank's shards."""
        module, device = self.module, self.root_device
        if self._units is not None:
            self._units.reshard()
        if self._units is None or not is_sharded(module):
            check_unsharded(module)
            self.model, self._units = self.precision_plugin.convert_module(module), None
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
        built = {n: p for n, p in module.named_parameters() if not (isinstance(p, DTensor) or p.is_meta)}
        check_replicas(built, self.assembly.specs, self.context)
        if self.data_parallel == "fsdp" and self._units is None and self.context.dp_cp.size > 1:
            options, micro_batches = self.data_parallel_options, not self._is_native
            self._units = shard_units(module, self.assembly, self.context, options, micro_batches=micro_batches)
        self.model_to_device()

    def _prepare_to_load(self) -> None:
        """Give the module the memory that a checkpoint is read into: Lightning reads it before it calls ``setup``."""
        if self._assembly is None:
            self._assemble()
        if self.data_parallel == "fsdp":  # parameters may be on ``meta`` still, where nothing can be read to
            self._place()

    @property
    def assembly(self) -> Assembly:
        """How this rank's part of the module was made.

        Raises:
            ConfigError: Before the module is set up.
        """
        if self._assembly is None:
            raise ConfigError("the module has not been sharded yet; it is in or after configure_model.")
        return self._assembly

    @property
    def sharded_units(self) -> ShardedUnits:
        """What FSDP2 shards.

        Raises:
            ConfigError: Without ``data_parallel="fsdp"`` over several ranks, and before setup.
        """
        if self._units is None:
            raise ConfigError('units are sharded with data_parallel="fsdp" on several data-parallel ranks, and after setup.')
        return self._units

    def _set_example_aside(self) -> None:
        """Keep summaries and graphs from running this rank's part as if it were the whole, or without the other ranks."""
        if self.module.example_input_array is not None:
            self._example, self.module.example_input_array = self.module.example_input_array, None

    def _give_module_back(self) -> None:
        """Undo what a run does to the module for its own time."""
        if self.lightning_module is None:
            return
        if self._layer_sync is not None:
            self._layer_sync.revert(self.lightning_module)
        if self._example is not None:
            self.lightning_module.example_input_array, self._example = self._example, None
