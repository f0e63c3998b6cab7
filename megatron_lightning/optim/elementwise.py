"""Check that an optimizer may be divided over ranks.

Ranks divide what an optimizer steps along several axes: data-parallel ranks step flat shards
(``zero1``, ``fsdp``), tensor- and expert-parallel ranks rows or columns of a matrix, and pipeline
ranks some tensors of a group. An element-wise optimizer does not notice. One that reads a full
matrix (a factorization, a trust ratio, blocks of 8 bits that share a scale) or a full group (a
norm, an estimated step size) would compute something else on every rank.

The element-wise optimizers of torch are listed, optimizers of full matrices get them
(``matrices``), and any other is tried before the first step (``probe``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.chained import members
from megatron_lightning.optim.entries import OptimizerEntry
from megatron_lightning.optim.matrices import steps_matrices
from megatron_lightning.optim.probe import Spread, probe
from megatron_lightning.parallel.context import ParallelContext

ELEMENTWISE = frozenset(
    {SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop}
)
READ_TENSORS = frozenset({"AdamP", "SGDP"})
"""Names of classes that project gradients which are nearly orthogonal to a tensor: whether a trial
shows it depends on the data."""

_PARTS: Mapping[str, str] = {
    "flat": 'data_parallel="zero1" or "fsdp" gives each rank flat shards',
    "rows": "tensor or expert parallelism gives each rank a part of a matrix",
    "columns": "tensor parallelism gives each rank a part of a matrix",
    "tensors": "pipeline parallelism gives each rank some of the parameters",
}
_HALVES: Mapping[str, str] = {
    "flat": "flat halves",
    "rows": "halves of its rows",
    "columns": "halves of its columns",
    "tensors": "halves of its tensors",
}


@dataclass(frozen=True)
class Divided:
    """How this rank's layout divides the groups of one optimizer."""

    optimizer: Optimizer
    entries: Sequence[OptimizerEntry]
    """Parameters of the optimizer."""
    divisions: tuple[str, ...]
    """Keys of ``probe.DIVISIONS``."""

    @classmethod
    def of(
        cls, optimizer: Optimizer, entries: Iterable[OptimizerEntry], context: ParallelContext
    ) -> Divided:
        """Return how ``context`` divides the parameters of ``optimizer``, an optimizer of a
        chain.
        """
        groups = {id(group) for group in optimizer.param_groups}
        own = [entry for entry in entries if id(entry.group) in groups]
        axes = {
            axis for entry in own for axis in entry.spec.sharded_over if context.axis(axis).size > 1
        }
        tensor_axes = not axes.isdisjoint({"tp", "etp"})
        divided = {
            "flat": any(entry.sharded for entry in own),
            "rows": tensor_axes or "ep" in axes,
            "columns": tensor_axes,
            "tensors": context.pp.size > 1,
        }
        return cls(optimizer, own, tuple(name for name, holds in divided.items() if holds))


def require_divisible(
    optimizers: Iterable[tuple[Optimizer, Sequence[OptimizerEntry]]], context: ParallelContext
) -> list[str]:
    """Check that the ranks of ``context`` may divide every optimizer; a collective of all ranks.

    Args:
        optimizers: Every optimizer with its parameters.
        context: Groups of this rank.

    Returns:
        Classes that were tried and passed, without being known as element-wise.

    Raises:
        ConfigError: On all ranks, if an optimizer reads more than the elements that a rank steps.
    """
    tried, failure = set[str](), ""
    for optimizer, entries in optimizers:
        for member in members(optimizer):
            divided = Divided.of(member, entries, context)
            if not divided.divisions or type(member) in ELEMENTWISE or steps_matrices(member):
                continue
            failure = failure or _failure(divided, context)
            tried.add(type(member).__name__)
    ranks = context.axis("world").all_gather_object((failure, tried))
    for failure, _ in ranks:  # pipeline ranks hold other groups
        if failure:
            raise ConfigError(failure)
    return sorted(set[str]().union(*(names for _, names in ranks)))


def _failure(divided: Divided, context: ParallelContext) -> str:
    """Return why the optimizer cannot be divided; "" if it can."""
    optimizer, divisions = divided.optimizer, divided.divisions
    names = {each.__name__ for each in type(optimizer).__mro__}
    if names & READ_TENSORS and divisions != ("tensors",):
        return _refusal(divided, divisions[0], "", reads_group=False)
    for group in optimizer.param_groups:
        entries = [entry for entry in divided.entries if entry.group is group]
        if not entries:  # pipeline ranks that have some try it
            continue
        target = next((target.tensor for entry in entries for target in entry.targets), None)
        tried = partial(
            probe,
            optimizer,
            group,
            shapes=[entry.spec.global_shape for entry in entries],
            device=context.device if target is None else target.device,
            dtype=target.dtype
            if target is not None and target.is_floating_point()
            else torch.float32,
        )
        try:
            for spread in tried(divisions):
                if not spread.is_equal:
                    reads_group = any(not each.is_equal for each in tried(["tensors"]))
                    return _refusal(divided, spread.division, _found(spread), reads_group)
        except Exception as error:
            return (
                f"{type(optimizer).__name__} could not be tried on small tensors "
                f"({type(error).__name__}: {error}). An unknown optimizer is tried, since "
                f"{_PARTS[divisions[0]]}. {_advice(reads_group=True)}"
            )
    return ""


def _found(spread: Spread) -> str:
    return (
        f": two copies of it that step {_HALVES[spread.division]} of a trial differ from one that "
        f"steps all by {spread.difference:.2g} of the largest update"
    )


def _refusal(divided: Divided, division: str, found: str, reads_group: bool) -> str:
    what = "statistics of all parameters of a group" if reads_group else "every tensor as a whole"
    text = (
        f"{type(divided.optimizer).__name__} reads {what}, and {_PARTS[division]}{found}. "
        f"{_advice(reads_group)}"
    )
    has_matrices = any(len(entry.spec.global_shape) > 1 for entry in divided.entries)
    if reads_group or not has_matrices:
        return text
    return (
        f"{text} An optimizer of matrices that works on every layout is Muon, since one rank owns "
        "each full matrix: ChainedOptimizer(Muon(matrices, ...), AdamW(others, ...))."
    )


def _advice(reads_group: bool) -> str:
    sizes = ["tensor_model", "expert_model", *(["pipeline_model"] if reads_group else [])]
    free = "context parallelism" if reads_group else "pipeline and context parallelism"
    return (
        "It works where every rank steps full parameters: set "
        f"{', '.join(f'{name}_parallel_size=1' for name in sizes)} and "
        f'data_parallel="ddp", with any {free}. Or choose an element-wise optimizer such as AdamW.'
    )
