"""Refuse code of the user that changes or measures sharded gradients between the end of a backward
pass and the optimizer step: a norm of shards is not the model's norm.

At this point the user's code runs in hooks, in an ``optimizer_step`` of the user's, in optimizers'
step hooks and, with manual optimization, in ``training_step``. Changes are detected by identity and
version of each ``p.grad``. Changes through ``grad.data`` are missed. Code that reads gradients is
recognized by the names of its functions (``mentions.py``). If this rank has no gradient, a read is
an error (``withheld.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_lightning.compat import step_pre_hooks
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.origin import is_library
from megatron_lightning.strategies.step.gradients.mentions import (
    CLIPS,
    READ_BY_STRATEGY,
    edits_gradients,
    mentioned,
    takes_norms,
)
from megatron_lightning.strategies.step.gradients.withheld import WithheldGradients
from megatron_lightning.strategies.step.overrides import users_methods

_ADVICE = (
    "self.trainer.strategy.gradient_norm() is the norm of all; clip with "
    "Trainer(gradient_clip_val=...) or the LightningModule's clip_gradients(optimizer, "
    "gradient_clip_val=..., gradient_clip_algorithm=...); strategy.gradients() shows what a rank "
    "holds."
)


class _Code(NamedTuple):
    """Code of the user's between backward and step."""

    name: str
    names: frozenset[str]
    """Names mentioned in the code."""


