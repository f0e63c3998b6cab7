"""Policies trained on answers of their own: rewards of users, files, replays and resumes."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megatron_lightning.config import PipelineOptions
from megatron_lightning.data.rollouts.generation import Generation, Rollout, Text
from megatron_lightning.data.rollouts.prompts import prompt_of
from megatron_lightning.data.rollouts.rewards import Rewards
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import GPTLightningModule, RolloutDataModule
from megatron_lightning.modules.post_training.sampling import RolloutSampler
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import PP, TP, tiny_config
from tests.helpers.policies import Policy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

CONFIG = tiny_config(vocab_size=16, max_sequence_length=16)
HERE = __name__


def evens(prompt: list[int], answer: list[int], row: Mapping[str, Any]) -> float:
    assert prompt == row["prompt_ids"]
    return sum(one % 2 == 0 for one in answer) / max(len(answer), 1)


async def moody(prompt: list[int], answer: list[int], row: Mapping[str, Any]) -> float | None:
    """Raise, take long, or return nothing, by the answer."""
    kind = sum(answer) % 4
    if kind == 0:
        raise OSError("the service is away")
    if kind == 1:
        await asyncio.sleep(60)
    return None if kind == 2 else 1.0


class Constant:
    """A reward with a state."""

    def __call__(self, prompt: Any, answer: Any, row: Any) -> float:
        return float(row["value"])


class _Metrics(Losses):
    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def _prompts(folder: Path, count: int = 12) -> str:
    rows = ({"prompt_ids": [1 + n % 7, n % 5, 3], "value": n % 2} for n in range(count))
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fit(
    folder: str,
    options: dict[str, Any] | None = None,
    of_data: Mapping[str, Any] | None = None,
    *,
    steps: int = -1,
    start: str | None = None,
    save: str | None = None,
    **of_policy: Any,
) -> _Metrics:
    """Train on the ranks of this process's group."""
    record = _Metrics()
    explicit = PipelineOptions(explicit_steps=True)
    strategy = MegatronStrategy(pipeline_options=explicit, **(options or {}))
    chosen = trainer(
        strategy, max_epochs=1, max_steps=steps, callbacks=[record], default_root_dir=folder
    )
    given = {"prompts": f"{folder}/prompts.jsonl", "rewards": [evens]}
    data = RolloutDataModule(
        **{"num_generations": 4, "batch_size": 16, "end_ids": [7], "pad_to": 4}
        | (given if "replay" not in (of_data or {}) else {})
        | dict(of_data or {})
    )
    policy = Policy(
        GPTLightningModule(CONFIG), temperature=0.7, max_completion_length=6, **of_policy
    )
    chosen.fit(policy, datamodule=data, ckpt_path=start)
    if save is not None:
        chosen.save_checkpoint(save)
    return record


def _files(folder: Path, version: int = 0) -> list[Generation]:
    paths = sorted((folder / "rollouts" / f"version_{version}").iterdir())
    return [Generation.read(str(path)) for path in paths]


def test_a_replay_is_bit_equal(tmp_path: Path) -> None:
    """Every row is written, with its end token; the sampler's scores are those of the update."""
    _prompts(tmp_path)
    sampled = fit(str(tmp_path))
    files = _files(tmp_path)
    assert len(files) == len(sampled.losses) == 3
    rows = [row for file in files for row in file.rows]
    assert len({row.seed for row in rows}) == len({row.group for row in rows}) * 4 == 48
    assert any(row.ids[-1] == 7 for row in rows) and any(len(row.ids) == 6 for row in rows)
    assert [set(row.steps) for row in rows[::16]] == [{0}, {1}, {2}]
    assert all(m["sampler_difference_max"] < 1e-5 for m in sampled.metrics)
    replayed = fit(str(tmp_path), of_data={"replay": f"{tmp_path}/rollouts/version_0"})
    assert (replayed.losses, replayed.norms) == (sampled.losses, sampled.norms)
    assert sampled.metrics[0]["reward"] == pytest.approx(
        sum(row.rewards["evens"] or 0.0 for row in files[0].rows) / 16, abs=1e-6
    )


