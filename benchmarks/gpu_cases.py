"""Measurements of ``benchmarks.gpu`` on one GPU. Every item is measured by itself and returns plain
numbers.

Model FLOP/s utilisation is the model's arithmetic (6 a weight and token, and causal attention's
products; no recomputation) over the time and the vendor's dense bf16 peak.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.statistics import ratio_of_medians
from benchmarks.teams import measure
from benchmarks.variants import VARIANTS, Shape
from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo
from megatron_lightning.layers.context.blocks import visible_blocks
from megatron_lightning.layers.context.kernels import Output
from megatron_lightning.layers.context.local import LocalAttention
from megatron_lightning.layers.context.merged import Gradients, Merged, Sharing
from megatron_lightning.parallel.grid.context import ALONE
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.planning.search.peaks import peak_flops

Numbers = Mapping[str, Any]

SMALL = Shape(
    num_layers=12, hidden_size=1024, num_heads=16, num_groups=8, ffn_size=2816, vocab_size=32000,
    sequence=2048, batch=8,
    accelerator="gpu", precision="bf16-mixed",
)  # fmt: skip
LARGE = replace(SMALL, num_layers=16, hidden_size=2048, ffn_size=5632, sequence=4096, batch=4)
HEADS, GROUPS, HEAD_SIZE = 32, 8, 128
"""Of attention over long sequences: Llama 3.1 8B."""


@dataclass(frozen=True)
class Item:
    """One measurement."""

    seconds: float
    """Expected time, the start of processes included."""
    measure: Callable[[], Numbers]


def rates_of(shape: Shape, seconds: float) -> dict[str, Any]:
    """Return what a step's time means."""
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    rates = {
        "step_ms": seconds * 1e3,
        "tokens_per_s": shape.tokens / seconds,
        "tflops": shape.flops / seconds / 1e12,
    }
    return {**rates, "mfu": shape.flops / seconds / peak if peak else None}


def step_beside_lightning(shape: Shape, num_rounds: int) -> Numbers:
    """Train in turn with plain Lightning on the same GPU."""
    names = ("single", "lightning-single")
    steps = measure([VARIANTS[name] for name in names], shape, num_rounds, num_dropped=3)
    walls = {name: [ranks[0].wall_s for ranks in steps[name]] for name in names}
    numbers = {name: rates_of(shape, statistics.median(walls[name])) for name in names}
    for name in names:
        numbers[name] |= {
            "peak_gib": steps[name][-1][0].peak_bytes / 2**30,
            "host_ms": statistics.median(ranks[0].cpu_s for ranks in steps[name]) * 1e3,
        }
    losses = {name: [ranks[0].loss for ranks in steps[name]] for name in names}
    ratio = ratio_of_medians(walls["lightning-single"], walls["single"])
    return {
        **numbers,
        "speed_of_lightning": [ratio.value, ratio.low, ratio.high],
        "losses": losses,
        "wall_s": walls,
    }


def gpu_times_ms(work: Callable[[], Any], repeats: int = 20) -> list[float]:
    """Return the GPU times of ``work`` in milliseconds, after three warm-up runs."""
    for _ in range(3):
        work()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) for start, end in events]


def attention(sequence: int, batch: int) -> Numbers:
    """Time our attention, forward and backward, with the kernel that torch picks and with each one
    forced.
    """
    heads, groups, width = 16, 8, 128
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q = torch.randn(sequence, batch, heads, width, **options)
    k, v = (torch.randn(sequence, batch, groups, width, **options) for _ in range(2))
    core, gradient = (
        CoreAttention(0.0),
        torch.randn(sequence, batch, heads * width, device="cuda", dtype=torch.bfloat16),
    )
    # Causal: half of 4; backward costs 2.5 forwards.
    flops = 3.5 * 2 * sequence * sequence * batch * heads * width

    def work() -> None:
        torch.autograd.grad(core(q, k, v), (q, k, v), gradient)

    numbers: dict[str, Any] = {}
    for backend in (
        None,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ):
        name = "picked by torch" if backend is None else backend.name.lower()
        try:
            if backend is None:
                times = gpu_times_ms(work)
            else:
                with sdpa_kernel(backend):
                    times = gpu_times_ms(work)
        except RuntimeError as error:
            numbers[name] = {"refused": str(error).splitlines()[0]}
            continue
        milliseconds = statistics.median(times)
        numbers[name] = {
            "ms": milliseconds,
            "tflops": flops / milliseconds / 1e9,
            "times_ms": times,
        }
    return numbers


def steps_of_a_ring(
    q: Tensor, parts: Sequence[Tensor], part: SequencePart, gradient: Tensor
) -> Iterator[Tensor]:
    """Compute what one rank of a ring does, without its messages: yield the output of its queries,
    the sums of gradients of the keys and values of every rank, and the gradient of its queries.

    Args:
        q: Queries [b, n, s / c, d] of the rank.
        parts: Keys and values [2, b, g, s / c, d] of every rank.
        part: The rank.
        gradient: Of the output.
    """
    length, scale = q.shape[2] * part.num_ranks, q.shape[3] ** -0.5
    spans = [SequencePart(rank, part.num_ranks).spans(length) for rank in range(part.num_ranks)]
    visible = [visible_blocks(spans[part.rank], keys, SequenceInfo()) for keys in spans]
    sharing = Sharing(ALONE, SequenceInfo(), scale)
    merged = Merged(q, sharing)
    for keys_and_values, blocks in zip(parts, visible, strict=True):
        merged.see(keys_and_values, blocks)
    final = Output(merged.out.to(q.dtype), merged.log_sum)
    del merged
    yield final.out
    gradients = Gradients(gradient, q, final, sharing)
    for keys_and_values, blocks in zip(parts, visible, strict=True):
        yield gradients.of(keys_and_values, blocks)
    yield gradients.q.to(q.dtype)


