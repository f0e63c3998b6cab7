"""Refuse what the user's hooks do to gradients of which each rank holds a part: a norm of them is
not the model's.

Changes are seen by the identity and the version of each ``p.grad``; what is written through
``grad.data`` is not.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import lightning.pytorch as pl
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.accumulation import GradientAccumulation
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.strategies.step.overrides import users_hooks


class GradientGuard:
    """Compare gradients before and after the hooks between a backward pass and the optimizer step.

    Args:
        module: The LightningModule; its Trainer has the callbacks.
        accumulation: Has the gradients.
        parts: What each rank holds of them, for the message; empty: full gradients, which hooks may
            change.
    """

    def __init__(
        self, module: pl.LightningModule, accumulation: GradientAccumulation, parts: str
    ) -> None:
        self._module = module
        self._accumulation = accumulation
        self._parts = parts
        self._hooks: list[str] = []  # of the user's, which run now
        self._before: list[tuple[Tensor | None, int]] = []

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all that carries gradients: the module's parameters, and what optimizers step in
        their place.
        """
        own = dict(self._module.named_parameters())
        targets = self._accumulation.reducer.targets().items()
        return [
            *own.items(),
            *((name, target) for name, target in targets if target is not own.get(name)),
        ]

    @contextmanager
    def around(self, *names: str) -> Generator[None, None, None]:
        """Around a call of the hooks of these names; costs nothing where none is the user's.

        Raises:
            ConfigError: If one of the user's changed a gradient.
        """
        self._hooks = [
            hook for name in names if self._parts for hook in users_hooks(self._module, name)
        ]
        self.record()
        yield
        self.check()
        self._hooks = []
        self._before = []

    def record(self) -> None:
        """Record the gradients as they are now."""
        if self._hooks:
            self._before = [_version(parameter) for _, parameter in self._parameters()]

    def check(self) -> None:
        """Compare the gradients with those that were recorded.

        Raises:
            ConfigError: If one has changed.
        """
        if not self._hooks:
            return
        for (name, parameter), (gradient, version) in zip(
            self._parameters(), self._before, strict=True
        ):
            now, version_now = _version(parameter)
            if now is not gradient or version_now != version:
                raise ConfigError(
                    f"{' or '.join(self._hooks)} changed the gradient of {name}, or of another "
                    "parameter in its bucket. Each rank holds a part of the gradients "
                    f"({self._parts}), so that a norm of them is not the model's. Set "
                    "Trainer(gradient_clip_val=...), or call the LightningModule's "
                    "clip_gradients(optimizer, gradient_clip_val=..., "
                    "gradient_clip_algorithm=...); strategy.gradients() shows what a rank holds."
                )


def _version(parameter: nn.Parameter) -> tuple[Tensor | None, int]:
    return parameter.grad, -1 if parameter.grad is None else parameter.grad._version


def describe_parts(context: ParallelContext, data_parallel: str) -> str:
    """Return what parts of the gradients each rank holds; empty if it holds full ones."""
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
