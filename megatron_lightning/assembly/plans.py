"""Resolve the sharding plans of a module: the user's plan, plans declared by submodules, and plans
of ``transformers`` models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import nn

from megatron_lightning.assembly.checks.attention_rows import check_attention_rows
from megatron_lightning.assembly.cp_comm_types import assign_cp_comm_types
from megatron_lightning.config import CPCommType
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.layers.styles import DispatchedExperts
from megatron_lightning.models.plans.gathered import auto_plan
from megatron_lightning.models.plans.hf_plans import transformers_models, transformers_plan
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.attachments import base_layer
from megatron_lightning.parallel.shards.sharding import (
    ShardingPlan,
    check_plan,
    sharding_plans,
)

PlanChoice: TypeAlias = ShardingPlan | Literal["auto"] | None
"""A user's plan for the full module. "auto": split every linear layer by output. None: the plans of
the module's models."""


@dataclass(frozen=True, kw_only=True)
class Plans:
    """The sharding plans of a module, resolved for a layout before the module is partitioned.

    Plans stay in the process that resolved the plans, since rows may hold functions. A pickled
    module has no plans.
    """

    declared: Mapping[str, ShardingPlan] = field(default_factory=dict)
    """Path of a module -> the plan from the user or the module. Equal for every layout."""
    applied: Mapping[str, ShardingPlan] = field(default_factory=dict)
    """Path of a module -> the plan used to divide the module on this layout: ``declared``, plans
    translated from ``transformers``, or the automatic plan."""

    @property
    def shards_sequence(self) -> bool:
        """Whether any plan shards activations over the sequence."""
        return any(plan.shards_sequence for plan in self.applied.values())

    @property
    def why_full_sequence(self) -> str | None:
        """Why a plan does not shard the sequence, if a plan says why."""
        reasons = (plan.why_full_sequence for plan in self.applied.values())
        return next(filter(None, reasons), None)

    def __deepcopy__(self, memo: object) -> Plans:
        return self

    def __reduce__(self) -> tuple[type[Plans], tuple[Any, ...]]:
        return Plans, ()


def check_plan_choice(plan: object) -> None:
    """Check that ``plan`` is a :data:`PlanChoice`.

    Raises:
        ConfigError: If ``plan`` is anything else.
    """
    if not (plan is None or plan == "auto" or isinstance(plan, ShardingPlan)):
        raise ConfigError(
            f'sharding_plan is {plan!r}. Set it to a ShardingPlan, or to "auto", which splits '
            "every linear layer by its output."
        )


_WAYS_OUT = (
    'Pass MegatronStrategy(sharding_plan="auto"), which splits every linear layer by its output, '
    "or a table: sharding_plan=ShardingPlan(...), or a method sharding_plan() of the model. Or set "
    "tensor_model_parallel_size to 1."
)


def declared_plans(module: nn.Module, plan: PlanChoice) -> dict[str, ShardingPlan]:
    """Return the user's plan for the module. Without a user's plan, return the plans from
    ``sharding_plan()`` methods of submodules, by path.
    """
    if isinstance(plan, ShardingPlan):
        return {"": plan}
    return {} if plan == "auto" else sharding_plans(module)


def find_plans(
    module: nn.Module,
    plan: PlanChoice,
    tensor_size: int = 1,
    context_size: int = 1,
    expert_size: int = 1,
) -> dict[str, ShardingPlan]:
    """Return the plans to divide a full module with, by path.

    Beside declared plans, an untouched model of ``transformers`` over several ranks receives a plan
    translated from the model's own plan, unless a module inside or around the model declares a
    plan.

    Args:
        module: The module with all layers, not yet partitioned.
        plan: The user's choice.
        tensor_size: Tensor-parallel ranks.
        context_size: Context-parallel ranks.
        expert_size: Expert-parallel ranks.

    Raises:
        ConfigError: If a plan of ``transformers`` cannot be translated.
    """
    if plan == "auto":
        return {"": auto_plan(module, tensor_size)} if tensor_size > 1 else {}
    plans = declared_plans(module, plan)
    if plan is not None or tensor_size == context_size == expert_size == 1:
        return plans
    # A declared plan anywhere around or inside the model is the user's word for all of it.
    translated = {
        path: transformers_plan(model, tensor_size, context_size, expert_size)
        for path, model in transformers_models(module).items()
        if not any(
            _is_inside(path, other_path) or _is_inside(other_path, path) for other_path in plans
        )
    }
    return plans | translated


def _why_nothing(
    module: nn.Module, plan: PlanChoice, plans: Mapping[str, ShardingPlan], tensor_size: int
) -> str:
    """Return why plans split no layer."""
    if plan == "auto":
        return (
            f'sharding_plan="auto" finds no linear layer whose output features {tensor_size} '
            "divides and whose weight nothing else reads"
        )
    if plan is not None:
        return "the table of sharding_plan has no row that splits one"
    texts = []
    for path, own_plan in plans.items():
        model = module.get_submodule(path)
        name = f"{type(model).__name__}{f' ({path})' if path else ''}"
        if own_plan.modules or not getattr(model, "_tp_plan", None):
            texts.append(f"the sharding plan of {name} has no row that splits one")
        else:
            texts.append(f"no entry of the tensor-parallel plan of {name} matches one")
    return "; ".join(texts)


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def resolve_plans(
    module: nn.Module,
    layout: ParallelLayout,
    plan: PlanChoice,
    cp_comm_type: CPCommType | Sequence[CPCommType] = "p2p",
) -> Plans:
    """Return the plans of a full module, checked against the module and the layout.

    Args:
        module: The module with all layers.
        layout: Sizes of the parallel axes.
        plan: The user's choice.
        cp_comm_type: Context-parallel communication. A list names a type for each attention module.

    Raises:
        ConfigError: If a pattern of a plan is not used. Over several tensor-parallel ranks also if
            no module has a plan, no plan splits a layer, a plan cannot be translated, or the user
            asks for sequence parallelism and a plan does not say how to shard the sequence.
        ShardingError: If experts of ``transformers`` do not divide.
    """
    declared = declared_plans(module, plan)
    for path, own_plan in declared.items():
        check_plan(module.get_submodule(path), own_plan, path)
    _check_wrapped(module, layout)
    plans = find_plans(module, plan, layout.tp, layout.cp, layout.ep)
    _check_attention(module, layout, plans)
    if plan is None and layout.divides_experts and not declared:
        _check_has_experts(module, layout, plans)
    if layout.tp > 1 or layout.divides_experts:
        _check_rows(module, layout, plans, "check")
    if layout.tp > 1:
        _check_split(module, layout, plan, plans)
    if layout.cp > 1:
        _check_rows(module, layout, plans, "check_context")
        # On the full module: the list counts all attention modules, and a pipeline rank has only a
        # part.
        plans = assign_cp_comm_types(module, plans, cp_comm_type)
    return Plans(declared=declared, applied=plans)


