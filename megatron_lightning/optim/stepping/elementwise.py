"""Decide how ranks divide the work of an optimizer.

Ranks divide the stepped tensors along several axes: data-parallel ranks step flat shards
(``zero1``, ``fsdp``), tensor- and expert-parallel ranks rows or columns of a matrix, and pipeline
ranks a subset of a group's tensors. The results of an element-wise optimizer stay the same. Other
optimizers read a full tensor (a factorization, a trust ratio, 8-bit blocks with a shared scale):
owners step full tensors (``owners``). An optimizer that reads a full group (a norm, an estimated
step size) would compute different results on every rank, and is refused.

The element-wise optimizers of torch are listed, and so are a few that read tensors in rare steps
(``readers``). Any other optimizer is tried before the first step (``probe``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from megatron_lightning.optim.gradients.parameter_shard import main_dtype
from megatron_lightning.optim.owners.readers import reads, steps_matrices
from megatron_lightning.optim.owners.units import Units, is_stack
from megatron_lightning.optim.stepping.chained import members
from megatron_lightning.optim.trials.expert_trial import steps_experts
from megatron_lightning.optim.trials.probe import DIVISIONS, Spread, probe, trials
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec

ELEMENTWISE = frozenset(
    {SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop}
)
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
_ADVICE = (
    "It works where every rank steps everything: set tensor_model_parallel_size=1, "
    "expert_model_parallel_size=1, pipeline_model_parallel_size=1 and "
    'data_parallel="ddp", with any context parallelism. Or choose an element-wise optimizer such '
    "as AdamW."
)
_HALVES: Mapping[str, str] = {
    "flat": "flat halves",
    "rows": "halves of the rows",
    "columns": "halves of the columns",
    "tensors": "half of the tensors each",
}


class Stepped(NamedTuple):
    """A parameter of an optimizer."""

    group: int
    """Id of the parameter group."""
    spec: ShardSpec
    sharded: bool
    """Whether data-parallel ranks hold different shards of the parameter."""

    def is_divided(self, context: ParallelContext) -> bool:
        """Return whether this rank holds a part of the parameter."""
        axes = self.spec.sharded_over
        return self.sharded or any(context.axis(axis).size > 1 for axis in axes)


class Division(NamedTuple):
    """How ranks divide the optimizers of a fit. Equal on all ranks, but for the groups."""

    owned: Mapping[int, Units] = {}
    """Id of a parameter group -> the full tensors that owners step."""
    tried: Sequence[str] = ()
    """Classes that are element-wise in a trial, and not known."""
    whole: Sequence[str] = ()
    """Classes that read full tensors, but for Muon."""
    matrices: Sequence[str] = ()
    """Classes that read full matrices: Muon."""


class _Verdict(NamedTuple):
    """Findings of a rank."""

    failure: str = ""
    tried: frozenset[str] = frozenset()
    whole: Mapping[tuple[int, int], Units] = {}
    """Place of an optimizer, and of a member in it -> the full tensors that owners step."""


def divide(
    optimizers: Iterable[tuple[Optimizer, Sequence[Stepped]]],
    context: ParallelContext,
    passed: set[Trial] | None = None,
    *,
    whole_tensors: bool = False,
) -> Division:
    """Decide how the ranks of ``context`` divide every optimizer. A collective of all ranks.

    Args:
        optimizers: Every optimizer with the optimizer's parameters.
        context: Groups of this rank.
        passed: Trials of earlier calls, not repeated. Trials of this call are added.
        whole_tensors: Whether owners step full tensors also for an optimizer that is element-wise
            in a trial.

    Raises:
        ConfigError: On all ranks, if an optimizer reads more than full tensors.
    """
    passed = set() if passed is None else passed
    steps = list(optimizers)
    sharded = any(parameter.sharded for _, parameters in steps for parameter in parameters)
    if not sharded and context.layout.model_parallel_size == 1:
        return Division()
    own = _judge_all(steps, context, passed, whole_tensors=whole_tensors)
    ranks = context.axis("world").all_gather_object(own)
    for failure in (rank.failure for rank in ranks):  # pipeline ranks hold other groups
        if failure:
            raise ConfigError(failure)
    owned, whole = dict[int, Units](), set[str]()
    for i, (optimizer, _) in enumerate(steps):
        for j, member in enumerate(members(optimizer)):
            kinds = {rank.whole[i, j] for rank in ranks if (i, j) in rank.whole}
            if kinds:  # stacks of experts are divided only if every stage found that they may be
                units = Units.WHOLE if Units.WHOLE in kinds else Units.EXPERTS
                owned |= {id(group): units for group in member.param_groups}
                whole.add(type(member).__name__)
    tried = set[str]().union(*(rank.tried for rank in ranks)) - whole
    matrices = {
        type(member).__name__ for o, _ in steps for member in members(o) if steps_matrices(member)
    }
    return Division(owned, sorted(tried), sorted(whole), sorted(matrices))


def _judge_all(
    steps: Sequence[tuple[Optimizer, Sequence[Stepped]]],
    context: ParallelContext,
    passed: set[Trial],
    *,
    whole_tensors: bool,
) -> _Verdict:
    """Return what this rank finds. An error is not raised here: other ranks may have no such group,
    and would wait in a collective.
    """
    tried, whole = set[str](), {}
    for i, (optimizer, parameters) in enumerate(steps):
        for j, member in enumerate(members(optimizer)):
            groups = {id(group) for group in member.param_groups}
            mine = [parameter for parameter in parameters if parameter.group in groups]
            divisions = _divisions(mine, context)
            if not divisions or type(member) in ELEMENTWISE or steps_matrices(member):
                continue
            shapes: dict[int, list[Sequence[int]]] = {}
            for parameter in mine:
                shapes.setdefault(parameter.group, []).append(parameter.spec.global_shape)
            try:
                if reads_tensors(member, divisions, shapes, passed, whole_tensors=whole_tensors):
                    stacks = {
                        group: [
                            p.spec.global_shape
                            for p in mine
                            if p.group == group and is_stack(p.spec)
                        ]
                        for group in groups
                    }
                    whole[i, j] = units_of(member, stacks, whole_tensors=whole_tensors)
            except ConfigError as error:
                return _Verdict(str(error))
            tried.add(type(member).__name__)
    return _Verdict("", frozenset(tried), whole)


def units_of(
    optimizer: Optimizer,
    stacks: Mapping[int, Sequence[Sequence[int]]],
    *,
    whole_tensors: bool = False,
) -> Units:
    """Return the full tensors of an optimizer: experts alone, unless a trial shows that a stack of
    experts is stepped as one tensor, or the class or the user says what no trial sees: that full
    tensors are read in rare steps.

    Args:
        optimizer: The optimizer, not a chain.
        stacks: Id of a parameter group -> global shapes of the group's stacked experts.
        whole_tensors: Whether the user says so.

    Raises:
        ConfigError: If the optimizer cannot be tried.
    """
    if any(stacks.values()) and (whole_tensors or reads(optimizer) is False):
        return Units.WHOLE
    for group in optimizer.param_groups:
        if shapes := stacks.get(id(group)):
            device, dtype = _place_of(group)
            try:
                is_alone = steps_experts(optimizer, group, shapes, device=device, dtype=dtype)
            except Exception as error:
                raise ConfigError(_untried(optimizer, "rows", error)) from error
            if not is_alone:
                return Units.WHOLE
    return Units.EXPERTS


def _divisions(parameters: Sequence[Stepped], context: ParallelContext) -> list[str]:
    """Return the divisions of the parameters of an optimizer, alone or in a chain."""
    axes = {
        axis
        for parameter in parameters
        for axis in parameter.spec.sharded_over
        if context.axis(axis).size > 1
    }
    tensor_axes = not axes.isdisjoint({"tp", "etp"})
    divides = {
        "flat": any(parameter.sharded for parameter in parameters),
        "rows": tensor_axes or "ep" in axes,
        "columns": tensor_axes,
        "tensors": context.pp.size > 1,
    }
    return [name for name, holds in divides.items() if holds]


def reads_tensors(
    optimizer: Optimizer,
    divisions: Sequence[str] = tuple(DIVISIONS),
    shapes: Mapping[int, Sequence[Sequence[int]]] | None = None,
    passed: set[Trial] | None = None,
    *,
    whole_tensors: bool = False,
) -> bool:
    """Return whether ``optimizer`` reads full tensors, and the ranks would divide tensors.

    Args:
        optimizer: The optimizer, not a chain.
        divisions: Keys of ``probe.DIVISIONS``.
        shapes: Id of a parameter group -> global shapes of the group's parameters. None: the shapes
            of the tensors in the groups.
        passed: Passed trials, not repeated. New passed trials are added.
        whole_tensors: Whether the user says so.

    Raises:
        ConfigError: If the optimizer reads more than a full tensor, or cannot be tried.
    """
    if type(optimizer) in ELEMENTWISE:
        return False
    known, divides_tensors = reads(optimizer), any(name != "tensors" for name in divisions)
    if known:
        raise ConfigError(_refusal(optimizer, divisions[0], ""))
    said = divides_tensors and (known is False or whole_tensors)
    passed = set() if passed is None else passed
    for group in optimizer.param_groups:
        sizes = [p.shape for p in group["params"]] if shapes is None else shapes.get(id(group), ())
        if not sizes:  # frozen parameters only, or parameters of other ranks, which run the trial
            continue
        found = _tried(optimizer, group, ["tensors"] if said else divisions, sizes, passed)
        if found:
            return True
    return said


def _tried(
    optimizer: Optimizer,
    group: dict[str, Any],
    divisions: Sequence[str],
    sizes: Sequence[Sequence[int]],
    passed: set[Trial],
) -> bool:
    """Return whether a trial shows that an optimizer reads full tensors.

    Raises:
        ConfigError: If it reads more, or cannot be tried.
    """
    device, dtype = _place_of(group)
    # Groups often differ in nothing that a trial sees: one trial is enough.
    trial = (optimizer, *divisions, str(trials(sizes)), device, dtype, _options(group))
    if trial in passed:
        return False
    tried = partial(probe, optimizer, group, shapes=sizes, device=device, dtype=dtype)
    try:
        difference = next((kind for kind in tried(_in_order(divisions)) if not kind.is_equal), None)
        # Owners step tensors apart: no more than a tensor may be read.
        reads_group = difference is not None and not all(s.is_equal for s in tried(["tensors"]))
    except Exception as error:
        raise ConfigError(_untried(optimizer, divisions[0], error)) from error
    if difference is None:
        passed.add(trial)
        return False
    if reads_group:
        part = difference.division if difference.division in divisions else "flat"
        raise ConfigError(_refusal(optimizer, part, _found(difference)))
    return True


def _place_of(group: Mapping[str, Any]) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype of a group's trial. A plan has no values, and its trial is on CPU."""
    target = group["params"][0]
    device = torch.device("cpu") if target.is_meta else target.device
    return device, main_dtype(target.dtype) if target.is_floating_point() else torch.float32


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


def _untried(optimizer: Optimizer, division: str, error: Exception) -> str:
    return (
        f"{type(optimizer).__name__} could not be tried on small tensors "
        f"({type(error).__name__}: {error}). An unknown optimizer is tried, since "
        f"{_PARTS[division]}. {_ADVICE}"
    )


def _refusal(optimizer: Optimizer, division: str, found: str) -> str:
    return (
        f"{type(optimizer).__name__} reads statistics of all parameters of a group, and "
        f"{_PARTS[division]}{found}. {_ADVICE}"
    )
