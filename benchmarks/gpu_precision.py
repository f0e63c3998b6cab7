"""Training with FP8 beside bf16 on one GPU: every recipe and backend that it can run.

A step is forward, backward and a fused AdamW step of the same GPT with fp32 weights, in one process
and in turn; bf16 is measured again at the end, to show what drifts. All have compiled layers.

The goal is 1.3 times the speed of bf16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases import LARGE, Item, Numbers, gpu_times_ms, rates_of
from benchmarks.statistics import ratio_of_medians
from benchmarks.variants import Shape
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.assignment import Assignment, apply_recipe
from megatron_lightning.precision.backends import Chosen, Gpu, choose_backend
from megatron_lightning.precision.delayed_scaling import advance
from megatron_lightning.precision.native import find_gpu
from megatron_lightning.precision.recipes import Scaling

GOAL = 1.3  # times the speed of bf16
SCALINGS: tuple[Scaling, ...] = ("delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4")
LAYERS_OF_8B = replace(
    LARGE, num_layers=8, hidden_size=4096, num_heads=32, num_groups=8, ffn_size=14336, batch=2
)
"""Layers of Llama 3 8B, as many as train on 80 GB."""
BF16 = "bf16"


@dataclass(frozen=True)
class Variant:
    """A precision to train with."""

    recipe: FP8Recipe | None = None
    """None: bf16."""
    backend: Chosen = "emulation"

    @property
    def repeats(self) -> int:
        """Steps to time."""
        return 20 if self.recipe is None or self.backend == "native" else 5


def variants(backend: Chosen, gpu: Gpu | None) -> dict[str, Variant]:
    """Return bf16, what a backend can run, and bf16 again."""
    recipes = [FP8Recipe(scaling=scaling) for scaling in SCALINGS]
    if backend == "native":
        recipes = [recipe for recipe in recipes if choose_backend("auto", recipe, gpu) == backend]
    found = {f"{recipe.scaling}, {backend}": Variant(recipe, backend) for recipe in recipes}
    return {BF16: Variant(), **found, f"{BF16}, at the end": Variant()}


def trainings(shape: Shape, backend: Chosen, device: str = "cuda") -> Numbers:
    """Train with every variant of a backend, and with bf16."""
    gpu = find_gpu(torch.device(device))
    numbers = {
        name: training(shape, variant, device) for name, variant in variants(backend, gpu).items()
    }
    for found in numbers.values():
        ratio = ratio_of_medians(numbers[BF16]["times_ms"], found["times_ms"])
        found["speed_of_bf16"] = [ratio.value, ratio.low, ratio.high]
    return {**numbers, "goal": GOAL}


def training(shape: Shape, variant: Variant, device: str) -> dict[str, Any]:
    """Time steps of one variant."""
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.device(device):
        model = GPTModel(shape.config)
        tokens = torch.randint(0, shape.vocab_size, (shape.batch, shape.sequence))
    assigned = None
    if variant.recipe is not None:
        assigned = apply_recipe(model, variant.recipe, backend=variant.backend)
    for layer in model.decoder.layers.values():
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return timed(shape, partial(step, model, tokens, optimizer, assigned), variant.repeats)


def step(
    model: GPTModel, tokens: Tensor, optimizer: torch.optim.Optimizer, assigned: Assignment | None
) -> Tensor:
    """Train one step; return the loss."""
    optimizer.zero_grad()
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss: Tensor = model(tokens, labels=tokens).mean()
    loss.backward()
    if assigned is not None:
        gemms = assigned.quantized.values()
        advance([history for gemm in gemms for history in gemm.histories.values()], None)
    optimizer.step()
    return loss.detach()


def timed(shape: Shape, work: Callable[[], Tensor], repeats: int) -> dict[str, Any]:
    """Time ``work`` on the GPU, with its peak memory."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    loss = work()
    times = gpu_times_ms(work, repeats=repeats)
    return {
        **rates_of(shape, statistics.median(times) / 1e3),
        "first_loss": float(loss),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "times_ms": times,
    }


CASES: Mapping[str, Mapping[str, Item]] = {
    "precision": {
        f"{backend}, layers of 8 B": Item(200, partial(trainings, LAYERS_OF_8B, backend))
        for backend in ("native", "emulation")
    }
}
"""Cases by name, as in :mod:`benchmarks.gpu_cases`."""
