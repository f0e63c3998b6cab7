"""The executor on several gloo ranks, against one process: gradients are equal bit by bit, since
every parameter sums the same micro-batches in the same order with the same kernels."""

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import ConfigError, PipelineError
from megatron_lightning.layers.linear.split_backward import split_backwards
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.schedules import simulate
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement, Schedule
from megatron_lightning.pipeline.timeline import Timeline
from tests.helpers.pipelines import Program, Stage, batch_of, executor_of_two
from tests.helpers.ranks import run_ranks


def _single_process(
    num_stages: int, steps: list[list[int]], skip: int | None
) -> tuple[list[float], dict[int, list[Tensor | None]]]:
    stages = {stage: Stage(stage, stage == skip) for stage in range(num_stages)}
    losses = []
    for step, lengths in enumerate(steps):
        for microbatch, length in enumerate(lengths):
            tensors: Any = batch_of(step, microbatch, length)
            for stage in stages.values():
                tensors = stage(*tensors)
            loss = tensors[0].square().mean() + tensors[1].float()
            loss.backward()
            losses.append(loss.item())
    return losses, {
        stage: [p.grad for p in module.parameters()] for stage, module in stages.items()
    }


def _random_table(seed: str, pp: int, microbatches: int) -> Schedule:
    """Return a table drawn at random: any placement, whole and split backwards, and any order in
    which messages arrive."""
    draw = random.Random(seed)
    extra = draw.choices(range(pp), k=draw.randrange(3))
    holders = (*draw.sample([*range(1, pp), *extra], pp - 1 + len(extra)), 0)
    split = {
        (stage, m): draw.random() < 0.5
        for stage in range(len(holders))
        for m in range(microbatches)
    }
    rows: list[list[Action]] = [[] for _ in range(pp)]
    here = [Action(0, Kind.FORWARD, m) for m in range(microbatches)]  # what can run in any order
    # What is read in the order of sending.
    arriving: dict[tuple[bool, int, int], deque[Action]] = defaultdict(deque)
    while here or any(arriving.values()):
        source = draw.choice([*here, *(channel for channel, queue in arriving.items() if queue)])
        if isinstance(source, Action):
            here.remove(source)
            action = source
        else:
            action = arriving[source].popleft()
        stage, kind, m = action
        rows[holders[stage]].append(action)
        backward = Kind.INPUT_GRADIENT if split[stage, m] else Kind.BACKWARD
        if kind is Kind.FORWARD and stage == len(holders) - 1:
            here.append(Action(stage, backward, m))
            continue
        if kind is Kind.INPUT_GRADIENT:
            here.append(Action(stage, Kind.WEIGHT_GRADIENT, m))
        taker = stage + (1 if kind is Kind.FORWARD else -1)
        if kind is Kind.WEIGHT_GRADIENT or taker < 0:
            continue
        needs = (
            Kind.FORWARD
            if kind is Kind.FORWARD
            else Kind.INPUT_GRADIENT
            if split[taker, m]
            else Kind.BACKWARD
        )
        local = holders[taker] == holders[stage]
        (here if local else arriving[kind is Kind.FORWARD, holders[stage], holders[taker]]).append(
            Action(taker, needs, m)
        )
    return Schedule(f"random/{seed}", Placement(holders), microbatches, tuple(map(tuple, rows)))


def _schedule(name: str, pp: int, microbatches: int) -> Schedule:
    if name.startswith("random/"):
        return _random_table(name, pp, microbatches)
    # Stages up the ranks and down again, all forwards, then all backwards: the ends meet on rank 0.
    if name == "v":
        placement = Placement.v(pp)
        rows = []
        for pp_rank in range(pp):
            up, down = placement.stages_of(pp_rank)
            forwards = [f"{stage}F{m}" for stage in (up, down) for m in range(microbatches)]
            rows.append(
                forwards + [f"{stage}B{m}" for stage in (down, up) for m in range(microbatches)]
            )
        actions = tuple(tuple(map(Action.parse, row)) for row in rows)
        return Schedule("v", placement, microbatches, actions)
    name, _, chunks = name.partition("/")
    return schedules.make_schedule(
        name, num_ranks=pp, num_microbatches=microbatches, num_chunks=int(chunks or 1)
    )