def _check_attention(
    module: nn.Module, layout: ParallelLayout, plans: Mapping[str, ShardingPlan]
) -> None:
    """Check that context-parallel ranks can share the sequences of the module."""
    rows = [row for own_plan in plans.values() for row in own_plan.modules.values()]
    bound = sum(bool(getattr(row, "shares_sequences", False)) for row in rows)
    check_attention_rows(layout.cp, bound, type(module).__name__)
    if layout.cp > 1 and all(own_plan.positions is None for own_plan in plans.values()):
        raise ConfigError(
            f"context_parallel_size is {layout.cp}, and no sharding plan of "
            f"{type(module).__name__} says how the model is given the positions of its tokens, "
            "which are not 0, 1, 2, … on a rank. Set ShardingPlan(positions=...) to the keyword "
            'of its forward, such as "position_ids", or to "" if it uses no positions.'
        )


def _check_split(
    module: nn.Module,
    layout: ParallelLayout,
    plan: PlanChoice,
    plans: Mapping[str, ShardingPlan],
) -> None:
    """Check that the plans split layers over tensor-parallel ranks."""
    if not plans:
        raise ConfigError(
            f"tensor_model_parallel_size is {layout.tp}, and no module of "
            f"{type(module).__name__} declares how it is split over ranks. {_WAYS_OUT}"
        )
    if not any(own.splits(module.get_submodule(path)) for path, own in plans.items()):
        raise ConfigError(
            f"tensor_model_parallel_size is {layout.tp}, and no layer of "
            f"{type(module).__name__} is split: {_why_nothing(module, plan, plans, layout.tp)}. "
            f"Every rank would hold and compute all of it. {_WAYS_OUT}"
        )
    without = [path for path, own_plan in plans.items() if not own_plan.shards_sequence]
    if layout.sequence_parallel is True and without:
        model, why = module.get_submodule(without[0]), plans[without[0]].why_full_sequence
        raise ConfigError(
            f"sequence_parallel is True, and the sharding plan of {type(model).__name__} does not "
            "say where activations are shards of the sequence "
            f"({why or 'it has no SequenceParallel or ShardSequence row'}). "
            'Set sequence_parallel to "auto" or False, or write a table with '
            "these rows and pass MegatronStrategy(sharding_plan=...)."
        )


def _check_wrapped(module: nn.Module, layout: ParallelLayout) -> None:
    """Check that no model called by peft through ``forward`` directly needs positions."""
    wrapped = [
        f"{type(child).__name__}{f' ({path})' if path else ''}"
        for path, child in module.named_modules()
        if type(child).__module__.startswith("peft.") and hasattr(child, "base_model")
    ]
    if layout.cp > 1 and wrapped:
        raise ConfigError(
            f"context_parallel_size is {layout.cp}, and {wrapped[0]} of peft calls the forward of "
            "its model so that the strategy cannot give it the positions of a rank's tokens. Use "
            "megatron_lightning.peft.LoRA(...).apply(model), which has peft's options and folders, "
            "or set context_parallel_size to 1."
        )


def _check_has_experts(
    module: nn.Module, layout: ParallelLayout, plans: Mapping[str, ShardingPlan]
) -> None:
    """Check that a module with only ``transformers`` models has experts for the layout to
    divide.
    """
    models = transformers_models(module).values()
    rows = [row for plan in plans.values() for row in plan.modules.values()]
    if models and not any(isinstance(row, DispatchedExperts) for row in rows):
        names = ", ".join(type(model).__name__ for model in models)
        raise ConfigError(
            f"expert_model_parallel_size={layout.ep} and expert_tensor_parallel_size={layout.etp} "
            f"divide experts otherwise than tensor_model_parallel_size={layout.tp}, and {names} "
            "has none that expert parallelism divides: stacked weights that its _ep_plan names, as "
            "in transformers 5. Leave both sizes unset, or pass "
            "MegatronStrategy(sharding_plan=...) with a table of your own."
        )


def _check_rows(
    module: nn.Module, layout: ParallelLayout, plans: Mapping[str, ShardingPlan], method: str
) -> None:
    """Check that every module can be sharded as the module's row says, by a method of the row's
    style.
    """
    for root, plan in plans.items():
        for path, child in module.get_submodule(root).named_modules():
            check = getattr(plan.style_of(path), method, None)
            if check is None:
                continue
            try:
                check(base_layer(child), layout, plan)
            except ShardingError as error:
                raise ShardingError(f"{'.'.join(filter(None, [root, path]))}: {error}") from error
