"""Refuse code of the user that changes or measures sharded gradients between the end of a backward
pass and the optimizer step: a norm of shards is not the model's norm.

At this point the user's code runs in hooks, in an ``optimizer_step`` of the user's, in optimizers'
step hooks and, with manual optimization, in ``training_step``. Changes are detected by identity and
version of each ``p.grad``. Changes through ``grad.data`` are missed. Reads are seen by stand-ins in
the place of each ``p.grad`` while the code runs (``optim/gradients/gradient_proxies.py``).

With manual optimization, stand-ins also show ``p.grad = None`` in the rest of ``training_step``, a
loop that clears gradients of an earlier step. Sharded gradients are then cleared as well.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_lightning.compat import step_pre_hooks
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.optim.gradients.gradient_proxies import StandIn, StandIns
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.origin import is_library
from megatron_lightning.step.judge import Judge
from megatron_lightning.step.overrides import users_hooks

_ADVICE = (
    "self.trainer.strategy.gradient_norm() is the norm of all; clip with "
    "Trainer(gradient_clip_val=...) or the LightningModule's clip_gradients(optimizer, "
    "gradient_clip_val=..., gradient_clip_algorithm=...); strategy.gradients() shows what a rank "
    "holds."
)


_NORMS = frozenset(
    {
        *(Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm),
        *(torch.linalg.matrix_norm, torch._foreach_norm),
    }
)


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
        judge: Verdict on findings. None: nothing is judged, and cleared gradients are followed.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        accumulation: GradientAccumulation,
        parts: str,
        *,
        sharded: bool,
        judge: Judge | None,
    ) -> None:
        self._module = module
        self._accumulation = accumulation
        self._parts = parts
        self._sharded = sharded
        self._judge = judge
        self._running: list[str] = []  # names of the user's code between now and the next check
        self._before: list[_Gradient] = []
        self._stand_ins = StandIns(self._use)
        self._warned: set[str] = set()
        self._may_clear = False  # before the next backward pass

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all holders of gradients: the module's parameters, and substitutes stepped by
        optimizers.
        """
        parameters = dict(self._module.named_parameters())
        targets = self._accumulation.reducer.targets().items()
        return [
            *parameters.items(),
            *((name, target) for name, target in targets if target is not parameters.get(name)),
        ]

    @contextmanager
    def around(self, *names: str) -> Generator[None, None, None]:
        """Enter around a call of the hooks of these names. Costs nothing without hooks of the user.

        Raises:
            ConfigError: If a hook of the user changed a gradient, or takes a norm of shards.
        """
        running_before, are_read = self._running, bool(self._stand_ins)
        self.check()
        self._begin([hook for name in names for hook in self._hooks(name)])
        yield
        self.check()
        self._begin(running_before, are_read=are_read)

    def open(self, optimizers: Sequence[object]) -> None:
        """Watch the user's own code from the end of a backward pass on."""
        judged = self._parts and self._judge is not None
        self._begin([*self._own_code(), *_step_hooks(optimizers)] if judged else [])

    def close(self) -> None:
        """Watch no longer: another backward pass begins, or the step is over."""
        self._begin([])

    def leave(self) -> None:
        """Watch reads no longer: the user's ``training_step`` is over."""
        self._remove_stand_ins()

    def follow_clearing(self) -> None:
        """Follow the user's own code from here to the next backward pass: a gradient set to None is
        cleared on all ranks. For manual optimization with sharded gradients.
        """
        self._begin(self._own_code(), may_clear=True)

    def pause(self) -> None:
        """Accept changes until the next :meth:`record`: the precision plugin unscales."""
        self._before = []

    @contextmanager
    def own_change(self) -> Generator[None, None, None]:
        """Enter around a change of the gradients by our own code, called by the user's.

        Raises:
            ConfigError: If the user's code changed a gradient before.
        """
        are_read, running = bool(self._stand_ins), self._running
        self.check()
        yield
        self._running = running
        self.record()  # gradients in a bucket share a version
        if are_read:
            self._watch_reads()

    def _hooks(self, name: str) -> list[str]:
        judged = self._parts and self._judge is not None
        return users_hooks(self._module, name) if judged else []

    def _own_code(self) -> list[str]:
        """Return the names of the module's own code for backward and optimizer steps."""
        module = self._module
        steps = [] if module.automatic_optimization else [f"{type(module).__name__}.training_step"]
        return [*self._hooks("optimizer_step"), *steps]

    def _begin(self, code: list[str], *, are_read: bool = True, may_clear: bool = False) -> None:
        self._remove_stand_ins()
        self._running, self._may_clear = code, may_clear
        self.record()
        if code and are_read:
            self._watch_reads()

    def _watch_reads(self) -> None:
        self._stand_ins.show(gradient.parameter for gradient in self._before)
        if self._sharded:
            target_ids = {id(target) for target in self._accumulation.reducer.targets().values()}
            self._stand_ins.replace_missing(
                parameter
                for parameter in self._module.parameters()
                if id(parameter) not in target_ids
            )

    def _use(self, stand_in: StandIn, func: Callable[..., Any]) -> None:
        """Refuse, or warn of, the use of a gradient by code of the user's."""
        code = " or ".join(self._running)
        if stand_in.gradient is None:
            clear = "Clear gradients by optimizer.zero_grad(). " if self._may_clear else ""
            self._refuse(
                f"{code} uses p.grad, which is None on every parameter ({self._parts}): a norm "
                f"would be 0, and a change would be lost. {clear}{_ADVICE}"
            )
            return
        if not self._stand_ins:  # kept by the code for later
            return
        if func in _NORMS:
            self._refuse(
                f"{code} takes norms of p.grad, of which each rank holds a part "
                f"({self._parts}), so that a norm of them is not the model's. {_ADVICE}"
            )
        elif code not in self._warned and self._judge is not None:
            self._warned.add(code)
            self._judge.warn(
                f"{code} reads p.grad, which is a part on each rank ({self._parts}). {_ADVICE}"
            )

    def _refuse(self, text: str) -> None:
        if self._judge is not None:
            self._judge.refuse(ConfigError(text))

    def _remove_stand_ins(self) -> bool:
        """Restore the gradients. Return whether the user's code has set sharded gradients to None
        where they cannot be cleared.
        """
        cleared = [at for at, stand_in in self._stand_ins.remove() if stand_in.gradient is None]
        if not cleared or not self._may_clear:
            return bool(cleared)
        ids = {id(parameter) for parameter in cleared}
        targets = self._accumulation.reducer.targets()
        for name, parameter in self._module.named_parameters():
            if id(parameter) in ids and name in targets:
                targets[name].grad = None
        return False

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
        if self._remove_stand_ins():
            self._refuse(
                f"{' or '.join(self._running)} sets p.grad to None, which it is on every parameter "
                f"({self._parts}), so that the parameter would be stepped. Clear gradients by "
                "zero_grad() of the optimizer, before the backward pass; set requires_grad=False "
                'before fit for parameters that are not trained, or use data_parallel="ddp".'
            )
        for name, parameter, gradient, version in self._before:
            view, version_now = _version(parameter)
            if gradient is None and self._may_clear:
                continue  # a backward pass of the user's own, which unreduced_gradients judges
            if view is None or (view is gradient and version_now == version) or not view.any():
                continue
            self._refuse(
                f"{' or '.join(self._running)} changed the gradient of "
                f"{name}, or of another parameter in its bucket. Each rank holds a part of the "
                f"gradients ({self._parts}), so that a norm of them is not the model's. {_ADVICE}"
            )
            return


def _step_hooks(optimizers: Sequence[object]) -> list[str]:
    """Return the names of the user's hooks before the step of an optimizer."""
    return [
        f"the step hook {getattr(hook, '__qualname__', hook)}"
        for optimizer in optimizers
        if isinstance(optimizer, Optimizer)
        for hook in step_pre_hooks(optimizer)
        if not is_library(hook)
    ]


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
