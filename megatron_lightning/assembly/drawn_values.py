"""Values drawn by hooks into shards and stages, over the runs of a module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron_lightning.assembly.draws import check_draws, equal_shards
from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.stage_draws import StageDraws
from megatron_lightning.parallel.grid.context import ParallelContext


class DrawnValues:
    """Compare shards, and layers of stages, with their values when training was set up.

    Args:
        equal: Shards allowed to be equal, by parameter and axis. None: not known yet.
    """

    def __init__(self, equal: Sequence[tuple[str, str]] | None = None) -> None:
        self._equal = equal
        self._stages: StageDraws | None = None

    def of_next_run(self) -> DrawnValues:
        """Return the comparison for a second run of the same module. Hooks may draw before the
        setup of the second run.
        """
        return DrawnValues(self._equal)

    def record(self, module: nn.Module, part: Part, context: ParallelContext) -> None:
        """Record the equal shards and layers. A collective."""
        self._stages = StageDraws(module, part, context)
        if self._equal is None:
            self._equal = equal_shards(module, part.specs, context)

    def forget(self) -> None:
        """Accept shards made equal by a checkpoint, from the next :meth:`record` on."""
        self._equal = None

    def check(self, module: nn.Module, part: Part, context: ParallelContext) -> None:
        """Check that no hook drew the same numbers into different shards, or into layers of
        different stages. A collective.

        Raises:
            ShardingError: If a hook did.
        """
        check_draws(module, part.specs, context, self._equal or ())
        if self._stages is not None:
            self._stages.check()
