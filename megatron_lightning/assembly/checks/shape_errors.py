"""Explain errors of a step caused by a missing row of a sharding plan, or by fsdp's shards.

A layer without a row expects full activations. If the layer receives a rank's shard of the sequence
or of the features, torch reports two numbers with a ratio of the number of tensor-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

from torch import nn

from megatron_lightning.errors import MegatronLightningError, ShardingError
from megatron_lightning.layers.linear.parallel_linear import ColumnParallelLinear, RowParallelLinear
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.sharding import ShardingPlan

_MOST_ROWS = 3  # suggested in a message
_MEETING = re.compile(
    r"size of (?:the )?tensor(?: a)? \((\d+)\) must match the (?:size of tensor b|existing size) "
    r"\((\d+)\) at non-singleton dimension (\d+)"
)
_CONCATENATED = re.compile(
    r"Sizes of tensors must match except in dimension \d+\. Expected size (\d+) but got size (\d+)"
)
_MATMUL = re.compile(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")
_NORMALIZED = re.compile(r"normalized_shape=\[(\d+)\].* got input of size\s?\[(?:.*, ?)?(\d+)\]")
_TARGETS = re.compile(r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)")
_UNPACKED = re.compile(r"values to unpack \(expected \d+")
_HEAD_COUNTS = ("n_head", "n_heads", "num_heads", "nhead", "heads", "num_attention_heads")
_MIXED = "mixed torch.Tensor and DTensor"
_VIEW = re.compile(r"shape '\[(.*)\]' is invalid for input of size (\d+)")


class _Mismatch(NamedTuple):
    sizes: tuple[int, int]
    dim: int | None
    """Dim of the mismatch between two tensors. None: not known."""
    is_feature: bool
    """Whether the sizes are always sizes of features."""


class _Place(NamedTuple):
    """The innermost running module."""

    path: str
    module: nn.Module
    owner: str
    """Path of the module with the plan."""
    plan: ShardingPlan


@contextmanager
def explained_shapes(
    module: nn.Module, plans: Mapping[str, ShardingPlan], context: ParallelContext
) -> Iterator[None]:
    """Explain shape errors from a missing row, and errors from fsdp's shards, with the rows to add.

    Raises:
        ShardingError: With the module and the rows to add, from torch's error.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if _MIXED in str(error):
            raise ShardingError(_explain_shard(error, module)) from error
        if context.tp.size == 1 or not plans or isinstance(error, MegatronLightningError):
            raise
        explanation = explain(error, module, plans, context)
        if explanation is None:
            raise
        raise ShardingError(explanation) from error


def explain(
    error: Exception,
    module: nn.Module,
    plans: Mapping[str, ShardingPlan],
    context: ParallelContext,
) -> str | None:
    """Return the missing rows. None: the error's numbers are not the sizes of a shard and of the
    full tensor.
    """
    mismatch, ranks = _mismatch(str(error)), context.tp.size
    place = _place(error, module, plans)
    if place is None:
        return None
    heads = _explain_heads(error, place, module, context)
    if heads is not None:
        return heads
    # Sizes that differ by exactly the number of ranks: a shard met a full tensor. Anything else is
    # the user's own error, and is left as it is.
    if mismatch is None or max(mismatch.sizes) != ranks * min(mismatch.sizes):
        return None
    path = place.path or type(module).__name__
    where = f"{path} ({type(place.module).__name__})" if place.path else path
    told = str(error).splitlines()[0]
    sharded = place.plan.is_sequence_parallel(context)
    if sharded and not mismatch.is_feature and _is_sequence(mismatch, place, module):
        return (
            f"{where} got a shard of the sequence where the full one was expected, or the other "
            f"way round ({told}). With sequence parallel on, activations are this rank's shard, 1 "
            f"of {ranks}, from the first row that shards them on, and only modules with a row "
            f"expect that. {_missing_rows(place, sequence=True)}, or set sequence_parallel=False."
        )
    return (
        f"{where} got a shard of the features where all were expected, or the other way round "
        f"({told}). The {max(mismatch.sizes)} features are split over the {ranks} tensor-parallel "
        "ranks between a ColumnParallel row and its RowParallel partner. "
        f"{_missing_rows(place, sequence=False)}, or gather them with "
        "ColumnParallel(gather_output=True)."
    )


