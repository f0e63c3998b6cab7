"""Memory of the executor: tensors until their last use, process groups for channels in use."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.schedules.actions import Placement
from tests.helpers.pipelines import Program, Stage, executor_of_two
from tests.helpers.ranks import run_ranks


class _Watching(Program):
    """Counts, at every forward, how many of the tensors received and handed on so far still have
    their storage."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.handed_on: list[StorageWeakRef] = []
        self.received: list[StorageWeakRef] = []
        self.alive: list[int] = []
        self.held: list[int] = []

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...] | None) -> Any:
        self.alive.append(sum(not reference.expired() for reference in self.handed_on))
        self.held.append(sum(not reference.expired() for reference in self.received))
        if received is not None:
            self.received.append(StorageWeakRef(received[0].untyped_storage()))
        outputs = super().forward(stage, microbatch, received)
        if isinstance(outputs, tuple):
            # A relu would keep its output for its backward; what is measured is what the executor
            # keeps.
            outputs = (outputs[0] + 1, *outputs[1:])
            self.handed_on.append(StorageWeakRef(outputs[0].untyped_storage()))
        return outputs


def _memory() -> tuple[list[int], list[int], int]:
    executor, stage = executor_of_two()
    program = _Watching({stage: Stage(stage)}, 2, [3] * 12)
    executor.run(schedules.one_f_one_b(2, 12), program)
    left = sum(not reference.expired() for reference in (*program.handed_on, *program.received))
    return program.alive, program.held, left


def test_buffers_do_not_grow_with_the_number_of_micro_batches() -> None:
    (_, held, last_left), (alive, _, first_left) = run_ranks(2, _memory)
    # The warm-up's forward and the one on its way: without release every output would be alive, up
    # to 11.
    assert max(alive) <= 2 and first_left == 0
    # A received tensor is gone with its backward, the next action of the last stage.
    assert max(held) <= 1 and last_left == 0


def _memory_without_replies(frozen: bool) -> list[int]:
    executor, stage = executor_of_two()
    program = _Watching({stage: Stage(stage).requires_grad_(stage > 0)}, 2, [3] * 24)
    for _ in range(1 + frozen):  # the first step of a signature has headers
        executor.run(schedules.gpipe(2, 24), program, backward=frozen)
    return program.alive


@pytest.mark.parametrize("frozen", [False, True])
def test_buffers_do_not_grow_where_nothing_comes_back(frozen: bool) -> None:
    """Validation, and first stages that are frozen: only gloo's own word says that a message is
    delivered."""
    _, alive = run_ranks(2, _memory_without_replies, frozen)
    # One on its way on paper, two that may be more, and the forward before this one.
    assert max(alive) <= 4


def _groups() -> tuple[int, int, int]:
    size = dist.get_world_size() if dist.is_initialized() else 1
    context = ParallelContext(ParallelLayout(pipeline_model_parallel_size=size))
    before = len(dist.distributed_c10d._world.pg_map)
    counts = [
        len(PipelineExecutor(context, placement).transport.groups)
        for placement in (Placement.loop(size), Placement.v(size))
    ]
    return counts[0], counts[1], len(dist.distributed_c10d._world.pg_map) - before


@pytest.mark.spread(1)
@pytest.mark.parametrize(("pp", "counts"), [(1, (0, 0, 0)), (2, (2, 4, 6)), (3, (2, 4, 6))])
def test_groups_exist_only_for_channels_in_use(pp: int, counts: tuple[int, int, int]) -> None:
    assert run_ranks(pp, _groups) == [counts] * pp