def _train(cases: list[tuple[str, list[list[int]], int | None]]) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    context = ParallelContext(ParallelLayout(pipeline_model_parallel_size=size))
    executors: dict[Placement, PipelineExecutor] = {}
    for name, steps, skip in cases:
        placement = _schedule(name, size, 1).placement
        if placement not in executors:
            executors[placement] = PipelineExecutor(context, placement)
            executors[placement].transport.warm_up()
        executor = executors[placement]
        executor.forget_boundaries()
        num_stages, own = placement.num_stages, placement.stages_of(context.pp.rank)
        stages = {stage: Stage(stage, stage == skip) for stage in own}
        for module in stages.values():
            split_backwards(module, executor.weight_gradients)
        losses: list[float] = []
        for step, lengths in enumerate(steps):
            schedule = _schedule(name, size, len(lengths))
            simulate.validate(schedule)
            program = Program(stages, num_stages, lengths, step)
            executor.run(schedule, program)
            losses += program.losses
            assert sorted(e for e in program.events if "last" in e) == sorted(
                f"last {stage}" for stage in own
            )
        expected_losses, expected_gradients = _single_process(num_stages, steps, skip)
        # Elsewhere micro-batches are summed in another order.
        in_order = not name.startswith("random/")
        if num_stages - 1 in own:
            assert losses == expected_losses or (
                not in_order and sorted(losses) == sorted(expected_losses)
            ), name
        for stage, module in stages.items():
            for parameter, expected in zip(
                module.parameters(), expected_gradients[stage], strict=True
            ):
                if expected is not None and in_order:
                    assert torch.equal(parameter.grad, expected), (name, steps, stage)
                elif expected is not None:
                    torch.testing.assert_close(
                        parameter.grad,
                        expected,
                        rtol=1e-6,
                        atol=1e-6,
                        msg=f"{name}, {steps}, {stage}",
                    )
                # Behind a detach one process has no gradient, a stage that is sent zeros has zeros.
                else:
                    assert parameter.grad is None or not parameter.grad.any(), (name, steps, stage)


NAMES = ("gpipe", "1f1b", "gpipe/2", "v", "interleaved/2", "interleaved/3", "zb-h1", "zbv/2")


@pytest.mark.spread(1)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_gradients_equal_one_process(pp: int) -> None:
    """Fewer micro-batches than stages, as many, more; equal and ragged, and other shapes in every
    step."""
    steps = [[3], [3, 3, 3], [4, 4, 4, 4, 2], [3, 5]]
    names = [name for name in NAMES if pp > 1 or not name.startswith(("gpipe/", "interleaved"))]
    run_ranks(pp, _train, [(name, steps, None) for name in names])


