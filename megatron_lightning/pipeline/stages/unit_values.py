"""Values that units set on themselves, such as ``self.aux_loss = ...`` in a block's forward.

Code behind the units finds the values of the last stage's units. On units of earlier stages the
values are missing, or left from another micro-batch. In a run without values every stage records
the attributes changed by the stage's units. In later steps the same attributes of units before the
last stage hold placeholders that refuse reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_lightning.parallel.shards.other_stages import AbsentTensor
from megatron_lightning.pipeline.batch.module_state import ModuleState, is_of_library
from megatron_lightning.pipeline.batch.records import MISSING
from megatron_lightning.pipeline.stages.stage import StagePartition

Left = tuple[int, str, str]
"""Index of a unit, path of a module in the unit, name of an attribute."""

_ADVICE = (
    "The unit leaves it on itself in its forward. Return it from the unit, so that it is handed "
    "on, or report a loss by a StepReport in the unit (docs/own_model.md)."
)


class UnitValues:
    """Values that units of this rank set on themselves in a run."""

    def __init__(self) -> None:
        self.left: set[Left] = set()
        self._states: list[ModuleState] = []

    @contextmanager
    def seen(self, index: int, unit: nn.Module) -> Iterator[None]:
        """Context of a unit's forward."""
        if index < 0 and is_of_library(unit):  # a model that sets up itself in the first call
            yield
            return
        state = ModuleState(unit, nn.Module, (), (0,), torch.device("cpu"))
        state.begin(undone=True)
        yield
        self._states.append(state)
        self.left |= {(index, path[0], str(path[1])) for path in state.changed_paths()}

    def undo(self) -> None:
        """Restore the values before the run."""
        while self._states:
            self._states.pop().undo()


class AbsentValues:
    """Placeholders for values that units before the last stage set on themselves."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def show(self, left: Collection[Left], partition: StagePartition) -> None:
        """Set placeholders for ``left``.

        Args:
            left: Attributes of units before the last stage.
            partition: The pipelined module and the module's units.
        """
        if self._before:
            return
        for index, path, name in left:
            unit = partition.name_of(index)
            owner = vars(partition.module.get_submodule(f"{unit}.{path}" if path else unit))
            self._before.append((owner, name, owner.get(name, MISSING)))
            place = ".".join(filter(None, (unit, path, name)))
            owner[name] = AbsentTensor.of(torch.empty((), device="meta"), place, advice=_ADVICE)

    def hide(self) -> None:
        """Set the values replaced by placeholders again."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is MISSING:
                owner.pop(name, None)
            else:
                owner[name] = value
