"""The gradients of an optimizer step, accumulated over pipeline runs and reduced in the last run.

An optimizer step consists of as many pipeline runs as are accumulated. Each run goes through

    begin_run()                  no gradient yet, or the gradients of earlier runs
    completing(stages)           around the last backward passes of gradients: in the last
                                 run, the reductions start
    end_backwards()              launch the remaining reductions, before other collectives of the
                                 same ranks
    finish_run()                 in the last run: wait for the reduction and scale

A module that counts items is weighted exactly: the mean loss of every micro-batch is multiplied by
the micro-batch's number of items, and the gradients are divided by the sum of all items
(micro-batches, data and context ranks, accumulated runs). Otherwise the loss of every micro-batch
is a mean, and means are averaged.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.fsdp.fully_sharded import ShardedUnits
from megatron_lightning.optim.fsdp.fully_sharded_reducer import FullyShardedReducer
from megatron_lightning.optim.gradients.data_groups import has_replicas
from megatron_lightning.optim.gradients.gradient_proxies import gradient_of
from megatron_lightning.optim.gradients.param_gather import ParameterGather
from megatron_lightning.optim.gradients.parameter_storage import ParameterStorage
from megatron_lightning.optim.gradients.reducer import GradientReducer
from megatron_lightning.optim.gradients.usage import Beside
from megatron_lightning.optim.optimizer_checks import check_stepped_tensors, check_tied_copies
from megatron_lightning.optim.owners.traffic import Traffic
from megatron_lightning.optim.stepping.distributed import DistributedOptimizer
from megatron_lightning.optim.stepping.elementwise import Division, Trial
from megatron_lightning.optim.stepping.external_writes import WrittenWeights
from megatron_lightning.optim.stepping.optimizer_views import OptimizerViews
from megatron_lightning.optim.stepping.param_group_changes import (
    SteppedParameters,
    refuse_regrouping,
)
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec


class GradientAccumulation:
    """Accumulate and reduce the gradients of a module's parameters, step by step.

    Args:
        module: The sharded module.
        specs: Spec of every parameter by name.
        context: Groups of this rank.
        optimizers: The user's optimizers. If ``sharded``, optimizers step this rank's shards.
        sharded: Whether the data-parallel ranks shard the optimizer state (ZeRO-1).
        options: Buckets, communication and optimizer state of the data-parallel ranks.
        stage_of: Name of a parameter -> the using pipeline stage. Parameters of several stages are
            absent.
        units: The FSDP2 units. None without FSDP2.
        storage: Storage of the parameters in sharded buckets. None: as values.
    """

    def __init__(
        self,
        module: nn.Module,
        specs: Mapping[str, ShardSpec],
        context: ParallelContext,
        optimizers: Sequence[object],
        *,
        sharded: bool,
        options: DataParallelOptions,
        stage_of: Mapping[str, int],
        units: ShardedUnits | None = None,
        storage: ParameterStorage | None = None,
    ) -> None:
        self._module = module
        self._specs = specs
        self._context = context
        self._optimizers = optimizers
        self._sharded = (sharded or units is not None) and has_replicas(context)
        self._options = options
        self._stage_of = stage_of
        self._units = units
        self._storage = storage
        self._names = dict(module.named_parameters())
        self._passed_trials: set[Trial] = set()
        self._attach(self._trainable())
        self._is_last_run = True
        self._started = False
        self._has_scaled = False  # the gradients of the last step
        self._was_started = False  # before the current run
        self._num_items: Tensor | None = None
        self._earlier: dict[str, Tensor] | None = None  # added to this step's gradients
        self.beside: Beside | None = None
        """Values exchanged between data ranks together with the unused parameters of a step."""

    def _attach(self, trainable: Mapping[str, nn.Parameter]) -> None:
        """Build the reduction of these parameters, and make the optimizers step the reduced
        gradients.
        """
        specs, context, options = self._specs, self._context, self._options
        optimizers = [
            optimizer for optimizer in self._optimizers if isinstance(optimizer, Optimizer)
        ]
        # Copies of a tied parameter must be stepped alike before anything is built: the check is a
        # collective, and every rank arrives here.
        check_tied_copies(optimizers, trainable, specs, context.pp)
        if self._units is None:
            self.reducer = GradientReducer(
                trainable,
                specs,
                context,
                sharded=self._sharded,
                stage_of=self._stage_of,
                options=options,
                storage=self._storage,
            )
        else:
            self.reducer = FullyShardedReducer(
                trainable,
                specs,
                context,
                units=self._units,
                options=options,
                storage=self._storage,
            )
        # Without a stage of its own a parameter is shared by stages: no stage's backward completes
        # the gradient.
        self.reducer.late = frozenset(trainable) - self._stage_of.keys()
        self.gather = ParameterGather(
            self.reducer, self._module if options.overlap_param_gather else None
        )
        """Gathers the parameters after a step. Wait for the gather before reading weights between
        steps."""
        self._view()

    def _view(self) -> None:
        """Make the optimizers step the results of the reduction."""
        stored = self._storage is not None and bool(self._storage.names)
        self._steps = OptimizerViews(
            self._optimizers,
            self.reducer,
            self.gather,
            self._names,
            self._passed_trials,
            is_stored=stored,
        )
        reduced = {id(parameter) for parameter in self.reducer.parameters.values()}
        frozen = [p for p in self._names.values() if id(p) not in reduced]
        self._stepped = SteppedParameters(self._optimizers, frozen)
        self.written = WrittenWeights(list(self.views), self.gather, self._context)
        """Sends weights written outside of a step to all ranks."""

    @property
    def division(self) -> Division:
        """How ranks divide the optimizers."""
        return self._steps.division

    def owner_traffic(self) -> Traffic:
        """Return what owners exchange and keep in a step of this pipeline stage."""
        return self._steps.owner_traffic()

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        }

    def follow(self, optimizers: Sequence[object]) -> bool:
        """Take over parameters newly trainable, and changes of parameter groups and optimizers,
        since the begin of training or the last call. Call this method before a backward pass.

        Args:
            optimizers: The user's optimizers now.

        Returns:
            Whether anything has changed.

        Raises:
            ConfigError: If optimizers step other tensors than the parameters, or if stages have
                agreed on the stepped parameters.
        """
        if not self._stepped.have_changed(optimizers):
            return False
        added = self._new()
        # Shards, main params and states of other ranks cannot be added to in the middle of a fit.
        if added and (self._is_exchanged or self._context.pp.size > 1):
            raise ConfigError(
                f"{_listed(added)} became trainable during fit. Layers are frozen or unfrozen "
                'during fit only with data_parallel="ddp", pipeline_model_parallel_size=1 and an '
                "optimizer that steps the parameters themselves (fp32, no Muon, default "
                "data_parallel_options). Set these, or choose what is trained before fit."
            )
        self._refuse_regrouping(optimizers)
        check_stepped_tensors(optimizers, self._module)
        self._optimizers = list(optimizers)
        if added:
            self._reduce_also(added)
        else:
            self._view()
        return True

    def check_step(self, optimizers: Sequence[object]) -> None:
        """Check that every tensor added after the backward pass is stepped with a reduced gradient.

        Raises:
            ConfigError: If :meth:`follow` cannot follow a change of groups, or if a newly grouped
                tensor has a gradient of this rank.
        """
        if not self._stepped.have_changed(optimizers):
            return
        self._refuse_regrouping(optimizers)
        reduced = {id(parameter) for parameter in self.reducer.parameters.values()}
        if (self.managed or self._has_scaled) and any(
            gradient_of(tensor) is not None and id(tensor) not in reduced
            for tensor in self._stepped.added(optimizers)
        ):
            raise ConfigError(
                f"{self._stepped.describe(optimizers, self._module_names())}, between a backward "
                "pass and the step, with a gradient that is neither reduced over ranks nor scaled. "
                "Add parameters before the backward pass, in on_train_batch_start or before."
            )

    def added(self, optimizers: Sequence[object]) -> list[nn.Parameter]:
        """Return the tensors added to the optimizers' groups since :meth:`follow`."""
        return self._stepped.added(optimizers)

    @property
    def _is_exchanged(self) -> bool:
        """Whether optimizers step other tensors than the parameters."""
        return self._sharded or any(view.exchanged for view in self.views)

    def _new(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters without a reduction of gradients."""
        known = self.reducer.parameters
        reduced = {id(parameter) for parameter in known.values()}
        return {  # gathered fsdp parameters are other objects, and pruning renames
            name: parameter
            for name, parameter in self._trainable().items()
            if id(parameter) not in reduced and (self._units is None or name not in known)
        }

    def _module_names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._module.named_parameters()}

    def _refuse_regrouping(self, optimizers: Sequence[object]) -> None:
        stages = self._context.pp.size
        if (self._is_exchanged or stages > 1) and self._stepped.are_regrouped(optimizers):
            what = self._stepped.describe(optimizers, self._module_names())
            raise refuse_regrouping(what, stages, is_exchanged=self._is_exchanged)

    def _reduce_also(self, new: Mapping[str, nn.Parameter]) -> None:
        """Reduce the gradients of further parameters too, even in the middle of a step.

        Raises:
            ConfigError: If several ranks created the parameters during fit.
        """
        created = {name: p for name, p in new.items() if self._names.get(name) is not p}
        if created and self._context.world_size > 1:
            raise ConfigError(
                f"{_listed(created)} was added to the module during fit, when the "
                f"{self._context.world_size} ranks had shared the initial values. Create it in "
                "__init__ or configure_model."
            )
        specs = {name: ShardSpec.replicated(p.shape) for name, p in created.items()}
        self._specs = {**self._specs, **specs}
        names_of_ids = {id(parameter): name for name, parameter in self.reducer.parameters.items()}
        module = self._module.named_parameters()
        self._names = {names_of_ids.get(id(p), name): p for name, p in module}
        reduced = {
            name: p for name, p in self._names.items() if id(p) in names_of_ids or name in new
        }
        # A step may be under way: gradients so far are taken over by the new buckets.
        gradients = {name: parameter.grad for name, parameter in reduced.items()}
        self.detach()
        with _requiring_gradients(reduced.values()):  # frozen meanwhile, or toggled off
            self._attach(reduced)
        self.reducer.adopt(gradients, accumulated=self._started)

    def detach(self) -> None:
        """Remove our hooks from the parameters and modules."""
        self.gather.detach()
        self.reducer.detach()

    @property
    def views(self) -> Iterator[DistributedOptimizer]:
        """Torch's optimizers, stepping this rank's shards."""
        return iter(self._steps.views)

    @property
    def managed(self) -> bool:
        """Whether gradients are in buckets, or read by other tensors than their parameters."""
        return self.reducer.exchanges or any(view.exchanged for view in self.views)

    def view(self, optimizer: Optimizer) -> DistributedOptimizer:
        """Return an optimizer by global parameter name, for checkpoints."""
        return self._steps.view(optimizer, is_kept=self.managed)

    def stepped_by_others(self, optimizer: Optimizer) -> set[str]:
        """Return the names of parameters stepped only by other optimizers, on this rank or not."""
        return self._steps.stepped_by_others(optimizer)

    @property
    def is_last_run(self) -> bool:
        """Whether the current pipeline run is the last of its step."""
        return self._is_last_run

    @contextmanager
    def accumulating(self) -> Generator[None, None, None]:
        """Mark pipeline runs in the block as not the last of their step."""
        self._is_last_run = False
        try:
            yield
        finally:
            self._is_last_run = True

    def begin_run(self, *, clear: bool = True, keep_earlier: bool = False) -> None:
        """Prepare for the backward passes of a pipeline run.

        Args:
            clear: Whether a new step clears plain gradients too. Lightning clears plain gradients
                before a native backward.
            keep_earlier: Whether the gradients of a new step are added to earlier steps' gradients,
                as with manual optimization.
        """
        self._was_started, self._started = self._started, True
        if not self._was_started:
            self._num_items = None
        self.reducer.sync = False
        if not (clear or self.managed):
            return
        if self._was_started:
            self.reducer.publish()
            return
        if keep_earlier:
            self._earlier = {
                name: gradient.clone() for name, gradient in self.reducer.gradients().items()
            }
        self.reducer.begin_step()

    @contextmanager
    def completing(self, stages: Sequence[int] | None = None) -> Iterator[None]:
        """Complete the gradients of these stages (None: all) in the block: in the last run their
        reduction starts.
        """
        self.reducer.sync = self._is_last_run
        with (
            self._units.completing(stages)
            if self._units is not None and self._is_last_run
            else nullcontext()
        ):
            yield
        self.reducer.sync = False
        if self._is_last_run and stages is not None:
            self.reducer.complete(name for name, user in self._stage_of.items() if user in stages)

    def end_backwards(self) -> None:
        """Launch the remaining reductions, before other collectives of the same ranks."""
        if self._is_last_run:
            self.reducer.launch()

    def add_items(self, num_items: Tensor | None) -> None:
        """Add items of this rank to the weight of the step."""
        if num_items is not None:
            self._num_items = num_items if self._num_items is None else self._num_items + num_items

    def drop_run(self) -> None:
        """Drop a run skipped by Lightning, because the training step returned None."""
        self._started = self._was_started

    def finish_run(self) -> None:
        """Complete the reduction if this run was the last of the step."""
        if not self._is_last_run:
            return
        self.reducer.launch()
        scale = self._scale()
        self._has_scaled = isinstance(scale, Tensor) or scale != 1.0
        if self.managed or self._has_scaled:
            self.reducer.finish(scale, self.beside)
        self._started = False
        self._add_earlier()

    def _add_earlier(self) -> None:
        if self._earlier is None:
            return
        for name, target in self.reducer.targets().items():
            earlier_gradient, fresh = self._earlier.get(name), target.grad
            target.grad = (
                earlier_gradient
                if fresh is None
                else fresh
                if earlier_gradient is None
                else fresh.add_(earlier_gradient)
            )
        self._earlier = None

    def _scale(self) -> float | Tensor:
        group = self._context.dp_cp
        if self._num_items is None:
            return 1.0 / group.size
        total = self._num_items.clone()
        if group.process_group is not None:
            dist.all_reduce(total, group=group.process_group)
        return 1.0 / torch.where(total > 0, total, 1.0)  # weights may sum to less than 1


def _listed(parameters: Iterable[str]) -> str:
    names = list(parameters)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def _requiring_gradients(parameters: Iterable[nn.Parameter]) -> Generator[None, None, None]:
    """Set ``requires_grad`` of all parameters within the block, as autograd hooks require."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad = True
    yield
    for parameter in frozen:
        parameter.requires_grad = False
