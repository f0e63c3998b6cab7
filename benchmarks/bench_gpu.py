"""Training on one GPU: a 1 B model and layers of Llama 3 8B, beside compiled ``transformers`` and
plain Lightning.

    python -m benchmarks.gpu --case training   # or make gpu-bench CASE=training

Every trainer has bf16 products and fp32 weights (``bf16-mixed``), fused AdamW and clipping, and
trains in a Lightning Trainer, so that a step is what a user waits for. One process trains at a
time, since two would share the memory, at the largest batch that fits: at 8,192 tokens a row, one
that is smaller computes no faster. The peak is measured as well, by the largest product of the
model, since a GPU under load is slower than its data sheet.

Goals: 55 % of the measured peak, and 1.05 times the best compiled rival at its own batch.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from benchmarks.bench_single import Llama
from benchmarks.gpu_cases import Item, Numbers, gpu_times_ms, rates_of
from benchmarks.variants import Shape, Variant, megatron, single_device
from megatron_lightning.compat import fused_adamw
from megatron_lightning.modules import GPTLightningModule

GOAL_OF_PEAK, GOAL_OF_RIVAL = 0.55, 1.05
NUM_STEPS, NUM_DROPPED = 10, 5
TRAINER_S, LIMIT_S = 75.0, 120.0
"""Of one training, the compiler included: expected, and at most."""
ONE_B = Shape(
    num_layers=16, hidden_size=2048, num_heads=32, num_groups=8, ffn_size=8192, vocab_size=128256,
    sequence=8192, batch=4, accelerator="gpu", precision="bf16-mixed",
)  # fmt: skip
"""Llama 3.2 1B, with an output layer of its own."""
EIGHT_B = replace(ONE_B, num_layers=6, hidden_size=4096, ffn_size=14336, batch=2)
"""Layers of Llama 3 8B: as many as have 16 bytes a weight, and activations, on 80 GB."""


class FusedLlama(Llama):
    """Llama of ``transformers`` with the optimizer that is fastest on a GPU."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return fused AdamW, whose gradients Lightning clips under autocast."""
        return fused_adamw([{"params": list(self.parameters())}], lr=3e-4)


class PlainGPT(GPTLightningModule):
    """Our model in plain Lightning, its layers compiled by hand."""

    def configure_model(self) -> None:
        """Build the model and compile its layers."""
        if self.model is None:
            super().configure_model()
            assert self.model is not None
            for layer in self.model.decoder.layers.values():
                layer.compile()


def _one(name: str, strategy: Callable[[Shape], Strategy], **options: Any) -> Variant:
    return Variant(name=name, size=1, strategy=strategy, **options)


TRAINERS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        _one("transformers, compiled", single_device, module=partial(FusedLlama, compiled=True)),
        _one("ours, compiled", partial(megatron, compile="block")),
        _one("our model in plain Lightning, compiled", single_device, module=PlainGPT),
        _one("ours, eager", megatron),
        _one("transformers, eager", single_device, module=FusedLlama),
    )
}
"""By name, those that are compared first."""
OURS = "ours, compiled"
RIVALS = ("transformers, compiled", "our model in plain Lightning, compiled")


