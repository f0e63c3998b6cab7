"""Sharding plans: tables to replace the modules of a plain model by parallel modules.

A module declares the specs of the module's parameters in the attribute ``shard_specs`` (a dict by
local name, a plain value that survives copying). A parameter without a spec is replicated.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import nn

from megatron_lightning.compat import avoid_fused_inference
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.parallel.shards.attachments import (
    Attachment,
    base_layer,
    is_extended,
    saved_copies,
)
from megatron_lightning.parallel.shards.other_stages import present_modules
from megatron_lightning.parallel.shards.parameters import (
    check_gradient_hooks,
    copy_attributes,
    rebind,
)
from megatron_lightning.parallel.shards.patterns import compile_pattern, describe_unused
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.parallel.shards.ties import tied_names, untied

if TYPE_CHECKING:
    from megatron_lightning.parallel.grid.context import ParallelContext

_Value = TypeVar("_Value")
_GATHERED_INPUT = "_megatron_gathered_input"
_LISTED = 6  # patterns in a message


def take_shards(module: nn.Module, source: nn.Module, specs: Mapping[str, ShardSpec]) -> None:
    """Register in ``module`` the shards of the parameters of ``source`` named by ``specs``.

    If ``source`` is the module itself, the parameters stay the same objects, for code with a list
    of parameters, and get other data. Parameters without a spec stay full. Otherwise the module
    gets new parameters with the attributes of the old parameters, and None for parameters without a
    spec. The shards are new tensors on the source's device, ``meta`` included. The specs become
    ``module.shard_specs``.

    Raises:
        ShardingError: If a hook of a parameter would be called with the gradient of a shard.
    """
    for name, spec in specs.items():
        if spec.local_shape != spec.global_shape:
            check_gradient_hooks(name, source._parameters.get(name))
    # Checked before anything changes, so that a refused module is still whole.
    for name, parameter in source._parameters.items():
        shard = None
        if parameter is not None and name in specs:
            shard = specs[name].shard(parameter.detach())
        if module is source:
            if parameter is not None and shard is not None:
                rebind(parameter, shard)
        elif parameter is None or shard is None:
            module.register_parameter(name, None)
        else:
            new_parameter = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            copy_attributes(vars(parameter), new_parameter)
            module.register_parameter(name, new_parameter)
    module.shard_specs = dict(specs)  # type: ignore[assignment]
    if module is not source and hasattr(source, "fused_rows"):
        module.fused_rows = source.fused_rows


def named_shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """Return the spec of every parameter, by the name in ``model.named_parameters()``.

    A module whose ``weight`` consists of several matrices declares the matrices in the attribute
    ``fused_rows`` (:class:`ShardSpec`).

    Raises:
        ShardingError: If a declared spec does not fit the local tensor.
    """
    specs: dict[str, ShardSpec] = {}
    seen_ids: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        declared: Mapping[str, ShardSpec] = getattr(module, "shard_specs", None) or {}
        for name, parameter in module.named_parameters(recurse=False):
            # The same tensor under a second name: named_parameters() lists the tensor once, too.
            if id(parameter) in seen_ids:
                continue
            seen_ids.add(id(parameter))
            spec = declared.get(name) or ShardSpec.replicated(parameter.shape)
            if tuple(parameter.shape) != spec.local_shape:
                raise ShardingError(
                    f"{prefix}{name} has shape {tuple(parameter.shape)}, and its shard spec says "
                    f"{spec.local_shape} of {spec.global_shape}."
                )
            fused = getattr(module, "fused_rows", ()) if name == "weight" else ()
            specs[prefix + name] = replace(spec, fused_rows=tuple(fused)) if fused else spec
    # A copy whose owner is on this rank as well is the same tensor, and listed above.
    ties = tied_names(model)
    return {
        name: replace(spec, tied_to=ties[name])
        if name in ties and ties[name] not in specs
        else spec
        for name, spec in specs.items()
    }


class Style(Protocol):
    """Rule to replace a module of a plain model. The concrete styles live in ``layers.styles``."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the replacement of ``module`` (possibly ``module`` itself, changed).

        A style for layers with adapters also has ``divide_adapters``, with the same arguments,
        called after ``apply``.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How a plain model is split over the tensor-parallel ranks, as a table.

    Patterns are dotted module paths. ``*`` matches a path segment and ``**`` any number of
    segments. The first matching pattern wins. Paths begin at the module with the
    ``sharding_plan()`` method, or at the LightningModule for
    ``MegatronStrategy(sharding_plan=...)``.

    Raises:
        ConfigError: If a row is no style, or an attribute's function does not take (value,
            context).
    """

    modules: Mapping[str, Style]
    """Module path pattern -> style."""
    sequence_dim: int = 0
    """Dim of the sequence in the activations between the model's modules (1 for batch-first
    models)."""
    attributes: Mapping[str, Callable[[int, ParallelContext], int]] = field(default_factory=dict)
    """Attribute path pattern -> function of (value, context) for sizes that become local, such as a
    head count."""
    positions: str | None = None
    """Keyword of the model for the positions of tokens [b or 1, s], passed on a rank with a part of
    the sequence. "": the model uses no positions. None: unknown, so that ranks cannot share a
    sequence."""
    documents: str | None = None
    """Keyword of the model for the document numbers of tokens [b, s]. On a rank with a part of the
    sequence, the model receives :class:`~megatron_lightning.layers.Documents` instead.
    ``SequenceInfo`` has a field for ``Documents``. None: no such keyword."""
    lengths: str | None = None
    """Keyword of the model for the lengths of the tokens' documents [b or 1, s or 1], passed on a
    rank with a part of the sequence. None: the model does not depend on them."""
    packed_positions: bool = False
    """Whether a document begins where positions do not go on by 1, as in ``transformers``, so that
    the model receives ``documents`` derived from the positions."""
    takes_deals: bool | None = None
    """Whether each module of the model that mixes tokens takes the chunks of any
    :attr:`~megatron_lightning.layers.Documents.deal`. Modules of styles in the table do, if
    attention receives the documents. Otherwise packed rows are divided as rows of one
    document."""
    full_rows: tuple[str, ...] = ()
    """Keywords of the model for values of the tokens of full rows [..., s]: the model divides rows
    itself, so that parts of the ranks are joined in its calls."""
    shards_output: bool = False
    """Whether the model returns shards on purpose, to a step that expects shards. Otherwise a
    sharded output is an error in the first step."""

    why_full_sequence: str | None = None
    """Why no row shards the sequence, to be told where sequence parallelism is off. None: the plan
    does not say."""

    def __post_init__(self) -> None:
        for pattern, style in self.modules.items():
            if isinstance(style, type) or not callable(getattr(style, "apply", None)):
                name = style.__name__ if isinstance(style, type) else repr(style)
                raise ConfigError(
                    f"row {pattern!r} of a sharding plan is {name}, which is no style. Write an "
                    f"instance of one, such as {_example_of(style)}."
                )
        for pattern, rewrite in self.attributes.items():
            _check_rewrite(pattern, rewrite)

    def __or__(self, other: ShardingPlan) -> ShardingPlan:
        """Return this plan with the rows and attributes of ``other`` first. A row of ``other``
        replaces the row of the same pattern. Fields set in ``other`` replace this plan's fields.

        Raises:
            ConfigError: If the plans have different sequence dims.
        """
        if not isinstance(other, ShardingPlan):
            return NotImplemented
        if self.sequence_dim != other.sequence_dim:
            raise ConfigError(
                f"plans with sequence_dim={self.sequence_dim} and "
                f"sequence_dim={other.sequence_dim} are combined by |: activations have one "
                "layout. Set both to the model's."
            )
        return ShardingPlan(
            modules=_first(other.modules, self.modules),
            sequence_dim=self.sequence_dim,
            attributes=_first(other.attributes, self.attributes),
            positions=self.positions if other.positions is None else other.positions,
            documents=self.documents if other.documents is None else other.documents,
            lengths=self.lengths if other.lengths is None else other.lengths,
            packed_positions=self.packed_positions or other.packed_positions,
            full_rows=other.full_rows or self.full_rows,
            takes_deals=self.takes_deals if other.takes_deals is None else other.takes_deals,
            shards_output=self.shards_output or other.shards_output,
            why_full_sequence=self.why_full_sequence or other.why_full_sequence,
        )

    def style_of(self, path: str) -> Style | None:
        """Return the style of the module at ``path``. None: no style, the module stays
        unchanged.
        """
        return next((style for pattern, style in self._styles if pattern.fullmatch(path)), None)

    def splits(self, model: nn.Module) -> bool:
        """Return whether a row splits parameters of a module in ``model``. A style with an
        attribute ``splits`` of False does not.
        """
        styles = (self.style_of(path) for path, _ in model.named_modules())
        return any(style is not None and getattr(style, "splits", True) for style in styles)

    @property
    def shards_sequence(self) -> bool:
        """Whether a row says how to shard activations over the sequence. Without such a row,
        sequence parallelism is off for this plan.
        """
        return any(getattr(style, "shards_sequence", False) for style in self.modules.values())

    def is_sequence_parallel(self, context: ParallelContext) -> bool:
        """Return whether activations are sequence shards: the layout allows sequence parallelism,
        and a row says how to shard.
        """
        return context.sp and self.shards_sequence

    @cached_property
    def _styles(self) -> list[tuple[re.Pattern[str], Style]]:
        return [(compile_pattern(pattern), style) for pattern, style in self.modules.items()]


def _first(rows: Mapping[str, _Value], others: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return ``rows``, then the rows of ``others`` for further patterns."""
    return {**rows, **{pattern: row for pattern, row in others.items() if pattern not in rows}}


