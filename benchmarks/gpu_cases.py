"""Measurements of ``benchmarks.gpu`` on one GPU. Every item is measured by itself and returns plain
numbers.

Model FLOP/s utilisation is the model's arithmetic (6 a weight and token, and causal attention's
products; no recomputation) over the time and the vendor's dense bf16 peak.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.statistics import ratio_of_medians
from benchmarks.teams import measure
from benchmarks.variants import Shape
from megatron_lightning.layers.attention import CoreAttention
from megatron_lightning.models.transformer import GPTModel

Numbers = Mapping[str, Any]

SMALL = Shape(
    num_layers=12, hidden_size=1024, num_heads=16, num_groups=8, ffn_size=2816, vocab_size=32000,
    sequence=2048, batch=8,
    accelerator="gpu", precision="bf16-mixed",
)  # fmt: skip
LARGE = replace(SMALL, num_layers=16, hidden_size=2048, ffn_size=5632, sequence=4096, batch=4)
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}


@dataclass(frozen=True)
class Item:
    """One measurement."""

    seconds: float
    """Expected time, the start of processes included."""
    measure: Callable[[], Numbers]


def peak_flops() -> float | None:
    """Return the dense bf16 peak of the GPU in FLOP/s (vendors' data sheets, SXM parts); None: not
    known.
    """
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def _rates(shape: Shape, seconds: float) -> dict[str, Any]:
    peak = peak_flops()
    rates = {
        "step_ms": seconds * 1e3,
        "tokens_per_s": shape.tokens / seconds,
        "tflops": shape.flops / seconds / 1e12,
    }
    return {**rates, "mfu": shape.flops / seconds / peak if peak else None}


def step_beside_lightning(shape: Shape, num_rounds: int) -> Numbers:
    """Train in turn with plain Lightning on the same GPU."""
    names = ("single", "lightning-single")
    steps = measure(names, shape, num_rounds, num_dropped=3)
    walls = {name: [ranks[0].wall_s for ranks in steps[name]] for name in names}
    numbers = {name: _rates(shape, statistics.median(walls[name])) for name in names}
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


def _times_ms(work: Callable[[], Any], repeats: int = 20) -> list[float]:
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
                times = _times_ms(work)
            else:
                with sdpa_kernel(backend):
                    times = _times_ms(work)
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


def compiled_layers(shape: Shape) -> Numbers:
    """Time forward and backward of the model in bf16, as it is and with ``torch.compile`` on every
    layer.
    """
    numbers: dict[str, Any] = {}
    tokens = torch.randint(0, shape.vocab_size, (shape.batch, shape.sequence), device="cuda")
    for name in ("eager", "compiled"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with torch.device("cuda"):
            model = GPTModel(shape.config).bfloat16()
        if name == "compiled":
            for layer in model.decoder.layers.values():
                layer.compile()
        start = time.perf_counter()
        loss = _forward_backward(model, tokens)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        times = _times_ms(partial(_forward_backward, model, tokens))
        numbers[name] = {
            **_rates(shape, statistics.median(times) / 1e3),
            "first_s": first,
            "loss": float(loss),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "times_ms": times,
        }
        del model, loss
    ratio = ratio_of_medians(numbers["eager"]["times_ms"], numbers["compiled"]["times_ms"])
    return {**numbers, "speed_of_compiled": [ratio.value, ratio.low, ratio.high]}


def _forward_backward(model: nn.Module, tokens: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(tokens, labels=tokens).mean()
    loss.backward()
    return loss.detach()


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
            name: {"us": statistics.median(_times_ms(work)) * 1e3} for name, work in works.items()
        }
    finally:
        dist.destroy_process_group()


HEADLINE: Mapping[str, Item] = {
    "step, 0.2 B, bf16-mixed": Item(60, partial(step_beside_lightning, SMALL, 15)),
    "attention, 4096": Item(10, partial(attention, 4096, 2)),
    "torch.compile on every layer, 0.2 B": Item(90, partial(compiled_layers, SMALL)),
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
    "compile": {
        f"{size}": Item(120, partial(compiled_layers, shape))
        for size, shape in (("0.2 B", SMALL), ("0.9 B", LARGE))
    },
}
"""Cases by name; each runs within 8 minutes and continues where it stopped."""