def rank_of_a_ring(length: int, num_ranks: int, device: str = "cuda") -> Numbers:
    """Time one process that plays a rank of a ring, beside flash attention of the full sequence.

    At the same tokens a second, the ranks of a ring lose nothing but what messages do not hide.
    """
    ring = _rank_numbers(length, num_ranks, device)  # its tensors are gone before the next ones
    return _beside_flash(f"rank of {num_ranks}", ring, length, device)


def packed_row(length: int, num_documents: int, device: str = "cuda") -> Numbers:
    """Time a row of documents of the same length, beside flash attention of a row of one."""
    edges = tuple(number * length // num_documents for number in range(num_documents + 1))
    sequence, attention = SequenceInfo(documents=Documents((edges,))), LocalAttention()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, sequence, HEAD_SIZE**-0.5)

    packed = _full_numbers(attend, length, device)
    return _beside_flash(f"{num_documents} documents", packed, length, device)


def _beside_flash(name: str, numbers: Numbers, length: int, device: str) -> Numbers:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    flash = _full_numbers(attend, length, device)
    found: dict[str, Any] = {name: numbers, "flash, all of it": flash}
    if all("tokens_per_s" in each for each in (numbers, flash)):
        found["speed_relative_to_flash"] = numbers["tokens_per_s"] / flash["tokens_per_s"]
    return found


def _rank_numbers(length: int, num_ranks: int, device: str) -> Numbers:
    shape = (1, HEADS, length // num_ranks, HEAD_SIZE)
    q, gradient = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    # A ring has two parts of keys and values in memory, and so do these.
    pair = [torch.stack([q[:, :GROUPS]] * 2) for _ in range(2)]
    parts = [pair[step % 2] for step in range(num_ranks)]

    def play() -> None:
        for _ in steps_of_a_ring(q, parts, SequencePart(0, num_ranks), gradient):
            pass

    return _attention_numbers(play, length // num_ranks)


def _full_numbers(attend: Callable[..., Tensor], length: int, device: str) -> Numbers:
    inputs = [
        torch.randn(1, heads, length, HEAD_SIZE, device=device, dtype=torch.bfloat16)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    gradient = torch.randn_like(inputs[0])

    def work() -> None:
        leaves = [x.requires_grad_() for x in inputs]
        torch.autograd.grad(attend(*leaves), leaves, gradient)

    return _attention_numbers(work, length)


def _attention_numbers(work: Callable[[], Any], num_tokens: int) -> Numbers:
    """Time ``work``, with its peak memory; that of what does not run is why."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        times = gpu_times_ms(work, repeats=10)
    except RuntimeError as error:  # out of memory is one
        return {"refused": str(error).splitlines()[0]}
    milliseconds = statistics.median(times)
    return {
        "ms": milliseconds,
        "tokens_per_s": num_tokens / milliseconds * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "times_ms": times,
    }


def nccl_of_one_rank() -> Numbers:
    """Time NCCL's collectives on a communicator of one rank: their cost without the network."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        buffer = torch.zeros(64 * 2**20 // 4, device="cuda")
        small = torch.zeros(1, device="cuda")
        works: dict[str, Callable[[], Any]] = {
            "all_reduce_4B": lambda: dist.all_reduce(small),
            "all_reduce_64MiB": lambda: dist.all_reduce(buffer),
            "all_gather_64MiB": lambda: dist.all_gather([buffer], buffer),
        }
        return {
            name: {"us": statistics.median(gpu_times_ms(work)) * 1e3}
            for name, work in works.items()
        }
    finally:
        dist.destroy_process_group()


HEADLINE: Mapping[str, Item] = {
    "step, 0.2 B, bf16-mixed": Item(60, partial(step_beside_lightning, SMALL, 15)),
    "attention, 4096": Item(10, partial(attention, 4096, 2)),
    "NCCL, one rank": Item(10, nccl_of_one_rank),
}

CASES: Mapping[str, Mapping[str, Item]] = {
    "step": {
        f"{size}, {precision}": Item(
            120, partial(step_beside_lightning, replace(shape, precision=precision), 30)
        )
        for size, shape in (("0.2 B", SMALL), ("0.9 B", LARGE))
        for precision in ("bf16-mixed", "bf16-true", "32-true")
    },
    "attention": {
        f"{sequence} x {batch}": Item(20, partial(attention, sequence, batch))
        for sequence, batch in ((1024, 16), (2048, 8), (4096, 4), (8192, 2), (16384, 1), (32768, 1))
    },
    "context": {
        f"{size}k, one of {num_ranks} ranks": Item(
            60, partial(rank_of_a_ring, size * 1024, num_ranks)
        )
        for size, num_ranks in ((32, 8), (128, 8))
    }
    | {"128k, 32 documents": Item(60, partial(packed_row, 128 * 1024, 32))},
}
"""Cases by name; each runs within 8 minutes and continues where it stopped."""