def _example_of(style: object) -> str:
    return f"{style.__name__}()" if hasattr(style, "__name__") else "ColumnParallel()"


def _check_rewrite(pattern: str, rewrite: object) -> None:
    """Check that an attribute's function takes (value, context)."""
    problem = f"is {rewrite!r}"
    if callable(rewrite):
        try:
            signature = inspect.signature(rewrite)
        except ValueError:
            return  # a builtin may have none
        try:
            signature.bind(None, None)
            return
        except TypeError:
            problem = f"takes {signature}"
    raise ConfigError(
        f"attributes[{pattern!r}] of a sharding plan {problem}. Set it to a function of (value "
        "of the full model, ParallelContext) that returns the rank's value, such as lambda "
        "value, context: value // context.tp.size."
    )


def declare_gathered_input(module: nn.Module, argument: str, dim: int) -> nn.Module:
    """Record that ``module`` takes sequence shards and gathers the shards along ``dim``. Return
    ``module``.

    ``argument``: name of the input, unless the input is the first positional argument.
    """
    module.__dict__[_GATHERED_INPUT] = (argument, dim)
    return module


def gathered_input(module: nn.Module) -> tuple[str, int] | None:
    """Return the record of :func:`declare_gathered_input`. None: no record."""
    return vars(module).get(_GATHERED_INPUT)


