"""Gradients between the steps that compute them and the optimizer that reads them, in Lightning's hook order.

Lightning calls ``training_step``, then ``zero_grad``, then ``backward``. With a schedule of micro-batches the gradients exist
after ``training_step``; they are put aside, and published in ``backward`` between Lightning's hooks. A *window* is one
optimizer step: one flush, or as many as are accumulated.

A module that returns ``num_items`` is weighted exactly: every micro-batch's mean loss is multiplied by its number of items, and
the gradients are divided by the sum of all items (micro-batches, data and context ranks, accumulated flushes). Otherwise every
micro-batch's loss is a mean, and means are averaged.

A module that optimizes manually makes each of its backward passes a window of its own, or several of which only the last is
synchronised. The reduced gradients are added to what the optimizers have from earlier windows, until the module clears them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.clipping import clip_grads_by_norm_, clip_grads_by_value_, global_grad_norm, global_zero_count
from megatron_lightning.optim.distributed import DistributedOptimizer
from megatron_lightning.optim.fully_sharded import ShardedUnits
from megatron_lightning.optim.fully_sharded_reducer import FullyShardedReducer
from megatron_lightning.optim.matrices import names_of_matrices
from megatron_lightning.optim.param_gather import ParameterGather
from megatron_lightning.optim.reducer import GradientReducer
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.sharding import ShardSpec


def unwrapped(optimizer: Any) -> Any:
    """Return the user's optimizer, which Lightning hands out in a wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