class _Clock(pl.Callback):
    """Times steps from the start of one batch to the start of the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.loss: Any = None
        self.on_gpu = torch.cuda.is_available()

    def on_train_batch_start(self, *_: Any) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        self.starts.append(time.perf_counter())

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.loss = outputs["loss"]


def train(variant: Variant, shape: Shape) -> dict[str, Any]:
    """Train some steps; return the seconds of the first, which compiles, and of others, the loss
    and the peak memory.
    """
    pl.seed_everything(1, verbose=False)
    clock, num_steps = _Clock(), NUM_DROPPED + NUM_STEPS + 1
    tokens = torch.randint(0, shape.vocab_size, (shape.batch * num_steps, shape.sequence + 1))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    trainer = pl.Trainer(
        accelerator=shape.accelerator,
        devices=1,
        precision=shape.precision,  # type: ignore[arg-type]
        strategy=variant.strategy(shape),
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[clock],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        variant.module(shape.config),
        DataLoader(rows, batch_size=shape.batch, pin_memory=clock.on_gpu),
    )
    seconds = [end - start for start, end in zip(clock.starts, clock.starts[1:], strict=False)]
    return {
        "first_s": seconds[0],
        "wall_s": seconds[NUM_DROPPED:],
        "loss": float(clock.loss),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if clock.on_gpu else None,
    }


def _process(pipe: Connection, variant: Variant, shape: Shape) -> None:
    try:
        pipe.send(train(variant, shape))
    except Exception as error:  # out of memory is one
        pipe.send({"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"})


def in_a_process(variant: Variant, shape: Shape, limit_s: float) -> dict[str, Any]:
    """Train in a process of its own, which gives back all memory; return what it measured."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_process, args=(theirs, variant, shape))
    process.start()
    theirs.close()
    found: dict[str, Any] = {"refused": f"no result within {limit_s:.0f} s"}
    try:
        if ours.poll(limit_s):
            found = ours.recv()
    except EOFError:
        found = {"refused": "the process died"}
    process.kill()
    process.join()
    return found


def largest_batch(name: str, shape: Shape, batches: Sequence[int]) -> Numbers:
    """Train at the first batch size that fits; return its numbers, the part of the measured peak,
    and why other sizes did not run.
    """
    peak = measured_peak(shape)
    torch.cuda.empty_cache()
    refused: dict[str, Any] = {"measured peak, TFLOP/s": peak / 1e12}
    for batch in batches:
        sized = replace(shape, batch=batch)
        found = in_a_process(TRAINERS[name], sized, LIMIT_S)
        if "refused" not in found:
            rates = rates_of(sized, statistics.median(found["wall_s"]))
            of_peak = {"of measured peak": rates["tflops"] * 1e12 / peak}
            return {"batch": batch, **rates, **of_peak, **found, **refused}
        refused[f"batch {batch}"] = found["refused"]
    return refused


def measured_peak(shape: Shape) -> float:
    """Return the FLOP/s of the largest product of a layer in bf16."""
    rows, h, f = shape.batch * shape.sequence, shape.hidden_size, 2 * shape.ffn_size
    x = torch.randn(rows, h, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(f, h, device="cuda", dtype=torch.bfloat16)
    seconds = statistics.median(gpu_times_ms(lambda: x @ weight.t(), repeats=50)) / 1e3
    return 2.0 * rows * h * f / seconds


def beside_rivals(measured: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return ours relative to the peak and to the best rival, for models whose trainers all ran.

    Args:
        measured: Numbers of items of the case ``training``, by name.
    """
    found: dict[str, Numbers] = {}
    for model in MODELS:
        of = {name: measured.get(f"{model}: {name}", {}) for name in (OURS, *RIVALS)}
        if all("tokens_per_s" in numbers for numbers in of.values()):
            best = max(of[name]["tokens_per_s"] for name in RIVALS)
            found[f"{model}, compared"] = {
                "of measured peak": [of[OURS]["of measured peak"], f"goal {GOAL_OF_PEAK}"],
                "speed of best rival": [of[OURS]["tokens_per_s"] / best, f"goal {GOAL_OF_RIVAL}"],
            }
    return found


MODELS: Mapping[str, tuple[Shape, Sequence[int]]] = {
    "1 B": (ONE_B, (4, 2, 1)),
    "6 layers of 8 B": (EIGHT_B, (2, 1)),
}
"""Shapes, and batches that are tried."""
CASES: Mapping[str, Mapping[str, Item]] = {
    "training": {
        f"{model}: {name}": Item(TRAINER_S, partial(largest_batch, name, shape, batches))
        for model, (shape, batches) in MODELS.items()
        for name in TRAINERS
    },
}
"""Cases by name, as in :mod:`benchmarks.gpu_cases`."""
HEADLINE: Mapping[str, Item] = {
    f"{name}, 2 layers of 8 B": Item(
        60, partial(largest_batch, name, replace(EIGHT_B, num_layers=2), (2,))
    )
    for name in ("ours, compiled", "ours, eager")
}
"""Cases of ``make gpu``."""
