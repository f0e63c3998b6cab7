"""Gradients, clipping and skipped optimizer steps of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from megatron_lightning.guards.gradients.sharded_gradients import ShardedGradients
from megatron_lightning.guards.guard import Fit
from megatron_lightning.layers.linear.split_backward import hide_quantized, join_backwards
from megatron_lightning.lightning_internals.trainer import put_around_hooks
from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.optim.gradients.data_groups import has_replicas
from megatron_lightning.optim.lr_schedules import ScheduledLR
from megatron_lightning.optim.maximal_update import scale_eps
from megatron_lightning.optim.norms import GradientNorms
from megatron_lightning.optim.owners.traffic import describe_owners, describe_stack
from megatron_lightning.pipeline.weight_gradients import WeightGradients
from megatron_lightning.step.gradients.gradient_guard import (
    GradientGuard,
    describe_parts,
)
from megatron_lightning.step.gradients.manual import (
    follow_toggling,
    follow_zero_grad,
)
from megatron_lightning.step.gradients.schedulers import hold_schedulers
from megatron_lightning.step.group_lines import print_groups
from megatron_lightning.step.overrides import unwrapped, users_hooks
from megatron_lightning.step.participant import Participants
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.strategies.checkpoint.finetuning import unfreeze_again
from megatron_lightning.strategies.checks.optimizers import effective_data_parallel
from megatron_lightning.strategies.fp8 import parameter_storage
from megatron_lightning.strategies.precision import MegatronMixedPrecision


class Training:
    """Reduce gradients and step optimizers during one ``fit``.

    Args:
        scope: The run context.
        optimizers: The user's optimizers.
        schedulers: The user's learning-rate schedulers.
    """

    def __init__(
        self,
        scope: RunContext,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRSchedulerConfig],
    ) -> None:
        module, part, context = scope.module, scope.part, scope.context
        options, undo = scope.options, scope.undo
        self._scope = scope
        storage = parameter_storage(module, part, scope.precision)
        replicas = context.dp_cp.size
        data_parallel = effective_data_parallel(options.data_parallel, optimizers, replicas)
        self.optimizers = optimizers
        """The user's, when the fit began."""
        for optimizer in optimizers:
            scale_eps(optimizer)
        self.schedules = [
            config.scheduler for config in schedulers if isinstance(config.scheduler, ScheduledLR)
        ]
        """Learning-rate schedules by samples."""
        self.accumulation = GradientAccumulation(
            module,
            part.specs,
            context,
            optimizers,
            sharded=data_parallel != "ddp",
            options=options.data,
            stage_of=part.stage_of,
            units=part.units,
            storage=storage,
        )
        self._print_division()
        print_groups(self.accumulation.views, context.pp)
        self._opaque: Mapping[str, Any] = storage.opaque_layers
        self._weight_gradients = WeightGradients()  # of compiled layers
        if storage.names:
            undo.callback(join_backwards, module)
            self.store_parameters()
        # Undone in reverse order: views on p.grad and hooks go after everything that reads them.
        undo.callback(self.accumulation.detach)
        self.norms = GradientNorms(self.accumulation, context)
        self._parts = describe_parts(context, data_parallel)
        is_sharded = data_parallel != "ddp" and has_replicas(context)
        judge = ShardedGradients.judge_of(scope)
        self.guard = GradientGuard(
            module, self.accumulation, self._parts, sharded=is_sharded, judge=judge
        )
        """Compares gradients around the user's code."""
        self._last_hooks: dict[Optimizer, RemovableHandle] = {}
        undo.callback(self._remove_hooks)
        self._has_clipped = not is_sharded  # or there is no need to warn
        if context.world_size > 1 or self.accumulation.managed:
            self._clip_globally()
        self.loss_scaling = self._scale_losses()
        is_manual = self.accumulation.managed and not module.automatic_optimization
        self._follows_clearing = is_manual and is_sharded
        if is_manual:
            follow_toggling(module, self.accumulation, undo)
            follow_zero_grad(module, optimizers, self.accumulation, undo, self.guard)
        self.step_skipped = False
        """Whether the last optimizer step was skipped."""
        callbacks: list[object] = getattr(module.trainer, "callbacks", [])
        # Whoever may skip a step: learning-rate schedules must then wait as well.
        is_judged = any(getattr(callback, "judges_updates", False) for callback in callbacks)
        if self.loss_scaling is not None or options.non_finite == "skip" or is_judged:
            hold_schedulers(module, schedulers, lambda: self.step_skipped, undo)
        self.participants = Participants(())
        """Concerns with a veto on updates, or with work after updates."""

    def _scale_losses(self) -> MegatronMixedPrecision | None:
        """Return the precision plugin, with a common verdict on overflow for all ranks. None:
        losses are not scaled.
        """
        precision = self._scope.precision
        if not isinstance(precision, MegatronMixedPrecision) or not precision.loss_scale:
            return None
        precision.ranks = self._scope.context.axis("world")
        precision.read_by = lambda optimizer: self.norms.gradients_of(optimizer)  # noqa: PLW0108 (shared by copies)
        self._scope.undo.callback(vars(precision).update, ranks=None, read_by=None)
        return precision

    def _print_division(self) -> None:
        """Print how ranks divide the optimizers."""
        division = self.accumulation.division
        traffic = self.accumulation.owner_traffic()
        if division.whole or traffic.num_sent:
            classes = [*division.whole, *division.matrices]
            rank_zero_info("MegatronStrategy: " + describe_owners(classes, traffic))
        if traffic.stack and self._scope.context.layout.ep > 1:
            rank_zero_warn("MegatronStrategy: " + describe_stack(division.whole, traffic))
        if names := division.tried:
            rank_zero_info(
                f"MegatronStrategy: {', '.join(names)} was tried, not known: two copies that "
                "step halves of its parameters, as the ranks do, agree with one that steps all."
            )

    def _clip_globally(self) -> None:
        """Replace the precision plugin's clipping by clipping over all ranks, whatever the plugin's
        class.
        """
        precision, undo = self._scope.precision, self._scope.undo
        # Functions, since bound methods would be copied with the Trainer.
        vars(precision).update(
            clip_grad_by_norm=lambda *args: self._clip(self.norms.clip_by_norm, *args),
            clip_grad_by_value=lambda *args: self._clip(self.norms.clip_by_value, *args),
        )
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            undo.callback(vars(precision).pop, name, None)
        undo.callback(put_around_hooks(precision, self._before_step))

    def _clip(
        self, clip: Callable[[Optimizer, float], None], optimizer: Optimizer, clip_val: float
    ) -> None:
        self._has_clipped = True
        with self.guard.own_change():
            clip(unwrapped(optimizer), clip_val)

    @contextmanager
    def _before_step(self) -> Iterator[None]:
        """Enter around the hooks before an optimizer step, clipping among them."""
        with self.guard.around("on_before_optimizer_step", "configure_gradient_clipping"):
            yield
        self.accumulation.check_step(self._optimizers)
        if not self._has_clipped and users_hooks(self._scope.module, "configure_gradient_clipping"):
            self._has_clipped = True  # warn once
            rank_zero_warn(
                "configure_gradient_clipping did not call clip_gradients, and there is nothing "
                f"else to clip by: p.grad is None on every parameter ({self._parts}). Call "
                "self.clip_gradients(optimizer, gradient_clip_val=..., "
                "gradient_clip_algorithm=...)."
            )

    def store_parameters(self) -> None:
        """Store the parameters as the precision plugin demands from now on. A collective."""
        self.accumulation.gather.store()
        names = self.accumulation.reducer.main_shards()
        hide_quantized(
            [layer for name, layer in self._opaque.items() if name in names], self._weight_gradients
        )

    @property
    def fit(self) -> Fit:
        """Objects of training, for guards."""
        return Fit(accumulation=self.accumulation, optimizers=self.optimizers)

    @property
    def loss_scale(self) -> float:
        """Factor of the losses, removed from the gradients again by the precision plugin."""
        return 1.0 if self.loss_scaling is None else self.loss_scaling.scale

    def unscaled_norm(self) -> Tensor:
        """Return the norm of the gradients before clipping, without a loss scale. A collective."""
        return self.norms.norm() / self.loss_scale

    def begin_run(self, *, clear: bool = True, keep_earlier: bool = False) -> None:
        """Prepare for the backward passes of a batch: follow parameters unfrozen or regrouped by
        the user. See :meth:`GradientAccumulation.begin_run`.
        """
        self.guard.close()
        self._follow()
        self.participants.backward_begins(clear=clear, keep_earlier=keep_earlier)
        self.accumulation.begin_run(clear=clear, keep_earlier=keep_earlier)

    def _follow(self) -> None:
        if self.accumulation.follow(self._optimizers):
            self.participants.follow_parameters()

    def follow_restored_groups(self) -> None:
        """Follow the parameter groups restored by callbacks before the states of optimizers are
        loaded.
        """
        unfreeze_again(self._scope.module, self.accumulation.added(self._optimizers))
        self._follow()

    @property
    def _optimizers(self) -> Sequence[Optimizer]:
        """The user's optimizers now."""
        return self._scope.module.trainer.optimizers

    def end_backwards(self) -> None:
        """Launch the remaining reductions and check the results of the backward passes. All ranks
        call this together.
        """
        self.accumulation.end_backwards()
        self.participants.after_backward()

    def follow_clearing(self) -> None:
        """Follow the user's training step to the next backward pass, if it optimizes manually and
        gradients are sharded.
        """
        if self._follows_clearing:
            self.guard.follow_clearing()

    def watch_gradients(self) -> None:
        """Watch the user's code for changes of the gradients from now until the step."""
        optimizers = self._optimizers
        self.participants.gradients_ready()
        self.guard.open(optimizers)
        for optimizer in optimizers if self._parts else ():
            self._check_last(optimizer)

    def _remove_hooks(self) -> None:
        self.guard.close()
        for handle in self._last_hooks.values():
            handle.remove()

    def _check_last(self, optimizer: Optimizer) -> None:
        """Check the gradients after all other step hooks of ``optimizer``."""
        if isinstance(optimizer, Optimizer):
            if optimizer in self._last_hooks:
                self._last_hooks[optimizer].remove()
            handle = optimizer.register_step_pre_hook(lambda *_: self.guard.check())
            self._last_hooks[optimizer] = handle

    def optimizer_step(
        self,
        optimizer: Any,
        step: Callable[[Callable[[], Any]], Any],
        closure: Callable[[], Any],
    ) -> Any:
        """Call ``step(closure)`` of ``optimizer`` unless a participant refuses the update.
        Participants then follow the update.
        """
        allowed = True

        def gradients() -> Any:
            nonlocal allowed
            result = closure()
            self.guard.check()
            self.guard.pause()
            allowed = self.participants.before_update()
            self._scope.progress.begin_update(self._scope.module.trainer.global_step)
            return result

        self.guard.check()
        self.participants.step_begins(unwrapped(optimizer))
        # With a possible veto the closure runs first and the step only afterwards. Otherwise the
        # closure runs inside of the step, as in Lightning, for optimizers that call it themselves.
        if self.participants.vetoes:
            output = gradients()  # shows whether there will be a step
            if allowed:
                output = step(lambda: output)
        else:
            output = step(gradients)
        self.step_skipped = not allowed or (
            self.loss_scaling is not None and self.loss_scaling.step_skipped
        )
        if self._scope.module.automatic_optimization:
            self.guard.close()
        self.participants.step_ends(unwrapped(optimizer))
        self.guard.record()  # another optimizer may step gradients of the same backward pass
        self.participants.after_update(stepped=not self.step_skipped)
        self.follow_clearing()
        return output
