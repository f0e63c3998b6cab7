"""Policies that talk with environments of users: turns, failures, tools, and replays."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from megatron_lightning.config import PipelineOptions
from megatron_lightning.data.rollouts.environments import Hosted, Outcome, call_all, close_all
from megatron_lightning.data.rollouts.generation import Generation
from megatron_lightning.data.rollouts.prompts import Prompt
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import (
    GPTLightningModule,
    RolloutDataModule,
    ToolEnvironment,
    Turn,
)
from megatron_lightning.modules.post_training import sampling
from megatron_lightning.modules.post_training.episodes import Episode, Episodes, _reset, _turn_of
from megatron_lightning.modules.post_training.policy import PolicyModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.chats import CHATML, make_tokenizer, write_rows
from tests.helpers.layouts import PP, TP, tiny_config
from tests.helpers.policies import Policy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

CONFIG = tiny_config(vocab_size=320, max_sequence_length=160)
HERE = __name__
ENDS = [1, *range(20, 80)]  # a model with random weights ends its answers, too
_closed: Counter[str] = Counter()


class Guess:
    """Answers every answer with its length, in two turns."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.count = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{row['question']} {seed % 2}"}]

    async def step(self, messages: list[dict[str, str]], answer: str) -> Turn:
        assert [one["role"] for one in messages] == ["user", "assistant"] * self.count + ["user"]
        await asyncio.sleep(0)
        self.count += 1
        again = [{"role": "user", "content": f"it has {len(answer)}"}]
        return Turn(again, self.scale * (len(answer) % 3), self.count == 3)

    def close(self) -> None:
        _closed["guess"] += 1


class Uneven(Guess):
    """Talks as many turns as the question says, from 0 on: a reset without a turn raises."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        self.most = row["kind"]
        if not self.most:
            raise OSError("nothing to talk about")
        return super().reset(row, seed)

    async def step(self, messages: list[dict[str, str]], answer: str) -> Turn:
        turn = await super().step(messages, answer)
        return turn._replace(done=self.count >= self.most)


class Moody(Guess):
    """Fails by the question: raises, sleeps, hangs, returns None, or all is well."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        self.kind = row["kind"]
        if self.kind == 0:
            raise OSError("no sandbox is left")
        return super().reset(row, seed)

    async def step(self, messages: list[dict[str, str]], answer: str) -> Turn:
        if self.kind == 1:
            await asyncio.sleep(60)
        if self.kind == 2:
            time.sleep(2)
        return None if self.kind == 3 else await super().step(messages, answer)  # type: ignore[return-value]

    def close(self) -> None:
        _closed[f"moody {self.kind}"] += 1


class _Metrics(Losses):
    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def write(folder: Path, template: str = CHATML) -> None:
    make_tokenizer(template=template).save_pretrained(folder / "tokenizer")
    rows = [{"question": f"what is {n}", "kind": n % 5} for n in range(10)]
    write_rows(folder / "prompts.jsonl", rows)


def fit(
    folder: str,
    options: dict[str, Any] | None = None,
    of_data: Mapping[str, Any] | None = None,
    *,
    steps: int = 2,
    budget: int = 90,
    runs: int = 1,
    **of_policy: Any,
) -> _Metrics:
    """Train on the ranks of this process's group."""
    record = _Metrics()
    explicit = PipelineOptions(explicit_steps=True)
    strategy = MegatronStrategy(pipeline_options=explicit, **(options or {}))
    chosen = trainer(
        strategy, max_steps=steps, callbacks=[record], default_root_dir=folder,
        accumulate_grad_batches=runs,
    )  # fmt: skip
    given = {"prompts": f"{folder}/prompts.jsonl", "environment": f"{HERE}.Guess"}
    data = RolloutDataModule(
        **{"num_generations": 2, "batch_size": 4, "end_ids": ENDS, "pad_to": 4}
        | {"tokenizer": f"{folder}/tokenizer"}
        | (given if "replay" not in (of_data or {}) else {})
        | dict(of_data or {})
    )
    policy = Policy(
        GPTLightningModule(CONFIG),
        temperature=0.7,
        max_completion_length=budget,
        scale_rewards="batch",
        **of_policy,
    )
    chosen.fit(policy, datamodule=data)
    return record


def _files(folder: Path, version: int = 0) -> list[Generation]:
    paths = sorted((folder / "rollouts" / f"version_{version}").iterdir())
    return [Generation.read(str(path)) for path in paths]


