"""Activation memory of a pipeline stage for one micro-batch, and of a pipeline rank for a schedule.
No torch here.

A rank holds what its stages keep of every micro-batch between its forward and its backward, and at
each action what that one needs beyond:

    peak = max over the actions ( kept by the micro-batches in flight + the action's own )
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from megatron_lightning.config import RecomputeOptions
from megatron_lightning.parallel.patterns import compile_pattern
from megatron_lightning.pipeline.actions import Action, Kind, Schedule
from megatron_lightning.planning import layers
from megatron_lightning.planning.attention import attention as attention_tape
from megatron_lightning.planning.layers import Sizes
from megatron_lightning.planning.parameters import EMBEDDING, FINAL_NORM, OUTPUT, layer_of
from megatron_lightning.planning.tape import Operation, Profile, Segment, profile

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("**.core_attention",),
    "layernorm": ("**.input_layernorm", "**.pre_mlp_layernorm"),
}
MESSAGES_PER_CHANNEL = 2
"""Buffers into which messages are received ahead of the action that takes them."""
_MODEL = "model."  # where GPTLightningModule holds its model


def stage_profile(sizes: Sizes, units: Sequence[str], recompute: RecomputeOptions) -> Profile:
    """Return the bytes of one micro-batch on a stage.

    Args:
        sizes: Model, layout and micro-batch.
        units: The stage's units.
        recompute: What backward computes again, and what it reads from the host.
    """
    stream = "received"
    segments: list[Segment] = []
    if EMBEDDING in units:
        segments += _selective(layers.embedding(sizes, stream), sizes, recompute)
    else:
        entrance = Operation(path="", keeps={stream: sizes.stream_bytes}, makes=(stream,))
        segments.append(Segment((entrance,)))
    numbers = [number for unit in units if (number := layer_of(unit)) is not None]
    for group, recomputed in _grouped(numbers, recompute):
        operations: list[Operation] = []
        for number in group:
            operations += _layer(sizes, number, stream)
            stream = operations[-1].makes[0]
        if recomputed:
            segments.append(Segment(tuple(operations), recomputed=True))
        else:
            segments += _selective(operations, sizes, recompute)
    ends: list[Operation] = []
    if FINAL_NORM in units:
        ends.append(layers.norm(sizes, "decoder.final_layernorm", stream, "final normed"))
    if OUTPUT in units:
        ends.append(layers.output_and_loss(sizes, "final normed"))
    segments += _selective(ends, sizes, recompute)
    offloaded = [_offloaded(segment, recompute) for segment in segments]
    return profile(offloaded, split_backward=sizes.split_backward)


def rank_peak(
    schedule: Schedule, pp_rank: int, profiles: Sequence[Profile], message_bytes: float
) -> float:
    """Return the most bytes of activations that a pipeline rank holds in a run of a schedule.

    Args:
        schedule: The table.
        pp_rank: The pipeline rank.
        profiles: Bytes of one micro-batch on each stage.
        message_bytes: Bytes of a message between stages.
    """
    peak = 0.0
    held = _num_channels(schedule, pp_rank) * MESSAGES_PER_CHANNEL * message_bytes
    for stage, kind, _ in schedule.actions[pp_rank]:
        one = profiles[stage]
        if kind is Kind.FORWARD:
            peak = max(peak, held + one.forward_peak)
            held += one.kept
        elif kind is Kind.WEIGHT_GRADIENT:
            held -= one.deferred
        else:
            peak = max(peak, held - one.kept + one.backward_peak)
            held -= one.kept
            held += one.deferred if kind is Kind.INPUT_GRADIENT else 0.0
    return peak


def _num_channels(schedule: Schedule, pp_rank: int) -> int:
    """Return from how many (direction, other pipeline rank) messages come."""
    holders = schedule.placement.pp_ranks
    neighbors = [
        (step, holders[stage + step])
        for stage in schedule.placement.stages_of(pp_rank)
        for step in (-1, 1)
        if 0 <= stage + step < len(holders)
    ]
    return len({neighbor for neighbor in neighbors if neighbor[1] != pp_rank})


def in_flight(schedule: Schedule, pp_rank: int) -> int:
    """Return the most (stage, micro-batch) activations that a pipeline rank holds at once."""
    held = peak = 0
    for action in schedule.actions[pp_rank]:
        held += _change(action)
        peak = max(peak, held)
    return peak


def _change(action: Action) -> int:
    if action.kind is Kind.FORWARD:
        return 1
    return 0 if action.kind is Kind.INPUT_GRADIENT else -1


def _layer(sizes: Sizes, number: int, stream: str) -> list[Operation]:
    """Return a layer's tape, from the stream that enters it to the one that leaves it."""
    config, name = sizes.config, f"decoder.layers.{number}"
    normed, middle, normed_again = f"{name} normed", f"{name} middle", f"{name} normed again"
    attention = [
        layers.norm(sizes, f"{name}.input_layernorm", stream, normed),
        *attention_tape(sizes, f"{name}.self_attention", normed),
        *layers.dropout(sizes, f"{name}.dropout", config.hidden_dropout, f"{name} dropout"),
        Operation(path=name, makes=(middle,), forward_bytes=sizes.stream_bytes),
    ]
    feed_forward = [layers.norm(sizes, f"{name}.pre_mlp_layernorm", middle, normed_again)]
    if config.moe is not None and config.layer_kinds[number] == "expert":
        feed_forward += layers.experts(sizes, config.moe, f"{name}.mlp", normed_again)
    else:
        feed_forward += layers.mlp(sizes, f"{name}.mlp", normed_again, config.ffn_size)
    again = f"{name} dropout again"
    feed_forward += layers.dropout(sizes, f"{name}.dropout", config.hidden_dropout, again)
    output = f"{name} output"
    feed_forward.append(Operation(path=name, makes=(output,), forward_bytes=sizes.stream_bytes))
    # The gradient of the residual stream waits beside each of them.
    return [
        replace(one, backward_bytes=one.backward_bytes + sizes.stream_bytes)
        for one in (*attention, *feed_forward)
    ]


