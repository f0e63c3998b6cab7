"""Uses of the engine: tasks of lm-evaluation-harness, beside its own ``hf`` model, and 16 clients
of the server, beside the engine alone.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import uvicorn

from benchmarks.inference_texts import cpu_seconds
from megatron_lightning.inference import Engine, Sampling
from megatron_lightning.inference.commands.evaluate import sharing_of
from megatron_lightning.inference.commands.load import find_codec, load_engine
from megatron_lightning.inference.serving.server import Server, ServerSettings
from megatron_lightning.inference.serving.serving_thread import Stepping, start
from tests.helpers.spoken import TEXT

NUM_CLIENTS, NEW = 16, 48


def write_choices(folder: Path, num_documents: int) -> str:
    """Write a task with four endings for each document, and return its folder."""
    draws = random.Random(0)

    def text(least: int, most: int) -> str:
        return "".join(draws.choices(TEXT, k=draws.randrange(least, most)))

    rows = [
        {"text": text(60, 200), "choices": [" " + text(8, 40) for _ in range(4)], "gold": i % 4}
        for i in range(num_documents)
    ]
    folder.mkdir()
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "endings.yaml").write_text(
        "task: endings\noutput_type: multiple_choice\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}\n"
        "doc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{gold}}'\n"
        "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    )
    return str(folder)


def ours(folder: str, tasks: str) -> Any:
    """Return the harness's values by the engine."""
    from megatron_lightning.inference.commands.harness import (
        HarnessModel,
        evaluate_tasks,
        values_of,
    )

    codec = find_codec(folder)
    engine = load_engine(folder, stops=codec.stops, decode=codec.decode)
    model = HarnessModel(engine, codec, sharing_of(engine))
    return values_of(evaluate_tasks(model, ["endings"], include_path=tasks))


def theirs(folder: str, tasks: str) -> Any:
    """Return the harness's values by its own ``hf`` model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megatron_lightning.inference.commands.harness import values_of

    return values_of(
        simple_evaluate(
            model=HFLM(pretrained=folder, batch_size=8, device="cpu", dtype="float32"),
            tasks=["endings"],
            task_manager=TaskManager(include_path=tasks, include_defaults=False),
            bootstrap_iters=0,
            verbosity="ERROR",
        )
    )


def task_seconds(
    folder: str, parent: Path, num_documents: int, rounds: int
) -> list[tuple[float, float]]:
    """Return processor seconds of a task by the engine and by the harness's own model, with loading
    of model and task.
    """
    tasks = write_choices(parent / "tasks", num_documents)
    seconds = []
    for _ in range(rounds + 1):
        own, values = cpu_seconds(lambda: ours(folder, tasks))
        other, expected = cpu_seconds(lambda: theirs(folder, tasks))
        if values != expected:
            raise RuntimeError(f"the values differ: {values} and {expected}")
        seconds.append((own, other))
    return seconds[1:]  # the first round imports


class Served(NamedTuple):
    """Seconds for a token, of the engine alone and of the server."""

    alone_wall: float
    alone_busy: float
    wall: float
    busy: float
    """Processor seconds without the clients'."""


@contextmanager
def served(engine: Engine, codec: Any) -> Iterator[str]:
    """Serve in this process. Yields the address."""
    stepping = Stepping(engine, 256)
    thread = start(stepping, lambda: None)
    stepping.wait_until_ready()
    settings = ServerSettings(name="bench", longest=stepping.longest)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = Server(stepping, codec, settings).app()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    runner = threading.Thread(target=server.run)
    runner.start()
    while not server.started:
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        server.should_exit = True
        runner.join()
        stepping.end()
        thread.join()


def serve(folder: str, rounds: int) -> list[Served]:
    """Return the times of 16 clients of the server in this process, and of the engine alone."""
    codec = find_codec(folder)
    engine = Engine.load(folder, decode=codec.decode, stops=())
    prompts = [TEXT[i : i + 20] for i in range(NUM_CLIENTS)]
    ids = [codec.encode(prompt) for prompt in prompts]
    sampling = Sampling(max_new_tokens=NEW, temperature=0.0)
    found = []
    for _ in range(rounds + 1):
        wall = time.perf_counter()
        alone_busy, texts = cpu_seconds(lambda: engine.generate(ids, sampling))
        alone_wall = time.perf_counter() - wall
        num_alone = sum(len(one.tokens) for (one,) in texts)
        with served(engine, codec) as address:
            wall = time.perf_counter()
            busy, (num_served, of_clients) = cpu_seconds(partial(_ask_all, address, ids))
            wall = time.perf_counter() - wall
        found.append(
            Served(
                alone_wall / num_alone,
                alone_busy / num_alone,
                wall / num_served,
                (busy - of_clients) / num_served,
            )
        )
    return found[1:]


def _ask_all(address: str, prompts: list[list[int]]) -> tuple[int, float]:
    """Return the number of new tokens, and processor seconds of the clients."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(lambda prompt: _ask(address, prompt), prompts))
    return sum(number for number, _ in answers), sum(seconds for _, seconds in answers)


def _ask(address: str, prompt: list[int]) -> tuple[int, float]:
    """Return the number of new tokens of a completion, and processor seconds of the client."""
    begin = time.thread_time()
    body = {"model": "bench", "prompt": prompt, "max_tokens": NEW, "temperature": 0.0}
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        number: int = json.load(answer)["usage"]["completion_tokens"]
    return number, time.thread_time() - begin
