"""The validator of action tables: it names every fault, and neither passes a table that stops nor
refuses one that runs."""

from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.schedules import simulate
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement, Schedule

DEADLOCK = r"deadlocks: pp rank 0 waits at 1B0 for 1F0; pp rank 1 waits at 0B0 for 1B0"
LOOP2 = Placement.loop(2)


def _table(num_microbatches: int, *rows: str, placement: Placement = LOOP2) -> Schedule:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("mine", placement, num_microbatches, actions)


def test_a_v_table_with_split_backward_is_valid() -> None:
    table = _table(
        1, "0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0", placement=Placement.v(2)
    )
    simulate.validate(table)
    assert simulate.simulate(table).peak_in_flight == (2, 2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("1B0 1F0", "0F0 0B0"), DEADLOCK),
        (("1F0 1B0", "0F0"), "stage 0, micro-batch 0 the actions F.*one F and one B"),
        (("1F0 1B0", "0F0 0B0 0I0 0W0"), "actions B, F, I, W"),
        (("1F0 1F0 1B0", "0F0 0B0"), "action 1F0 2 times"),
        (("1F0 1B0 0F0", "0B0"), "action 0F0 on pp rank 0, and stage 0 lives on pp rank 1"),
        (("1F0 1B0 2F0", "0F0 0B0"), "action 2F0, and there are 2 stages and 1 micro-batches"),
        (("1F0 1B0",), "1 rows and its placement 2"),
    ],
)
def test_faults_are_named(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate.validate(_table(1, *rows))


def test_numbers_below_zero_are_named() -> None:
    table = _table(1, "1F0 1B0", "0F0 0B0")
    # Stage -1 would be the last of a tuple.
    rows = ((*table.actions[0], Action(-1, Kind.FORWARD, 0)), table.actions[1])
    with pytest.raises(ConfigError, match="action -1F0, and there are 2 stages"):
        simulate.validate(replace(table, actions=rows))


def test_messages_out_of_order_are_named() -> None:
    table = _table(2, "1F1 1F0 1B0 1B1", "0F0 0F1 0B0 0B1")
    with pytest.raises(
        ConfigError,
        match=r"forward channel from pp rank 1 to 0.*stage 1, micro-batch 0 is sent where",
    ):
        simulate.validate(table)


CHUNKS = {"gpipe": (1, 2, 3), "1f1b": (1,), "interleaved": (1, 2, 3), "zb-h1": (1,), "zbv": (2,)}


@given(
    name=st.sampled_from(list(CHUNKS)),
    num_ranks=st.integers(1, 5),
    num_microbatches=st.integers(1, 6),
    data=st.data(),
)
@settings(deadline=None, max_examples=200)
def test_a_broken_table_is_caught(
    name: str, num_ranks: int, num_microbatches: int, data: st.DataObject
) -> None:
    num_chunks = data.draw(st.sampled_from(CHUNKS[name]))
    schedule = schedules.SCHEDULES[name](num_ranks, num_microbatches, num_chunks)
    pp_rank = data.draw(st.integers(0, num_ranks - 1))
    row = list(schedule.actions[pp_rank])
    index = data.draw(st.integers(0, len(row) - 1))
    fault = data.draw(st.sampled_from(["drop", "duplicate", "swap"]))
    if fault == "drop":
        # The only backward of the only stage: a forward-only table would be left, which is valid.
        assume(
            num_ranks * num_chunks * num_microbatches > 1 or row[index].kind is not Kind.BACKWARD
        )
        del row[index]
    elif fault == "duplicate":
        row.insert(index, row[index])
    else:
        # Actions may commute; a swap is a fault for certain where it breaks a message order (one
        # kind of one stage, with another pp rank beside it) or a dependency (two kinds of one stage
        # and micro-batch).
        other = data.draw(st.integers(0, len(row) - 1))
        first, second = row[index], row[other]
        assume(first.stage == second.stage and first != second)
        neighbours = {
            stage
            for stage in (first.stage - 1, first.stage + 1)
            if 0 <= stage < schedule.placement.num_stages
        }
        travels = any(schedule.placement.pp_ranks[stage] != pp_rank for stage in neighbours)
        same_kind = first.kind is second.kind and first.kind is not Kind.WEIGHT_GRADIENT and travels
        assume(same_kind or first.microbatch == second.microbatch)
        row[index], row[other] = second, first
    rows = tuple(tuple(row) if c == pp_rank else r for c, r in enumerate(schedule.actions))
    with pytest.raises(ConfigError):
        simulate.validate(Schedule("broken", schedule.placement, num_microbatches, rows))


def _runs(schedule: Schedule) -> bool:
    """Return whether ranks that do a table's actions in order, with a queue for each channel, come
    to its end.

    Written apart from the validator: queues that are filled and emptied, where that one compares
    orders.
    """
    holders, done = schedule.placement.pp_ranks, set[Action]()
    queues: dict[tuple[bool, int, int], deque[tuple[int, int]]] = defaultdict(deque)
    left = [deque(row) for row in schedule.actions]

    def can_run(action: Action) -> bool:
        """Consume the inputs of ``action``, if they are there."""
        stage, kind, microbatch = action
        if kind is Kind.WEIGHT_GRADIENT:
            return Action(stage, Kind.INPUT_GRADIENT, microbatch) in done
        forward = kind is Kind.FORWARD
        before = stage - 1 if forward else stage + 1
        if not forward and Action(stage, Kind.FORWARD, microbatch) not in done:
            return False
        if not 0 <= before < len(holders):
            return True
        if holders[before] == holders[stage]:
            kinds = (Kind.FORWARD,) if forward else (Kind.BACKWARD, Kind.INPUT_GRADIENT)
            return any(Action(before, other, microbatch) in done for other in kinds)
        queue = queues[forward, holders[before], holders[stage]]
        # What is first in a queue stays there until it is taken.
        if not queue or queue[0] != (stage, microbatch):
            return False
        queue.popleft()
        return True

    progress = True
    while progress:
        progress = False
        for row in left:
            while row and can_run(row[0]):
                progress = True
                action = row.popleft()
                done.add(action)
                stage, kind, microbatch = action
                after = stage + 1 if kind is Kind.FORWARD else stage - 1
                if (
                    kind is not Kind.WEIGHT_GRADIENT
                    and 0 <= after < len(holders)
                    and holders[after] != holders[stage]
                ):
                    queues[kind is Kind.FORWARD, holders[stage], holders[after]].append(
                        (after, microbatch)
                    )
    return not any(left)


@given(
    name=st.sampled_from(list(CHUNKS)),
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 5),
    data=st.data(),
)
@settings(deadline=None, max_examples=300)
def test_what_is_valid_is_what_runs(
    name: str, num_ranks: int, num_microbatches: int, data: st.DataObject
) -> None:
    """Two ranks' actions moved anywhere: the validator neither passes a table that stops nor
    refuses one that runs."""
    schedule = schedules.SCHEDULES[name](
        num_ranks, num_microbatches, data.draw(st.sampled_from(CHUNKS[name]))
    )
    rows = list(map(list, schedule.actions))
    for _ in range(data.draw(st.integers(0, 2))):
        row = rows[data.draw(st.integers(0, num_ranks - 1))]
        row.insert(
            data.draw(st.integers(0, len(row) - 1)),
            row.pop(data.draw(st.integers(0, len(row) - 1))),
        )
    moved = replace(schedule, actions=tuple(map(tuple, rows)))
    try:
        simulate.validate(moved)
        valid = True
    except ConfigError:
        valid = False
    assert valid == _runs(moved), str(moved)


@given(
    num_ranks=st.integers(1, 6), num_chunks=st.integers(1, 3), num_microbatches=st.integers(1, 9)
)
@settings(deadline=None, max_examples=60)
def test_any_generated_table_is_valid(
    num_ranks: int, num_chunks: int, num_microbatches: int
) -> None:
    for name in (name for name, chunks in CHUNKS.items() if num_chunks in chunks):
        schedule = schedules.SCHEDULES[name](num_ranks, num_microbatches, num_chunks)
        simulate.validate(schedule)
        simulate.validate(schedules.forward_only(schedule))
        simulate.validate(schedules.sweep(schedule.placement, num_microbatches))