def _explain_heads(
    error: Exception, place: _Place, module: nn.Module, context: ParallelContext
) -> str | None:
    """Return the change to make in a forward that divides a rank's features by all heads, as ``C //
    self.n_head`` does. None: the error is of another kind.

    The error arises where the forward reshapes or unpacks the features of its column-parallel
    layers, or in the row-parallel layer behind.
    """
    text = str(error)
    path, owner = place.path, place.module
    if isinstance(owner, RowParallelLinear) and _MATMUL.search(text):
        path = path.rpartition(".")[0]
        owner = module.get_submodule(path)
    elif not (_VIEW.search(text) or _UNPACKED.search(text)):
        return None
    columns = [
        name
        for name, child in owner.named_children()
        if isinstance(child, ColumnParallelLinear) and not child.gather_output
    ]
    if not columns:
        return None
    # Name the model's own attribute, so that the user finds the line to change.
    counts = [name for name in vars(owner) if name in _HEAD_COUNTS]
    count = f"self.{counts[0]}" if counts else "its number of heads"
    prefix = f"{place.owner}." if place.owner else ""
    path_in_plan = path.removeprefix(prefix)
    gathers = place.plan.is_sequence_parallel(context) and not place.plan.style_of(path_in_plan)
    sequence = (
        f" Its input is a shard of the sequence, too: add the row {path_in_plan!r}: ParallelInput()"
        ", and copy_input=False to its column-parallel layers."
        if gathers
        else ""
    )
    return (
        f"{path or type(module).__name__} ({type(owner).__name__}) computes with the sizes of the "
        f"full model ({text.splitlines()[0]}): the outputs of {', '.join(columns)} are "
        f"shards of the features, 1 of {context.tp.size} on each tensor-parallel rank, and its "
        f"forward divides all of them by {count}, as in C // self.n_head. Let it take the number "
        "of heads from the tensor, view(B, T, -1, head_size) and view(B, T, -1), and split a fused "
        f"projection by chunk(3, dim=2).{sequence} Or leave its forward as it is: "
        "ColumnParallel(gather_output=True) and RowParallel(split_input=True), or "
        'MegatronStrategy(sharding_plan="auto").'
    )


def _explain_shard(error: Exception, module: nn.Module) -> str:
    where = _running(error, module) or type(module).__name__
    return (
        f'{where} reads a parameter of a unit that data_parallel="fsdp" shards, and the forward of '
        "the unit is not called, which would gather it. Name units whose forward is called in "
        'PipelineOptions(units=[...]), or set data_parallel="zero1".'
    )


def _mismatch(text: str) -> _Mismatch | None:
    if match := _MEETING.search(text):
        return _Mismatch((int(match[1]), int(match[2])), int(match[3]), is_feature=False)
    if match := _MATMUL.search(text) or _NORMALIZED.search(text):
        return _Mismatch((int(match[1]), int(match[2])), None, is_feature=True)
    if match := _TARGETS.search(text) or _CONCATENATED.search(text):
        return _Mismatch((int(match[1]), int(match[2])), None, is_feature=False)
    if match := _VIEW.search(text):
        sizes = [int(size) for size in match[1].split(",") if size.strip().lstrip("-").isdigit()]
        return _Mismatch((prod(sizes), int(match[2])), None, is_feature=False)
    return None


def _is_sequence(mismatch: _Mismatch, place: _Place, module: nn.Module) -> bool:
    """Return whether the sizes are of the sequence, not of the features split by parallel
    layers.
    """
    if mismatch.dim == place.plan.sequence_dim:
        return True
    layers = [
        child
        for child in module.modules()
        if isinstance(child, ColumnParallelLinear | RowParallelLinear)
    ]
    features = {size for layer in layers for size in (layer.in_features, layer.out_features)}
    return max(mismatch.sizes) not in features


def _place(
    error: BaseException, module: nn.Module, plans: Mapping[str, ShardingPlan]
) -> _Place | None:
    """Return the innermost module of ``module`` running when ``error`` was raised."""
    path = _running(error, module)
    if path is None:
        return None
    owners = [owner for owner in plans if not owner or f"{path}.".startswith(f"{owner}.")]
    owner = max(owners, key=len) if owners else min(plans, key=len)
    return _Place(path, module.get_submodule(path), owner, plans[owner])


def _running(error: BaseException, module: nn.Module) -> str | None:
    """Return the path of the innermost running module."""
    paths = {id(child): path for path, child in module.named_modules()}
    frame_found, step = None, error.__traceback__
    while step is not None:
        candidate = step.tb_frame.f_locals.get("self")
        if isinstance(candidate, nn.Module):
            frame_found = paths.get(id(candidate), frame_found)
        step = step.tb_next
    return frame_found


def _missing_rows(place: _Place, *, sequence: bool) -> str:
    """Return a sentence with the modules that lack a row, modules inside of the place first."""
    prefix = f"{place.owner}." if place.owner else ""
    prefix_inside = f"{place.path}." if place.path else ""
    # Modules with parameters and without a row, by their paths in the plan.
    bare = {
        (prefix_inside + path if path else place.path).removeprefix(prefix): child
        for path, child in place.module.named_modules()
        if next(child.parameters(recurse=False), None) is not None
    }
    bare = {path: child for path, child in bare.items() if not place.plan.style_of(path)}
    rows = [f"{path!r}: {_style(child, place, sequence)}" for path, child in bare.items()]
    if rows:
        return f"Add a row: {', '.join(rows[:_MOST_ROWS])}{', …' if rows[_MOST_ROWS:] else ''}"
    relative_path = place.path.removeprefix(prefix)
    if (
        sequence
        and place.path
        and place.path != place.owner
        and not place.plan.style_of(relative_path)
    ):
        return f"Add a row: {relative_path!r}: ParallelInput()"
    if sequence:
        return (
            "Add a row that shards or gathers the sequence before it, such as ShardSequence(), "
            "ParallelInput() or VocabParallel(gather_output=True)"
        )
    return "Add the row that is missing for the layer before or behind it"


def _style(module: nn.Module, place: _Place, sequence: bool) -> str:
    if not isinstance(module, nn.Linear):
        return "SequenceParallel()" if sequence else "HeadParallel()"
    if not sequence:
        return "RowParallel()"
    # In the step itself, outside of the model, the full output is needed.
    return "SequenceParallel()" if place.path else "ColumnParallel(gather_output=True)"
