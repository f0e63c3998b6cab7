"""Intercept the call of the parallel module in a step, on every layout; cross from one pipeline
stage to the next.

Under a pipeline the user's step runs on every stage. Before the call all stages compute the same.
At the call a stage runs its own units on the output of the stage before; then the step is unwound
on every stage but the last, where the call returns the real output and the rest of the step runs.
With one stage the call goes through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from megatron_lightning.errors import PipelineError
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.pipeline.stage import StagePartition


class StageExit(BaseException):
    """Unwinds the user's step on every stage but the last, right after the stage has run."""

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        super().__init__("the step left a pipeline stage")
        self.outputs = outputs


class ParallelCall:
    """Forward pre-hook of the parallel module.

    Under a pipeline it stays after a run, as the module stays divided, and refuses calls outside of
    steps. It is plain data, so that the module can be copied and pickled.

    Args:
        num_ranks: Pipeline ranks that share the module's layers.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open = False

    @classmethod
    def on(cls, module: nn.Module, num_ranks: int, undo: ExitStack) -> ParallelCall:
        """Return the hook of ``module``, new or from an earlier run; with one stage ``undo``
        removes it.
        """
        call = next(
            (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, cls)), None
        )
        if call is None:
            call = cls(num_ranks)
            handle = module.register_forward_pre_hook(call, with_kwargs=True)
            if num_ranks == 1:
                undo.callback(handle.remove)
        return call

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context of a step, in which calls pass."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse calls outside of steps where this rank has only some of the layers."""
        if self._num_ranks > 1 and not self._open:
            raise PipelineError(
                f"{type(module).__name__} was called outside of a training, validation, test or "
                "predict step, and this rank holds only part of its layers (pipeline "
                f"{self._num_ranks}). Call it in a step: trainer.validate and trainer.predict run "
                "one. A checkpoint holds the full model: load_from_checkpoint reads a "
                "consolidated one."
            )


def find_parallel_module(root: nn.Module) -> nn.Module | None:
    """Return the first submodule of ``root`` that declares units or a sharding plan; None if there
    is none.
    """
    divided = (
        child
        for child in root.modules()
        if hasattr(child, "pipeline_units") or hasattr(child, "sharding_plan")
    )
    return next(divided, None)


class StageCrossing:
    """Replacement of the pipelined module's forward by this rank's stages, for one pipeline run.

    Args:
        hook: Name of the user's step, for messages.
        partition: The pipelined module and its stages.
        context: Groups of this rank.
        run_stage: Called with a stage, its forward and the forward's arguments; runs it with its
            parameters gathered.
        reached: Called with the micro-batch, right before the stage runs.
    """

    def __init__(
        self,
        hook: str,
        partition: StagePartition,
        context: ParallelContext,
        *,
        run_stage: Callable[..., Any],
        reached: Callable[[int], None],
    ) -> None:
        self._hook = hook
        self._partition = partition
        self._context = context
        self._run_stage = run_stage
        self._reached = reached
        self._forwards = {stage: partition.view(stage).forward for stage in partition.own}
        self._first = next(iter(inspect.signature(next(iter(self._forwards.values()))).parameters))
        self._stage = self._microbatch = 0
        self._received: tuple[Tensor, ...] | None = None
        self.crossed = False
        """Whether the step has called the module since :meth:`enter`."""

    def is_last(self, stage: int) -> bool:
        """Return whether the step runs to its end on ``stage``."""
        return stage == len(self._partition.stages) - 1

    def enter(self, stage: int, microbatch: int, received: tuple[Tensor, ...] | None) -> None:
        """Set stage, micro-batch and input of the module's next call."""
        self._stage = stage
        self._microbatch = microbatch
        self._received = received
        self.crossed = False

    def installed(self) -> AbstractContextManager[None]:
        """Replace the module's forward by :meth:`cross` inside the block."""
        return replaced_attribute(self._partition.module, "forward", self.cross)

    def cross(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage on the received tensors; return on the last stage only.

        Raises:
            StageExit: On every other stage, with the outputs.
            PipelineError: If a step calls the module in a way that a pipeline cannot run.
        """
        stage, received = self._stage, self._received
        self._check_call()
        self.crossed = True
        if received is not None:
            stage_input = received[0] if len(received) == 1 else received
            if args:
                args = (stage_input, *args[1:])
            else:
                kwargs = {**kwargs, self._first: stage_input}
        self._reached(self._microbatch)
        with self._context.rng.fork("data-parallel-rng"):
            output = self._run_stage(stage, self._forwards[stage], *args, **kwargs)
        if self.is_last(stage):
            return output
        outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
        if not all(isinstance(tensor, Tensor) for tensor in outputs):
            kinds = ", ".join(type(item).__name__ for item in outputs)
            raise PipelineError(
                f"stage {stage} of the pipelined module returned ({kinds}); only tensors travel "
                "between stages. Return a tensor or a tuple of tensors when the last units are "
                "absent."
            )
        raise StageExit(outputs)

    def _check_call(self) -> None:
        if self.crossed:
            raise PipelineError(
                f"{self._hook} called the pipelined module twice on stage {self._stage}, "
                f"micro-batch {self._microbatch}. A pipelined step calls it exactly once; put the "
                "inputs into one batch, or set pipeline_model_parallel_size=1."
            )
        if self._received == ():
            raise PipelineError(
                f"{self._hook} called the pipelined module on stage {self._stage} and not on the "
                "stage before. Whether a step calls it must follow from the batch and its index "
                "alone."
            )


@contextmanager
def replaced_attribute(owner: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Set the instance attribute ``owner.name`` to ``value`` inside the block, and restore it
    after.
    """
    attributes = vars(owner)
    before = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        if before is not None:
            attributes[name] = before