def test_turns_are_sampled_trained_and_replayed(tmp_path: Path) -> None:
    write(tmp_path)
    _closed.clear()
    sampled = fit(str(tmp_path))
    rows = [row for file in _files(tmp_path) for row in file.rows]
    assert len(rows) == _closed["guess"] == 8
    tokenizer, nums_turns = make_tokenizer(), []
    for row in rows:
        assert len(row.ids) <= 90
        first = tokenizer.decode(row.prompt_ids)
        assert first.startswith("<|im_start|>user\nwhat is") and first.endswith("assistant\n")
        context = tokenizer.decode([i for i, m in zip(row.ids, row.mask, strict=True) if not m])
        nums_turns.append(context.count("it has"))
        assert nums_turns[-1] == context.count("<|im_start|>assistant")
        assert [one is None for one in row.logprobs] == [not m for m in row.mask]
    assert max(nums_turns) == 2  # of the environment
    assert sampled.metrics[0]["turns"] > 2
    assert all(m["sampler_difference_max"] < 1e-5 for m in sampled.metrics)
    replayed = fit(str(tmp_path), of_data={"replay": f"{tmp_path}/rollouts/version_0"})
    assert (replayed.losses, replayed.norms) == (sampled.losses, sampled.norms)


def test_a_template_that_changes_history_splits_its_conversations(tmp_path: Path) -> None:
    """Every text is what the model has read; a row has one reward, and all texts are trained."""
    counts = CHATML.replace("{% for", "{{ messages | length }}{% for", 1)
    write(tmp_path, counts)
    options: dict[str, Any] = {"history": "split", "environment": f"{HERE}.Uneven"}
    with pytest.raises(ConfigError, match=r"loss_type=grpo is a mean over rows.*dapo"):
        fit(str(tmp_path), of_data=options, loss_type="grpo")
    sampled = fit(str(tmp_path), of_data=options, budget=40, num_iterations=2, steps=4)
    files, tokenizer = _files(tmp_path), make_tokenizer()
    rows = [row for file in files for row in file.rows]
    assert len(files) == 2 and len(rows) == 8
    assert {len(row.texts) for row in rows} > {1}
    for row in rows:
        assert sum(len(text.ids) for text in row.texts) <= 40
        for number, text in enumerate(row.texts if row.ids else ()):  # not of a failed reset
            assert tokenizer.decode(text.prompt_ids).startswith(f"{1 + 2 * number}<|im_start|>user")
            assert all(text.mask) and None not in text.logprobs and None not in text.steps
    assert all(m["sampler_difference_max"] < 1e-5 for m in sampled.metrics[::2])
    assert sampled.metrics[0]["texts_of_row"] == sum(len(r.texts) for r in files[0].rows) / 4
    again = {"replay": f"{tmp_path}/rollouts/version_0"}
    replayed = fit(str(tmp_path), of_data=again, num_iterations=2, steps=4)
    assert (replayed.losses, replayed.norms) == (sampled.losses, sampled.norms)
    one_by_one = {**again, "batch_size": 2}
    halves = fit(str(tmp_path), of_data=one_by_one, num_iterations=2, steps=4, runs=2)
    assert halves.norms == pytest.approx(sampled.norms, rel=1e-5)


