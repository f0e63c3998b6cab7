"""Protocol of a concern that takes part in every step, and the list of all concerns.

A step knows no concern by name. The step works through an ordered list (``participants.py``), so a
new concern is a file and a line in the list. A participant overrides methods as needed:

    hooks_ran(batch)                       before repairs of what hooks have written
    begin_batch(batch)                     before the user's step, on all ranks
      begin(run)                           before a run of the step on the micro-batches
        around(run)                        all forwards, under a pipeline also all backwards
          around_forward(run, stage, m)    the user's step on micro-batch m, on a stage
            at_call(m)                     the step calls the pipelined module
          returned(run, m, loss)           the training step has returned
          around_backward(run, m)
        after_backward()                   of a training run: all ranks call this together
      end(run)
      before_reduction(run)                ranks that share sequences reduce outputs next
      share(run) -> apply(run, shared)     the last stage sends, and every stage applies
    end_batch(batch, output)
    before_update() -> bool                gradients are reduced: may the optimizer step?
    after_update(stepped)
    end_training()                         after the last batch of a fit

Windows onto user code, for guards (``guards/``), form a closed list:

    user_code(where, number)               around a hook of the module or of a callback
    collective(name)                       user code asks the strategy for a collective
    backward_begins(...)                   gradients of a batch begin
    gradients_ready()                      gradients are complete, until the optimizer step
    step_begins(opt), step_ends(opt)       around an optimizer step
    loaded()                               a checkpoint was loaded

With manual optimization updates happen inside of the step. Explicit steps have several runs in a
batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from megatron_lightning.pipeline.executor import Observer
from megatron_lightning.step.step_run import StepRun


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """A batch of Lightning, before the step splits the batch."""

    hook: str
    """Name of the user's step, such as ``"training_step"``."""
    value: Any
    """The batch of this rank."""
    indices: tuple[Any, ...] = ()
    """Further arguments of a training step."""
    loader: tuple[Any, ...] = ()
    """Index of the DataLoader, if there are several."""
    number: int = 0
    """Number of a training batch in the epoch, from 1."""
    num_samples: int = 0
    """Samples of a training batch on this rank."""
    begins_loop: bool = False
    """Whether this is the first batch of an epoch or of an evaluation: hooks have run."""
    is_first: bool = False
    """Whether this is the first batch of the step and DataLoader in the run."""
    compares: bool = False
    """Whether hooks have run and may have left different values on different ranks."""

    @property
    def trains(self) -> bool:
        """Whether the batch is trained on."""
        return self.hook == "training_step"


