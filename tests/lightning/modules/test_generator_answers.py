"""Answers of generators, good and bad, and generations in threads: without a server."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5")

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Sampling
from megatron_lightning.inference.serving.new_weights import Version
from megatron_lightning.modules.post_training.generators import (
    ahead,
    published_weights,
    remote_engine,
)
from megatron_lightning.modules.post_training.generators.client import (
    AwayError,
    Generator,
    StaleError,
)
from megatron_lightning.modules.post_training.generators.published_weights import PublishedWeights
from megatron_lightning.modules.post_training.generators.remote_engine import (
    Generators,
    RemoteEngine,
)
from megatron_lightning.modules.post_training.generators.replica_rows import Replica


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:99999", "Set a port"),
        ("http://127.0.0.1:abc", "Set a port"),
        ("http://127.0.0.1:8001/v1/", "Leave /v1 out"),
    ],
)
def test_an_address_that_cannot_answer_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Generator(url, "secret")


@pytest.mark.parametrize(
    ("status", "content", "kind", "message"),
    [
        (200, b"[1]", ConfigError, "without texts"),
        (200, b"<html>", ConfigError, "<html>.*without texts"),
        (404, b"<html>no page", ConfigError, "404.*no page.*--accept-weights"),
        (401, b'{"error": "who?"}', ConfigError, "401.*who.*API_KEY"),
        (502, b"<html>bad gateway", AwayError, "502.*bad gateway"),
        (409, b'["old"]', StaleError, "old"),
    ],
)
def test_answers_of_other_servers(
    status: int, content: bytes, kind: type[Exception], message: str, monkeypatch: Any
) -> None:
    """A page of a proxy, or another server: what it says is the error, at once."""
    monkeypatch.setattr(Generator, "_answer", lambda *_: (status, content))
    with pytest.raises(kind, match=message):
        Generator("http://a", "secret").continue_each({}, 1.0)


def test_a_generation_has_the_device_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins with GPU 0, where reward models of all ranks would lie."""
    used: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda one: used.append((threading.current_thread().name, one))
    )
    ahead._in_thread(lambda: ({}, Counter())).result()
    assert used == [("generation", 3)]


def test_weights_that_a_generator_may_read_are_kept(tmp_path: Path) -> None:
    published = PublishedWeights(None, torch.nn.Linear(1, 1), str(tmp_path), "a", kept=3)
    for step in range(5):
        published._written.append(Version("a", step))
        (tmp_path / Version("a", step).folder).mkdir()
    published.remove()
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        Version("a", step).folder for step in (2, 3, 4)
    ]


def test_weights_of_killed_fits_are_removed(tmp_path: Path) -> None:
    """Those of a fit that runs, here or on another machine, and whatever others have, stay."""
    a, b, c, d = (letter * 12 for letter in "abcd")

    def began(run: str) -> PublishedWeights:
        published = PublishedWeights(None, torch.nn.Linear(1, 1), str(tmp_path), run)
        published.begin()
        (tmp_path / Version(run, 7).folder).mkdir()  # also of a write that failed
        return published

    for name in ("mine-7", "train-data", "train.running", ".running", f"{d}.elsewhere.running"):
        (tmp_path / name).mkdir()
    (tmp_path / Version(d, 7).folder).mkdir()
    (tmp_path / f"{d}{published_weights._MARK}").symlink_to(tmp_path / "gone")
    others = {one.name for one in tmp_path.iterdir()}
    killed, running = began(a), began(b)
    (tmp_path / f"{Version(a, 7).folder}.tmp-{a}").mkdir()
    assert killed._lock is not None
    os.close(killed._lock)
    last = began(c)
    names = {one.name for one in tmp_path.iterdir()}
    marks = {f"{run}{published_weights._MARK}" for run in (b, c)}
    assert names == others | marks | {Version(run, 7).folder for run in (b, c)}
    for one in (running, last):
        one.remove(all_of_them=True)
    assert {one.name for one in tmp_path.iterdir()} == others


