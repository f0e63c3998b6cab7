"""The example of a policy trained on samples of its own, in one job with the engine."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest

from examples.grpo import train
from megatron_lightning.config import PipelineOptions
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks


class _Rewards(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["reward"]))


def rewards(devices: int, steps: int, sizes: dict[str, int]) -> list[float]:
    """Return the mean reward of every step on ranks that this process belongs to."""
    record = _Rewards()
    options = PipelineOptions(explicit_steps=True)
    strategy = MegatronStrategy(micro_batch_size=16, pipeline_options=options, **sizes)  # type: ignore[arg-type]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    with TemporaryDirectory() as folder:
        train(strategy, devices, folder, steps, callbacks=[record], **quiet)
    return record.values


@pytest.mark.slow  # 40 steps; the test below has the first updates
def test_the_reward_rises() -> None:
    found = rewards(1, 40, {})
    assert found[0] < 0.15 < 0.75 < found[-1]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["pipeline", pytest.param("tensor", marks=pytest.mark.slow)])
def test_rollouts_and_updates_on_two_ranks(axis: str) -> None:
    """The first updates give the texts, and so the rewards, of one process."""
    expected = rewards(1, 6, {})
    assert len(set(expected)) > 4
    for found in run_ranks(2, rewards, 2, 6, {f"{axis}_model_parallel_size": 2}):
        assert found == expected