class StepParticipant:
    """A concern in the steps of a run of the Trainer. Every method does nothing by default."""

    vetoes: ClassVar[bool] = False
    """Whether :meth:`before_update` may return False. Gradients are then computed before the
    optimizer's step, not in the closure of the step.
    """
    observer: Observer | None = None
    """Observer of the actions in a training pipeline run."""

    def hooks_ran(self, batch: StepBatch) -> None:
        """Look at what hooks have left before a batch, and before repairs. All ranks call this
        together.
        """

    def begin_batch(self, batch: StepBatch) -> None:
        """Begin a batch. All ranks call this together."""

    def end_batch(self, batch: StepBatch, output: Any) -> None:
        """End a batch, given the step's ``output``. All ranks call this together."""

    def begin(self, run: StepRun) -> None:
        """Begin a run of the step on the micro-batches of a batch."""

    def around(self, run: StepRun) -> AbstractContextManager[None]:
        """Return the context of all forwards and, under a pipeline, of all backwards."""
        return nullcontext()

    def around_forward(
        self, run: StepRun, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """Return the context of the user's step on a micro-batch, on ``stage``."""
        return nullcontext()

    def at_call(self, microbatch: int) -> None:
        """Take note of a call of the pipelined module in the step of ``microbatch``."""

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Take note of a training step's return on the last stage.

        Args:
            run: The run, with the output.
            microbatch: Number of the micro-batch.
            loss: The loss before any scaling. None: the step returned None.
        """

    def around_backward(self, run: StepRun, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of the backward of a micro-batch."""
        return nullcontext()

    def after_backward(self) -> None:
        """Follow the backwards of a training run. All ranks call this together."""

    def end(self, run: StepRun) -> None:
        """End a run, before values are shared."""

    def before_reduction(self, run: StepRun) -> None:
        """Look at the outputs of a run on the last stage, before ranks reduce them."""

    def share(self, run: StepRun) -> Any:
        """Return the data sent by the last stage to the other stages: numbers, tensors, names and
        containers.
        """

    def apply(self, run: StepRun, shared: Any) -> None:
        """Apply the last stage's result of :meth:`share`. Every stage calls this."""

    def tensors(self) -> Sequence[Tensor]:
        """Return tensors left behind by the step, beside the output."""
        return ()

    def repeated(self) -> AbstractContextManager[None]:
        """Return the context of a forward repeated as a check, without recording."""
        return nullcontext()

    def rehearsed(self) -> AbstractContextManager[None]:
        """Return the context of a run without values, before the first micro-batch of a kind. The
        run leaves nothing behind.
        """
        return nullcontext()

    def user_code(self, where: str, number: int) -> AbstractContextManager[None]:
        """Return the context of a hook of the user's, outside of steps.

        Args:
            where: Hook and class, for messages.
            number: Number of the call, from 1.
        """
        return nullcontext()

    def collective(self, name: str) -> None:
        """Take note of a collective of all ranks that user code has asked the strategy for."""

    def backward_begins(self, *, clear: bool, keep_earlier: bool) -> None:
        """Take note that gradients of a batch begin. Arguments as those of
        :meth:`GradientAccumulation.begin_run`.
        """

    def gradients_ready(self) -> None:
        """Take note of complete gradients. User code runs until the optimizer step."""

    def step_begins(self, optimizer: Any) -> None:
        """Take note of a call of an optimizer's step."""

    def step_ends(self, optimizer: Any) -> None:
        """Take note of the end of an optimizer's step, or of a skipped step."""

    def loaded(self) -> None:
        """Take note of weights loaded from a checkpoint. A collective."""

    def follow_parameters(self) -> None:
        """Take note of newly trainable parameters, or of changed parameter groups."""

    def before_update(self) -> bool:
        """Return whether the optimizer may step. Equal on all ranks.

        Gradients are reduced and not clipped yet. Optimizers with a line search ask at every
        evaluation of the loss.
        """
        return True

    def after_update(self, *, stepped: bool) -> None:
        """Follow an optimizer step.

        Args:
            stepped: Whether the optimizer has stepped: no participant and no loss scale has skipped
                the step.
        """

    def end_training(self) -> None:
        """End a fit. All ranks call this together."""


class Participants:
    """The participants of a run in order. Methods without an override cost nothing."""

    def __init__(self, participants: Iterable[StepParticipant]) -> None:
        everybody = tuple(participants)
        self._overriding = {
            name: tuple(
                participant
                for participant in everybody
                if getattr(type(participant), name) is not getattr(StepParticipant, name)
            )
            for name, method in vars(StepParticipant).items()
            if callable(method)
        }
        self.vetoes = any(participant.vetoes for participant in everybody)
        """Whether a participant may keep an optimizer from stepping."""
        self.observers = [
            participant.observer for participant in everybody if participant.observer is not None
        ]
        """Observers of the actions in a training pipeline run."""

    def overrides(self, method: str) -> bool:
        """Return whether a participant overrides a method."""
        return bool(self._overriding[method])

    def begin_batch(self, batch: StepBatch) -> None:
        """See :meth:`StepParticipant.begin_batch`, as for all methods."""
        for participant in self._overriding["hooks_ran"]:
            participant.hooks_ran(batch)
        for participant in self._overriding["begin_batch"]:
            participant.begin_batch(batch)

    def end_batch(self, batch: StepBatch, output: Any) -> None:
        """End a batch."""
        for participant in self._overriding["end_batch"]:
            participant.end_batch(batch, output)

    def begin(self, run: StepRun) -> None:
        """Begin a run."""
        for participant in self._overriding["begin"]:
            participant.begin(run)

    @contextmanager
    def around(self, run: StepRun) -> Iterator[None]:
        """Around a run."""
        with ExitStack() as contexts:
            for participant in self._overriding["around"]:
                contexts.enter_context(participant.around(run))
            yield

    @contextmanager
    def around_forward(self, run: StepRun, stage: int, microbatch: int) -> Iterator[None]:
        """Around a forward."""
        with ExitStack() as contexts:
            for participant in self._overriding["around_forward"]:
                contexts.enter_context(participant.around_forward(run, stage, microbatch))
            yield

    def at_call(self, microbatch: int) -> None:
        """Follow the call of the pipelined module."""
        for participant in self._overriding["at_call"]:
            participant.at_call(microbatch)

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Follow the end of a training step."""
        for participant in self._overriding["returned"]:
            participant.returned(run, microbatch, loss)

    @contextmanager
    def around_backward(self, run: StepRun, microbatch: int) -> Iterator[None]:
        """Around a backward."""
        with ExitStack() as contexts:
            for participant in self._overriding["around_backward"]:
                contexts.enter_context(participant.around_backward(run, microbatch))
            yield

    def after_backward(self) -> None:
        """Follow the backwards of a run."""
        for participant in self._overriding["after_backward"]:
            participant.after_backward()

    def end(self, run: StepRun) -> None:
        """End a run."""
        for participant in self._overriding["end"]:
            participant.end(run)

    def before_reduction(self, run: StepRun) -> None:
        """Look at outputs."""
        for participant in self._overriding["before_reduction"]:
            participant.before_reduction(run)

    def share(self, run: StepRun) -> list[Any]:
        """Return the data sent by the last stage, in the order of the participants."""
        return [participant.share(run) for participant in self._overriding["share"]]

    def apply(self, run: StepRun, shared: Sequence[Any]) -> None:
        """Apply the last stage's result of :meth:`share`."""
        for participant, value in zip(self._overriding["share"], shared, strict=True):
            participant.apply(run, value)

    def tensors(self) -> list[Tensor]:
        """Return the tensors left behind by the step."""
        return [
            tensor
            for participant in self._overriding["tensors"]
            for tensor in participant.tensors()
        ]

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Enter around a repeated forward."""
        with ExitStack() as contexts:
            for participant in self._overriding["repeated"]:
                contexts.enter_context(participant.repeated())
            yield

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Around a run without values."""
        with ExitStack() as contexts:
            for participant in self._overriding["rehearsed"]:
                contexts.enter_context(participant.rehearsed())
            yield

    @contextmanager
    def user_code(self, where: str, number: int) -> Iterator[None]:
        """Around a hook of the user's."""
        with ExitStack() as contexts:
            for participant in self._overriding["user_code"]:
                contexts.enter_context(participant.user_code(where, number))
            yield

    def collective(self, name: str) -> None:
        """Follow a collective."""
        for participant in self._overriding["collective"]:
            participant.collective(name)

    def backward_begins(self, *, clear: bool, keep_earlier: bool) -> None:
        """Follow the beginning of gradients."""
        for participant in self._overriding["backward_begins"]:
            participant.backward_begins(clear=clear, keep_earlier=keep_earlier)

    def gradients_ready(self) -> None:
        """Follow complete gradients."""
        for participant in self._overriding["gradients_ready"]:
            participant.gradients_ready()

    def step_begins(self, optimizer: Any) -> None:
        """Follow an optimizer."""
        for participant in self._overriding["step_begins"]:
            participant.step_begins(optimizer)

    def step_ends(self, optimizer: Any) -> None:
        """Follow an optimizer."""
        for participant in self._overriding["step_ends"]:
            participant.step_ends(optimizer)

    def loaded(self) -> None:
        """Follow a load."""
        for participant in self._overriding["loaded"]:
            participant.loaded()

    def follow_parameters(self) -> None:
        """Follow other parameters."""
        for participant in self._overriding["follow_parameters"]:
            participant.follow_parameters()

    def before_update(self) -> bool:
        """Return whether the optimizer may step. Every participant is asked."""
        verdicts = [
            participant.before_update() for participant in self._overriding["before_update"]
        ]
        return all(verdicts)

    def after_update(self, *, stepped: bool) -> None:
        """Follow an optimizer step."""
        for participant in self._overriding["after_update"]:
            participant.after_update(stepped=stepped)

    def end_training(self) -> None:
        """End a fit."""
        for participant in self._overriding["end_training"]:
            participant.end_training()