def sharding_plans(module: nn.Module) -> dict[str, ShardingPlan]:
    """Return the plans of the modules in ``module`` with a ``sharding_plan()``, by path."""
    plan_makers = (
        (path, getattr(child, "sharding_plan", None)) for path, child in module.named_modules()
    )
    return {path: make_plan() for path, make_plan in plan_makers if callable(make_plan)}


def check_plan(model: nn.Module, plan: ShardingPlan, owner: str = "") -> None:
    """Check that every row and every attribute pattern of ``plan`` is used in the full ``model``.

    Args:
        model: The module at the start of the plan's paths, with all layers.
        plan: The plan.
        owner: Path of ``model`` in the LightningModule, for the message.

    Raises:
        ConfigError: Naming the unused patterns and the nearest paths.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    # Listing the attributes of a large model takes time, so only for plans that name some.
    attributes = {
        f"{path}.{name}" if path else name
        for path, module in modules.items()
        for name in vars(module)
        if plan.attributes and not name.startswith("_")
    }
    rows = describe_unused(list(plan.modules), [path for path in modules if path])
    problems = [f"row {text}" for text in rows] + [
        f"attribute {text}" for text in describe_unused(list(plan.attributes), attributes)
    ]
    if problems:
        where = f"{type(model).__name__}{f' ({owner})' if owner else ''}"
        listed = "; ".join(problems[:_LISTED]) + ("; …" if len(problems) > _LISTED else "")
        raise ConfigError(
            f"{len(problems)} of the {len(plan.modules) + len(plan.attributes)} patterns of the "
            f"sharding plan of {where} match no module or attribute: {listed}. What is left out "
            f"would be replicated. Paths begin at {type(model).__name__}: correct the patterns, "
            "or remove them."
        )


def parallelize(
    model: nn.Module, context: ParallelContext, plan: ShardingPlan, *, is_full: bool = True
) -> nn.Module:
    """Replace the modules of a model (full, or this rank's pipeline units) by their parallel
    counterparts, in place.

    Modules are replaced in the order of the model, parents before children, so that a style may
    look at a module's original children. Then the named attributes are rewritten. Over axes of size
    1 every module stays, and only specs are declared. Return ``model``.

    Args:
        model: Start of the plan's paths.
        context: Groups of this rank.
        plan: The plan.
        is_full: Whether ``model`` has all layers, so that every row must have a match.

    Raises:
        ConfigError: If a row or an attribute pattern matches nothing.
        ShardingError: If a size does not divide over the ranks, or the same module is reached under
            two names.
    """
    if is_full:
        check_plan(model, plan)
    swaps = False
    # Each module takes the shards of its own name of a tied weight. Afterwards the shards are one
    # parameter again, and have to be equal.
    with untied(model):
        modules = list(present_modules(model))
        attached = tuple(f"{path}." for path, module in modules if isinstance(module, Attachment))
        for path, module in modules:
            style = plan.style_of(path)
            # The style of the layer divides the layer's attachments, not a row of their own.
            if style is None or f"{path}.".startswith(attached):
                continue
            kind = type(base_layer(module))
            try:
                swapped = style.apply(base_layer(module), context, plan)
                if is_extended(module):
                    _divide_extension(module, style, context, plan)
            except ShardingError as error:
                raise ShardingError(f"{path}: {error}") from error
            if swapped is base_layer(module):
                swaps |= type(swapped) is not kind
                continue
            if is_extended(module):
                raise ShardingError(
                    f"{path}: style {type(style).__name__} makes another module of a layer with "
                    "adapters. Leave this layer out of the adapters' target_modules."
                )
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, swapped)
            swaps = True
    # torch's fused inference of nn.TransformerEncoder reads weights of layers behind their
    # forwards.
    if swaps:
        avoid_fused_inference(model)
    rewrites = [(compile_pattern(pattern), rewrite) for pattern, rewrite in plan.attributes.items()]
    for path, module in present_modules(model):
        prefix = f"{path}." if path else ""
        for name, value in list(vars(module).items()):
            rewrite = next((f for pattern, f in rewrites if pattern.fullmatch(prefix + name)), None)
            if rewrite is not None:
                setattr(module, name, rewrite(value, context))
    return model


def _divide_extension(
    module: nn.Module, style: Style, context: ParallelContext, plan: ShardingPlan
) -> None:
    """Divide the attachments of a layer, or the layer's copies in a wrapper of ``peft``."""
    copies = saved_copies(module)
    for copy in copies:
        style.apply(copy, context, plan)
    if copies:
        return
    divide = getattr(style, "divide_adapters", None)
    if divide is None:
        raise ShardingError(
            f"style {type(style).__name__} divides this {type(base_layer(module)).__name__}, and "
            "does not know how to divide its adapters. Leave the layer out of the adapters' "
            "target_modules."
        )
    divide(module, context, plan)