def test_a_fit_keeps_nothing_of_the_one_before(tmp_path: Path) -> None:
    """One policy, and the same data in two fits: rows, files and rewards are those of each fit."""
    policy = Policy(GPTLightningModule(CONFIG), temperature=0.7, max_completion_length=4)

    def run(data: RolloutDataModule, *callbacks: Any) -> tuple[int, ...]:
        explicit = PipelineOptions(explicit_steps=True)
        chosen = trainer(
            MegatronStrategy(pipeline_options=explicit),
            max_epochs=1, callbacks=list(callbacks), default_root_dir=str(tmp_path),
        )  # fmt: skip
        chosen.fit(policy, datamodule=data)
        assert policy._generation is not None
        return tuple(policy._generation.rows.rows[0].prompt_ids)

    def data_of(first: int) -> RolloutDataModule:
        path = tmp_path / f"{first}.jsonl"
        path.write_text(json.dumps({"prompt_ids": [first, 3]}) + "\n")
        return RolloutDataModule(
            prompts=str(path), rewards={"sum": _sum}, num_generations=4, batch_size=4,
            end_ids=[7], pad_to=4,
        )  # fmt: skip

    class Boom(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise KeyError("boom")

    once, twice = data_of(1), data_of(2)
    with pytest.raises(KeyError, match="boom"):
        run(once, Boom())
    assert [run(twice), run(once), run(twice)] == [(2, 3), (1, 3), (2, 3)]
    firsts = [_files(tmp_path, version)[0].rows[0].prompt_ids for version in range(4)]
    assert firsts == [[1, 3], [2, 3], [1, 3], [2, 3]]


def test_all_texts_of_a_row_count() -> None:
    """A conversation of two texts is shown, named and cut as one row."""
    first = Text(prompt_ids=[1, 2], ids=[3, 7], mask=[0, 1], logprobs=[None, -1.0], steps=[None, 0])
    last = {"prompt_ids": [4], "ids": [5], "mask": [1], "logprobs": [-2.0], "steps": [0]}
    row = Rollout(**last, group=0, rewards={"one": 1.0}, earlier=(first,))  # type: ignore[arg-type]
    arrays = {name: found.tolist() for name, found in row.arrays().items()}
    assert arrays == {
        "tokens": [1, 2, 3, 7, 4, 5],
        "labels": [-100, -100, 7, -100, 5, -100],
    }
    generation = Generation([row, replace(row, ids=[7])])
    assert generation.truncated([7]).tolist() == [True, False]
    for other in (replace(first, mask=[1, 1]), replace(first, logprobs=[None, -3.0])):
        assert Generation([replace(row, earlier=(other,))]).digest != Generation([row]).digest


class _ReadOnce:
    """A reward that reads a model, as reward models do."""

    is_serial = True

    def __init__(self) -> None:
        self.num_reads = 0

    def load(self) -> None:
        count = self.num_reads
        if not count:
            time.sleep(0.02)
            self.num_reads = count + 1

    def __call__(self, *answer: Any) -> float:
        return float(self.num_reads)


def test_generations_at_once_read_a_reward_model_once() -> None:
    reward = _ReadOnce()
    rewards, at_once = Rewards({"one": reward}, 5.0), []
    load = reward.load

    def counted() -> None:
        at_once.append(1)
        load()
        assert len(at_once) == 1
        at_once.pop()

    reward.load = counted  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda _: rewards.score([([1], [2], {})]), range(4)))
    assert [found for [found], _ in scores] == [{"one": 1.0}] * 4


def _sum(prompt: Any, answer: list[int], row: Any) -> float:
    return float(sum(answer) % 5)


_LAYOUTS: Mapping[str, tuple[int, int, dict[str, Any]]] = {
    "pp": (2, 1, {PP: 2, "micro_batch_size": 4}),
    "dp": (2, 2, {"micro_batch_size": 4}),
    "tp": (2, 1, {TP: 2}),
    "fsdp": (2, 2, {"data_parallel": "fsdp"}),
}


