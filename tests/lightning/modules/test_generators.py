"""Policies whose answers servers sample, ahead of the updates."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5")

from megatron_lightning.config import PipelineOptions
from megatron_lightning.data.rollouts.generation import Generation
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Sampling, load_engine
from megatron_lightning.inference.serving.new_weights import NewWeights, Version
from megatron_lightning.inference.serving.serving_thread import Stepping, start
from megatron_lightning.modules import GPTLightningModule, RolloutDataModule, Turn
from megatron_lightning.modules.post_training.generators.client import (
    Generator,
    StaleError,
)
from megatron_lightning.peft import LoRA
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import CONFIG, llama
from tests.helpers.chats import make_tokenizer
from tests.helpers.generators import local_generators
from tests.helpers.layouts import MICRO, PP, TP
from tests.helpers.policies import Policy
from tests.helpers.ranks import run_ranks
from tests.helpers.slurm import free_port
from tests.helpers.trainers import Losses, trainer

HERE = __name__
END = 7
MODEL = replace(CONFIG, vocab_size=320)


def evens(prompt: Any, answer: str, row: Mapping[str, Any]) -> float:
    return sum(ord(one) % 2 == 0 for one in answer) / max(len(answer), 1)


class Echo:
    """An environment of two turns."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "blue"}]

    def step(self, messages: Any, answer: str) -> Turn:
        return Turn([{"role": "user", "content": "green"}], evens(None, answer, {}), False)


class Metrics(Losses):
    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []
        self.after: Any = lambda: None

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.after()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    llama(vocab_size=320).save_pretrained(path)
    make_tokenizer(vocab_size=320).save_pretrained(path)
    rows = ({"prompt_ids": [1 + n % 7, n % 5, 3]} for n in range(16))
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fit(
    folder: str,
    target: Path,
    record: Metrics | None = None,
    lora: bool = False,
    layout: Mapping[str, Any] = MappingProxyType({}),
    **of_data: Any,
) -> tuple[Metrics, list[Generation]]:
    """Train four generations, or as many as there are prompts."""
    record = record or Metrics()
    explicit = PipelineOptions(explicit_steps=True)
    run = trainer(
        MegatronStrategy(pipeline_options=explicit, **layout),
        max_epochs=1, callbacks=[record], default_root_dir=str(target),
    )  # fmt: skip
    module = GPTLightningModule(MODEL, init_from_hf=folder, peft=LoRA() if lora else None)
    given: dict[str, Any] = {
        "rewards": [evens], "num_generations": 4, "batch_size": 16, "end_ids": [END], "pad_to": 4,
        "prompts": f"{folder}/prompts.jsonl", "folder": str(target / "rollouts"),
    }  # fmt: skip
    length = 6 if "environment" not in of_data else 32
    policy = Policy(module, temperature=0.7, max_completion_length=length)
    run.fit(policy, datamodule=RolloutDataModule(**{**given, **of_data}))
    paths = sorted((target / "rollouts").iterdir())
    return record, [Generation.read(str(path)) for path in paths]


