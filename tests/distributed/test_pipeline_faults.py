"""Errors inside a pipeline: they keep their type, get their position, and leave nobody waiting."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import PipelineError
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.executor import PipelinePosition
from tests.helpers.pipelines import Program, Stage, executor_of_two
from tests.helpers.ranks import run_ranks


class _Fault(Exception):
    # Neither copyable nor re-creatable from its args.
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(detail)


class _Failing(Program):
    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...] | None) -> Any:
        if (stage, microbatch) == (1, 2):
            raise _Fault(1, detail="user's own")
        return super().forward(stage, microbatch, received)


class _Altering(Program):
    def __init__(self, *args: Any, alter: Callable[[int, int, Any], Any]) -> None:
        super().__init__(*args)
        self.alter = alter

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...] | None) -> Any:
        return self.alter(stage, microbatch, super().forward(stage, microbatch, received))


def _caught(run: Callable[[], None]) -> tuple[str, str, PipelinePosition | None]:
    try:
        run()
    except Exception as error:
        dist.destroy_process_group()  # as a job that ends: the peers' connections break
        return (
            type(error).__name__,
            f"{error}\n{' '.join(getattr(error, '__notes__', []))}",
            vars(error)["pipeline_position"],
        )
    return "", "", None


def _user_error() -> tuple[str, str, PipelinePosition | None]:
    executor, stage = executor_of_two()
    program = _Failing({stage: Stage(stage)}, 2, [3] * 4)
    start = time.monotonic()
    caught = _caught(lambda: executor.run(schedules.one_f_one_b(2, 4), program))
    assert time.monotonic() - start < 10
    return caught


def test_an_error_keeps_its_type_and_gets_its_position() -> None:
    (kind, text, position), (peer_kind, _, peer_position) = run_ranks(2, _user_error)
    assert kind == "_Fault" and text.startswith("user's own")
    assert (
        position is not None
        and str(position) == "rank 0 (pp rank 0) was at stage 1, action 1F2, micro-batch 2"
    )
    # The peer does not hang.
    assert peer_kind and peer_position is not None and peer_position.action.stage == 0


def _promise(text: str) -> tuple[str, str, PipelinePosition | None]:
    executor, stage = executor_of_two()
    alter: dict[str, Callable[[int, int, Any], Any]] = {
        "dtype": lambda s, m, outputs: (
            (outputs[0].double(), *outputs[1:]) if (s, m) == (0, 1) else outputs
        ),
        "none": lambda s, m, outputs: None if s == 0 else outputs,
        "vector": lambda s, m, outputs: torch.ones(3) if s == 1 else outputs,
    }
    program = _Altering({stage: Stage(stage)}, 2, [3] * 4, alter=alter[text])
    return _caught(lambda: executor.run(schedules.one_f_one_b(2, 4), program))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("fault", "rank", "message"),
    [
        (
            "dtype",
            1,
            (
                r"stage 0 sends float64\[2, 3, 6\] with gradient.*micro-batch 1.*signature 3 had "
                r"float32\[2, 3, 6\] with"
            ),
        ),
        ("none", 1, "stage 0 returned NoneType; only tensors travel"),
        (
            "vector",
            0,
            r"last stage returned a tensor of shape \(3,\); a backward starts from one number",
        ),
    ],
)
def test_broken_promises_are_named(fault: str, rank: int, message: str) -> None:
    kind, text, _ = run_ranks(2, _promise, fault)[rank]
    assert kind == "PipelineError"
    with pytest.raises(PipelineError, match=message):
        raise PipelineError(text)
