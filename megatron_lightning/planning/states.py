"""Bytes of weights, gradients and optimizer on a rank. No torch here.

Of N parameters on n data-parallel ranks, with weights of w bytes and Adam's two moments in fp32
(``optim/buckets.py``, ``optim/fully_sharded.py``; padding of buckets is left out):

             weights                   gradients               optimizer (m: main params, 4 or 0)
    ddp      w N                       4 N                     (8 + m) N
    zero1    w N                       4 N                     (8 + m) N / n
    fsdp     (m or w) N / n            4 N, or with reduce_    8 N / n
             + gathered units          every_microbatch of
                                       one unit, + 4 N / n

n counts data x context parallel ranks, and for experts those that hold the same ones. fsdp's shards
are the main params, and it leaves shared embeddings to zero1.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lightning.config import DataParallel, DataParallelOptions, TransformerConfig
from megatron_lightning.parallel.grid import RankGrid
from megatron_lightning.planning.parameters import (
    EMBEDDING,
    OUTPUT,
    ParameterCount,
    count_rank,
    count_unit,
)
from megatron_lightning.planning.precision import Precision

_MAIN = 4  # bytes of fp32
_MOMENTS = 2  # of Adam


class State:
    """Weights, gradients and optimizer of a rank.

    Args:
        config: The model.
        grid: The ranks.
        own: Units of the rank's stages.
        precision: Bytes of an element.
        mode: How data-parallel ranks share them.
        options: Options of that.
        num_microbatches: Micro-batches of a pipeline run.
    """

    def __init__(
        self,
        config: TransformerConfig,
        grid: RankGrid,
        own: Sequence[Sequence[str]],
        *,
        precision: Precision,
        mode: DataParallel,
        options: DataParallelOptions,
        num_microbatches: int,
    ) -> None:
        layout, units = grid.layout, [unit for stage in own for unit in stage]
        instances = options.num_distributed_optimizer_instances
        self.parameters = count_rank(config, layout, own)
        shards = max(1, grid.size("dp-cp") // instances), max(1, grid.size("edp") // instances)
        self._precision = precision
        self._options = options
        tied = {EMBEDDING, OUTPUT} if config.share_embeddings_and_output_weights else set[str]()
        tied |= {EMBEDDING} if config.num_predicting_layers else set()
        # What fsdp shards, by unit: all but shared embeddings.
        counted = [count_unit(config, layout, unit) for unit in units if unit not in tied]
        managed = [
            ParameterCount(unit.dense if shards[0] > 1 else 0, unit.experts if shards[1] > 1 else 0)
            for unit in counted
            if mode == "fsdp"
        ]
        of_units = sum(managed, ParameterCount(0))
        sharded = of_units.total
        left = ParameterCount(
            self.parameters.dense - of_units.dense, self.parameters.experts - of_units.experts
        )
        per_optimizer = _MOMENTS * (2 if options.moments_dtype == "bf16" else _MAIN)
        main = precision.main_bytes
        over = shards if mode != "ddp" else (1, 1)
        stepped = left.dense / over[0] + left.experts / over[1]
        own_shard = of_units.dense / shards[0] + of_units.experts / shards[1]
        self.optimizer_bytes = round((per_optimizer + main) * stepped + per_optimizer * own_shard)
        if options.optimizer_cpu_offload:
            self.optimizer_bytes = 0
        reshards = options.reshard_after_forward
        if reshards is None:
            reshards = num_microbatches == 1
        largest = max((unit.total for unit in managed), default=0)
        # The next unit, without its experts, arrives beside this one.
        beside = max((unit.dense for unit in managed), default=0)
        gathered = largest + beside if reshards else sharded
        self.weights_bytes = round(
            precision.weight_bytes * left.total
            + (main or precision.weight_bytes) * own_shard
            + precision.weight_bytes * min(gathered, sharded)
        )
        full = largest + own_shard if options.reduce_every_microbatch else sharded
        self.gradients_bytes = round(_MAIN * (left.total + full))