def _on_ranks(folder: str, options: dict[str, Any], of_data: dict[str, Any]) -> Any:
    own = fit(folder, options, of_data)
    return own.norms, own.metrics


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=() if n == "dp" else pytest.mark.slow) for n in _LAYOUTS]
)
def test_every_layout_samples_and_trains_alike(tmp_path: Path, layout: str) -> None:
    _prompts(tmp_path)
    whole = fit(str(tmp_path))
    world, data, options = _LAYOUTS[layout]
    of_data = {"batch_size": 16 // data, "folder": str(tmp_path / "own")}
    ranks = run_ranks(world, _on_ranks, str(tmp_path), options, of_data, timeout_s=600)
    for norms, metrics in ranks:
        assert norms == pytest.approx(whole.norms, rel=1e-5)
        assert all(m["sampler_difference_max"] < 1e-5 for m in metrics)
    texts = [[row.ids for row in file.rows] for file in _files(tmp_path)]
    paths = sorted((tmp_path / "own").iterdir())
    assert [[row.ids for row in Generation.read(str(path)).rows] for path in paths] == texts


def test_seeds_have_draws_of_their_own() -> None:
    draws = set()
    for seed in (0, 1):
        own: Any = SimpleNamespace(_data=SimpleNamespace(options=SimpleNamespace(seed=seed)))
        for place in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
            generator = torch.Generator().manual_seed(RolloutSampler._seed(own, *place))
            draws.add(float(torch.rand((), generator=generator)))
    assert len(draws) == 8


def test_a_resume_within_a_generation_takes_the_rows_on_disk(tmp_path: Path) -> None:
    _prompts(tmp_path, 24)
    options: dict[str, Any] = {"updates_per_generation": 2, "num_iterations": 2}
    whole = fit(str(tmp_path), **options)
    saved = str(tmp_path / "saved.ckpt")
    before = fit(str(tmp_path), steps=6, save=saved, **options)
    after = fit(str(tmp_path), start=saved, **options)
    assert before.norms + after.norms == whole.norms
    assert len(_files(tmp_path, 1)) == 3
    assert not (tmp_path / "rollouts" / "version_2").exists()
    with pytest.raises(ConfigError, match=r"3 generations of 32 rows.*within another generation"):
        fit(str(tmp_path), {}, {"batch_size": 8}, start=saved, **options)
    file = tmp_path / "rollouts" / "version_1" / "generation-000001.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    with pytest.raises(ConfigError, match="generation 1 on disk has other rows"):
        fit(str(tmp_path), start=saved, **options)


def test_rewards_that_fail_are_counted_and_the_fit_continues(tmp_path: Path) -> None:
    """By class path, ordinary and asynchronous; also a thread that hangs."""
    _prompts(tmp_path)
    found = fit(
        str(tmp_path),
        of_data={
            "rewards": {"even": f"{HERE}.evens", "mood": f"{HERE}.moody", "c": f"{HERE}.Constant"},
            "reward_weights": {"c": 0.0},
            "reward_timeout_s": 0.2,
            "overlong_buffer": 2,
        },
        steps=1,
    )
    [file] = _files(tmp_path)
    moods = [sum(row.ids[:-1] if row.ids[-1] == 7 else row.ids) % 4 for row in file.rows]
    counts = found.metrics[0]
    for name, kind in (("raised_OSError", 0), ("timed_out", 1), ("none", 2)):
        assert counts.get(f"reward_failures/{name}", 0) == moods.count(kind) > 0
    for row, mood in zip(file.rows, moods, strict=True):
        assert row.rewards["mood"] == (1.0 if mood == 3 else None)
        assert row.rewards["overlong"] == pytest.approx(-max(len(row.ids) - 4, 0) / 2)


class AwayAtFirst:
    """A reward that no answer of the first generation gets."""

    def __init__(self) -> None:
        self._calls = count()

    def __call__(self, prompt: Any, answer: Any, row: Any) -> float:
        if next(self._calls) < 16:
            raise OSError("the service is away")
        return float(len(answer))


def test_failures_are_those_of_the_generation(tmp_path: Path) -> None:
    """Lightning repeats the last value of a name that a step does not log."""
    _prompts(tmp_path)
    rewards = {"even": evens, "away": f"{HERE}.AwayAtFirst"}
    metrics = fit(str(tmp_path), of_data={"rewards": rewards}, steps=2).metrics
    assert [one["reward_failures/raised_OSError"] for one in metrics] == [16.0, 0.0]


def test_runs_that_begin_together_write_to_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = RolloutDataModule(replay=str(tmp_path), batch_size=4)
    monkeypatch.setattr(data, "_root", lambda: tmp_path)
    free = iter([str(tmp_path / "v0"), str(tmp_path / "v0"), str(tmp_path / "v1")])
    monkeypatch.setattr(data, "free_folder", lambda: next(free))
    assert [data.new_folder(), data.new_folder()] == [str(tmp_path / "v0"), str(tmp_path / "v1")]


def test_an_answer_that_nobody_has_scored_has_no_length_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _prompts(tmp_path)
    data = {"rewards": [f"{HERE}.moody"], "reward_timeout_s": 0.2, "overlong_buffer": 2}
    found = fit(str(tmp_path), of_data=data, steps=1)
    assert "reward_failures/raised_OSError" in caplog.text and "the service is away" in caplog.text
    [file] = _files(tmp_path)
    unscored = [row for row in file.rows if row.rewards["moody"] is None]
    assert found.metrics[0]["unscored_rows"] == len(unscored) > 0
    assert all(row.rewards["overlong"] is None for row in unscored)


def test_groups_without_signal_are_replaced(tmp_path: Path) -> None:
    """Every second prompt has another reward, but its answers have the same."""
    _prompts(tmp_path, 24)
    data = {"rewards": [f"{HERE}.Constant"], "dynamic_sampling": 2}
    found = fit(str(tmp_path), of_data=data, steps=1)
    assert found.metrics[0]["replaced_groups"] == 8.0
    assert found.metrics[0]["groups_without_signal"] == 1.0
    found = fit(str(tmp_path), of_data={"dynamic_sampling": 2}, steps=1)
    assert found.metrics[0]["groups_without_signal"] == 0.0


def test_a_thread_that_hangs_does_not_hold_the_rewards() -> None:
    release = threading.Event()

    def hangs(*_: Any) -> float:
        release.wait(30)
        return 1.0

    start = time.monotonic()
    scores, failures = Rewards({"hangs": hangs, "one": Constant()}, 0.1).score(
        [("p", "a", {"value": 2})] * 3
    )
    assert scores == [{"hangs": None, "one": 2.0}] * 3
    assert failures == {"timed_out": 3}
    assert time.monotonic() - start < 10
    release.set()


@pytest.mark.parametrize(
    ("of_data", "message"),
    [
        ({"prompts": None}, "both left out"),
        ({"rewards": None}, "rewards are not"),
        ({"rewards": ["nowhere.reward"]}, "'nowhere.reward' cannot be imported"),
        ({"reward_weights": {"odd": 1.0}}, "reward_weights has odd, and the rewards are evens"),
        ({"num_generations": 1}, "Set it to 2 or more"),
        ({"batch_size": 10}, "num_generations=4 does not divide"),
        ({"batch_size": 64}, "there are 12 prompts, and a generation has 16"),
        ({"replay": "nowhere", "prompts": None}, "no such file"),
    ],
)
def test_data_that_cannot_work_are_refused(
    tmp_path: Path, of_data: dict[str, Any], message: str
) -> None:
    _prompts(tmp_path)
    with pytest.raises((ConfigError, DataError), match=message):
        fit(str(tmp_path), of_data=of_data)


def test_a_budget_beyond_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_ids": [1] * 12}) + "\n")
    with pytest.raises(ConfigError, match="max_completion_length=6 the text is longer"):
        fit(str(tmp_path), of_data={"batch_size": 4})


def test_rows_without_a_prompt_are_refused() -> None:
    for fields, message in (
        ({"prompt": "text"}, "have a tokenizer"),
        ({"prompt_ids": [3]}, None),
    ):
        row = Row("rows.jsonl:1", fields)
        if message is None:
            assert prompt_of(row, None, None).ids == [3]
            continue
        with pytest.raises(DataError, match=message):
            prompt_of(row, None, None)


class Queued:
    """A reward for one thread at a time, whose first call may hang."""

    is_serial = True

    def __init__(self, release: threading.Event | None = None) -> None:
        self.release = release
        self.calls = self.running = 0
        self.is_loaded = False

    def load(self) -> None:
        time.sleep(0.3)
        self.is_loaded = True

    def __call__(self, prompt: Any, answer: Any, row: Any) -> float:
        assert self.is_loaded and not self.running
        self.calls, self.running = self.calls + 1, self.running + 1
        time.sleep(0.03)
        if self.release is not None:
            self.release.wait(30)
        self.running -= 1
        return 1.0


@pytest.mark.slow
def test_the_time_of_a_queued_reward_begins_with_its_own_call() -> None:
    queued = Queued()
    scores, failures = pickle.loads(pickle.dumps(Rewards([queued], 0.2))).score(
        [("p", "a", {})] * 9
    )
    assert scores == [{"Queued": 1.0}] * 9 and not failures

    release = threading.Event()
    hanging = Queued(release)
    rewards = Rewards([hanging], 0.1)
    assert rewards.score([("p", "a", {})] * 3)[1] == {"timed_out": 3}
    release.set()
    assert rewards.score([("p", "a", {})])[0] == [{"Queued": 1.0}]
    assert hanging.calls == 2  # no call was made for answers that had been given up
