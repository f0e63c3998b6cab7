"""Pipeline stages that sleep instead of computing, run by our executor and by
``torch.distributed.pipelining``.

Both run the same schedule on the same processes with messages of the same size. A stage's forward
takes one unit, and so do the gradient of its input and that of its weights; with V chunks on a rank
a stage takes 1 / V of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.weight_gradients import WeightGradients

SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2}
"""Chunks on a rank, by schedule."""


class Case(NamedTuple):
    """One schedule on one pipeline."""

    schedule: str
    ranks: int
    microbatches: int
    unit_s: float
    numel: int
    """Elements of a message, fp32."""

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return SCHEDULES[self.schedule]

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and weights are actions of their own."""
        return self.schedule.startswith("zb")

    def stage(self, store: WeightGradients | None = None) -> nn.Module:
        """Return one stage, with a store for the weight gradients that our executor defers."""
        seconds = self.unit_s / self.chunks
        return SplitStage(seconds, store) if self.splits_backward else Stage(seconds)

    @property
    def ideal_s(self) -> float:
        """Time of a step by the papers' formulas, compute only."""
        work, waits = 3 * self.microbatches * self.unit_s, (self.ranks - 1) * self.unit_s
        idle = {
            "1f1b": 3 * waits,
            "interleaved": 3 * waits / self.chunks,
            "zb-h1": waits,
            "zbv": waits / self.chunks,
        }
        return work + idle[self.schedule]


class _Input(torch.autograd.Function):
    """Identity that sleeps in forward, and in backward as long as the gradient of an input
    takes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.seconds = seconds
        _sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return grad, None


class _Weight(torch.autograd.Function):
    """Identity on a weight that sleeps in backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return grad, None


class _SplitWeight(torch.autograd.Function):
    """Addition of a weight whose gradient may be deferred."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, deliver: Callable[..., None], seconds: float
    ) -> Tensor:
        ctx.deliver, ctx.seconds = deliver, seconds
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        seconds = ctx.seconds

        def product() -> Tensor:
            _sleep(seconds)
            return grad.sum().view(1)

        ctx.deliver(product)
        return grad, None, None, None


class _Work(torch.autograd.Function):
    """Addition of a weight that sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.seconds = seconds
        _sleep(seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        _sleep(2 * ctx.seconds)
        return grad, grad.sum().view(1), None


class Stage(nn.Module):
    """Map from [1, n] to [1, n] with a full backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        y: Tensor = _Work.apply(x, self.weight, self.seconds)
        return y


class SplitStage(nn.Module):
    """Map from [1, n] to [1, n] with a backward in two halves, which torch splits by the graph and
    we by the store.
    """

    def __init__(self, seconds: float, store: WeightGradients | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self.shift, self.weight = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.deliver = None if store is None else partial(store.deliver, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        x = _Input.apply(x + self.shift, self.seconds)
        if self.deliver is not None:
            return _SplitWeight.apply(x, self.weight.detach(), self.deliver, self.seconds)
        return x + _Weight.apply(self.weight, self.seconds)


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class _Program:
    """Program for our executor."""

    def __init__(self, stages: dict[int, nn.Module], num_stages: int, inputs: Tensor) -> None:
        self._stages, self._num_stages, self._inputs = stages, num_stages, inputs

    def forward(
        self, stage: int, microbatch: int, received: tuple[Tensor, ...] | None
    ) -> Tensor | tuple[Tensor, ...]:
        x = self._inputs[microbatch : microbatch + 1] if received is None else received[0]
        y: Tensor = self._stages[stage](x)
        return y.mean() if stage == self._num_stages - 1 else (y,)

    def signature(self, microbatch: int) -> Hashable:
        return None

    def recomputing(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Return an empty context: nothing is recomputed."""
        return nullcontext()

    def completing(self, stage: int) -> AbstractContextManager[None]:
        return nullcontext()


def our_step(case: Case, rank: int) -> Callable[[], None]:
    """Return a function that runs one step of the case on this rank, with our executor."""
    layout = ParallelLayout(
        pipeline_model_parallel_size=case.ranks,
        virtual_pipeline_model_parallel_size=case.chunks if case.ranks > 1 else 1,
    )
    context = ParallelContext(layout)
    choice = schedules.resolve(case.schedule, num_ranks=case.ranks, num_chunks=case.chunks)
    executor = PipelineExecutor(context, choice.placement)
    executor.transport.warm_up()
    own = choice.placement.stages_of(rank)
    stages = {stage: case.stage(executor.weight_gradients) for stage in own}
    inputs = torch.zeros(case.microbatches if 0 in own else 0, case.numel)
    table, program = (
        choice.table(case.microbatches),
        _Program(stages, choice.placement.num_stages, inputs),
    )
    return lambda: executor.run(table, program)


def torch_step(case: Case, rank: int) -> Callable[[], None]:
    """Return a function that runs one step of the case on this rank, with torch's own
    pipelining.
    """
    num_stages = case.ranks * case.chunks
    own = (
        [rank, num_stages - 1 - rank]
        if case.schedule == "zbv"
        else list(range(rank, num_stages, case.ranks))
    )
    example = torch.zeros(1, case.numel)
    stages = [
        pipelining.PipelineStage(
            case.stage(),
            index,
            num_stages,
            torch.device("cpu"),
            # Torch sends gradients where the metadata says so.
            input_args=(example.clone().requires_grad_(index > 0),),
            output_args=(example.clone().requires_grad_(),),
        )
        for index in own
    ]
    options: dict[str, Any] = {
        "n_microbatches": case.microbatches,
        "loss_fn": lambda output, target: output.mean(),
    }
    pipeline: Any
    if case.schedule == "1f1b":
        pipeline = pipelining.Schedule1F1B(stages[0], **options)
    else:
        kinds = {
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zb-h1": pipelining.ScheduleInterleavedZeroBubble,
            "zbv": pipelining.ScheduleZBVZeroBubble,
        }
        pipeline = kinds[case.schedule](stages, **options)
    inputs = (torch.zeros(case.microbatches, case.numel),) if 0 in own else ()
    target = {"target": torch.zeros(case.microbatches, 1)} if num_stages - 1 in own else {}
    return lambda: pipeline.step(*inputs, **target)


def bare_step(case: Case, rank: int) -> Callable[[], None]:
    """Return a function that runs this rank's stages forward and backward, with no schedule and no
    messages.
    """
    stages = [case.stage() for _ in range(case.chunks)]
    x, gradient = torch.zeros(1, case.numel, requires_grad=True), torch.zeros(1, case.numel)

    def step() -> None:
        for stage in stages:
            for _ in range(case.microbatches):
                torch.autograd.backward(stage(x), gradient)

    return step


ENGINES = {"ours": our_step, "torch": torch_step}
