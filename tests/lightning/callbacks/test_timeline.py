"""A run records what its pipeline did, and the command line lays it beside the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lightning.callbacks import PipelineTimeline
from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules import zbv
from megatron_lightning.pipeline.schedules.description import describe_schedule
from megatron_lightning.pipeline.schedules.trace import read_trace
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer


def _train(folder: str) -> None:
    strategy = MegatronStrategy(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_schedule="zbv",
        micro_batch_size=2,
    )
    trainer(strategy, max_steps=4, callbacks=[PipelineTimeline(folder, step=2)]).fit(
        ToyModule(), ToyData(batch_size=8)
    )


@pytest.mark.slow
def test_the_executed_step_is_the_schedule(tmp_path: Path) -> None:
    run_ranks(4, _train, str(tmp_path))  # two pipelines
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"rank_{rank}.jsonl" for rank in range(4)
    ]
    timeline = read_trace(str(tmp_path))
    assert timeline.schedule.actions == zbv(2, 4).actions and timeline.ranks == (0, 2)
    assert all(0 <= start < end for start, end in timeline.spans.values())
    text = describe_schedule(trace=str(tmp_path), output=str(tmp_path / "out"))
    executed, simulated = map(
        float, next(line for line in text.splitlines() if line.startswith("step time")).split()[-2:]
    )
    assert executed > 0 and simulated > 0 and (tmp_path / "out" / "executed.svg").exists()


def test_there_must_be_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"PipelineTimeline records the pipeline of MegatronStrategy"
    ):
        trainer(max_steps=1, callbacks=[PipelineTimeline(str(tmp_path))]).fit(
            ToyModule(), ToyData()
        )
    with pytest.raises(ConfigError, match="step is -1"):
        PipelineTimeline(step=-1)