def test_a_start_that_fails_leaves_no_mark(tmp_path: Path, monkeypatch: Any) -> None:
    """A notebook lives on, and would hold the lock."""
    monkeypatch.setenv("MEGATRON_LIGHTNING_API_KEY", "secret")
    trainer = SimpleNamespace(is_global_zero=True, strategy=None)

    class _Data:
        options = SimpleNamespace(
            weights_folder=tmp_path, max_staleness=0, generators=(), generator_timeout_s=1.0
        )

        @property
        def prompts(self) -> Any:
            raise ConfigError("no prompts")

    fit: Any = SimpleNamespace(data=_Data(), model=None, run="a" * 12, trainer=trainer)
    with pytest.raises(ConfigError, match="no prompts"):
        ahead.Ahead(fit, SimpleNamespace(is_first=True), lambda _: ({}, {}))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


class _Server:
    """A generator of texts with one id, which hangs while it is away."""

    url = "http://a"

    def __init__(self, *, is_away: bool = False) -> None:
        self.is_away = is_away
        self.bodies: list[Any] = []
        self.weights: Version | None = None

    def take_weights(self, version: Version, _: float) -> None:
        self._hang()
        self.weights = version

    def continue_each(self, body: Any, _: float) -> Any:
        self.bodies.append(body)
        self._hang()
        text = {"logprobs": [0.0], "ended": False, "reason": "length", "steps": [0]}
        return [{"ids": one["prompt"], **text} for one in body["requests"]]

    def _hang(self) -> None:
        if self.is_away:
            time.sleep(0.05)
            raise AwayError("no answer")


def test_a_closed_fit_asks_for_no_texts() -> None:
    """A generation ahead whose server is away ends with the fit, not behind its time."""

    generators: Any = Generators([_Server(is_away=True)], 600.0)  # type: ignore[list-item]
    engine = RemoteEngine(generators, (), Version("a", 0))
    begun = ahead._in_thread(lambda: engine.continue_each([[1]], [Sampling()]))  # type: ignore[arg-type, return-value]
    while not generators.asked_again:
        time.sleep(0.001)
    generators.close()
    with pytest.raises(RuntimeError, match="the fit has ended"):
        begun.result(0.4)


def test_requests_of_all_replicas_are_counted() -> None:
    axis = SimpleNamespace(all_gather_object=lambda count: [count, 0, 2])
    context: Any = SimpleNamespace(dp=axis, tp=axis, cp=axis, pp=axis)
    assert Replica(context).total(1) == 3


def test_a_server_that_hangs_costs_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others write its texts, each a share of neighbors, until it has taken weights again."""
    monkeypatch.setattr(remote_engine, "_PAUSE_S", 0.01)
    servers = [_Server(), _Server(is_away=True)]
    generators = Generators(servers, 5.0)  # type: ignore[arg-type]
    prompts = [[n] for n in range(17)]

    def generation(step: int) -> list[int]:
        for one in servers:
            one.bodies.clear()
        engine = RemoteEngine(generators, (), Version("a", step))
        texts = engine.continue_each(prompts, [Sampling()] * len(prompts))
        assert [one.tokens for one in texts] == prompts
        return [sum(len(body["requests"]) for body in one.bodies) for one in servers]

    generators.newest = Version("a", 0)
    assert generation(0) == [17, 9]  # the share is asked for twice
    assert generation(0) == [17, 0]
    generators.serve(Version("a", 1))  # does not wait for the other
    assert generators.asked_again == 1
    servers[1].is_away = False
    while len(generators.present) < 2:
        time.sleep(0.001)
    assert servers[1].weights == Version("a", 1)
    assert generation(1) == [8, 9]
    assert [one["prompt"] for one in servers[1].bodies[0]["requests"]] == prompts[8:]
    generators.close()


@pytest.mark.parametrize(
    ("batches", "max_steps", "last"), [(8, -1, 11), (3, -1, 5), (8, 11, 9), (3, 11, 5)]
)
def test_no_generation_begins_that_nobody_trains(batches: int, max_steps: int, last: int) -> None:
    """Epochs of four generations, each of two updates; ``limit_train_batches`` of 3."""
    trainer = SimpleNamespace(
        max_steps=max_steps, max_epochs=3, current_epoch=1, global_step=0,
        accumulate_grad_batches=1, num_training_batches=batches,
    )  # fmt: skip
    data = SimpleNamespace(updates_of_generation=2, number_of=lambda n, epoch: 4 * epoch + n)
    one = ahead.Ahead.__new__(ahead.Ahead)
    one._fit = SimpleNamespace(trainer=trainer, data=data)  # type: ignore[assignment]
    assert one._last(4) == last
