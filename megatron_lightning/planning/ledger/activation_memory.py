"""Activation memory of a pipeline stage for one micro-batch, and of a pipeline rank for a schedule.

No torch here.

A rank holds the saved tensors of every micro-batch between forward and backward. Each action needs
additional memory:

    peak = max over the actions ( kept by the micro-batches in flight + the action's own )
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from megatron_lightning.config import RecomputeOptions, TransformerConfig
from megatron_lightning.config.layer_kinds import entry_of
from megatron_lightning.models.blueprint import EMBEDDING, FINAL_NORM, OUTPUT, depth_layers
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.pipeline.schedules.actions import Kind, Schedule
from megatron_lightning.planning.ledger import layer_tapes, single_mixer
from megatron_lightning.planning.ledger.attention_memory import attention as attention_tape
from megatron_lightning.planning.ledger.delta_net_tape import delta_net, delta_net_layer
from megatron_lightning.planning.ledger.layer_tapes import Sizes
from megatron_lightning.planning.ledger.rank_parameters import (
    config_of,
    kind_of,
    layer_of,
    predicting_layer_of,
)
from megatron_lightning.planning.ledger.state_space_tape import mamba_layer
from megatron_lightning.planning.ledger.tape import (
    Kept,
    Operation,
    Profile,
    Segment,
    compiled,
    profile,
)

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("**.core_attention",),
    "layernorm": ("**.input_layernorm", "**.pre_mlp_layernorm"),
}
MESSAGES_PER_CHANNEL = 3
"""Two messages are received ahead of the consuming action, and one message waits for the
receiver.
"""
_MODEL = "model."  # attribute of GPTLightningModule with the model


def stage_profile(sizes: Sizes, units: Sequence[str], recompute: RecomputeOptions) -> Profile:
    """Return the bytes of one micro-batch on a stage.

    Args:
        sizes: Model, layout and micro-batch.
        units: The stage's units.
        recompute: Recomputed and offloaded activations.
    """
    stream = "received"
    ends = replace(sizes, compiled=False)  # the ends are outside of blocks
    segments: list[Segment] = []
    if EMBEDDING in units:
        segments += _selective(layer_tapes.embedding(ends, stream), ends, recompute)
    else:
        stream_received = {stream: sizes.stream_bytes * num_received(sizes.config, units)}
        segments.append(Segment((Operation(path="", keeps=stream_received, makes=(stream,)),)))
    predicting = [unit for unit in units if predicting_layer_of(unit) is not None]
    own_units = [unit for unit in units if layer_of(unit) is not None]
    groups = [
        *_grouped(own_units, recompute),
        ([], False),
        *_grouped(predicting, recompute, len(own_units)),
    ]
    # In the order of the forward: layers, the final norm, then the predicting layers, each with the
    # stream that enters it.
    for group, recomputed in groups:
        operations: list[Operation] = []
        if not group and FINAL_NORM in units:
            operations.append(layer_tapes.norm(ends, FINAL_NORM, stream, "final normed"))
            stream = "final normed"
        for unit in group:
            make = _unit_layer if layer_of(unit) is not None else _predicting_layer
            operations += make(sizes, unit, stream)
            stream = operations[-1].makes[0]
        if recomputed:
            segments.append(Segment(tuple(operations), recomputed=True))
        else:
            segments += _selective(operations, sizes, recompute)
    if OUTPUT in units:
        segments += _selective(_output(ends, stream), ends, recompute)
    offloaded = [_offloaded(segment, recompute) for segment in segments]
    return profile(offloaded, split_backward=sizes.split_backward)


def num_received(config: TransformerConfig, units: Sequence[str]) -> int:
    """Return the number of stream-sized tensors that a stage receives for a micro-batch.

    An output layer on another stage than the layers of multi-token prediction receives the tensors
    of all depths.
    """
    joins = OUTPUT in units and all(predicting_layer_of(unit) is None for unit in units)
    return 1 + config.num_predicting_layers if joins else 1


def rank_peak(
    schedule: Schedule,
    pp_rank: int,
    profiles: Sequence[Profile],
    *,
    message_bytes: float,
    stream_bytes: float,
) -> float:
    """Return the peak activation bytes of a pipeline rank in a run of a schedule.

    Args:
        schedule: The table.
        pp_rank: The pipeline rank.
        profiles: Bytes of one micro-batch on each stage.
        message_bytes: Bytes of a message between stages.
        stream_bytes: Bytes of the residual stream.
    """
    peak = 0.0
    current = _num_channels(schedule, pp_rank) * MESSAGES_PER_CHANNEL * message_bytes
    if len(schedule.actions) > 1:
        current += stream_bytes  # stands for the outputs of the units of other ranks
    # The row is replayed with bytes in the place of tensors: forwards add what is kept, backwards
    # free it, and the peak is inside of an action.
    for stage, kind, _ in schedule.actions[pp_rank]:
        one = profiles[stage]
        if kind is Kind.FORWARD:
            peak = max(peak, current + one.forward_peak)
            current += one.kept
        elif kind is Kind.WEIGHT_GRADIENT:
            current -= one.deferred
        else:
            peak = max(peak, current - one.kept + one.backward_peak)
            current -= one.kept
            current += one.deferred if kind is Kind.INPUT_GRADIENT else 0.0
    return peak


def _num_channels(schedule: Schedule, pp_rank: int) -> int:
    """Return the number of distinct (direction, other pipeline rank) message sources."""
    holders = schedule.placement.pp_ranks
    neighbors = [
        (step, holders[stage + step])
        for stage in schedule.placement.stages_of(pp_rank)
        for step in (-1, 1)
        if 0 <= stage + step < len(holders)
    ]
    return len({neighbor for neighbor in neighbors if neighbor[1] != pp_rank})


def _output(sizes: Sizes, stream: str) -> list[Operation]:
    """Return the tape of the output layer and the loss.

    The hidden states of all depths of multi-token prediction pass side by side.
    """
    depths = sizes.config.num_predicting_layers
    if not depths:
        return [layer_tapes.output_and_loss(sizes, stream)]
    sizes = replace(sizes, micro_batch_size=(1 + depths) * sizes.micro_batch_size)
    size = float(sizes.sharded_tokens * sizes.config.hidden_size * sizes.element)
    joined = Operation(path="", makes=("states",), forward_bytes=size, backward_bytes=size)
    return [joined, layer_tapes.output_and_loss(sizes, "states")]


def _predicting_layer(sizes: Sizes, unit: str, stream: str) -> list[Operation]:
    """Return the tape of a layer of multi-token prediction."""
    h, e, embedded = sizes.config.hidden_size, sizes.element, f"{unit} embedded"
    joined, entering = f"{unit} joined", f"{unit} stream"
    both_bytes, size = 2.0 * sizes.sharded_tokens * h * e, sizes.stream_bytes
    normed = (f"{unit} e", f"{unit} h")
    operations = [
        *(
            replace(one, path=f"{unit}.{one.path}")
            for one in layer_tapes.embedding(sizes, embedded)
        ),
        layer_tapes.norm(sizes, f"{unit}.enorm", embedded, normed[0]),
        layer_tapes.norm(sizes, f"{unit}.hnorm", stream, normed[1]),
        Operation(path=unit, makes=(joined,), forward_bytes=both_bytes, backward_bytes=both_bytes),
        layer_tapes.linear(sizes, f"{unit}.eh_proj", joined, entering),
    ]
    if sizes.layout.tp > 1:  # gathered, and split again
        full_bytes = float(sizes.tokens * h * e)
        operations.append(
            Operation(
                path=unit, makes=(entering,), forward_bytes=full_bytes, backward_bytes=full_bytes
            )
        )
    leaving = entering
    for path, kind in depth_layers(sizes.config):
        operations += _layer(sizes, unit, leaving, kind, f"{unit}.{path}")
        leaving = operations[-1].makes[0]
    operations.append(layer_tapes.norm(sizes, f"{unit}.final_layernorm", leaving, f"{unit} normed"))
    # The gradient of the previous depth's hidden states waits beside each operation.
    return [replace(one, backward_bytes=one.backward_bytes + size) for one in operations]


def _unit_layer(sizes: Sizes, unit: str, stream: str) -> list[Operation]:
    """Return the tape of a layer that is a unit."""
    return _layer(sizes, unit, stream, kind_of(sizes.config, unit) or "dense", unit)


def _layer(sizes: Sizes, unit: str, stream: str, kind: str, path: str) -> list[Operation]:
    """Return the tape of a layer at ``path`` from the entering to the leaving stream."""
    sizes = replace(sizes, config=config_of(sizes.config, unit))
    operations = entry_of(kind, LEDGERS, "ledger")(sizes, path, stream)
    # The gradient of the residual stream waits beside each operation.
    return [
        replace(one, backward_bytes=one.backward_bytes + sizes.stream_bytes) for one in operations
    ]


def _dense_layer(sizes: Sizes, name: str, stream: str) -> list[Operation]:
    normed = _read_by_feed_forward(sizes, name)
    feed_forward = layer_tapes.mlp(sizes, f"{name}.mlp", normed, sizes.config.ffn_size)
    return _transformer_layer(sizes, name, (stream, normed), feed_forward, has_experts=False)


def _expert_layer(sizes: Sizes, name: str, stream: str) -> list[Operation]:
    normed, moe = _read_by_feed_forward(sizes, name), sizes.config.moe
    if moe is None:
        return _dense_layer(sizes, name, stream)
    feed_forward = layer_tapes.experts(sizes, moe, f"{name}.mlp", normed)
    return _transformer_layer(sizes, name, (stream, normed), feed_forward, has_experts=True)


def _transformer_layer(
    sizes: Sizes,
    name: str,
    streams: tuple[str, str],
    feed_forward: list[Operation],
    *,
    has_experts: bool,
) -> list[Operation]:
    """Return the tape of attention and feed-forward.

    Args:
        sizes: Sizes.
        name: Path of the layer.
        streams: Names of the entering stream and of the normed stream for the feed-forward.
        feed_forward: Operations behind the second norm.
        has_experts: Whether the operations are experts.
    """
    config, (stream, normed_again) = sizes.config, streams
    normed, middle = f"{name} normed" if config.norms_inputs else stream, f"{name} middle"
    mix = delta_net if config.has_linear_attention else attention_tape
    attention = mix(sizes, f"{name}.self_attention", normed)
    if config.norms_inputs:
        attention = [layer_tapes.norm(sizes, f"{name}.input_layernorm", stream, normed), *attention]
    attention = [
        *_with_norm(sizes, attention, f"{name}.post_self_attn_layernorm"),
        *layer_tapes.dropout(sizes, f"{name}.dropout", config.hidden_dropout, f"{name} dropout"),
        Operation(path=name, makes=(middle,), forward_bytes=sizes.stream_bytes),
    ]
    if config.norms_middle:
        is_kept = not sizes.compiled or has_experts
        attention.append(_norm_of_sum(sizes, name, middle, normed_again, is_kept=is_kept))
    again = f"{name} dropout again"
    output = Operation(path=name, makes=(f"{name} output",), forward_bytes=sizes.stream_bytes)
    dropped = layer_tapes.dropout(sizes, f"{name}.dropout", config.hidden_dropout, again)
    feed_forward = _with_norm(sizes, feed_forward, f"{name}.post_mlp_layernorm")
    feed_forward = [*feed_forward, *dropped, output]
    if not sizes.compiled:
        return [*attention, *feed_forward]
    # Experts end a graph.
    graphs = [attention, feed_forward] if has_experts else [[*attention, *feed_forward]]
    return [one for graph in graphs for one in compiled(graph)]


def _read_by_feed_forward(sizes: Sizes, name: str) -> str:
    """Return the name of the feed-forward's input stream."""
    if sizes.config.norm_placement == "parallel":
        return f"{name} normed"
    return f"{name} normed again" if sizes.config.norms_middle else f"{name} middle"