@pytest.mark.slow
def test_replicas_split_unequal_conversations(tmp_path: Path) -> None:
    write(tmp_path, CHATML.replace("{% for", "{{ messages | length }}{% for", 1))
    split = {"history": "split", "environment": f"{HERE}.Uneven"}
    whole = fit(str(tmp_path), of_data=split, budget=40)
    of_data = {"batch_size": 2, "folder": str(tmp_path / "own"), **split}
    for options in ({"micro_batch_size": 1}, {"data_parallel": "fsdp"}):
        arguments = (str(tmp_path), options, of_data, 40)
        for own in run_ranks(2, _on_ranks, *arguments, timeout_s=600):
            assert own.norms == pytest.approx(whole.norms, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp", "cp", "fsdp"])
def test_turns_are_replayed_on_another_layout(tmp_path: Path, layout: str) -> None:
    write(tmp_path)
    sampled = fit(str(tmp_path))
    options = {
        "pp": {PP: 2, "micro_batch_size": 2},
        "cp": {"context_parallel_size": 2},
        "fsdp": {"data_parallel": "fsdp"},
    }[layout]
    of_data = {
        "replay": f"{tmp_path}/rollouts/version_0",
        "batch_size": 2 if layout == "fsdp" else 4,
    }
    for own in run_ranks(2, _on_ranks, str(tmp_path), options, of_data, timeout_s=600):
        assert own.norms == pytest.approx(sampled.norms, rel=1e-5)


@pytest.mark.slow
def test_updates_that_share_a_generation_are_not_alike_on_fsdp(tmp_path: Path) -> None:
    """The first one of each generation samples, by another number of forwards, and scores."""
    write(tmp_path)
    uneven = {"environment": f"{HERE}.Uneven", "batch_size": 2}
    whole = fit(str(tmp_path), of_data={**uneven, "batch_size": 4}, num_iterations=2, steps=4)
    arguments = (str(tmp_path), {"data_parallel": "fsdp"}, uneven, 90, 2)
    for own in run_ranks(2, _on_ranks, *arguments, timeout_s=600):
        assert own.norms == pytest.approx(whole.norms, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "fsdp", "tp", "pp"])
def test_every_layout_talks_alike(tmp_path: Path, layout: str) -> None:
    """Also if the conversations of one replica are longer."""
    write(tmp_path)
    uneven = {"environment": f"{HERE}.Uneven"}
    whole = fit(str(tmp_path), of_data=uneven)
    options = {
        "dp": {},
        "fsdp": {"data_parallel": "fsdp"},
        "tp": {TP: 2},
        "pp": {PP: 2, "micro_batch_size": 2},
    }[layout]
    size = 2 if layout in ("dp", "fsdp") else 4
    of_data = {"batch_size": size, "folder": str(tmp_path / "own"), **uneven}
    for own in run_ranks(2, _on_ranks, str(tmp_path), options, of_data, timeout_s=600):
        assert own.norms == pytest.approx(whole.norms, rel=1e-5)
        assert all(m["sampler_difference_max"] < 1e-5 for m in own.metrics)
    paths = sorted((tmp_path / "own").iterdir())
    texts = [[row.ids for row in Generation.read(str(path)).rows] for path in paths]
    assert texts == [[row.ids for row in file.rows] for file in _files(tmp_path)]


def _on_ranks(
    folder: str, options: dict[str, Any], of_data: dict[str, Any], budget: int = 90, times: int = 1
) -> Any:
    counts = {"num_iterations": times, "steps": 2 * times}
    own = fit(folder, options, of_data, budget=budget, **counts)
    return SimpleNamespace(norms=own.norms, metrics=own.metrics)


def test_environments_that_fail_are_counted_and_closed(tmp_path: Path) -> None:
    """Ten samples of five kinds: one each is well. The fit continues."""
    write(tmp_path)
    _closed.clear()
    of_data = {
        "environment": f"{HERE}.Moody",
        "environment_options": {"scale": 2.0},
        "timeout_s": 0.5,
        "batch_size": 20,
    }
    counts = fit(str(tmp_path), of_data=of_data, steps=1).metrics[0]
    for kind, count in (
        ("reset_raised_OSError", 4), ("step_timed_out", 8), ("step_none", 4),
    ):  # fmt: skip
        assert counts[f"environment_failures/{kind}"] == count
    assert counts["unscored_rows"] == 16
    assert sum(_closed.values()) == 20
    [file] = _files(tmp_path)
    rewards = [row.rewards["environment"] for row in file.rows]
    assert rewards.count(None) == 16 and all(one % 2.0 == 0.0 for one in rewards if one)


