"""The steps of the strategy: one Lightning batch is one flush of the pipeline, and gradients follow Lightning's own hook order.

:class:`MegatronSteps` knows how a batch is run; the flush comes from ``steps``, reduction and clipping from ``gradients``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.assembly.assemble import check_same_batch
from megatron_lightning.config import NonFinite
from megatron_lightning.errors import ConfigError, PipelineError
from megatron_lightning.layers.split_backward import join_backwards
from megatron_lightning.optim.finite_watch import FiniteWatch
from megatron_lightning.optim.replicated_gradients import GradientAgreement
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.pipeline.microbatches import batch_size_of
from megatron_lightning.strategies import preflight
from megatron_lightning.strategies.buffers import BufferSync
from megatron_lightning.strategies.building import MegatronModules
from megatron_lightning.strategies.explicit import ExplicitStep, not_in_a_step
from megatron_lightning.strategies.gradients import GradientFlow
from megatron_lightning.strategies.held_schedulers import HeldSchedulers
from megatron_lightning.strategies.lightning_internals import skips_backward
from megatron_lightning.strategies.precision import MegatronMixedPrecision, megatron_plugin
from megatron_lightning.strategies.steps import Step, StepRunner, precision_context
from megatron_lightning.strategies.toggling import Toggling
from megatron_lightning.strategies.validation_clock import ValidationClock


class MegatronSteps(MegatronModules):
    """Runs training, validation, test and predict steps on every rank.

    Args:
        layout: Sizes of the parallel axes.
        non_finite: What is done about infinite or NaN losses and gradients.
        settings: See :class:`MegatronModules`.
    """

    def __init__(self, layout: ParallelLayout, *, non_finite: NonFinite, **settings: Any) -> None:
        super().__init__(layout, **settings)
        self._runner: StepRunner | None = None
        self._buffers: BufferSync | None = None
        self._explicit: ExplicitStep | None = None
        self._gradients: GradientFlow | None = None
        self._loaders_checked: set[tuple[Any, ...]] = set()
        self._step_skipped = False
        self._held: HeldSchedulers | None = None
        self.non_finite: NonFinite = non_finite
        """What is done about infinite or NaN losses and gradients; read when training is set up."""
        self._watch: FiniteWatch | None = None
        self._agreement: GradientAgreement | None = None
        self._non_finite_found = False
        self._verdict_used = False  # by an optimizer step since
        self._toggling: Toggling | None = None
        self._validation_clock = ValidationClock(self)
        self._log_dirs: dict[Any, Any] = {}  # this rank's own, and the one that all use
        self._learns_log_dir = False

    @property
    def precision_plugin(self) -> Precision:
        """What decides the dtypes: Lightning's plugin, exchanged for its counterpart that is right on several ranks."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else megatron_plugin(plugin)

    @property
    def _loss_scaling(self) -> MegatronMixedPrecision | None:
        """The precision plugin, if it scales losses."""
        plugin = self.precision_plugin
        return plugin if isinstance(plugin, MegatronMixedPrecision) and plugin.loss_scale is not None else None

    @property
    def last_grad_norm(self) -> Tensor | None:
        """Global gradient norm before clipping, of the last step that clipped by norm; None on one process."""
        return self._gradients.last_norm if self._gradients else None

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of all gradients over every axis, as they are now; a collective."""
        return self.gradient_flow.norm()

    def gradient_group_norms(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the 2-norm of the gradients of every parameter group, by its name or number; a collective."""
        return self.gradient_flow.group_norms(optimizer)

    def num_zero_gradients(self) -> Tensor:
        """Return how many elements of the gradients are zero, over every axis; a collective."""
        return self.gradient_flow.zero_count()

    @property
    def may_skip_steps(self) -> bool:
        """Whether optimizer steps are left out when something is not finite."""
        return self._loss_scaling is not None or self.non_finite == "skip"

    def gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradients that the optimizer reads, by global name (this rank's parts)."""
        return self._gradients.by_name() if self._gradients else {}

    def wait_for_parameters(self) -> None:
        """Wait until the weights are those of the last step on every rank; needed with ``overlap_param_gather`` only."""
        if self._gradients is not None:
            self._gradients.gather.wait()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Agree with the other ranks whether it will be time to validate."""
        self._validation_clock.agree(self.module.trainer)

    def on_validation_start(self) -> None:
        """Validate with the same buffers on all ranks."""
        self.share_buffers(newly=True)

    def on_train_end(self) -> None:
        """Leave the module with the weights of the last step, and with the same buffers on all ranks."""
        self.wait_for_parameters()
        self.share_buffers(newly=True)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one flush; gradients are computed here (pipelined) or in :meth:`backward` (one stage, one micro-batch)."""
        gradients, trainer = self.gradient_flow, self.module.trainer
        gradients.gather.begin_step()
        self._check_first_batch(batch, "training_step")
        explicit = self.pipeline_options.explicit_steps
        microbatches = [batch] if explicit else self._split(batch)
        self.count_samples(sum(batch_size_of(part) or 1 for part in microbatches) * self.context.dp.size)
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self._is_native:
            self.share_buffers(newly=batches == 2)  # of the step before: a graph that awaits its backward may hold them
            with self._units_in_order("training_step"):
                output = super().training_step(batch, *args, **kwargs)
            if self.module.automatic_optimization:
                gradients.note_native_output(output, trainer.accumulate_grad_batches)
            return output
        indices = (*args, *kwargs.values())
        if explicit:
            output = self._explicitly("training_step", self._flush, batch, *indices)
        else:
            output = self._flush(self._hook("training_step", *indices), microbatches)
        self.share_buffers(newly=batches == 1)
        return output

    def _flush(self, call: Callable[[Any], Any], microbatches: Sequence[Any]) -> Any:
        """Run ``call`` on every micro-batch and on every stage, forward and backward."""
        runner, gradients, trainer = self.runner, self.gradient_flow, self.module.trainer
        skip_backward = skips_backward(trainer)
        if not skip_backward:
            gradients.begin_flush()
        step = Step(
            hook="training_step",
            microbatches=microbatches,
            call=call,
            context=precision_context(self.precision_plugin, "training_step"),
            backward_scale=None if skip_backward else 1.0 / trainer.accumulate_grad_batches,
            loss_scale=self._loss_scaling.scale if self._loss_scaling else 1.0,
            completing=gradients.completing,
            watch=None if skip_backward else self._watch,
            after_backwards=None if skip_backward else self._after_backwards,
        )
        result = runner.run(step)
        if not skip_backward:
            gradients.end_flush(result.num_items)
            if result.output is None:
                gradients.drop_flush()
        return result.output

    def _split(self, batch: Any) -> list[Any]:
        return self.runner.split(batch, self.micro_batch_size)

    def _units_in_order(self, hook: str) -> AbstractContextManager[None]:
        """Around a step that Lightning runs itself: the data-parallel ranks call the same units."""
        return nullcontext() if self._units is None else self._units.in_order(hook)

    def _hook(self, name: str, *indices: Any) -> Callable[[Any], Any]:
        """Return a ``*_step`` of the module as a function of the (micro-)batch."""
        hook = getattr(self.module, name)
        return lambda batch: hook(batch, *indices)

    def _explicitly(self, name: str, flush: Callable[..., Any], batch: Any, *indices: Any) -> Any:
        """Call a ``*_step`` once with its whole batch; it says what is flushed."""
        flushed = ExplicitStep(name, lambda fn, part: flush(fn, self._split(part)), once=name == "training_step")
        self._explicit = flushed
        try:
            return flushed.check(self._hook(name, *indices)(batch))
        finally:
            self._explicit = None

    def run_pipeline(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Run a part of a step on every micro-batch; see :func:`megatron_lightning.strategies.run_pipeline`."""
        if self._is_native:
            return fn(batch)
        if self._explicit is None:
            raise not_in_a_step()
        return self._explicit.run_pipeline(fn, batch)

    def _check_first_batch(self, batch: Any, *loader: Any) -> None:
        """Check the first batch of every loader, which all ranks of a replica have to read alike."""
        if loader not in self._loaders_checked:
            check_same_batch(batch, self.context)
            self._loaders_checked.add(loader)

    def share_buffers(self, *, newly: bool) -> None:
        """Give all ranks the same buffers; a collective.

        Args:
            newly: Whether to look for buffers that have parted: after the first step, and before anybody relies on them.
        """
        if self._buffers is not None:
            self._buffers.compare() if newly else self._buffers.share()

    def _after_backwards(self) -> None:
        self.gradient_flow.after_backwards()
        self._settle()

    def _settle(self) -> None:
        if self._agreement is not None:
            self._agreement.settle()
        if self._watch is not None:
            self._non_finite_found &= not self._verdict_used
            self._verdict_used = False
            self._non_finite_found |= self._watch.settle(self.module.trainer.global_step)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Publish the gradients between Lightning's backward hooks; compute them first if no schedule did."""
        gradients, module = self.gradient_flow, self.module
        if self._watch is not None and not gradients.computed:
            self._watch.forward(closure_loss, is_loss=True)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if gradients.computed:
            gradients.expose()
        else:
            with gradients.native_backward():
                weighted = gradients.weighted(closure_loss)
                self.precision_plugin.backward(weighted, module, optimizer, *args, **kwargs)
            gradients.after_backwards()
            self._settle()
        gradients.finish_flush()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step unless something is not finite, and count the steps that were skipped."""

        def gradients() -> Any:
            result = closure()
            self._updated_from = self.module.trainer.global_step
            return result

        if self._watch is not None:
            output = gradients()  # shows whether there will be a step
            if not self._non_finite_found:
                output = super().optimizer_step(optimizer, lambda: output, model, **kwargs)
        else:
            output = super().optimizer_step(optimizer, gradients, model, **kwargs)
        overflowed = self._loss_scaling is not None and self._loss_scaling.step_skipped
        self._step_skipped = self._non_finite_found or overflowed
        # Optimizers that a module steps itself may share one backward pass, whose verdict holds for all of them.
        self._verdict_used = True
        if self.module.automatic_optimization:
            self._non_finite_found = False
        self.skipped_steps += self._step_skipped
        if self._step_skipped:
            for scheduler in self._scheduled():
                scheduler.forget_samples()
        return output

    def _watch_for_non_finite(self) -> None:
        """Begin to look for infinities and NaN, if that is wanted; in gradients unless a loss scale may let them overflow."""
        if self._watch is not None:
            self._watch.detach()
        self._watch = None
        preflight.check_non_finite(self.non_finite)
        if self.non_finite == "ignore":
            return
        scale = None if self._loss_scaling is None else self._loss_scaling.loss_scale
        self._watch = FiniteWatch(self.context, self.num_stages, policy=self.non_finite, place=self.runner.place)
        self._watch.attach(self._whole_parameters(), lambda: scale is None or scale.is_lowest)

    def _whole_parameters(self) -> dict[str, Tensor]:
        """Return what backward passes give gradients to."""
        parameters: dict[str, Tensor] = dict(self.module.named_parameters())
        return parameters if self._units is None else parameters | self._units.whole_parameters()

    def _watch_for_forgotten_parameters(self) -> None:
        """Begin to compare gradients of which the sharding table says nothing."""
        self._agreement = GradientAgreement(self._whole_parameters(), self.assembly.specs, self.context.tp)

    def _release_steps(self) -> None:
        """Give back what the module and its optimizers have lent; what checkpoints read stays: a Trainer may save after fit."""
        self._release_methods()
        if self._watch is not None:
            self._watch.detach()
        if self._gradients is not None:
            self._gradients.release()
        if self._runner is not None:
            self._runner.release()
            join_backwards(self.module)

    def __getstate__(self) -> dict[str, Any]:
        local = ("_runner", "_buffers", "_gradients", "_held", "_watch", "_agreement", "_toggling")
        return super().__getstate__() | dict.fromkeys(local)

    def _release_methods(self) -> None:
        """Give the module's own methods back to it."""
        for taken in (self._held, self._toggling):
            if taken is not None:
                taken.release()
        if self._agreement is not None:
            self._agreement.detach()
        self._held = self._toggling = self._agreement = None

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; an error in the middle of a pipelined step."""
        self._check_ranks_meet("a barrier")
        super().barrier(name)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over the world; an error in the middle of a pipelined step."""
        self._check_ranks_meet("a decision of all ranks")
        return super().reduce_boolean_decision(decision, all)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object on every rank; of ``trainer.log_dir`` alone in the middle of a pipelined step."""
        if self._in_pipelined_step and isinstance(obj, str | os.PathLike) and obj in self._log_dirs:
            return self._log_dirs[obj]
        self._check_ranks_meet("a broadcast")
        result = super().broadcast(obj, src)
        if self._learns_log_dir:
            self._log_dirs[obj] = result
        return result

    def _learn_log_dir(self, trainer: pl.Trainer) -> None:
        """Ask for ``trainer.log_dir``, which is a broadcast, while the ranks meet: Lightning's own example is a step."""
        if self.context.pp.size > 1:
            self._log_dirs, self._learns_log_dir = {}, True
            _ = trainer.log_dir
            self._learns_log_dir = False

    @property
    def _in_pipelined_step(self) -> bool:
        return self._runner is not None and self._runner.metrics.in_step and self.context.pp.size > 1

    def _check_ranks_meet(self, what: str) -> None:
        if self._in_pipelined_step:
            raise PipelineError(
                f"{what} was asked for in the middle of a step of {type(self.module).__name__}, and the "
                f"{self.context.pp.size} pipeline ranks run their parts of it one after another, so that they would wait for "
                "each other forever. Ask for it in a hook before the step (setup, on_fit_start) and keep it."
            )

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients inside the block without reducing them."""
        with self.gradient_flow.accumulating():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch of validation."""
        return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch of testing."""
        return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch of prediction; every stage gets the whole output."""
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, hook: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.wait_for_parameters()
        if self._units is not None and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # parameters gathered in inference mode could not be trained
                return self._evaluate(hook, batch, *args, **kwargs)
        self._check_first_batch(batch, hook, *(*args, *kwargs.values())[1:])  # the loader's index, if there are several
        if self._is_native:
            with self._units_in_order(hook):
                return getattr(super(), hook)(batch, *args, **kwargs)

        def flush(call: Callable[[Any], Any], microbatches: Sequence[Any]) -> Any:
            context = precision_context(self.precision_plugin, hook)
            return self.runner.run(Step(hook=hook, microbatches=microbatches, call=call, context=context)).output

        indices = (*args, *kwargs.values())
        if self.pipeline_options.explicit_steps:
            return self._explicitly(hook, flush, batch, *indices)
        return flush(self._hook(hook, *indices), self._split(batch))

    @property
    def runner(self) -> StepRunner:
        """Runs steps.

        Raises:
            ConfigError: Before setup.
        """
        if self._runner is None:
            raise ConfigError("steps can be run after the Trainer has set the strategy up.")
        return self._runner

    @property
    def gradient_flow(self) -> GradientFlow:
        """Reduces and exposes gradients.

        Raises:
            ConfigError: Outside of fitting.
        """
        if self._gradients is None:
            raise ConfigError("gradients exist while the Trainer fits.")
        return self._gradients
