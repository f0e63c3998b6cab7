"""Bytes that a data-parallel step sends and keeps, counted on real ranks and compared with theory.

For a model of P parameters in bf16 on n data-parallel ranks (Megatron-Core's distributed
optimizer):

    sent     ddp     all-reduce 4 P                          memory   18 P
             zero1   reduce-scatter 4 P, all-gather 2 P               (6 + 12 / n) P

Every parameter is padded to 64 elements and a sharded bucket to a multiple of lcm(n, 128); in
addition, one byte a parameter (which ranks used it) and 4 bytes for the norm are sent.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lightning.config import DataParallelOptions, TransformerConfig
from megatron_lightning.models import GPTModel, num_parameters
from megatron_lightning.optim import DistributedOptimizer, GradientReducer, global_grad_norm
from megatron_lightning.parallel import ParallelContext, ParallelLayout, cpu_exchange
from megatron_lightning.parallel.shards.sharding import named_shard_specs

NUM_MICROBATCHES = 3
_KINDS = {
    "allreduce_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "_allgather_base_": "all_gather",
}


@dataclass(frozen=True)
class Count:
    """Counts of one mode on one number of ranks."""

    mode: str
    num_ranks: int
    num_parameters: int
    sent: dict[str, int]
    """Bytes of rank 0's buffers in each collective of a step, counted where torch dispatches
    them."""
    theory: dict[str, int]
    """The same by formula, padding included."""
    padding: float
    """Padding as a fraction of the parameters."""
    bytes_a_parameter: float
    """Parameters, gradients, main params and moments on the rank with the most."""
    expected_bytes: float

    @property
    def sends_what_it_should(self) -> bool:
        """Whether both agree to the byte."""
        return self.sent == self.theory

    @property
    def keeps_what_it_should(self) -> bool:
        """Whether memory is within 5 % of the formula."""
        return abs(self.bytes_a_parameter / self.expected_bytes - 1.0) <= 0.05


class _Dispatched(TorchDispatchMode):
    """Dispatch mode that counts the bytes given to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = str(func).split(".")[1]
            buffer = args[1] if "reduce_scatter" in name else args[0]
            self.sent[_KINDS.get(name, name)] += (
                buffer[0] if isinstance(buffer, (list, tuple)) else buffer
            ).nbytes
        return func(*args, **(kwargs or {}))


def count(mode: str, num_ranks: int, config: TransformerConfig) -> Count:
    """Run a step on ``num_ranks`` processes; return rank 0's counts, with the memory of the fullest
    rank.
    """
    context = mp.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_main,
                args=(mode, rank, num_ranks, config, f"{folder}/store", sender),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    numels, sent = results[0][:2]
    kept = max(result[2] for result in results)
    total, buckets = sum(numels), results[0][3]
    sharded = mode == "zero1" and num_ranks > 1
    padded = sum(_padded(bucket, num_ranks if sharded else 1) for bucket in buckets)
    theory = (
        {"reduce_scatter": 4 * padded, "all_gather": 2 * padded}
        if sharded
        else {"all_reduce": 4 * padded}
    )
    if num_ranks == 1:
        theory = {}
    elif sharded:
        theory["all_reduce"] = len(numels) + 4
    else:
        theory["all_reduce"] += len(numels)
    expected = 6 + 12 / num_ranks if sharded else 18.0
    return Count(mode, num_ranks, total, sent, theory, padded / total - 1.0, kept / total, expected)


def _padded(numels: Iterable[int], num_shards: int) -> int:
    size = sum(math.ceil(numel / 64) * 64 for numel in numels)
    unit = math.lcm(num_shards, 128)
    return math.ceil(size / unit) * unit if num_shards > 1 else size


def _main(
    mode: str, rank: int, size: int, config: TransformerConfig, store: str, pipe: Any
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    cpu_exchange.SMALLEST_DIRECT_BYTES = sys.maxsize  # collectives, as on GPUs
    if size > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size
        )
    pipe.send(_step(mode, config))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _step(
    mode: str, config: TransformerConfig
) -> tuple[list[int], dict[str, int], int, list[list[int]]]:
    """Return sizes of the parameters, bytes by collective, bytes kept, and the sizes in every
    bucket.
    """
    context, model = ParallelContext(ParallelLayout()), GPTModel(config).bfloat16()
    parameters, specs = dict(model.named_parameters()), named_shard_specs(model)
    options = DataParallelOptions(bucket_size=num_parameters(config) // 4)
    reducer = GradientReducer(parameters, specs, context, sharded=mode == "zero1", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    DistributedOptimizer(optimizer, reducer)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    with _Dispatched() as dispatched:
        reducer.begin_step()
        for index in range(NUM_MICROBATCHES):
            reducer.sync = index == NUM_MICROBATCHES - 1
            model(tokens, labels=tokens).mean().backward()
        reducer.finish(1.0 / context.dp_cp.size)
        global_grad_norm(reducer.counted(), context, sharded=reducer.sharded)
        optimizer.step()
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    kept = [
        *parameters.values(),
        *(bucket.gradient for bucket in reducer.buckets),
        *optimizer.state,
        *states,
    ]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept
    }
    buckets = [[parameter.numel() for parameter in bucket.parameters] for bucket in reducer.buckets]
    return (
        [p.numel() for p in parameters.values()],
        dict(dispatched.sent),
        sum(storages.values()),
        buckets,
    )