def _texts(files: list[Generation]) -> Any:
    return [[(row.ids, row.steps, row.seed) for row in file.rows] for file in files]


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", ["full", "lora", "turns"])
def test_generators_without_staleness_train_as_the_fit_alone(
    kind: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two generators: the same ids, steps and losses; weights are those of the step."""
    options: dict[str, Any] = {"lora": kind == "lora"}
    if kind == "turns":
        options |= {"environment": Echo, "rewards": None, "max_turns": 2, "history": "keep"}
        options["end_ids"] = list(range(END, 320, 8))
    own, files = fit(folder, tmp_path / "own", **options)
    weights = str(tmp_path / "weights")
    with local_generators(folder, weights, 2, monkeypatch) as generators:
        options |= {"generators": [one.url for one in generators], "weights_folder": weights}
        far, far_files = fit(folder, tmp_path / "far", **options)
    assert _texts(far_files) == _texts(files)
    assert any(0 in row.mask for row in far_files[0].rows) == (kind == "turns")
    assert far.losses == pytest.approx(own.losses, abs=1e-6)
    assert far.norms == pytest.approx(own.norms, rel=1e-4)
    assert all(m["sampler_difference_max"] < 1e-5 for m in far.metrics)
    assert [set(row.steps) - {None} for file in far_files for row in file.rows[:1]] == [
        {0}, {1}, {2}, {3},
    ]  # fmt: skip
    assert all(len(one.asked) >= 4 for one in generators)
    assert {m["staleness_max"] for m in far.metrics} == {0.0}
    assert not list(Path(weights).iterdir())


def test_adapters_of_another_base_are_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of other weights with the same shapes."""
    other, weights = str(tmp_path / "other"), str(tmp_path / "weights")
    model = llama(vocab_size=320)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(other)
    with local_generators(other, weights, 1, monkeypatch) as [server]:
        options: dict[str, Any] = {"generators": [server.url], "weights_folder": weights}
        with pytest.raises(ConfigError, match=r"trained on other weights than .*other, which is"):
            fit(folder, tmp_path, lora=True, **options)


@pytest.mark.slow
def test_generations_ahead_keep_the_bound_and_survive_a_generator(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two generators dies when it is asked, and comes back without its weights."""
    record, weights = Metrics(), str(tmp_path / "weights")
    with local_generators(folder, weights, 2, monkeypatch) as generators:
        first = generators[0]

        def killed(body: Any, limit_s: float) -> Any:
            first.is_alive, first.continue_each = False, texts  # type: ignore[method-assign]
            return texts(body, limit_s)

        def after() -> None:
            if len(record.metrics) == 1:
                first.continue_each = killed  # type: ignore[method-assign]
            first.is_alive = first.is_alive or len(record.metrics) > 1

        texts, record.after = first.continue_each, after
        urls = [one.url for one in generators]
        _, files = fit(
            folder, tmp_path, record, generators=urls, weights_folder=weights, max_staleness=1
        )
    steps = [{step for row in file.rows for step in row.steps} for file in files]
    assert steps[:2] == [{0}, {0}]
    assert all(min(found) >= number - 1 for number, found in enumerate(steps))
    assert [m["staleness_max"] for m in record.metrics][:2] == [0.0, 1.0]
    assert max(m["staleness_max"] for m in record.metrics) == 1.0
    assert record.metrics[-1]["asked_again"] > 0
    assert {"waited_s", "transfer_s", "staleness"} < record.metrics[0].keys()
    assert threading.active_count() < 30


_LAYOUTS: Mapping[str, tuple[int, int, dict[str, Any]]] = {
    "tp-pp": (4, 1, {TP: 2, PP: 2, MICRO: 4}),
    "zero1": (2, 2, {MICRO: 4}),
    "fsdp": (2, 2, {"data_parallel": "fsdp"}),
}


def _on_ranks(folder: str, target: str, layout: dict[str, Any], lora: bool, rows: int) -> Any:
    weights = f"{target}/weights"
    with (
        pytest.MonkeyPatch.context() as patch,
        local_generators(folder, weights, 1, patch) as [generator],
    ):
        record, _ = fit(
            folder, Path(target), lora=lora, layout=layout, batch_size=rows,
            generators=[generator.url], weights_folder=weights,
        )  # fmt: skip
    return record.norms, record.metrics


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(_LAYOUTS))
@pytest.mark.parametrize("lora", [False, True])
def test_every_layout_gives_generators_its_weights(
    layout: str, lora: bool, folder: str, tmp_path: Path
) -> None:
    whole, files = fit(folder, tmp_path / "own", lora=lora)
    world, data, options = _LAYOUTS[layout]
    arguments = (folder, str(tmp_path / "far"), options, lora, 16 // data)
    for norms, metrics in run_ranks(world, _on_ranks, *arguments, timeout_s=600):
        assert norms == pytest.approx(whole.norms, rel=1e-4)
        assert all(m["sampler_difference_max"] < 1e-5 for m in metrics)
    paths = sorted((tmp_path / "far" / "rollouts").iterdir())
    assert _texts([Generation.read(str(path)) for path in paths]) == _texts(files)


@pytest.fixture
def server(folder: str, tmp_path: Path) -> Iterator[str]:
    """The address of a server of HTTP in this process."""
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    from megatron_lightning.inference.commands.load import find_codec
    from megatron_lightning.inference.serving.server import Server, ServerSettings

    engine = load_engine(folder)
    stepping = Stepping(engine, 64)
    stepping.weights = NewWeights(engine, folder, str(tmp_path))
    steps = start(stepping, lambda: None)
    stepping.wait_until_ready()
    settings = ServerSettings(name="tiny", longest=stepping.longest, api_key="secret")
    app = Server(stepping, find_codec(folder), settings).app()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
    stepping.end()
    steps.join()


def test_requests_of_a_fit_over_http(server: str, tmp_path: Path, folder: str) -> None:
    request = {"prompt": [1, 2], "max_new_tokens": 3, "temperature": 1.0, "seed": 5}
    body: dict[str, Any] = {"requests": [request], "stops": [END]}
    with pytest.raises(ConfigError, match=r"401.*API_KEY"):
        Generator(server, "wrong").continue_each(body, 10.0)
    with pytest.raises(ConfigError, match=r"404.*--accept-weights"):
        Generator(f"{server}/elsewhere", "secret").continue_each(body, 10.0)
    generator, version = Generator(server, "secret"), Version("abc", 3)
    [text] = generator.continue_each(body, 10.0)
    engine = load_engine(folder, stops=[END])
    [expected] = engine.continue_each([[1, 2]], [Sampling(max_new_tokens=3, seed=5)])
    assert (text["ids"], text["logprobs"]) == (expected.sampled_tokens, expected.sampled_logprobs)
    assert set(text["steps"]) == {None}
    with pytest.raises(StaleError, match="started with"):
        generator.continue_each({**body, "run": "abc", "step": 3}, 10.0)
    for wrong, message in (
        ({"prompt": [999]}, "beyond the model's 320"),
        ({"prompt": ["a"]}, "no list of ids"),
        ({"max_new_tokens": 99999}, "longer than the"),
        ({"temperature": -1.0}, "no finite number"),
    ):
        with pytest.raises(ConfigError, match=message):
            generator.continue_each({**body, "requests": [{**request, **wrong}]}, 10.0)
    with pytest.raises(ConfigError, match="is no folder on this machine"):
        generator.take_weights(version, 10.0)
    with pytest.raises(ConfigError, match="letters and digits"):
        generator.take_weights(Version("../abc", 3), 10.0)
    llama(vocab_size=320, num_hidden_layers=2).save_pretrained(tmp_path / version.folder)
    with pytest.raises(ConfigError, match="holds another model"):
        generator.take_weights(version, 10.0)
    llama(vocab_size=320).save_pretrained(tmp_path / version.folder)
    generator.take_weights(version, 10.0)
    [again] = generator.continue_each({**body, "run": "abc", "step": 3}, 10.0)
    assert (again["ids"], set(again["steps"])) == (text["ids"], {3})


@pytest.mark.slow
def test_a_killed_server_and_one_that_comes_back(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of the command; the second is killed in the fit, and started again."""
    for package in ("uvicorn", "fastapi"):
        pytest.importorskip(package)
    monkeypatch.setenv("MEGATRON_LIGHTNING_API_KEY", "secret")
    weights, record, ports = str(tmp_path / "weights"), Metrics(), [free_port(), free_port()]
    command = [sys.executable, "-m", "megatron_lightning", "serve", "--checkpoint", folder]
    command += ["--accept-weights", weights, "--device", "cpu", "--port"]
    servers = [subprocess.Popen([*command, str(port)]) for port in ports]

    def after() -> None:
        if len(record.metrics) == 1:
            servers[1].kill()
            servers[1].wait()
        if len(record.metrics) == 2:
            servers.append(subprocess.Popen([*command, str(ports[1])]))

    record.after = after
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        options: dict[str, Any] = {"generators": urls, "weights_folder": weights}
        _, files = fit(folder, tmp_path / "far", record, max_staleness=1, **options)
        far, far_files = fit(folder, tmp_path / "again", **options)
    finally:
        for server in servers:
            server.kill()
            server.wait()
    own, own_files = fit(folder, tmp_path / "own")
    assert [m["staleness_max"] for m in record.metrics] == [0.0, 1.0, 1.0, 1.0]
    assert len(files) == 4
    assert _texts(far_files) == _texts(own_files)
    assert far.losses == pytest.approx(own.losses, abs=1e-6)


def test_what_cannot_work_is_refused(folder: str, tmp_path: Path, monkeypatch: Any) -> None:
    given: dict[str, Any] = {"prompts": "rows", "rewards": [evens], "batch_size": 4}
    for wrong, message in (
        ({"generators": ["http://a"]}, "weights_folder=None"),
        ({"max_staleness": 1}, "generators is not set"),
        ({"generators": ["http://a"], "weights_folder": "w", "max_staleness": -1}, "negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            RolloutDataModule(**given, **wrong)
    monkeypatch.delenv("MEGATRON_LIGHTNING_API_KEY", raising=False)
    far: dict[str, Any] = {"generators": ["http://a"], "weights_folder": str(tmp_path / "w")}
    with pytest.raises(ConfigError, match="API_KEY is not"):
        fit(folder, tmp_path, **far)
    monkeypatch.setenv("MEGATRON_LIGHTNING_API_KEY", "secret")
    with pytest.raises(ConfigError, match="no address"):
        fit(folder, tmp_path, **{**far, "generators": ["127.0.0.1:1"]})
    far |= {"generators": ["http://127.0.0.1:1"], "generator_timeout_s": 0.1}
    with pytest.raises(ConfigError, match=r"no generator \(http://127.0.0.1:1\) has answered"):
        fit(folder, tmp_path, **far)
