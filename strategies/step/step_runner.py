"""Interface of the two ways to run a batch. The choice is made once a run.

``native`` for a single stage and micro-batch: Lightning's own step does the work. ``pipelined`` for
all other runs.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from megatron_lightning.assembly.buffers.buffer_broadcast import BufferSync
from megatron_lightning.errors import ConfigError, PipelineError
from megatron_lightning.guards.table import make_guards
from megatron_lightning.lightning_internals.loops import evaluation_batches
from megatron_lightning.pipeline.batch.metrics import MetricSync
from megatron_lightning.pipeline.stages.parallel_call import (
    ParallelCall,
    find_parallel_module,
    replaced_attribute,
)
from megatron_lightning.step.loaders.batch_counts import (
    EvaluationCounts,
    check_training,
    forwards_together,
)
from megatron_lightning.step.participant import Participants, StepBatch
from megatron_lightning.step.repeats.dummy_step import unseen
from megatron_lightning.step.repeats.recorded_step import RecordedStep
from megatron_lightning.step.repeats.rerun import Rerun, RerunResult
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.user_code import watch_hooks
from megatron_lightning.step.values.sequence_parts import SequenceParts
from megatron_lightning.strategies.fp8 import check_rerun
from megatron_lightning.strategies.step.participants import SharedParts, step_participants
from megatron_lightning.strategies.step.training import Training

_ASK_BEFORE = "Ask for it in a hook before the step (setup, on_fit_start) and keep it."


class StepRunner(ABC):
    """Run the batches of a run.

    Args:
        scope: The run context.
        training: Reduces gradients. None before the Trainer fits.
    """

    def __init__(self, scope: RunContext, training: Training | None) -> None:
        self._scope = scope
        self._training = training
        self._begins_loop = False  # hooks may have made metrics since
        self._counts = EvaluationCounts(
            scope.context.axis("world"),
            together=forwards_together(scope.options, scope.context),
        )
        self._evaluates = False
        self.reduces = False
        """Whether evaluation steps have called collectives of the data-parallel ranks."""
        self._seen_loaders = set[tuple[Any, ...]]()
        self.buffers = BufferSync(scope.module, scope.part, scope.context)
        """Keeps buffers equal on all ranks with the same buffer."""
        if training is not None:
            # Flags of buffers travel with the gradients' flags: no collective of their own.
            training.accumulation.beside = self.buffers.replicas
        self._metrics = MetricSync(
            scope.module, scope.context, lambda: getattr(scope.module.trainer, "callbacks", ())
        )
        scope.undo.callback(self._metrics.release)
        partition = scope.part.partition
        parallel = find_parallel_module(scope.module) if partition is None else partition.module
        self._call = (
            None
            if parallel is None
            else ParallelCall.on(parallel, scope.context.pp.size, scope.undo)
        )
        self._sequence = SequenceParts(scope) if scope.context.cp.size > 1 else None
        self.inputs = RecordedStep(scope)
        """Inputs of the current training step, for a rerun."""
        parts = SharedParts(
            buffers=self.buffers,
            metrics=self._metrics,
            guards=make_guards(scope, None if training is None else training.fit),
            sequence=self._sequence,
            inputs=self.inputs,
        )
        self.participants = Participants(step_participants(scope, parts, training))
        """Concerns of every step, in their order."""
        watch_hooks(scope, self.participants)
        if training is not None:
            training.participants = self.participants

    @property
    def training(self) -> Training:
        """Gradients and optimizer steps.

        Raises:
            ConfigError: Before the Trainer fits.
        """
        if self._training is None:
            raise ConfigError("gradients exist while the Trainer fits.")
        return self._training

    @abstractmethod
    def training_step(self, batch: Any, *indices: Any) -> Any:
        """Run a training batch. Return the step's output."""

    @abstractmethod
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Make the gradients of the batch the parameters' own, between Lightning's hooks around
        backward.
        """

    @abstractmethod
    def repeat(self, batch: Any, indices: tuple[Any, ...]) -> None:
        """Compute the losses and gradients of a training batch again."""

    def rerun(self) -> RerunResult:
        """Run the current step again. See the strategy's method. A collective."""
        check_rerun(self._scope.precision)
        rerun = Rerun(self._scope, self.training, self.inputs, self._metrics)
        with self.participants.repeated():
            return rerun.run(self.repeat)

    @abstractmethod
    def evaluate(self, hook: str, batch: Any, *indices: Any) -> Any:
        """Run a batch of validation, test or prediction. Return the step's output."""

    def probe(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Return ``step(batch)`` on every rank. See the strategy's method. A collective."""
        module, begins_loop = self._scope.module, self._begins_loop
        is_explicit = self._scope.options.pipeline.explicit_steps

        def predict_step(part: Any, batch_idx: int) -> Any:
            return self.run_pipeline(step, part) if is_explicit else step(part)

        with (
            torch.no_grad(),
            unseen(self._scope, self._metrics),
            self.participants.repeated(),
            replaced_attribute(module, "predict_step", predict_step),
        ):
            try:
                return self.evaluate("predict_step", batch, 0)
            finally:
                self._begins_loop = begins_loop

    @abstractmethod
    def run_pipeline(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Run a part of a step on every micro-batch. See
        :func:`megatron_lightning.strategies.run_pipeline`.
        """

    def deal_chunks(self, *, deals: bool) -> None:
        """Set whether chunks of packed rows are dealt by work. Otherwise ranks divide packed rows
        as rows of one document, at places that do not depend on the batch.
        """
        if self._sequence is not None:
            self._sequence.deals = deals

    def refuse_in_step(self, what: str, advice: str | None = None) -> None:
        """Refuse a call that needs all ranks in the middle of a pipelined step.

        Args:
            what: The requested call.
            advice: The way out. None: call before the step.

        Raises:
            PipelineError: In a step, over several pipeline ranks.
        """
        if advice is None:
            self.participants.collective(what)
        num_ranks = self._scope.context.pp.size
        if self._metrics.in_step and num_ranks > 1:
            raise PipelineError(
                f"{what} was asked for in the middle of a step of "
                f"{type(self._scope.module).__name__}, and the {num_ranks} pipeline ranks run "
                "their parts of it one after another, so that they would wait for each other "
                f"forever. {advice or _ASK_BEFORE}"
            )

    def begin_training(self) -> None:
        """Begin the training of a fit, before its first batch. A collective.

        Raises:
            ConfigError: If the ranks have different numbers of batches.
        """
        if self._scope.context.world_size > 1:
            count = self._scope.module.trainer.num_training_batches
            check_training(count, self._scope.context.axis("world"))

    def end_training(self) -> None:
        """End the training of a fit, after its last batch. A collective."""
        self.participants.end_training()

    def begin_evaluation(self, hook: str) -> None:
        """Begin a validation, test or prediction, before its first batch. A collective.

        Raises:
            ConfigError: If the numbers of batches of the ranks do not fit together.
        """
        self._begins_loop = True
        self.reduces = False
        if self._scope.context.dp.size > 1:
            step = getattr(self._scope.module, hook)
            reads_on = is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
            trainer = self._scope.module.trainer
            self._counts.begin(trainer, evaluation_batches(trainer), repeats=not reads_on)

    def refuse_uneven(self, what: str) -> None:
        """Refuse a collective of the data-parallel ranks in an evaluation step, if the ranks run
        different numbers of steps.

        Raises:
            ConfigError: If the numbers differ.
        """
        if self._evaluates:
            self.reduces = True
            self._counts.refuse(what)

    def run_evaluation(self, hook: str, batch: Any, *indices: Any) -> Any:
        """Run a batch of validation, test or prediction. Return the step's output.

        If forwards are collectives and this rank's data end before the data of other ranks, the
        step runs again on the last batch, without any effect.
        """
        num_repeats = self._counts.next()
        batch_copy = (
            copy.deepcopy(batch) if num_repeats else None
        )  # steps may write into their batch
        self._evaluates = True
        try:
            output = self.evaluate(hook, batch, *indices)
            for _ in range(num_repeats):
                with unseen(self._scope, self._metrics), self.participants.repeated():
                    self.evaluate(hook, copy.deepcopy(batch_copy), *indices)
        finally:
            self._evaluates = False
        return output

    def _begin_training(self, batch: Any, indices: tuple[Any, ...], num_samples: int) -> StepBatch:
        """Begin a training batch of ``num_samples`` samples on this rank."""
        trainer = self._scope.module.trainer
        number: int = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        is_first, written_weights = number == 1, self.training.accumulation.written
        if is_first:
            self._begins_loop = True
            if getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
                self.begin_training()
        return self._begin_batch(
            StepBatch(
                hook="training_step",
                value=batch,
                indices=indices,
                number=number,
                num_samples=num_samples,
                begins_loop=self._begins_loop,
                is_first=self._is_first("training_step"),
                compares=is_first or written_weights.is_due,  # hooks of a validation have run
            )
        )

    def _begin_evaluated(self, hook: str, batch: Any, indices: tuple[Any, ...]) -> StepBatch:
        """Begin a batch of an evaluation. ``indices`` hold the batch's index and, with several
        loaders, the loader's index.
        """
        return self._begin_batch(
            StepBatch(
                hook=hook,
                value=batch,
                loader=indices[1:],
                begins_loop=self._begins_loop,
                is_first=self._is_first(hook, *indices[1:]),
            )
        )

    def _is_first(self, *loader: Any) -> bool:
        is_first = loader not in self._seen_loaders
        self._seen_loaders.add(loader)
        return is_first

    def _begin_batch(self, batch: StepBatch) -> StepBatch:
        self._begins_loop = False
        self.participants.begin_batch(batch)
        return batch