def _grouped(
    numbers: Sequence[int], recompute: RecomputeOptions
) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the layers that are kept or recomputed together, and whether they are recomputed."""
    count = recompute.recompute_num_layers or 1
    if recompute.recompute_granularity != "full":
        yield from (([number], False) for number in numbers)
    elif recompute.recompute_method == "block":
        yield from (([number], index < count) for index, number in enumerate(numbers))
    else:
        for start in range(0, len(numbers), count):
            yield numbers[start : start + count], True


def _selective(
    operations: Sequence[Operation], sizes: Sizes, recompute: RecomputeOptions
) -> list[Segment]:
    """Divide operations into segments by the modules that are recomputed."""
    patterns: tuple[re.Pattern[str], ...] = ()
    if recompute.recompute_granularity == "selective":
        patterns = _compiled(recompute.recompute_modules)
    found = [_outermost(operation.path, patterns) for operation in operations]
    dropped: dict[str, float] = {}
    kept = []
    for operation, module in zip(operations, found, strict=True):
        left = {name: size for name, size in operation.keeps.items() if name not in dropped}
        again = sum(operation.keeps.values()) - sum(left.values())
        inputs = {name: size for name, size in operation.inputs.items() if name not in dropped}
        needed = operation.backward_bytes + again
        one = replace(operation, keeps=left, inputs=inputs, backward_bytes=needed)
        kept.append(one)
        # Under autocast the next layer keeps a cast copy of what a norm returns.
        is_cast = module is not None and sizes.precision.autocast and _is_norm(module)
        if module is not None and _is_cheap(module) and not is_cast:
            dropped |= dict.fromkeys(operation.makes, 0.0)
    segments = []
    for module, group in groupby(zip(kept, found, strict=True), key=lambda pair: pair[1]):
        run = tuple(operation for operation, _ in group)
        segments.append(Segment(run, module is not None and not _is_cheap(module)))
    return segments


def _offloaded(segment: Segment, recompute: RecomputeOptions) -> Segment:
    """Leave out what is kept in host memory; a backward has its own tensors on the device."""
    patterns = _compiled(recompute.offload_modules)
    operations = []
    for operation in segment.operations:
        if _outermost(operation.path, patterns) is None:
            operations.append(operation)
            continue
        large = {
            name: size
            for name, size in operation.keeps.items()
            if size >= recompute.offload_min_bytes
        }
        left = {name: size for name, size in operation.keeps.items() if name not in large}
        size = operation.backward_bytes + sum(large.values())
        operations.append(replace(operation, keeps=left, backward_bytes=size))
    return replace(segment, operations=tuple(operations))


def _compiled(names: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    patterns = (
        pattern
        for name in names
        for pattern in _ALIASES.get(name, (name if "." in name else f"**.{name}",))
    )
    return tuple(compile_pattern(pattern) for pattern in patterns)


def _outermost(path: str, patterns: Sequence[re.Pattern[str]]) -> str | None:
    """Return the outermost module around ``path`` that a pattern matches; None: there is none."""
    segments = path.split(".")
    modules = [".".join(segments[: index + 1]) for index in range(len(segments))]
    return next(
        (
            module
            for module in modules
            if any(p.fullmatch(name) for p in patterns for name in (module, _MODEL + module))
        ),
        None,
    )


def _is_norm(module: str) -> bool:
    return module.endswith("norm")


def _is_cheap(module: str) -> bool:
    """Return whether a module's output is dropped rather than its inputs kept."""
    return _is_norm(module) or module.endswith(".activation")