class _Gradient(NamedTuple):
    """The gradient of a parameter at a point in time."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor | None
    version: int


class GradientGuard:
    """Compare gradients around the user's code between a backward pass and the optimizer step.

    Args:
        module: The LightningModule. The module's Trainer has the callbacks.
        accumulation: Holds the gradients.
        parts: Description of each rank's gradient shards, for the message. Empty: full gradients.
            Hooks may change full gradients.
        sharded: Whether ``p.grad`` is None.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        accumulation: GradientAccumulation,
        parts: str,
        *,
        sharded: bool,
    ) -> None:
        self._module = module
        self._accumulation = accumulation
        self._parts = parts
        self._sharded = sharded
        self._known: dict[tuple[int, Any], _Code] = {}
        self._running: list[_Code] = []  # between now and the next check
        self._before: list[_Gradient] = []
        self._withheld = WithheldGradients()
        self._reason = ""  # for withholding gradients
        self._warned: set[str] = set()

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all holders of gradients: the module's parameters, and substitutes stepped by
        optimizers.
        """
        own = dict(self._module.named_parameters())
        targets = self._accumulation.reducer.targets().items()
        return [
            *own.items(),
            *((name, target) for name, target in targets if target is not own.get(name)),
        ]

    @contextmanager
    def around(self, *names: str) -> Generator[None, None, None]:
        """Enter around a call of the hooks of these names. Costs nothing without hooks of the user.

        Raises:
            ConfigError: If a hook of the user changed a gradient, or takes a norm of shards.
        """
        self.check()
        before = self._running
        self._begin([code for name in names for code in self._hooks(name)])
        yield
        self.check()
        self._begin(before)

    def open(self, optimizers: Sequence[object]) -> None:
        """Watch the user's own code from the end of a backward pass on.

        Raises:
            ConfigError: If the code takes a norm of shards.
        """
        self._begin([*self._own_code(), *self._step_hooks(optimizers)] if self._parts else [])

    def close(self) -> None:
        """Watch no longer: another backward pass begins, or the step is over."""
        self._begin([])

    def leave(self) -> None:
        """Restore withheld gradients after the end of the reading code."""
        self._withheld.end()
        self._reason = ""

    def pause(self) -> None:
        """Accept changes until the next :meth:`record`: the precision plugin unscales."""
        self._before = []

    def _hooks(self, name: str) -> list[_Code]:
        methods = users_methods(self._module, name) if self._parts else []
        return [
            self._code(f"{type(owner).__name__}.{name}", hook, owner) for owner, hook in methods
        ]

    def _own_code(self) -> list[_Code]:
        """Return the module's own code for backward and optimizer steps."""
        module = self._module
        codes = self._hooks("optimizer_step")
        if not module.automatic_optimization:
            name = f"{type(module).__name__}.training_step"
            codes.append(self._code(name, module.training_step, module))
        return codes

    def _step_hooks(self, optimizers: Sequence[object]) -> list[_Code]:
        hooks = [
            hook
            for optimizer in optimizers
            if isinstance(optimizer, Optimizer)
            for hook in step_pre_hooks(optimizer)
            if not is_library(hook)
        ]
        return [
            self._code(f"the step hook {getattr(hook, '__qualname__', hook)}", hook, None)
            for hook in hooks
        ]

    def _code(self, name: str, function: Callable[..., Any], owner: object) -> _Code:
        key = (id(owner), getattr(function, "__func__", function))
        if key not in self._known:
            self._known[key] = _Code(name, mentioned(function, owner))
        return self._known[key]

    def _begin(self, codes: list[_Code]) -> None:
        self._withheld.end()
        self._running, self._reason = codes, ""
        self.record()
        for code in codes:
            self._examine(code)
        self._withhold()

    def _withhold(self) -> None:
        if self._reason:
            held = {id(target) for target in self._accumulation.reducer.targets().values()}
            others = [p for p in self._module.parameters() if id(p) not in held]
            self._withheld.begin(others, self._reason)

    def resume(self) -> None:
        """Watch the user's code again, after our code has changed gradients in between."""
        self.record()
        self._withhold()

    def _examine(self, code: _Code) -> None:
        """Refuse, or warn of, reads of gradients in code."""
        takes, aware = takes_norms(code.names), not code.names.isdisjoint(READ_BY_STRATEGY)
        if self._sharded and (takes or not code.names.isdisjoint(CLIPS)):
            self._reason = self._reason or (
                f"{code.name} uses p.grad, which is None on every parameter ({self._parts}): a "
                f"norm would be 0, and clipping would change nothing. {_ADVICE}"
            )
        elif self._sharded and edits_gradients(code.names):
            self._reason = self._reason or (
                f"{code.name} uses p.grad, which is None on every parameter ({self._parts}): what "
                f"it changes would be lost. {_ADVICE}"
            )
        elif aware:  # a module for several strategies chooses by itself
            return
        elif takes:
            raise ConfigError(
                f"{code.name} takes norms of p.grad, of which each rank holds a part "
                f"({self._parts}), so that a norm of them is not the model's. {_ADVICE}"
            )
        elif "grad" in code.names and code.name not in self._warned:
            self._warned.add(code.name)
            held = "is None on every parameter" if self._sharded else "is a part on each rank"
            rank_zero_warn(f"{code.name} reads p.grad, which {held} ({self._parts}). {_ADVICE}")

    def record(self) -> None:
        """Record the current gradients."""
        if self._running:
            self._before = [
                _Gradient(name, parameter, *_version(parameter))
                for name, parameter in self._parameters()
            ]
        else:
            self._before = []

    def check(self) -> None:
        """Compare the gradients with the recorded gradients. Cleared gradients are accepted.

        Raises:
            ConfigError: If a gradient has changed.
        """
        setters = [code.name for code in self._running if "set:grad" in code.names]
        if self._withheld.end() and setters:
            raise ConfigError(
                f"{' or '.join(setters)} sets p.grad to None, which it is on every parameter "
                f"({self._parts}), so that the parameter would be stepped. Set requires_grad=False "
                'before fit, or use data_parallel="ddp".'
            )
        for name, parameter, gradient, version in self._before:
            now, version_now = _version(parameter)
            if now is None or (now is gradient and version_now == version) or not now.any():
                continue
            raise ConfigError(
                f"{' or '.join(code.name for code in self._running)} changed the gradient of "
                f"{name}, or of another parameter in its bucket. Each rank holds a part of the "
                f"gradients ({self._parts}), so that a norm of them is not the model's. {_ADVICE}"
            )


def _version(parameter: nn.Parameter) -> tuple[Tensor | None, int]:
    return parameter.grad, -1 if parameter.grad is None else parameter.grad._version


def describe_parts(context: ParallelContext, data_parallel: str) -> str:
    """Describe the gradient shards of each rank. Empty for full gradients."""
    layout, replicas = context.layout, context.dp_cp.size
    sharded = (
        f', data_parallel="{data_parallel}" over {replicas}'
        if data_parallel != "ddp" and replicas > 1
        else ""
    )
    experts = f", experts {layout.ep} x {layout.etp}" if layout.divides_experts else ""
    return (
        f"tensor {layout.tp} x pipeline {layout.pp}{experts}{sharded}"
        if sharded or layout.model_parallel_size > 1
        else ""
    )
