"""Answers of generators, good and bad, and generations in threads: without a server."""

from __future__ import annotations

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
from megatron_lightning.modules.post_training.generators import ahead
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


def test_a_closed_fit_asks_for_no_texts() -> None:
    """A generation ahead whose server is away ends with the fit, not behind its time."""

    class Away:
        url = "http://a"

        def continue_each(self, *_: Any) -> Any:
            raise AwayError("killed")

    generators: Any = Generators([Away()], 600.0)  # type: ignore[list-item]
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
