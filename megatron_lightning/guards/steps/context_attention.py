"""Refuse attention that sees the tokens of one rank only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.guards.watches.attention_watch import AttentionWatch
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun
from megatron_lightning.step.values.sequence_parts import calls_with_positions


class ContextAttention(Guard):
    """Watch the first run of every kind of step. Later runs do the same."""

    sentence = (
        "context parallelism: the model computes attention outside of the modules that its "
        "sharding plan binds, so that a token sees the tokens of one rank only"
    )

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        self._calls = calls_with_positions(scope)
        self._seen: set[str] = set()

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether ranks share sequences."""
        return scope.context.cp.size > 1

    @contextmanager
    def around(self, run: StepRun) -> Iterator[None]:
        """Watch the attention of all forwards."""
        if run.hook in self._seen:
            yield
            return
        self._seen.add(run.hook)
        with AttentionWatch(self.scope.module, self.judge) as watch:
            yield
        if run.hook == "training_step":  # an evaluation may do without the model
            watch.check()
        for path, (plan, call) in self._calls.items():
            prefix = f"{path}." if path else ""
            ran = any(called.startswith(prefix) for called in watch.called)
            if plan.positions and ran and not call.was_called:
                self._refuse(run.hook, self.scope.module.get_submodule(path))

    def _refuse(self, hook: str, model: nn.Module) -> None:
        self.judge.refuse(
            ConfigError(
                f"{hook} ran attention of a {type(model).__name__} and did not call the module "
                "itself, so that it could not be given the positions of this rank's tokens. Call "
                "it, not its parts or its forward; a sharding_plan() belongs to the module that "
                "the step calls with tokens. Or set context_parallel_size to 1."
            )
        )
