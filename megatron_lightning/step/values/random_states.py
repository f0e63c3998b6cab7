"""Equal random states on all stages, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from megatron_lightning.parallel.random.replica_rng import ReplicaRng
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun


class RandomStates(StepParticipant):
    """Give every stage the random numbers of one device for draws outside of layers.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        self._rng = ReplicaRng(scope.context.device)
        self._streams = scope.context.rng

    def begin(self, run: StepRun) -> None:
        """Record the random state at the start of the first micro-batch."""
        self._rng.begin_step()

    def around_forward(
        self, run: StepRun, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """Restore the random state at the start of the micro-batch."""
        self._rng.begin_microbatch(microbatch)
        return nullcontext()

    def at_call(self, microbatch: int) -> None:
        """Record the random state at the start of the next micro-batch."""
        self._rng.at_call(microbatch)

    def end(self, run: StepRun) -> None:
        """Set the random state, equal on all stages."""
        self._rng.end_step()

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Restore all states after the block."""
        states, streams = self._rng.everything(), self._streams.state_dict()
        self._rng.begin_step()
        yield
        self._rng.restore(states)
        self._streams.load_state_dict(streams)
