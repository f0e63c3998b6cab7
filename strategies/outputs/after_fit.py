"""Full weights of a run's module, and a warning against saving one rank's part as the full
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from megatron_lightning.assembly.state.full_state import FullState
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure_watch import is_lost_connection
from megatron_lightning.step.judge import Judge
from megatron_lightning.strategies.lightning_internals import saves_or_loads


class PartWarning:
    """Warning about ``state_dict()`` of a part, given once.

    Args:
        judge: Gives the warning. None: the user has passed the guard.
    """

    def __init__(self, judge: Judge | None) -> None:
        self._judge = judge
        self._given = False

    def __call__(self, path: str) -> None:
        """Warn, unless a checkpoint is made or this package asks."""
        if self._judge is None or self._given or saves_or_loads():
            return
        self._given = True
        place = f"module.{path}" if path else "module"
        argument = place if path else ""
        self._judge.warn(
            f"{place}.state_dict() has the part of the model that this rank holds. To save the "
            f"model, write on every rank: state = trainer.strategy.full_state_dict({argument}), "
            "which is full on rank 0 and empty on the others; then, if trainer.is_global_zero: "
            "torch.save(state, path)."
        )


@contextmanager
def called_by_all(call: str) -> Iterator[None]:
    """Explain the loss of another rank during ``call``, a collective, when no watch for failures
    runs any more.

    Raises:
        ConfigError: If another rank's program has ended.
    """
    try:
        yield
    except Exception as error:
        if not is_lost_connection(error):
            raise
        raise ConfigError(
            f"{call} waits for all ranks, and the program of another rank has ended or has failed. "
            "If nothing is printed there, it did not make the call: call it on all ranks, outside "
            "of `if trainer.is_global_zero:`, and use the result on rank 0."
        ) from error


def full_state(state: ModuleState, local: Mapping[str, Any], module: nn.Module | None) -> FullState:
    """Collect the state of the LightningModule, or of a sub-module. All ranks call this.

    Raises:
        ConfigError: If ``module`` is no part of the LightningModule.
    """
    return FullState(state, local, "" if module is None else path_of(state.module, module))


def path_of(root: nn.Module, module: nn.Module) -> str:
    """Return the path of a sub-module.

    Raises:
        ConfigError: If ``module`` is no sub-module of ``root``.
    """
    for path, child in root.named_modules():
        if child is module:
            return str(path)
    raise ConfigError(
        f"{type(module).__name__} is no sub-module of the {type(root).__name__} that this strategy "
        "has run. Pass a sub-module of it, such as module.model, or nothing for all of it."
    )
