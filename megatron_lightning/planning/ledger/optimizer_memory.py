"""Bytes of weights, gradients and optimizer on a rank. No torch here.

Of N parameters on n data-parallel ranks, with weights of w bytes and Adam's two moments in fp32
(``optim/gradients/buckets.py``, ``optim/fsdp/fully_sharded.py``, without padding of buckets):

             weights                   gradients               optimizer (m: main params, 4 or 0)
    ddp      w N                       4 N                     (8 + m) N
    zero1    w N                       4 N                     (8 + m) N / n
    fsdp     (m or w) N / n            4 N, or with reduce_    8 N / n
             + gathered units          every_microbatch of
                                       one unit, + 4 N / n

n counts data x context parallel ranks, and for experts the ranks with the same experts. fsdp's
shards are the main params, and fsdp leaves shared embeddings to zero1. Weights stored as quantized
data take 1 byte each, beside main params in fp32: 1 + 4 / n with zero1. With fsdp they take 5 / n,
and 1 while gathered. The numbers exclude gradients and moments. Scales are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_lightning.config import DataParallel, DataParallelOptions, TransformerConfig
from megatron_lightning.models.blueprint import EMBEDDING, OUTPUT
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.planning.ledger.precision_bytes import Precision
from megatron_lightning.planning.ledger.quantized_weights import count_quantized
from megatron_lightning.planning.ledger.rank_parameters import (
    ParameterCount,
    count_rank,
    count_unit,
)
from megatron_lightning.precision.recipes import FP8Recipe

_MAIN = 4  # bytes of fp32
_QUANTIZED = 1  # byte of a code
_MOMENTS = 2  # of Adam


class State:
    """Weights, gradients and optimizer of a rank.

    Args:
        parameters: Parameters of the rank.
        managed: Parameters sharded by fsdp, by unit.
        quantized: Parameters stored as quantized data, by unit.
        shards: Numbers of ranks that share dense parameters, and experts.
        precision: Bytes of an element.
        options: Options of the data-parallel mode.
        num_microbatches: Micro-batches of a pipeline run.
    """

    def __init__(
        self,
        parameters: ParameterCount,
        managed: Mapping[str, ParameterCount],
        quantized: Mapping[str, ParameterCount],
        *,
        shards: tuple[int, int],
        precision: Precision,
        options: DataParallelOptions,
        num_microbatches: int,
    ) -> None:
        self.parameters = parameters
        of_units = sum(managed.values(), ParameterCount(0))
        of_units_quantized = sum((quantized[unit] for unit in managed), ParameterCount(0))
        outside_units = _minus(self.parameters, of_units)
        left_quantized = _minus(sum(quantized.values(), ParameterCount(0)), of_units_quantized)
        moments = _MOMENTS * (2 if options.moments_dtype == "bf16" else _MAIN)
        main, weight_bytes = precision.main_bytes, precision.weight_bytes
        # FSDP2's shards are the main params. Parameters outside of units have separate ones.
        own_shard = _share(of_units, shards)
        self.optimizer_bytes = round(
            (moments + main) * _share(outside_units, shards)
            + moments * own_shard
            + _MAIN * _share(left_quantized, shards)
        )
        if options.optimizer_cpu_offload:
            self.optimizer_bytes = 0

        def in_use(count: int, quantized: int) -> float:
            return float(weight_bytes * (count - quantized) + _QUANTIZED * quantized)

        reshards = options.reshard_after_forward
        if reshards is None:
            reshards = num_microbatches == 1
        everything = in_use(of_units.total, of_units_quantized.total)
        # The next unit, without experts, arrives beside the largest unit.
        at_once = max(
            (in_use(one.total, quantized[unit].total) for unit, one in managed.items()),
            default=0.0,
        ) + max(
            (in_use(one.dense, quantized[unit].dense) for unit, one in managed.items()),
            default=0.0,
        )
        self.weights_bytes = round(
            in_use(outside_units.total, left_quantized.total)
            + (main or weight_bytes) * own_shard
            + _QUANTIZED * _share(of_units_quantized, shards)
            + (min(at_once, everything) if reshards else everything)
        )
        largest = max((unit.total for unit in managed.values()), default=0)
        unit_gradients = largest + own_shard if options.reduce_every_microbatch else of_units.total
        self.gradients_bytes = round(_MAIN * (outside_units.total + unit_gradients))


def state_of_units(
    config: TransformerConfig,
    grid: RankGrid,
    own: Sequence[Sequence[str]],
    *,
    precision: Precision,
    recipe: FP8Recipe | None,
    mode: DataParallel,
    options: DataParallelOptions,
    num_microbatches: int,
) -> State:
    """Return the state of a rank of a :class:`GPTModel`.

    Args:
        config: The model.
        grid: The ranks.
        own: Units of the rank's stages.
        precision: Bytes of an element.
        recipe: Recipe of quantized layers, or None.
        mode: Data-parallel mode.
        options: Options of the data-parallel mode.
        num_microbatches: Micro-batches of a pipeline run.
    """
    layout, units = grid.layout, [unit for stage in own for unit in stage]
    shards = shards_of(grid, mode, options)
    tied = {EMBEDDING, OUTPUT} if config.share_embeddings_and_output_weights else set[str]()
    tied |= {EMBEDDING} if config.num_predicting_layers else set()
    quantized = {
        unit: _shared(count_quantized(config, layout, unit, recipe), shards) for unit in units
    }
    # Parameters sharded by fsdp, by unit: all except shared embeddings.
    managed = {
        unit: _shared(count_unit(config, layout, unit), shards)
        for unit in units
        if mode == "fsdp" and unit not in tied
    }
    return State(
        count_rank(config, layout, own), managed, quantized, shards=shards, precision=precision,
        options=options, num_microbatches=num_microbatches,
    )  # fmt: skip


def shards_of(grid: RankGrid, mode: DataParallel, options: DataParallelOptions) -> tuple[int, int]:
    """Return the numbers of ranks that share the optimizer state of dense parameters, and of
    experts.
    """
    instances = options.num_distributed_optimizer_instances
    if mode == "ddp":
        return 1, 1
    return max(1, grid.size("dp-cp") // instances), max(1, grid.size("edp") // instances)


def _shared(count: ParameterCount, shards: tuple[int, int]) -> ParameterCount:
    """Return the parameters shared by several ranks."""
    return ParameterCount(
        count.dense if shards[0] > 1 else 0, count.experts if shards[1] > 1 else 0
    )


def _share(count: ParameterCount, shards: tuple[int, int]) -> float:
    """Return the parameters in one shard, for the given numbers of dense and expert shards."""
    return count.dense / shards[0] + count.experts / shards[1]


def _minus(count: ParameterCount, other: ParameterCount) -> ParameterCount:
    return ParameterCount(count.dense - other.dense, count.experts - other.experts)
