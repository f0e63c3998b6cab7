"""A pipeline of small stages for tests of the executor: tensors of three dtypes cross every
boundary."""

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.schedules.actions import Placement

WIDTH = 6


class Stage(nn.Module):
    """One layer between boundaries of three tensors: hidden, auxiliary (its own dtype), integer
    positions."""

    def __init__(self, stage: int, skip_gradient: bool = False) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.auxiliary = nn.Linear(WIDTH, 1).double()
        self.skip_gradient = skip_gradient

    def forward(
        self, hidden: Tensor, total: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden + self.linear(hidden) + positions.unsqueeze(-1)
        if self.skip_gradient:
            hidden = hidden.detach()
        return hidden.relu(), total + self.auxiliary(hidden.double()).mean(), positions + 1


def executor_of_two() -> tuple[PipelineExecutor, int]:
    """Return the executor of a pipeline over the two ranks, and this rank's stage."""
    context = ParallelContext(ParallelLayout(pipeline_model_parallel_size=2))
    return PipelineExecutor(context, Placement.loop(2)), 1 - context.pp.rank


def batch_of(step: int, microbatch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return (
        torch.randn(2, length, WIDTH, generator=generator),
        torch.zeros((), dtype=torch.float64),
        torch.arange(length),
    )


class Program:
    """Runs the stages of one rank; ``lengths[step][microbatch]`` is both shape and signature."""

    def __init__(
        self, stages: dict[int, nn.Module], num_stages: int, lengths: list[int], step: int = 0
    ) -> None:
        self.stages, self.num_stages, self.lengths, self.step = stages, num_stages, lengths, step
        self.losses: list[float] = []
        self.events: list[str] = []

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...] | None) -> Any:
        assert (received is None) == (stage == 0)
        self.events.append(f"{stage}F{microbatch}")
        inputs = (
            batch_of(self.step, microbatch, self.lengths[microbatch])
            if received is None
            else received
        )
        outputs = self.stages[stage](*inputs)
        if stage < self.num_stages - 1:
            return outputs
        loss = outputs[0].square().mean() + outputs[1].float()
        self.losses.append(loss.item())
        return loss

    def signature(self, microbatch: int) -> Hashable:
        return self.lengths[microbatch]

    def recomputing(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Return an empty context: nothing is recomputed."""
        return nullcontext()

    @contextmanager
    def completing(self, stage: int) -> Iterator[None]:
        self.events.append(f"last {stage}")
        yield