SLOW = pytest.mark.slow
MATRIX = (
    "gpipe",
    "1f1b",
    "zb-h1",
    "zbv/2",
    *(f"{name}/{chunks}" for name in ("gpipe", "interleaved") for chunks in (2, 3, 4)),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_gradients_equal_one_process_matrix(pp: int, name: str) -> None:
    """Micro-batches that divide into the groups and that do not; with and without a stage that
    stops gradients."""
    counts = [[[3] * count, [4] * (count - 1) + [2]] for count in (*range(1, 9), 11, 16)]
    cases = [(name, steps, skip) for steps in counts for skip in (None, 1)]
    run_ranks(pp, _train, cases, timeout_s=280)


@pytest.mark.parametrize(
    ("pp", "seeds"), [(3, range(4)), *(pytest.param(pp, range(80), marks=SLOW) for pp in (1, 2, 4))]
)
def test_any_table_that_is_valid_runs(pp: int, seeds: range) -> None:
    """Tables that nobody would write: stages anywhere, micro-batches in any order, some backwards
    whole and some split."""
    run_ranks(
        pp,
        _train,
        [(f"random/{seed}", [[3], [3, 3, 4], [4, 2, 4, 4, 2]], None) for seed in seeds],
        timeout_s=280,
    )


@pytest.mark.slow
def test_stages_without_gradient_are_skipped() -> None:
    """A detach in a middle or last stage: zeros travel where a gradient is waited for, nothing
    where none can be."""
    run_ranks(2, _train, [(name, [[3, 3, 2]], skip) for name in NAMES for skip in (0, 1)])


def _frozen() -> None:
    executor, stage = executor_of_two()
    module = Stage(stage).requires_grad_(stage == 1)
    executor.run(schedules.one_f_one_b(2, 3), Program({stage: module}, 2, [3, 3, 3]))
    assert all((parameter.grad is not None) == (stage == 1) for parameter in module.parameters())
    module.requires_grad_()
    executor.forget_boundaries()  # unfrozen: the same signature now takes gradients
    executor.run(schedules.one_f_one_b(2, 3), Program({stage: module}, 2, [3, 3, 3]))
    assert all(parameter.grad is not None for parameter in module.parameters())
    losses = []
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            program = Program({stage: module}, 2, [3, 4, 3])
            executor.run(schedules.one_f_one_b(2, 3), program, backward=False)
            losses.append(program.losses)
            assert program.events == [f"{stage}F{m}" for m in range(3)]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 3 * stage


def test_frozen_stages_and_forward_only() -> None:
    run_ranks(2, _frozen)


def test_a_placement_for_another_pipeline_is_refused() -> None:
    context = ParallelContext(ParallelLayout())
    with pytest.raises(
        ConfigError, match="placement is for 2 ranks, and pipeline_model_parallel_size is 1"
    ):
        PipelineExecutor(context, Placement.loop(2))
    with pytest.raises(PipelineError, match="schedule 1f1b is for the placement"):
        PipelineExecutor(context, Placement.loop(1)).run(
            schedules.one_f_one_b(2, 1), Program({}, 1, [3])
        )


def _changing_shapes(warm: bool) -> None:
    """Every step has other shapes on every boundary, whose headers travel against the stream of
    gradients."""
    context = ParallelContext(
        ParallelLayout(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    )
    for name, chunks in (("interleaved", 2), ("zbv", 2)):
        placement = _schedule(f"{name}/{chunks}", 4, 1).placement
        executor = PipelineExecutor(context, placement)
        if warm:
            executor.transport.warm_up()
        stages = {stage: Stage(stage) for stage in placement.stages_of(context.pp.rank)}
        for step in range(4):
            lengths = [1 + (step * 5 + microbatch) % 7 for microbatch in range(3 + 2 * step)]
            executor.run(
                _schedule(f"{name}/{chunks}", 4, len(lengths)), Program(stages, 8, lengths, step)
            )


@pytest.mark.spread(1)
@pytest.mark.parametrize("warm", [True, False])
def test_shapes_that_change_never_deadlock_four_ranks_with_virtual_stages(warm: bool) -> None:
    """Megatron-Core hangs here in two ways: exchanging shapes in a fixed order (issue 5100), and
    building communicators when the first message meets them (issue 5240)."""
    run_ranks(4, _changing_shapes, warm, timeout_s=40)


def _reduction_order() -> list[str]:
    """Return when each stage's reduction could start, between the actions of this rank."""
    context = ParallelContext(
        ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    )
    placement = _schedule("zbv/2", 2, 1).placement
    executor = PipelineExecutor(context, placement)
    stages = {stage: Stage(stage) for stage in placement.stages_of(context.pp.rank)}
    for module in stages.values():
        split_backwards(module, executor.weight_gradients)
    program = _Ordered(stages, 4, [3] * 4)
    program.timeline = Timeline()
    executor.observers.append(program.timeline)
    executor.run(_schedule("zbv/2", 2, 4), program)
    return program.completed


class _Ordered(Program):
    timeline: Timeline

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.completed: list[str] = []

    @contextmanager
    def completing(self, stage: int) -> Iterator[None]:
        yield
        gradients = [
            parameter.grad is not None for parameter in self.stages[stage].linear.parameters()
        ]
        self.completed.append(
            f"{stage} after {len(self.timeline.intervals()) + 1} {all(gradients)}"
        )


def test_a_chunks_gradients_are_complete_with_its_last_action() -> None:
    """Data-parallel ranks reduce each chunk at its last weight gradient, not at the step's end."""
    table = _schedule("zbv/2", 2, 4)
    for rank, completed in enumerate(run_ranks(2, _reduction_order)):
        row = table.actions[rank]
        last = {action.stage: index + 1 for index, action in enumerate(row)}
        assert completed == [
            f"{stage} after {last[stage]} True"
            for stage in sorted(last, key=lambda stage: last[stage])
        ]
        assert min(last.values()) < len(row)