def _with_norm(sizes: Sizes, operations: list[Operation], path: str) -> list[Operation]:
    """Return operations and the norm of their output, if outputs are normed."""
    if not sizes.config.norms_outputs:
        return operations
    channels = sizes.sharded_tokens * sizes.config.hidden_size
    output = operations[-1].makes[0]
    norm = layer_tapes.norm_of(
        sizes, path, output, f"{path} out", channels=channels, element=sizes.element
    )
    return [*operations, norm]


LEDGERS: Mapping[str, Callable[[Sizes, str, str], list[Operation]]]
LEDGERS = MappingProxyType(
    {
        "dense": _dense_layer,
        "expert": _expert_layer,
        "attention": single_mixer.attention_layer,
        "delta_net": delta_net_layer,
        "mlp": single_mixer.mlp_layer,
        "moe": single_mixer.moe_layer,
        "mamba": mamba_layer,
    }
)
"""Kind of a layer -> function of sizes, path and entering stream that returns the operations."""


def _norm_of_sum(sizes: Sizes, name: str, middle: str, normed: str, *, is_kept: bool) -> Operation:
    """Return the norm of the stream in the middle of a layer.

    If the middle stream is not kept, backward recomputes the stream from the saved layer input and
    attention's output.
    """
    if is_kept:
        return layer_tapes.norm(sizes, f"{name}.pre_mlp_layernorm", middle, normed)
    added = f"{name}.self_attention out"
    channels = sizes.sharded_tokens * sizes.config.hidden_size
    return layer_tapes.norm_of(
        sizes, f"{name}.pre_mlp_layernorm", added, normed, channels=channels, element=sizes.element
    )


