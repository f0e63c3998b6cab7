"""Forwards of a rank's stages outside of the steps of a training: text, scores, exports.

Every stage knows the arguments of every call, so no dependency run is needed. The runner asks for a
call when the call is due: a call may follow from the results of earlier calls, as the next token
follows from the previous token. Results stay on the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron_lightning.assembly.part import Part
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.pipeline.channel import StageTensors
from megatron_lightning.pipeline.executor import KnownBoundaries, PipelineExecutor
from megatron_lightning.pipeline.schedules import forward_only, sweep
from megatron_lightning.pipeline.schedules.actions import Schedule
from megatron_lightning.pipeline.stages.crossing import StageCrossing, StageExit
from megatron_lightning.pipeline.stages.dependencies import CallFacts, Uses
from megatron_lightning.pipeline.stages.parallel_call import ParallelCall

_MOST_SIGNATURES = 64
"""Known shapes of messages before all are dropped, since texts have many shapes."""


class StageCall(NamedTuple):
    """Arguments of a call of the module, equal on all stages."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signature: Hashable
    """Key of the shapes between stages."""


class StageRunner:
    """Runs calls of a module through the stages, forward only.

    Args:
        module: The module partitioned into stages. With a single stage any module.
        part: Description of this rank's part of the module.
        context: Groups of this rank.
        executor: Runs the stages.
    """

    def __init__(
        self, module: nn.Module, part: Part, context: ParallelContext, executor: PipelineExecutor
    ) -> None:
        self._module = module if part.partition is None else part.partition.module
        self._part = part
        self._context = context
        self._executor = executor
        self._tables: dict[tuple[int, int], Schedule] = {}
        self._known = KnownBoundaries()
        self._facts = CallFacts(Uses())

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return self._executor.placement.num_ranks

    def run(
        self,
        num_calls: int,
        call: Callable[[int], StageCall],
        finish: Callable[[int, Any], None],
        *,
        group_size: int = 1,
    ) -> None:
        """Run calls. All ranks that share the module run the calls together.

        Args:
            num_calls: Number of calls.
            call: Returns a call by index. Every stage asks when the call is due there: calls of a
                group of ``group_size`` pass all stages before the next group begins.
            finish: Takes index and output of a call, on the last stage, and may call units of the
                stage.
            group_size: Calls in flight at once.
        """
        if self._part.partition is None:
            for index in range(num_calls):
                args, kwargs, _ = call(index)
                finish(index, self._module(*args, **kwargs))
            return
        crossing = StageCrossing(
            "generate", self._part.partition, self._context, self._facts, run_stage=self._run_stage
        )
        key = num_calls, group_size
        if key not in self._tables:
            table = sweep(self._executor.placement, num_calls, group_size=group_size)
            self._tables[key] = forward_only(table)
        streams = self._context.rng.state_dict()
        with self._opened(), crossing.installed():
            self._executor.run(
                self._tables[key],
                _Calls(call, finish, self._module, crossing),
                backward=False,
                asks_when_due=True,
                known=self._known,
            )
        # A training draws as if there had been no calls.
        self._context.rng.load_state_dict(streams)
        # Every length of a text is a signature of its own, and a long run of generation would
        # collect them without end. All ranks have counted alike, so that all forget at once.
        if len(self._known.numbers) > _MOST_SIGNATURES:
            self._known.forget()
            self._facts.notes.clear()

    def _run_stage(self, stage: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        units = self._part.units
        if units is None:
            return forward(*args, **kwargs)
        return units.call(stage, forward, *args, **kwargs)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Allow calls of the module that training refuses outside of steps."""
        hooks = self._module._forward_pre_hooks.values()
        with ExitStack() as stack:
            for hook in hooks:
                if isinstance(hook, ParallelCall):
                    stack.enter_context(hook.in_step())
            yield


class _Calls:
    """Calls of the module as a program of the executor."""

    def __init__(
        self,
        call: Callable[[int], StageCall],
        finish: Callable[[int, Any], None],
        module: nn.Module,
        crossing: StageCrossing,
    ) -> None:
        self._call = call
        self._finish = finish
        self._module = module
        self._crossing = crossing
        self._due: dict[int, StageCall] = {}

    def signature(self, microbatch: int) -> Hashable:
        """Ask for the call that is due now."""
        self._due[microbatch] = self._call(microbatch)
        return self._due[microbatch].signature

    def forward(
        self, stage: int, microbatch: int, received: StageTensors | None
    ) -> tuple[Tensor, ...] | None:
        """Run a call on the stage."""
        args, kwargs, signature = self._due[microbatch]
        self._crossing.enter(stage, microbatch, received, signature)
        try:
            output = self._module(*args, **kwargs)
        except StageExit as left:
            return left.outputs
        with self._crossing.suspended():
            self._finish(microbatch, output)
        return None

    recomputing = completing = staticmethod(lambda *_: nullcontext())  # there is no backward
