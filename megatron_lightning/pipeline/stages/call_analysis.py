"""Find out what the stages of a pipelined module have to send, in a run without values.

Before the first micro-batch of a kind of call is run, every stage runs its forward once on
placeholders, in order, under :class:`~megatron_lightning.pipeline.stages.taint.Taint`. What the
stages have seen together says which outputs a boundary carries. A run of the full model on example
inputs (``analysis``) also sees what crosses stages by other ways, but a step may call the model
otherwise than the example does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.rng import host_state
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.pipeline.stages.taint import TAIL, Taint, Uses
from megatron_lightning.pipeline.stages.unit_values import UnitValues
from megatron_lightning.pipeline.stages.visit import CallFacts


class CallAnalysis:
    """One run of all stages without values.

    Args:
        partition: The pipelined module and its stages.
    """

    def __init__(self, partition: StagePartition) -> None:
        self._partition = partition
        self._uses: list[Uses] = []
        self.values = UnitValues()
        """Attributes that units set on themselves in their forward."""
        self.draws_on_host = False

    def follow(self) -> Taint:
        """Return the mode under which a stage runs its forward."""
        return Taint(dict(nn.Module.named_parameters(self._partition.module)))

    def learn(self, taint: Taint) -> None:
        """Keep what the forward of a stage has shown."""
        self._uses.append(taint.uses())

    @contextmanager
    def watching_draws(self) -> Iterator[None]:
        """Context of a forward, which may draw from Python's or NumPy's generators."""
        before = host_state()
        yield
        self.draws_on_host |= host_state() != before

    @contextmanager
    def running(self, root: nn.Module) -> Iterator[None]:
        """Context of the run: nothing is recorded, and the buffers of ``root``, which the step may
        use, and the values on units are restored at the end.
        """
        with _unchanged(root), torch.no_grad():
            yield
        self.values.undo()

    def conclude(self, facts: CallFacts, context: ParallelContext) -> None:
        """Write what all stages have shown to ``facts``; a collective of the pipeline.

        Raises:
            ConfigError: If state that units hand on by other ways crosses a stage boundary.
        """
        partition = self._partition
        facts.notes.clear()  # dtypes may be others than with values: autocast, fused paths
        ranks = context.pp.all_gather_object((self._uses, self.values.left, self.draws_on_host))
        shown = [uses for of_rank, *_ in ranks for uses in of_rank]
        facts.left = {value for _, of_rank, _ in ranks for value in of_rank}
        facts.draws_on_host = any(draws for *_, draws in ranks)
        # Fewer where the step calls the units itself: everything is carried then.
        if len(shown) == len(partition.stages):
            facts.uses = Uses.union(shown)
            starts = [first for first, _ in partition.bounds]
            check_boundaries(facts.uses, partition.units, starts)
            self._check_tail(facts.uses, starts[-1])

    def _check_tail(self, uses: Uses, last: int) -> None:
        """Check that the units of the last stage hand nothing on that others of their kind, on
        earlier stages, would as well.
        """
        units, module = self._partition.units, self._partition.module
        kinds = [type(module.get_submodule(unit)) for unit in units]
        for source, reader in sorted(uses.leaks):
            if reader == TAIL and kinds[source] in kinds[:last]:
                raise ConfigError(
                    f"unit {units[source]!r} hands state to the code behind the units by a list, "
                    "an attribute or a hook, and the same state of units on earlier stages is "
                    "missing there. Return it from the units, or switch it off (transformers: "
                    "output_attentions=False, output_router_logits=False)."
                )


def check_boundaries(uses: Uses, units: Sequence[str], starts: Sequence[int]) -> None:
    """Check that no state that units hand on by other ways than their outputs crosses a boundary.

    Args:
        uses: What the units use.
        units: Their paths.
        starts: The first unit of every stage.

    Raises:
        ConfigError: Naming the units and the boundaries that work.
    """
    for source, alias in sorted(uses.aliased) if len(starts) > 1 else ():
        written = {source, alias} & (uses.written_between | {j for j, _ in uses.writes})
        if written:
            raise ConfigError(
                f"unit {units[alias]!r} returns memory that it was given, or the same memory "
                f"twice, and the model writes into the output of {units[min(written)]!r} in place, "
                "which changes both. A stage that receives copies would not see it. Return a copy "
                "from the unit (x.clone()), or write into one."
            )
    for start in starts:
        carried = uses.carried(start) if start else ()
        for source, writer in sorted(uses.writes):
            if writer < start and source in carried:
                raise ConfigError(
                    f"unit {units[writer]!r} writes into the output of unit {units[source]!r} in "
                    f"place, which a stage that begins with {units[start]!r} uses too. Let it "
                    "write into a copy (inplace=False)."
                )
        if start and not uses.allows(start):
            source, reader = min((j, i) for j, i in uses.leaks if j < start <= i)
            by = "the code behind the units" if reader >= len(units) else repr(units[reader])
            works = ", ".join(repr(units[cut]) for cut in range(1, len(units)) if uses.allows(cut))
            otherwise = (
                f"or begin stages only with {works} (pipeline_model_parallel_layout)"
                if works
                else "otherwise this model cannot be divided"
            )
            raise ConfigError(
                f"unit {units[source]!r} hands state to {by} by a list, an attribute or a hook, "
                f"and a stage begins with {units[start]!r} between them. Return it from the unit, "
                f"or switch it off (transformers: output_router_logits=False); {otherwise}."
            )


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of the module after the block."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
