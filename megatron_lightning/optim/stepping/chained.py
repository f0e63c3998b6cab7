"""A chain of optimizers as a single optimizer, for instance Muon for matrices and AdamW for the
rest.

Lightning's automatic optimization takes a single optimizer. The chain shares groups and state with
the inner optimizers: learning-rate schedulers, checkpoints and the distributed optimizer see a
single list of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.errors import ConfigError


class ChainedOptimizer(Optimizer):
    """Step ``optimizers`` in turn."""

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers or any(optimizer.state for optimizer in optimizers):
            raise ConfigError(
                f"ChainedOptimizer was given {len(optimizers)} optimizers, or used ones. Give it "
                "one or more new ones."
            )
        self.optimizers: tuple[Optimizer, ...] = ()
        super().__init__(
            [group for optimizer in optimizers for group in optimizer.param_groups], {}
        )
        self.optimizers = optimizers
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group at construction."""
        if self.optimizers:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise ConfigError(
                f"a parameter group was added to a chain of {kinds}, and it is unknown which of "
                "them is to step it. Add it to one of the optimizers before they are chained."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every optimizer. ``closure`` computes the loss once."""
        loss: Tensor | float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Share these groups and this state with the optimizers inside."""
        first = 0
        for optimizer in self.optimizers:
            last = first + len(optimizer.param_groups)
            optimizer.param_groups = self.param_groups[first:last]
            optimizer.state = self.state
            first = last


def members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a chain, or ``optimizer`` itself."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
