"""Parameter groups from a table of learning rates, minimum rates and weight decays.

Rows match parameters by name and number of dims, whatever a rank holds, and rows without a match
here stay as empty groups. So every rank of a pipeline has the same groups in the same order, and
schedulers, monitors and checkpoints agree.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.maximal_update import GroupScaling
from megatron_lightning.parallel.shards.attachments import Attachment, is_wrapper
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.parallel.shards.ties import tied_names

DEFAULT_GROUP = "default"
"""Name of the group of parameters without a matching row."""


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """A row of the table."""

    name: str
    """Name of the group, as logged by LearningRateMonitor."""
    params: Sequence[str] = ("**",)
    """Patterns of parameter names. ``*`` represents a segment of a dotted name or a part of a
    segment, ``**`` any number of segments."""
    max_dims: int | None = None
    """Match only parameters of at most this number of dims. 1: norms and biases."""
    lr: float | None = None
    """Peak learning rate of the group (decoupled, such as Megatron's for embeddings)."""
    lr_mult: float = 1.0
    """Factor of the common learning rate, warm-up and minimum included."""
    min_lr: float | None = None
    """Learning rate after the decay. Leave out for the schedule's."""
    wd_mult: float = 1.0
    """Factor of the common weight decay. 0: no weight decay."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the optimizer, such as betas and eps. Lists become tuples."""

    def __post_init__(self) -> None:
        for name in ("lr", "lr_mult", "min_lr", "wd_mult"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(
                    f"{name}={value} of parameter group {self.name!r} is negative. Set it to 0 or "
                    "more."
                )
        if self.lr is not None and self.lr_mult != 1.0:
            raise ConfigError(
                f"parameter group {self.name!r} has both lr={self.lr} and lr_mult={self.lr_mult}. "
                "Leave one out."
            )
        if isinstance(self.params, str) or not self.params:
            raise ConfigError(
                f"params={self.params!r} of parameter group {self.name!r} is no list of patterns. "
                "Set one."
            )


NO_DECAY = ParamGroup(name="no_decay", max_dims=1, wd_mult=0.0)
"""Norms and biases, without weight decay."""


def make_param_groups(
    module: nn.Module,
    table: Sequence[ParamGroup] = (NO_DECAY,),
    *,
    lr: float,
    weight_decay: float = 0.0,
    only: Container[str] | None = None,
    scaling: GroupScaling | None = None,
) -> list[dict[str, Any]]:
    """Return the groups for an optimizer. A parameter belongs to the first matching row. In a
    module with adapters, or with a frozen model beside the trained, frozen parameters are left out.

    Args:
        module: Owner of the parameters. Patterns match the names of ``named_parameters()``. A tied
            copy matches by the owner's name.
        table: The rows, in order.
        lr: Common peak learning rate.
        weight_decay: Common weight decay.
        only: Names of ``named_parameters()``, to leave out all others. None: all parameters.
        scaling: Factors of maximal updates, which divide every group. None: none.

    Returns:
        The default group, then a group for each row, empty groups included.
    """
    names = [DEFAULT_GROUP, *(row.name for row in table)]
    if len(set(names)) != len(names):
        raise ConfigError(
            f"parameter groups are named {', '.join(names)}; one name occurs twice. Rename one."
        )
    default: dict[str, Any] = {
        "params": [],
        "name": DEFAULT_GROUP,
        "lr": lr,
        "weight_decay": weight_decay,
        "wd_mult": 1.0,
    }
    # Groups without parameters stay: pipeline ranks hold other parameters, and checkpoints and
    # schedulers count on equal groups everywhere.
    groups = [default, *(_group(row, lr, weight_decay) for row in table)]
    # Otherwise frozen parameters stay in the groups, since a callback may unfreeze them later.
    skips_frozen = any(
        is_wrapper(m) or isinstance(m, Attachment) or getattr(m, "is_partly_frozen", False)
        for m in module.modules()
    )
    divided = [[group] if scaling is None else scaling.divided(group) for group in groups]
    for index, name, parameter in _rows_of(module, table):
        if only is not None and name not in only:
            continue
        if parameter.requires_grad or not skips_frozen:
            place = 0 if scaling is None else scaling.place(name, parameter.dim())
            divided[index][place]["params"].append(parameter)
    return [group for some in divided for group in some]


def _rows_of(
    module: nn.Module, table: Sequence[ParamGroup]
) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield index of the group (0: the default), name and parameter."""
    patterns = [[compile_pattern(pattern) for pattern in row.params] for row in table]
    owners = tied_names(module)
    for copy, parameter in module.named_parameters():
        name = owners.get(copy, copy)
        matching = (
            index
            for index, (row, own) in enumerate(zip(table, patterns, strict=True), start=1)
            if (row.max_dims is None or parameter.dim() <= row.max_dims)
            and any(pattern.fullmatch(name) for pattern in own)
        )
        yield next(matching, 0), copy, parameter


def check_rows(module: nn.Module, table: Sequence[ParamGroup]) -> None:
    """Check on the full module: every row must match a parameter."""
    used_rows = {index for index, *_ in _rows_of(module, table)}
    for index, row in enumerate(table, start=1):
        if index in used_rows:
            continue
        fitting = [
            name
            for name, p in module.named_parameters()
            if row.max_dims is None or p.dim() <= row.max_dims
        ]
        raise ConfigError(
            f"parameter group {row.name!r} takes no parameter of {type(module).__name__}: "
            f"params={list(row.params)} match none, or only what rows before it have taken. "
            f"Parameters are called {' or '.join(map(repr, fitting[:2]))}; give such names, in "
            "which * represents a part of a segment and ** any number of segments, or remove the "
            "row."
        )


def _group(row: ParamGroup, lr: float, weight_decay: float) -> dict[str, Any]:
    group: dict[str, Any] = {
        "params": [],
        "name": row.name,
        "lr": lr * row.lr_mult if row.lr is None else row.lr,
    }
    group |= {"weight_decay": weight_decay * row.wd_mult, "wd_mult": row.wd_mult}
    if row.lr_mult != 1.0:
        group["lr_mult"] = row.lr_mult
    if row.min_lr is not None:
        group["min_lr"] = row.min_lr
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in row.options.items()}
    return {**group, **options}


def check_options(table: Sequence[ParamGroup], optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer reads the options of all groups: torch keeps others in silence.

    Raises:
        ConfigError: If an option is none of the optimizer's.
    """
    known = sorted(optimizer.defaults)
    for row in table:
        unknown = [key for key in row.options if key not in known]
        if unknown:
            raise ConfigError(
                f"parameter group {row.name!r} has the option {unknown[0]!r}, which "
                f"{type(optimizer).__name__} does not read. It has {', '.join(known)}. Correct the "
                "name, or leave it out."
            )
