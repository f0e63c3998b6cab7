"""Describe how a layout divides a full module: stage, style, local shapes and axes of every layer.

Nothing is communicated and no memory allocated: a copy of the module on ``meta`` is parallelized
for the first rank of every stage.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_lightning.assembly.assemble import is_assembled, parallelize_models
from megatron_lightning.assembly.partition import Stages, find_stages
from megatron_lightning.assembly.plans import PlanChoice, Plans, resolve_plans
from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import ShardingPlan, named_shard_specs
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.parallel.shards.ties import shared_names
from megatron_lightning.pipeline.schedules.actions import Placement

_HEADER = ("module", "stage", "style", "local shape", "axes")


def describe_layout(
    module: nn.Module,
    layout: ParallelLayout,
    plan: PlanChoice,
    placement: Placement,
    options: PipelineOptions,
) -> str:
    """Return a table of the layers of a full module under ``layout``.

    Args:
        module: The full module, on a real device or ``meta``. Stays unchanged.
        layout: Sizes of the parallel axes.
        plan: Tensor-parallel plan. None: the plans of modules with a ``sharding_plan()``.
        placement: Pipeline ranks of the stages.
        options: How the model is partitioned into stages.

    Raises:
        ConfigError: If the module is not full, or does not fit the layout.
    """
    if is_assembled(module):
        raise ConfigError(
            f"{type(module).__name__} holds only a rank's part of its layers, since a Trainer has "
            "divided it. Describe a new module."
        )
    partition = find_stages(module, placement, options) if layout.num_stages > 1 else None
    stages = {} if partition is None else _stages(partition)
    plans = resolve_plans(module, layout, plan)
    styles = _styles(module, plans.applied)
    # The smallest job with this layout: ranks of dense and of expert layers must both divide it.
    sizes = (layout.tp * layout.cp * layout.pp, layout.etp * layout.ep * layout.pp)
    context = ParallelContext(layout, planned_world_size=math.lcm(*sizes))
    # A copy without memory becomes the part of one rank, so that specs come from the code that a
    # run uses.
    shell = copy_on_meta(module)
    parallelize_models(shell, context, plans.applied)
    specs = named_shard_specs(shell)
    # Ties within one rank are one tensor, and specs list only the first name.
    for owner, *copies in shared_names(shell):
        specs |= {name: replace(specs[owner], tied_to=owner) for name in copies}
    rows: list[tuple[str, ...]] = [_HEADER]
    for path, _ in module.named_modules():
        prefix = f"{path}." if path else ""
        own_specs = {n[len(prefix) :]: s for n, s in specs.items() if n.rpartition(".")[0] == path}
        if path and (own_specs or path in styles):
            stage = _stage_of(path, stages, layout.num_stages)
            lines = [_parameter(name, spec, context) for name, spec in own_specs.items()] or [
                ("-", "-")
            ]
            rows.append((path, stage, styles.get(path, "-"), *lines[0]))
            rows += [("", "", "", *line) for line in lines[1:]]
    title = _title(layout, specs, describe_sequence_parallel(layout, plans))
    return "\n".join([title, *_aligned(rows), *_replicated_modules(partition)])


def describe_sequence_parallel(layout: ParallelLayout, plans: Plans) -> str:
    """Return whether sequence parallelism is on. If the user leaves the choice to the plans and
    the plans decide against, say why.
    """
    if not layout.sp:
        return "off"
    if plans.shards_sequence:
        return "on"
    why = "the sharding plan does not say where the sequence is sharded"
    return f"off ({plans.why_full_sequence or why})"


def _title(layout: ParallelLayout, specs: Mapping[str, ShardSpec], sequence_parallel: str) -> str:
    size = sum(math.prod(spec.global_shape) for spec in specs.values() if spec.tied_to is None)
    context_text = f" x context {layout.cp}" if layout.cp > 1 else ""
    experts = f", experts {layout.ep} x tensor {layout.etp}" if layout.divides_experts else ""
    return (
        f"tensor {layout.tp}{context_text} x pipeline {layout.pp} ({layout.num_stages} stage"
        f"{'s' if layout.num_stages > 1 else ''}){experts}, sequence parallel "
        f"{sequence_parallel}, {size:,} parameters; shapes of tensor-parallel rank 0"
    )


def _stages(found: Stages) -> dict[str, int]:
    prefix = f"{found.path}." if found.path else ""
    stages = {prefix + unit: stage for stage, units in enumerate(found.units) for unit in units}
    return {**stages, **{prefix + path: 0 for path in found.outside.preludes}}


def _replicated_modules(found: Stages | None) -> Iterator[str]:
    """Yield a line for every module that every stage holds and runs."""
    if found is not None:
        prefix = f"{found.path}." if found.path else ""
        for path, reason in found.outside.replicated.items():
            yield f"{prefix}{path} is on every stage: {reason}"


def _stage_of(path: str, stages: Mapping[str, int], num_stages: int) -> str:
    units = (stage for unit, stage in stages.items() if f"{path}.".startswith(f"{unit}."))
    return str(next(units, "all" if num_stages > 1 else 0))


def _styles(module: nn.Module, plans: Mapping[str, ShardingPlan]) -> dict[str, str]:
    styles = {}
    for owner, plan in plans.items():
        prefix = f"{owner}." if owner else ""
        for path, _ in module.get_submodule(owner).named_modules():
            style = plan.style_of(path)
            if style is not None:
                text: str = getattr(style, "description", type(style).__name__)
                styles[f"{prefix}{path}".removesuffix(".")] = text
    return styles


def _parameter(name: str, spec: ShardSpec, context: ParallelContext) -> tuple[str, str]:
    """Return a parameter's local shape and axes as texts."""

    def present(axes: tuple[str, ...]) -> str:
        return ", ".join(axis for axis in axes if context.axis(axis).size > 1)

    local_text, full_text = (
        "x".join(map(str, shape)) or "1" for shape in (spec.local_shape, spec.global_shape)
    )
    shape = (
        f"{name} {local_text}" if local_text == full_text else f"{name} {local_text} of {full_text}"
    )
    sharded, summed = present(spec.sharded_over), present(spec.partial_over)
    axes = [sharded] if sharded else []
    axes += [f"gradients summed over {summed}"] if summed else []
    axes += [f"tied to {spec.tied_to}"] if spec.tied_to else []
    return shape, "; ".join(axes) or "replicated"


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()


def copy_on_meta(module: nn.Module) -> nn.Module:
    """Return a copy without data. The copy shares objects that the module refers to, such as a
    Trainer.
    """
    memo: dict[int, Tensor] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    shell = copy.copy(module)
    for members in ("_modules", "_parameters", "_buffers"):
        copied = {
            name: copy.deepcopy(member, memo) for name, member in vars(module)[members].items()
        }
        vars(shell)[members] = copied
    return shell
