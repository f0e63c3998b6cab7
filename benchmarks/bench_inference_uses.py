"""Uses of the engine, compared: tasks of lm-evaluation-harness by its own ``hf`` model, and 16
clients of the server by the engine alone. One process, one thread, the same weights, in turns.

    python -m benchmarks.bench_inference_uses           # 5 rounds
    python -m benchmarks.bench_inference_uses --quick   # 1 round: does it run?

Tasks: CPU time, ours over theirs (goal 0.7 or less), with the loading of model and tasks, which is
most of it at this size. Serving: tokens a second of wall time, the
server over the engine (goal 0.9 or more), with all clients and the server in this process. The
model of the tests has two layers, so that the share of the server is larger than with a real one.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
import uvicorn

from megatron_lightning.inference import Engine, Sampling
from megatron_lightning.inference.load import find_codec
from megatron_lightning.inference.server import Server, ServerSettings
from megatron_lightning.inference.stepping import Stepping, start
from tests.distributed.test_inference_harness import ours, theirs, write_tasks
from tests.helpers.spoken import TEXT, make_spoken

NUM_CLIENTS, NEW = 16, 48


def _cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _wall_seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def tasks_ratio(folder: str, tasks: str, rounds: int) -> float:
    """Return the CPU time of our tasks over the harness's own model, median of the rounds."""
    ratios = []
    for _ in range(rounds + 1):
        own = _cpu_seconds(lambda: ours(folder, tasks, {}))
        # Their side unsets the variables of a launcher.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        ratios.append(own / _cpu_seconds(lambda: theirs(folder, tasks)))
    return statistics.median(ratios[1:])  # the first round imports


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


def serving_ratio(folder: str, rounds: int) -> float:
    """Return the server's tokens a second over the engine's, median of the rounds."""
    codec = find_codec(folder)
    engine = Engine.load(folder, decode=codec.decode, stops=())
    prompts = [TEXT[i : i + 20] for i in range(NUM_CLIENTS)]
    ids = [codec.encode(prompt) for prompt in prompts]
    numbers: dict[str, int] = {}

    def alone() -> None:
        texts = engine.generate(ids, Sampling(max_new_tokens=NEW, temperature=0.0))
        numbers["alone"] = sum(len(one.tokens) for (one,) in texts)

    def clients(address: str) -> None:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            numbers["served"] = sum(pool.map(lambda prompt: _ask(address, prompt), prompts))

    ratios = []
    for _ in range(rounds + 1):
        engine_s = _wall_seconds(alone)
        with served(engine, codec) as address:
            server_s = _wall_seconds(lambda where=address: clients(where))  # type: ignore[misc]
        ratios.append(numbers["served"] / server_s / (numbers["alone"] / engine_s))
    return statistics.median(ratios[1:])


def _ask(address: str, prompt: str) -> int:
    """Return the number of new tokens of a completion."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": NEW, "temperature": 0.0}
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        number: int = json.load(answer)["usage"]["completion_tokens"]
    return number


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as parent:
        folder = str(make_spoken(Path(parent)))
        serving = serving_ratio(folder, rounds)
        tasks = tasks_ratio(folder, write_tasks(Path(parent) / "tasks"), rounds)
    print(f"{rounds} rounds, torch {torch.__version__}")
    print("| | ratio | goal |")
    print("|---|---|---|")
    print(f"| lm_eval, CPU time over its hf model | {tasks:.2f} | <= 0.7 |")
    print(f"| {NUM_CLIENTS} clients, tokens/s over the engine alone | {serving:.2f} | >= 0.9 |")


if __name__ == "__main__":
    main()