def _grouped(
    units: Sequence[str], recompute: RecomputeOptions, num_before: int = 0
) -> Iterator[tuple[Sequence[str], bool]]:
    """Yield groups of layers kept or recomputed together, and whether the group is recomputed.

    ``num_before``: earlier layers of the stage.
    """
    count = recompute.recompute_num_layers or 1
    if recompute.recompute_granularity != "full":
        yield from (([unit], False) for unit in units)
    elif recompute.recompute_method == "block":
        yield from (([unit], index < count) for index, unit in enumerate(units, num_before))
    else:
        for start in range(0, len(units), count):
            yield units[start : start + count], True


def _selective(
    operations: Sequence[Operation], sizes: Sizes, recompute: RecomputeOptions
) -> list[Segment]:
    """Divide operations into segments by recomputed modules."""
    patterns: tuple[re.Pattern[str], ...] = ()
    if recompute.recompute_granularity == "selective":
        patterns = _compiled(recompute.recompute_modules)
    matches = [_outermost(operation.path, patterns) for operation in operations]
    if sizes.compiled:  # a graph keeps the operands of backward's GEMMs, also of norms
        matches = [None if module is None or _is_cheap(module) else module for module in matches]
    dropped: dict[str, str] = {}
    segments_kept = []
    for operation, module in zip(operations, matches, strict=True):
        remaining = _not_dropped(operation.keeps, dropped, module)
        again = sum(operation.keeps.values()) - sum(remaining.values())
        inputs = _not_dropped(operation.inputs, dropped, module)
        needed = operation.backward_bytes + again
        segments_kept.append(
            replace(operation, keeps=remaining, inputs=inputs, backward_bytes=needed)
        )
        # Under autocast the next layer saves a cast copy of a norm's output.
        is_cast = module is not None and sizes.precision.autocast and _is_norm(module)
        # A graph also recomputes a module for the readers of the module's output.
        drops = sizes.compiled or (module is not None and _is_cheap(module) and not is_cast)
        if module is not None and drops:
            dropped |= dict.fromkeys(operation.makes, module)
    segments = []
    for module, group in groupby(
        zip(segments_kept, matches, strict=True), key=lambda pair: pair[1]
    ):
        run = tuple(operation for operation, _ in group)
        segments.append(Segment(run, module is not None and not _is_cheap(module)))
    return segments


def _not_dropped(tensors: Kept, dropped: Mapping[str, str], module: str | None) -> Kept:
    """Leave out recomputed tensors made by other modules."""
    return {n: size for n, size in tensors.items() if dropped.get(n, module) == module}


def _offloaded(segment: Segment, recompute: RecomputeOptions) -> Segment:
    """Leave out tensors in host memory.

    During a backward, the operation's tensors are on the device.
    """
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
        remaining = {name: size for name, size in operation.keeps.items() if name not in large}
        size = operation.backward_bytes + sum(large.values())
        operations.append(replace(operation, keeps=remaining, backward_bytes=size))
    return replace(segment, operations=tuple(operations))


def _compiled(names: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    patterns = (
        pattern
        for name in names
        for pattern in _ALIASES.get(name, (name if "." in name else f"**.{name}",))
    )
    return tuple(compile_pattern(pattern) for pattern in patterns)


def _outermost(path: str, patterns: Sequence[re.Pattern[str]]) -> str | None:
    """Return the outermost matching module around ``path``, or None."""
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
    """Return whether a module's output is dropped instead of keeping the module's inputs."""
    return _is_norm(module) or module.endswith(".activation")
