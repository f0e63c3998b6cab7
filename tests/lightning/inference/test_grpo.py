"""The examples of policies trained on samples of their own, in one job with the engine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

pytest.importorskip("transformers", "5")

from examples import grpo
from megatron_lightning.config import PipelineOptions
from megatron_lightning.data.rollouts.generation import Generation
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.timeout(3600)  # the slow ones take minutes
QUIET: dict[str, Any] = {"enable_progress_bar": False}


class _Rewards(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["reward"]))


def rewards(
    model: str, folder: str, devices: int, sizes: dict[str, int], steps: int, prompts: int = 8
) -> list[float]:
    """Return the mean reward of every step on ranks that this process belongs to."""
    record = _Rewards()
    Path(folder).mkdir(exist_ok=True)
    options = PipelineOptions(explicit_steps=True)
    strategy = MegatronStrategy(micro_batch_size=16, pipeline_options=options, **sizes)  # type: ignore[arg-type]
    grpo.train(
        model, folder, strategy, devices, steps=steps, prompts=prompts, callbacks=[record], **QUIET
    )
    return record.values


def _texts(folder: Path) -> list[list[tuple[list[int], Any]]]:
    files = sorted((folder / "rollouts" / "version_0").iterdir())
    return [[(row.ids, row.rewards) for row in Generation.read(str(file)).rows] for file in files]


@pytest.fixture
def calculator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, which imports the other one as a script does."""
    monkeypatch.syspath_prepend(str(Path(grpo.__file__).parent))
    return importlib.import_module("calculator")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has seen the form of answers."""
    return grpo.teach(str(tmp_path_factory.mktemp("taught")), grpo.sloppy_sums(6_000))


@pytest.mark.slow  # minutes; the tests below have the first updates
def test_the_reward_rises(tmp_path: Path) -> None:
    taught = grpo.teach(str(tmp_path), grpo.sloppy_sums(24_000), epochs=3)
    found = rewards(taught, str(tmp_path), 1, {}, grpo.STEPS, 32)
    assert found[0] < 0.4 < 0.9 < sum(found[-10:]) / 10


@pytest.mark.slow
def test_the_calculator_is_called(calculator: Any, tmp_path: Path) -> None:
    taught = grpo.teach(str(tmp_path), calculator.guesses_and_calls(40_000))
    found = calculator.train(taught, str(tmp_path), **QUIET)
    assert found.callback_metrics["reward"] > 0.9 and found.callback_metrics["turns"] > 1.9


def test_the_examples_run(calculator: Any, tmp_path: Path) -> None:
    """A model that nobody has taught: every conversation is trained."""
    model = grpo.make_model(str(tmp_path / "model"))
    assert rewards(model, str(tmp_path / "sums"), 1, {}, 1, 2)[0] < 0.5
    trainer = calculator.train(model, str(tmp_path), steps=1, prompts=2, **QUIET)
    [rows] = _texts(tmp_path)
    assert len(rows) == 16 and {name for _, given in rows for name in given} == {"environment"}
    assert trainer.callback_metrics["turns"] >= 1
    one = calculator.Calculator()
    one.reset({"question": "47*86"}, 0)
    [message] = one.step([], "c47*86").messages
    assert message == {"role": "tool", "content": "4042"}
    assert [one.step([], text)[1:3] for text in ("4042", "4041")] == [(1.0, True), (0.0, True)]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_rollouts_and_updates_on_two_ranks(taught: str, tmp_path: Path, axis: str) -> None:
    """The first updates give the texts, and so the rewards, of one process."""
    _equal_first_generations(taught, tmp_path, 2, {f"{axis}_model_parallel_size": 2})


@pytest.mark.slow
def test_rollouts_and_updates_on_four_ranks(taught: str, tmp_path: Path) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    _equal_first_generations(taught, tmp_path, 4, sizes)


def _equal_first_generations(taught: str, folder: Path, world: int, sizes: dict[str, int]) -> None:
    expected = rewards(taught, str(folder / "one"), 1, {}, 5)
    arguments = (taught, str(folder / "ranks"), world, sizes, 5)
    for found in run_ranks(world, rewards, *arguments, timeout_s=600):
        assert found == expected
    assert any(expected)
    assert _texts(folder / "ranks") == _texts(folder / "one")
