"""Check that ranks may divide the work of an optimizer.

Ranks divide the stepped tensors along several axes: data-parallel ranks step flat shards
(``zero1``, ``fsdp``), tensor- and expert-parallel ranks rows or columns of a matrix, and pipeline
ranks a subset of a group's tensors. The results of an element-wise optimizer stay the same. Other
optimizers read a full matrix (a factorization, a trust ratio, 8-bit blocks with a shared scale) or
a full group (a norm, an estimated step size). Such an optimizer would compute different results on
every rank.

The element-wise optimizers of torch are listed. Optimizers of full matrices get full matrices
(``matrices``). Any other optimizer is tried before the first step (``probe``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
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
from megatron_lightning.optim.stepping.chained import members
from megatron_lightning.optim.stepping.entries import OptimizerEntry
from megatron_lightning.optim.stepping.owners import steps_matrices
from megatron_lightning.optim.stepping.probe import DIVISIONS, Spread, probe, trials
from megatron_lightning.parallel.grid.context import ParallelContext

ELEMENTWISE = frozenset(
    {SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop}
)
READERS: Mapping[str, bool] = {
    "AdamP": False,
    "SGDP": False,
    "ScalableShampoo": False,
    "DistributedShampoo": False,
    "SWATS": True,
}
"""Class of optimizers missed by a trial -> whether the class reads a full group as well. A trial
may miss optimizers that read full tensors only in rare steps (with gradients nearly orthogonal to a
tensor, or every thousandth step)."""

_LABELS = frozenset(
    {"params", "param_names", "name", "lr", "lr_scale", "initial_lr", "max_lr", "min_lr"}
)
"""Options of a group without influence on a trial. Layers may differ in these options, and the
trial sets the rate."""

Trial = tuple[Hashable, ...]
"""The optimizer, the divisions, and the inputs of the trial."""

_PARTS: Mapping[str, str] = {
    "flat": 'data_parallel="zero1" or "fsdp" gives each rank flat shards',
    "rows": "tensor or expert parallelism gives each rank a part of a matrix",
    "columns": "tensor parallelism gives each rank a part of a matrix",
    "tensors": "pipeline parallelism gives each rank some of the parameters",
}
_HALVES: Mapping[str, str] = {
    "flat": "flat halves",
    "rows": "halves of the rows",
    "columns": "halves of the columns",
    "tensors": "half of the tensors each",
}


def require_divisible(
    optimizers: Iterable[tuple[Optimizer, Sequence[OptimizerEntry]]],
    context: ParallelContext,
    passed: set[Trial] | None = None,
) -> list[str]:
    """Check that the ranks of ``context`` may divide every optimizer. A collective of all ranks.

    Args:
        optimizers: Every optimizer with the optimizer's parameters.
        context: Groups of this rank.
        passed: Trials of earlier calls, not repeated. Trials of this call are added.

    Returns:
        Classes with a passed trial, not known as element-wise.

    Raises:
        ConfigError: On all ranks, if an optimizer reads more than the elements stepped by a rank.
    """
    passed = set() if passed is None else passed
    tried, failure, steps = set[str](), "", list(optimizers)
    sharded = any(entry.sharded for _, entries in steps for entry in entries)
    if not sharded and context.layout.model_parallel_size == 1:
        return []
    for optimizer, entries in steps:
        for member in members(optimizer):
            divisions = _divisions(member, entries, context)
            if not divisions or type(member) in ELEMENTWISE or steps_matrices(member):
                continue
            shapes: dict[int, list[Sequence[int]]] = {}
            for entry in entries:
                shapes.setdefault(id(entry.group), []).append(entry.spec.global_shape)
            try:
                require_elementwise(member, divisions, shapes, passed)
            except ConfigError as error:
                # Not raised here: other ranks may have no such group, and would wait in the
                # collective.
                failure = failure or str(error)
            tried.add(type(member).__name__)
    ranks = context.axis("world").all_gather_object((failure, tried))
    for failure, _ in ranks:  # pipeline ranks hold other groups
        if failure:
            raise ConfigError(failure)
    return sorted(set[str]().union(*(names for _, names in ranks)))


def _divisions(
    optimizer: Optimizer, entries: Iterable[OptimizerEntry], context: ParallelContext
) -> list[str]:
    """Return the divisions of the parameters of an optimizer, alone or in a chain."""
    groups = {id(group) for group in optimizer.param_groups}
    group_entries = [entry for entry in entries if id(entry.group) in groups]
    axes = {
        axis
        for entry in group_entries
        for axis in entry.spec.sharded_over
        if context.axis(axis).size > 1
    }
    tensor_axes = not axes.isdisjoint({"tp", "etp"})
    divides = {
        "flat": any(entry.sharded for entry in group_entries),
        "rows": tensor_axes or "ep" in axes,
        "columns": tensor_axes,
        "tensors": context.pp.size > 1,
    }
    return [name for name, holds in divides.items() if holds]


def require_elementwise(
    optimizer: Optimizer,
    divisions: Sequence[str] = tuple(DIVISIONS),
    shapes: Mapping[int, Sequence[Sequence[int]]] | None = None,
    passed: set[Trial] | None = None,
) -> None:
    """Check that ``optimizer`` gives the same result with sharded parameters.

    Args:
        optimizer: The optimizer, not a chain.
        divisions: Keys of ``probe.DIVISIONS``.
        shapes: Id of a parameter group -> global shapes of the group's parameters. None: the shapes
            of the tensors in the groups.
        passed: Passed trials, not repeated. New passed trials are added.

    Raises:
        ConfigError: If the optimizer reads more than a single element, or cannot be tried.
    """
    if type(optimizer) in ELEMENTWISE:
        return
    # Optimizers known to read more than elements, by the names of their classes, since their
    # packages need not be installed.
    for name in (kind.__name__ for kind in type(optimizer).__mro__):
        part = next((d for d in divisions if d != "tensors" or READERS.get(name)), None)
        if name in READERS and part is not None:
            raise ConfigError(_refusal(optimizer, part, "", READERS[name]))
    passed = set() if passed is None else passed
    for group in optimizer.param_groups:
        target = next(iter(group["params"]), None)
        if target is None:  # other ranks with parameters run the trial
            continue
        sizes = [p.shape for p in group["params"]] if shapes is None else shapes[id(group)]
        dtype = target.dtype if target.is_floating_point() else torch.float32
        # Groups often differ in nothing that a trial sees: one trial is enough.
        trial = (optimizer, *divisions, str(trials(sizes)), target.device, dtype, _options(group))
        if trial in passed:
            continue
        tried = partial(probe, optimizer, group, shapes=sizes, device=target.device, dtype=dtype)
        try:
            difference = next(
                (kind for kind in tried(_in_order(divisions)) if not kind.is_equal), None
            )
            # Tells whether only the group as a whole matters (a global norm), as the advice
            # differs.
            reads_group = difference is not None and not all(s.is_equal for s in tried(["tensors"]))
        except Exception as error:
            raise ConfigError(
                f"{type(optimizer).__name__} could not be tried on small tensors "
                f"({type(error).__name__}: {error}). An unknown optimizer is tried, since "
                f"{_PARTS[divisions[0]]}. {_advice(reads_group=True)}"
            ) from error
        if difference is not None:
            part = difference.division if difference.division in divisions else "flat"
            raise ConfigError(_refusal(optimizer, part, _found(difference), reads_group))
        passed.add(trial)


def _options(group: Mapping[str, object]) -> str:
    """Return the options of a group with a possible influence on a trial."""
    options = {key: value for key, value in group.items() if key not in _LABELS}
    # Trust ratios of several optimizers apply only to groups with a weight decay.
    return repr(options | {"weight_decay": bool(options.get("weight_decay"))})


def _in_order(divisions: Sequence[str]) -> list[str]:
    """Return the divisions to try. Rows and columns come before flat halves, because rows and
    columns reveal most optimizers too, and because Shampoo decomposes a matrix of a flat half's
    length squared.
    """
    tried = {"rows", "columns", *divisions} if "flat" in divisions else {*divisions}
    return [name for name in ("rows", "columns", "tensors", "flat") if name in tried]


def _found(spread: Spread) -> str:
    return (
        f": in a trial, two copies of it that step {_HALVES[spread.division]} differ from one that "
        f"steps everything by {spread.difference:.2g} of the largest update"
    )


def _refusal(optimizer: Optimizer, division: str, found: str, reads_group: bool) -> str:
    what = "statistics of all parameters of a group" if reads_group else "every tensor as a whole"
    text = (
        f"{type(optimizer).__name__} reads {what}, and {_PARTS[division]}{found}. "
        f"{_advice(reads_group)}"
    )
    if reads_group:
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
