"""Uses of the engine, compared: tasks of lm-evaluation-harness by its own ``hf`` model, and 16
clients of the server by the engine alone. One process, one thread, the same weights, in turns.

    python -m benchmarks.bench_inference_uses           # 5 rounds
    python -m benchmarks.bench_inference_uses --quick   # 1 round: does it run?

Tasks: CPU time, ours over theirs (goal 0.7 or less), with the loading of model and tasks. A Llama
of 8 million parameters scores four endings of each of 60 documents, 240 texts of 70 to 240 tokens,
in batches of 8 for the harness's own model. Serving: tokens a second of wall time, the server over
the engine (goal 0.9 or more), with all clients and the server in this process. The served model has
two layers, so that the share of the server is larger than with a real one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
from megatron_lightning.inference.evaluate import sharing_of
from megatron_lightning.inference.load import find_codec, load_engine
from megatron_lightning.inference.server import Server, ServerSettings
from megatron_lightning.inference.stepping import Stepping, start
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
    from megatron_lightning.inference.harness import HarnessModel, evaluate_tasks, values_of

    codec = find_codec(folder)
    engine = load_engine(folder, stops=codec.stops, decode=codec.decode)
    model = HarnessModel(engine, codec, sharing_of(engine))
    return values_of(evaluate_tasks(model, ["endings"], include_path=tasks))


def theirs(folder: str, tasks: str) -> Any:
    """Return the harness's values by its own ``hf`` model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megatron_lightning.inference.harness import values_of

    return values_of(
        simple_evaluate(
            model=HFLM(pretrained=folder, batch_size=8, device="cpu", dtype="float32"),
            tasks=["endings"],
            task_manager=TaskManager(include_path=tasks, include_defaults=False),
            bootstrap_iters=0,
            verbosity="ERROR",
        )
    )


def tasks_ratio(parent: Path, rounds: int, *, quick: bool) -> float:
    """Return the CPU time of our tasks over the harness's own model, median of the rounds."""
    layers, hidden, vocabulary = (2, 64, 512) if quick else (6, 256, 8192)
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "vocab_size": vocabulary,
    }
    folder = str(make_spoken(parent, name="scored", length=512, **sizes))
    tasks = write_choices(parent / "tasks", 8 if quick else 60)
    ratios = []
    for _ in range(rounds + 1):
        values: list[Any] = []
        own = _cpu_seconds(lambda into=values: into.append(ours(folder, tasks)))  # type: ignore[misc]
        other = _cpu_seconds(lambda into=values: into.append(theirs(folder, tasks)))  # type: ignore[misc]
        if values[0] != values[1]:
            raise SystemExit(f"the values differ: {values}")
        ratios.append(own / other)
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
        tasks = tasks_ratio(Path(parent), rounds, quick=options.quick)
    print(f"{rounds} rounds, torch {torch.__version__}")
    print("| | ratio | goal |")
    print("|---|---|---|")
    print(f"| lm_eval, CPU time over its hf model | {tasks:.2f} | <= 0.7 |")
    print(f"| {NUM_CLIENTS} clients, tokens/s over the engine alone | {serving:.2f} | >= 0.9 |")


if __name__ == "__main__":
    main()