def _call(arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


class Odd(Guess):
    """Returns by the question: a text, no message, or a number as messages; no number, or no finite
    one as reward.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self.kind = row["kind"]
        first = super().reset(row, seed)
        return {0: "hello", 1: 5}.get(self.kind, first)

    async def step(self, messages: list[dict[str, str]], answer: str) -> Turn:
        turn = await super().step(messages, answer)
        return turn._replace(messages=["again"], done=False) if self.kind == 2 else turn  # type: ignore[list-item]

    def end(self) -> Any:
        return {3: "good", 4: float("inf")}[self.kind]


def test_odd_answers_of_environments_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    of_data = {"environment": f"{HERE}.Odd", "batch_size": 20}
    counts = fit(str(tmp_path), of_data=of_data, steps=1).metrics[0]
    for kind, count in (("reset_not_messages", 8), ("step_not_messages", 4), ("end_not_finite", 8)):
        assert counts[f"environment_failures/{kind}"] == count
    assert counts["unscored_rows"] == 20
    said = [record.getMessage() for record in caplog.records]
    assert sum("An environment has returned" in one for one in said) == 3
    assert any("returned 'hello'" in one or "returned 5" in one for one in said)


@pytest.mark.parametrize(
    ("turn", "kind"),
    [
        (Turn([{"role": "tool", "content": ["hello"]}]), "step_not_messages"),
        (Turn([{"role": "tool", "content": [{"type": "json", "json": {}}]}]), "step_not_messages"),
        (Turn([{"role": "tool", "content": [{"type": "image"}]}]), "step_not_messages"),
        (Turn([{"role": "tool", "content": "", "tool_calls": ["f()"]}]), "step_not_messages"),
        (Turn([{"role": "tool", "content": "", "tool_calls": 5}]), "step_not_messages"),
        (Turn(answer={"content": {"text": "a"}}), "step_not_messages"),
        (Turn(answer={"tool_calls": [{"function": "f"}]}), "step_not_messages"),
        (Turn(answer={"tool_calls": [_call('{"a": 1')]}), "step_not_messages"),
        (Turn(answer="a"), "step_no_turn"),  # type: ignore[arg-type]
    ],
)
def test_turns_that_no_template_can_show_are_counted(turn: Turn, kind: str) -> None:
    """They would end the fit later, also for what a policy has written."""
    assert _turn_of(Outcome(turn, None)) == kind


def test_calls_as_json_text_are_messages() -> None:
    turn = Turn(answer={"tool_calls": [_call('{"a": 1}')]})
    assert _turn_of(Outcome(turn, None)) == turn


class Rare(Guess):
    """Names a reward in some turns only."""

    async def step(self, messages: list[dict[str, str]], answer: str) -> Turn:
        turn = await super().step(messages, answer)
        return turn._replace(reward={"length": len(answer), **({"rare": 1.0} if turn.done else {})})


def test_a_weighed_reward_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in all rows of a round."""
    write(tmp_path)
    of_data = {
        "environment": f"{HERE}.Rare",
        "reward_weights": {"rare": 2.0},
        "max_turns": 1,
        "dynamic_sampling": 1,
    }
    said: list[str] = []
    monkeypatch.setattr(sampling, "rank_zero_warn", said.append)
    fit(str(tmp_path), of_data=of_data, steps=1)
    assert "reward_weights has rare, and no row" in said[0]
    [file] = _files(tmp_path)
    assert all(row.rewards["rare"] is None for row in file.rows)


def test_a_statistic_that_a_generation_lacks_is_finite() -> None:
    """EarlyStopping ends a fit by another one, and Lightning would repeat the last."""
    logged: dict[str, float] = {}
    rows = SimpleNamespace(texts=(), rows=())
    generation = SimpleNamespace(
        number=1, statistics=lambda: {"reward": 0.5}, texts_of=list, rows=rows
    )
    module = SimpleNamespace(
        _data=SimpleNamespace(number_of=lambda *_: 1), current_epoch=0, _generation=generation,
        _logged={"reward/rare"}, log=lambda name, value, **_: logged.update({name: value}),
        context=None, _batch_of=lambda *_: {},
    )  # fmt: skip
    PolicyModule._rows_of(module, {"places": torch.tensor([[1, 0]])})  # type: ignore[arg-type]
    assert logged == {"reward/rare": 0.0, "reward": 0.5}


def test_turns_have_draws_of_their_own() -> None:
    episode = Episode(Prompt([], [], {}), 3, SimpleNamespace())  # type: ignore[arg-type]
    draws = []
    for episode.num_turns in (0, 1, 2):
        [(_, _, seed)] = Episodes._open(SimpleNamespace(all=[episode], _budget=8))  # type: ignore[arg-type]
        draws.append(float(torch.rand((), generator=torch.Generator().manual_seed(seed))))
    assert len(set(draws)) == 3


def test_close_is_called_though_a_thread_hangs_or_a_task_is_not_cancelled() -> None:
    release, closed = threading.Event(), Counter[str]()

    class Stuck:
        async def deaf(self) -> None:
            while not release.is_set():
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue

        def hangs(self) -> None:
            release.wait(20)

        async def close(self) -> None:
            closed["closed"] += 1

    failures = Counter[str]()
    hosted = [Hosted(Stuck) for _ in range(2)]
    calls = {0: (hosted[0], lambda one: one.deaf()), 1: (hosted[1], lambda one: one.hangs())}
    start = time.monotonic()
    found = call_all(calls, "step", 0.2, failures)
    close_all(hosted, 0.2, failures)
    assert time.monotonic() - start < 5
    assert [one.failure for one in found.values()] == ["step_timed_out"] * 2
    assert failures == {"step_timed_out": 2} and closed["closed"] == 2
    release.set()
    time.sleep(0.2)  # the threads end


DROPS = CHATML.replace(
    "{{ message.content }}",
    "{% if loop.last or message.role != 'assistant' %}{{ message.content }}{% endif %}",
)


def test_a_template_that_drops_answers_is_refused_or_kept(tmp_path: Path) -> None:
    write(tmp_path, DROPS)
    with pytest.raises(DataError, match=r"prompts.jsonl:\d+: .* message 1 \(assistant\)"):
        fit(str(tmp_path))
    found = fit(str(tmp_path), of_data={"history": "keep"}, steps=1)
    assert found.metrics[0]["turns"] > 2
    assert found.metrics[0]["sampler_difference_max"] < 1e-5


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


class Bank:
    """An environment of TRL."""

    def reset(self, **row: Any) -> str:
        self.money = row["money"]
        return f" You have {self.money}."

    async def spend(self, amount: int) -> str:
        """Spend.

        Args:
            amount: How much.
        """
        if amount > self.money:
            raise ValueError("too much")
        self.money -= amount
        return f"{self.money} left"

    def get_reward(self) -> float:
        return float(self.money)


def test_tools_and_environments_of_trl_are_environments() -> None:
    environment = ToolEnvironment([f"{HERE}.add"], f"{HERE}.Bank")
    assert [tool["function"]["name"] for tool in environment.tools] == ["add", "spend"]
    parts = [{"type": "text", "text": one} for one in ("Bu", "y.")]
    row = {"prompt": [{"role": "user", "content": parts}], "money": 5}

    async def talk() -> tuple[Any, list[Turn], float | None]:
        first = await environment.reset(row, 3)
        said = [
            "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"
            for name, arguments in (
                ("add", {"a": 2, "b": 3}), ("spend", {"amount": 9}), ("spend", {"amount": 2}),
            )
        ]  # fmt: skip
        turns = [await environment.step([], one) for one in (*said, "I have 3.")]
        return first, turns, await environment.end()

    first, turns, reward = asyncio.run(talk())
    assert first == [{"role": "user", "content": "Buy. You have 5."}]
    results = [turn.messages[0]["content"] for turn in turns[:3]]
    assert results == ["5", '{"error": "too much"}', "3 left"]
    assert [turn.done for turn in turns] == [False, False, False, True]
    assert turns[0].answer is not None
    assert turns[0].answer["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 3}
    assert reward == 3.0


def test_environments_get_the_messages_of_a_row_as_prompt() -> None:
    asked = [{"role": "user", "content": "Buy."}]
    row = {"messages": [*asked, {"role": "assistant", "content": "Done."}], "money": 5}
    prompt = Prompt([], asked, row)
    messages, _ = asyncio.run(_reset(prompt, 3)(ToolEnvironment(environment=f"{HERE}.Bank")))
    assert messages == [{"role": "user", "content": "Buy. You have 5."}]


@pytest.mark.parametrize(
    ("of_data", "message"),
    [
        ({"environment": "nowhere.Game"}, "environment 'nowhere.Game' cannot be imported"),
        ({"environment": f"{HERE}.Bank"}, "has no step. Set it to a class with reset"),
        ({"environment": None, "environment_options": {}}, "environment is not"),
        ({"tokenizer": None}, "have a tokenizer"),
        ({"history": "drop"}, "must be one of refuse, keep"),
        ({"max_turns": 0}, "max_turns"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
    ],
)
def test_environments_that_cannot_work_are_refused(
    tmp_path: Path, of_data: dict[str, Any], message: str
) -> None:
    write(tmp_path)
    with pytest.raises((ConfigError, DataError), match=message):
        fit(str(tmp_path), of_data={"rewards": [f"{HERE}.add"], **of_data})