class GradientFlow:
    """Accumulates, reduces, exposes and clips the gradients of one fit.

    Args:
        module: The sharded LightningModule.
        specs: Spec of every parameter by name.
        context: Groups of this rank.
        optimizers: The user's optimizers; sharded in place over the data-parallel ranks if ``sharded``.
        sharded: ZeRO-1.
        options: Buckets, communication and state of the data-parallel ranks.
        stage_of: The one pipeline stage that uses a parameter, by name; parameters that several stages use are absent.
        units: What FSDP2 shards; None without it.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        specs: Mapping[str, ShardSpec],
        context: ParallelContext,
        optimizers: Sequence[Optimizer],
        *,
        sharded: bool,
        options: DataParallelOptions,
        stage_of: Mapping[str, int],
        units: ShardedUnits | None = None,
    ) -> None:
        self._module, self._context, self._specs, self._optimizers = module, context, specs, optimizers
        self._sharded, self._options = (sharded or units is not None) and context.dp_cp.size > 1, options
        self._stage_of, self._units = stage_of, units
        self._attach()
        self.last_norm: Tensor | None = None
        """Global norm before the last clipping by norm."""
        self.computed = False
        """Whether the gradients of the current flush exist already."""
        self._is_last_flush = True
        self._window_open = self._window_was_open = False
        self._num_items: Tensor | None = None
        self._native_weight: Tensor | None = None
        self._held: dict[str, Tensor] | None = None  # gradients of earlier windows of a manual optimization
        self._clipped: Precision | None = None
        self._released = False
        self._group_names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __deepcopy__(self, memo: object) -> GradientFlow:
        return self  # met on the way to a copy of the Trainer, whose precision plugin clips by it

    def _attach(self) -> None:
        """Build the reduction of the parameters that are trainable now, and let the optimizers step its results."""
        self._names = dict(self._module.named_parameters())
        trainable = {name: parameter for name, parameter in self._names.items() if parameter.requires_grad}
        specs, context, options = self._specs, self._context, self._options
        whole = names_of_matrices(self._optimizers, trainable)
        if self._units is None:
            self.reducer = GradientReducer(
                trainable, specs, context, sharded=self._sharded, whole=whole, part_of=self._stage_of, options=options
            )
        else:
            self.reducer = FullyShardedReducer(trainable, specs, context, units=self._units, whole=whole, options=options)
        self.reducer.late = frozenset(trainable) - self._stage_of.keys()
        self.gather = ParameterGather(self.reducer, self._module if self._options.overlap_param_gather else None)
        """Whoever reads weights between the steps waits for it."""
        self._views = [
            DistributedOptimizer(optimizer, self.reducer, self._names, self.gather)
            if isinstance(optimizer, Optimizer)
            else None
            for optimizer in self._optimizers
        ]

    def _follow_unfreezing(self) -> None:
        """Reduce parameters as well that a callback has made trainable since.

        Raises:
            ConfigError: If this cannot be done while other ranks have other parameters, or parts of the optimizer's state.
        """
        trainable = {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}
        known = self.reducer.parameters
        same = {id(parameter) for parameter in known.values()}  # pruning gives other names, fsdp other objects
        new = [name for name, parameter in trainable.items() if name not in known and id(parameter) not in same]
        if self._context.world_size == 1 or not new:
            return
        if self._sharded or self._context.pp.size > 1 or any(view is not None and view.exchanged for view in self._views):
            raise ConfigError(
                f"{len(trainable)} parameters are trainable, and {len(known)} were when training began; new is {new[0]}. "
                'Layers are frozen or unfrozen during fit only with data_parallel="ddp", pipeline_model_parallel_size=1 and an '
                "optimizer that steps the parameters themselves (fp32, no Muon, default data_parallel_options). "
                "Set these, or choose what is trained before fit."
            )
        self.gather.detach()
        self.reducer.detach()
        self._attach()

    @property
    def managed(self) -> bool:
        """Whether gradients are kept in buckets, or read by something else than the parameters they belong to."""
        return self.reducer.exchanges or any(view is not None and view.exchanged for view in self._views)

    def by_name(self) -> dict[str, Tensor]:
        """Return the reduced gradients that the optimizers read, by parameter name."""
        return self.reducer.gradients()

    def view(self, optimizer: Optimizer) -> DistributedOptimizer:
        """Return an optimizer as checkpoints see it: by global parameter name."""
        for view in self._views:
            if self.managed and view is not None and view.optimizer is optimizer:
                return view
        # Nothing was exchanged: described anew, since callbacks may have added parameter groups.
        return DistributedOptimizer(optimizer, self.reducer, self._names)

    @contextmanager
    def accumulating(self) -> Generator[None, None, None]:
        """Inside the block flushes are not the window's last."""
        self._is_last_flush = False
        try:
            yield
        finally:
            self._is_last_flush = True

    # ------------------------------------------------------------------------------- flushes run by a schedule

    def begin_flush(self) -> None:
        """Prepare for the backward passes of a flush."""
        self._follow_unfreezing()
        self._window_was_open = self._window_open
        if self._window_open:
            self.reducer.expose()
        else:
            self._num_items, self._window_open = None, True
            self.reducer.start_window()
        self.reducer.sync = False

    def after_backwards(self) -> None:
        """Launch what is left to reduce, before logs are reduced over the same ranks."""
        if self._is_last_flush:
            self.reducer.launch()

    @contextmanager
    def completing(self, stage: int) -> Generator[None, None, None]:
        """Around what completes a stage's gradients: in the window's last flush their reduction starts."""
        self.reducer.sync = self._is_last_flush
        with self._reducing_units([stage]):
            yield
        self.reducer.sync = False
        if self._is_last_flush:
            self.reducer.complete(name for name, user in self._stage_of.items() if user == stage)

    def end_flush(self, num_items: Tensor | None) -> None:
        """Put the gradients aside until ``backward``."""
        self._add_items(num_items)
        self.reducer.hide()
        self.computed = True

    def drop_flush(self) -> None:
        """Forget a flush whose step returned nothing, as Lightning skips it."""
        self.computed = False
        self._window_open = self._window_was_open
        self.reducer.hide()

    def expose(self) -> None:
        """Bring the gradients back."""
        self.reducer.expose()

    # ------------------------------------------------------------------- flushes run by Lightning's own closure

    def note_native_output(self, output: Any, accumulated: int) -> None:
        """Remember how much a step that Lightning runs itself weighs.

        Args:
            output: What ``training_step`` returned.
            accumulated: Flushes of a window, by which Lightning divides the loss.
        """
        self.computed, self._native_weight = False, None
        if not self._window_open:
            self._num_items = None
        if isinstance(output, Mapping) and "num_items" in output and (accumulated > 1 or self._context.dp_cp.size > 1):
            items = torch.as_tensor(output["num_items"], dtype=torch.float32, device=self._context.device).detach()
            self._native_weight = items * accumulated
            self._add_items(items)

    def weighted(self, loss: Tensor) -> Tensor:
        """Return what to backpropagate for the loss that Lightning computed."""
        return loss if self._native_weight is None else loss * self._native_weight

    @contextmanager
    def native_backward(self) -> Generator[None, None, None]:
        """Around one backward pass that produces all gradients of a flush."""
        self._follow_unfreezing()
        if self.managed:
            if self._window_open:
                self.reducer.expose()
            else:
                if not self._module.automatic_optimization:
                    self._held = {name: gradient.clone() for name, gradient in self.by_name().items()}
                self.reducer.start_window()
        self._window_open = True
        self.reducer.sync = self._is_last_flush
        with self._reducing_units(None):
            yield

    def _reducing_units(self, stages: Sequence[int] | None) -> AbstractContextManager[None]:
        """Around the last backward pass of these stages (None: all) in a window: FSDP2 reduces what their units have."""
        return self._units.completing(stages) if self._units is not None and self._is_last_flush else nullcontext()

    # ---------------------------------------------------------------------------------------------- both kinds

    def finish_flush(self) -> None:
        """Complete the reduction if this flush was the window's last."""
        self.computed = False
        if not self._is_last_flush:
            return
        self.reducer.launch()
        scale = self._scale()
        if self.managed or isinstance(scale, Tensor) or scale != 1.0:
            self.reducer.finish(scale)
        self._window_open = False
        self._add_held()

    def _add_held(self) -> None:
        """Add the gradients of a window of manual backward passes to those of earlier windows."""
        if self._held is None:
            return
        for name, target in self.reducer.targets().items():
            held, fresh = self._held.get(name), target.grad
            target.grad = held if fresh is None else fresh if held is None else fresh.add_(held)
        self._held = None

    def stepped_by_others(self, optimizer: Any) -> set[str]:
        """Return the names of the parameters that only the other optimizers step, this rank's or not."""
        mine, others = set[str](), set[str]()
        for view in self._views:
            if view is not None:
                is_it = view.optimizer is unwrapped(optimizer)
                (mine if is_it else others).update(view.names)
        return others - mine

    def _add_items(self, num_items: Tensor | None) -> None:
        if num_items is not None:
            self._num_items = num_items if self._num_items is None else self._num_items + num_items

    def _scale(self) -> float | Tensor:
        group = self._context.dp_cp
        if self._num_items is None:
            return 1.0 / group.size
        total = self._num_items.clone()
        if group.process_group is not None:
            dist.all_reduce(total, group=group.process_group)
        return 1.0 / torch.where(total > 0, total, 1.0)  # weights that are no counts may add up to less than one

    # ------------------------------------------------------------------------------------------------ clipping

    def take_over_clipping(self, plugin: Precision) -> None:
        """Let the precision plugin, whatever its class, clip by the norm over all ranks."""
        self._clipped = plugin
        plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]

    def norm(self, optimizer: Optimizer | None = None) -> Tensor:
        """Return the global norm of the gradients, or of those that one optimizer reads; a collective."""
        counted = self.reducer.counted(self._read_by(optimizer))
        return global_grad_norm(counted, self._context, sharded=self.reducer.sharded)

    def zero_count(self) -> Tensor:
        """Return how many elements of the gradients are zero; a collective."""
        return global_zero_count(self.reducer.counted(), self._context, sharded=self.reducer.sharded)

    def group_norms(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the global norm of every parameter group by its name, or its number from 0 on; a collective."""
        targets, groups = self.reducer.targets(), zip(optimizer.param_groups, self._carriers(optimizer), strict=True)
        mine = {str(group.get("name", index)): ids for index, (group, ids) in enumerate(groups)}
        norms = {}
        for name in self._agreed(tuple(mine)):
            ids = mine.get(name, set())
            chosen = {key: gradient for key, gradient in self.by_name().items() if id(targets[key]) in ids}
            norms[name] = global_grad_norm(self.reducer.counted(chosen), self._context, sharded=self.reducer.sharded)
        return norms

    def _carriers(self, optimizer: Optimizer) -> list[set[int]]:
        """Return which tensors carry the gradients that each parameter group reads; not always what it steps."""
        for view in self._views:
            if view is not None and view.exchanged and view.optimizer is unwrapped(optimizer):
                return view.carriers_of_groups()
        return [{id(parameter) for parameter in group["params"]} for group in optimizer.param_groups]

    def _agreed(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of all pipeline ranks, which may have other groups; exchanged when this rank's change."""
        pipeline = self._context.pp
        if pipeline.process_group is None:
            return names
        if names not in self._group_names:
            ranks = pipeline.all_gather_object(names)
            self._group_names[names] = tuple(dict.fromkeys(name for rank in ranks for name in rank))
        return self._group_names[names]

    def _read_by(self, optimizer: Optimizer | None) -> dict[str, Tensor]:
        """Return the gradients by name, without those that ``optimizer`` does not step."""
        if optimizer is None:
            return self.by_name()
        stepped = set().union(*self._carriers(optimizer))
        targets = self.reducer.targets()
        return {name: gradient for name, gradient in self.by_name().items() if id(targets[name]) in stepped}

    def read_by(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients that ``optimizer`` is going to read, where they can still be changed."""
        gradients = list(self._read_by(optimizer).values())
        known = {id(target) for target in self.reducer.targets().values()}
        others = [p.grad for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        return gradients + [gradient for gradient in others if gradient is not None]

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.last_norm = self.norm(optimizer)
        clip_grads_by_norm_(self._read_by(optimizer).values(), clip_val, self.last_norm)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_grads_by_value_(self._read_by(optimizer).values(), clip_val)

    def release(self) -> None:
        """Remove hooks from the parameters and give clipping back to the plugin."""
        if not self._released:
            self.gather.detach()
            self.reducer.detach()
        self._released = True
        if self._clipped is not None:
            del self._clipped.clip_grad_by_norm, self._clipped.clip_grad_by_value
            self._clipped = None
