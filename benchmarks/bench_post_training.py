"""Post-training: sampling ahead of the updates, and what a policy costs beside fine-tuning.

    python -m benchmarks.bench_post_training          # minutes; writes results/
    python -m benchmarks.bench_post_training --quick  # two rounds of a tiny model: does it run?

*Ahead*: a policy in this process, and a generator (``serve --accept-weights``) in another. An
environment waits as long as the updates of a generation take. Rows a second of the whole fit with
``max_staleness`` 1 and 0, in turn: the updates hide the waits, or do not. By time of day, since
waits are no processor seconds: the machine needs two free cores.

*Replay*: steps of one model on the same tokens: fine-tuning, a policy on recorded rows, and a
policy with a correction of the sampler. Policies log entropies. In turn, by processor seconds.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import machine
from benchmarks.bench_finetune import TEMPLATE, make_tokenizer
from benchmarks.command_line import parser_of
from benchmarks.statistics import Ratio, ratio_of_medians
from megatron_lightning.config import PipelineOptions
from megatron_lightning.modules import HuggingFaceModule, PolicyModule, RolloutDataModule, Turn
from megatron_lightning.modules.post_training.generators.client import API_KEY
from megatron_lightning.strategies import MegatronStrategy

GOAL = 1.4
"""Least ratio of rows a second with and without a generation ahead."""
REPLAY_LIMIT, CORRECTION_LIMIT = 1.1, 1.15
"""Most time of a policy's step over fine-tuning, and of one with a correction over one without."""
GENERATIONS, ROWS, SAMPLES, ITERATIONS = 6, 8, 4, 4


class Waiting:
    """An environment whose only turn takes a given time.

    Args:
        seconds: The time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        """Return the question."""
        return [{"role": "user", "content": "why is the sky blue"}]

    def step(self, messages: Sequence[Mapping[str, Any]], answer: str) -> Turn:
        """Wait, and reward short answers."""
        time.sleep(self.seconds)
        return Turn(reward=-len(answer) / 100, done=True)


class Size(NamedTuple):
    """Sizes of the model and of its answers."""

    hidden: int
    layers: int
    answer: int

    def write(self, folder: str) -> None:
        """Write the model with its tokenizer."""
        tokenizer = make_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=self.hidden, num_hidden_layers=self.layers,
            intermediate_size=3 * self.hidden, num_attention_heads=8, num_key_value_heads=8,
        )  # fmt: skip
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)


class _Times(pl.Callback):
    """Times of day at the beginning of the fit, and of the updates of each generation."""

    def __init__(self) -> None:
        self.start = self.end = 0.0
        self.metrics: list[dict[str, float]] = []
        self.ends: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        self.start = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ends.append(time.monotonic())
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    @property
    def updates_s(self) -> float:
        """Seconds of the updates behind the first one, of a median generation."""
        spans = [
            self.ends[at + ITERATIONS - 1] - self.ends[at]
            for at in range(0, len(self.ends), ITERATIONS)
        ]
        return statistics.median(spans) * ITERATIONS / (ITERATIONS - 1)

    @property
    def rows_per_s(self) -> float:
        """Rows of the whole fit, the first weights and the last update included."""
        return GENERATIONS * ROWS / (self.ends[-1] - self.start)


def fit(folder: str, url: str, size: Size, wait_s: float, staleness: int) -> _Times:
    """Train a policy by a generator."""
    times = _Times()
    with tempfile.TemporaryDirectory() as target:
        prompts = Path(target, "prompts.jsonl")
        prompts.write_text('{"row": 1}\n' * (GENERATIONS * ROWS // SAMPLES))
        data = RolloutDataModule(
            prompts=str(prompts), environment=Waiting, environment_options={"seconds": wait_s},
            num_generations=SAMPLES, batch_size=ROWS, generators=[url], timeout_s=600.0,
            weights_folder=f"{folder}/weights", max_staleness=staleness, history="keep",
        )  # fmt: skip
        policy = PolicyModule(
            HuggingFaceModule(folder, learning_rate=1e-6),
            max_completion_length=size.answer,
            num_iterations=ITERATIONS,
            importance_sampling_correction="token_truncate",
        )
        trainer = pl.Trainer(
            strategy=MegatronStrategy(pipeline_options=PipelineOptions(explicit_steps=True)),
            accelerator="cpu", devices=1, max_epochs=1, callbacks=[times], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=target,
        )  # fmt: skip
        trainer.fit(policy, datamodule=data)
    return times


@contextmanager
def generator(folder: str) -> Iterator[str]:
    """Serve the model in another process, on a core of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "megatron_lightning", "serve", "--checkpoint", folder]
    command += ["--accept-weights", f"{folder}/weights", "--port", str(port), "--device", "cpu"]
    os.environ[API_KEY] = secrets.token_hex(16)
    server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            if server.poll() is not None:
                raise RuntimeError(f"the generator has ended with {server.returncode}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1.0).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()


def measure_ahead(size: Size, num_rounds: int) -> dict[str, Any]:
    """Train with and without a generation ahead, in turn."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"0": [], "1": []}
    with tempfile.TemporaryDirectory() as folder:
        size.write(folder)
        with generator(folder) as url:
            wait_s = fit(folder, url, size, 0.0, 0).updates_s
            for number in range(num_rounds):
                for staleness in (0, 1) if number % 2 else (1, 0):
                    times = fit(folder, url, size, wait_s, staleness)
                    oldest = max(one["staleness_max"] for one in times.metrics)
                    if oldest != staleness:
                        raise RuntimeError(f"staleness is {oldest} of {staleness}")
                    found[str(staleness)].append(times.rows_per_s)
    return {"wait_s": wait_s, "rows_per_s": found}


class _Seconds(pl.Callback):
    """Processor seconds of every step behind the first."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.values.append(time.process_time() - self._start)


def _recorded(length: int) -> dict[str, torch.Tensor]:
    """Return rows of sampled tokens behind a prompt of a quarter of their length."""
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (ROWS, length + 1), generator=draws)
    labels = tokens[:, 1:].clone()
    labels[:, : length // 4] = -100
    return {
        "tokens": tokens[:, :-1], "labels": labels,
        "logprobs": torch.full((ROWS, length), -5.5),
        "advantages": torch.randn(ROWS, generator=draws),
    }  # fmt: skip


def measure_replay(size: Size, num_rounds: int) -> dict[str, list[float]]:
    """Train three modules on the same rows, in turn: median processor seconds of a step."""
    torch.set_num_threads(1)
    rows = _recorded(8 * size.answer)
    found: dict[str, list[float]] = {"fine-tuning": [], "policy": [], "with a correction": []}
    with tempfile.TemporaryDirectory() as folder:
        size.write(folder)
        for _ in range(num_rounds):
            for name, values in found.items():
                module: Any = HuggingFaceModule(folder, learning_rate=1e-6)
                batch = dict(rows)
                if name == "fine-tuning":
                    batch = {"tokens": rows["tokens"], "labels": rows["labels"]}
                elif name == "policy":
                    module = PolicyModule(module)
                else:
                    module = PolicyModule(module, importance_sampling_correction="token_truncate")
                seconds = _Seconds()
                trainer = pl.Trainer(
                    strategy=MegatronStrategy(
                        pipeline_options=PipelineOptions(explicit_steps=name != "fine-tuning")
                    ),
                    accelerator="cpu", devices=1, max_steps=6, callbacks=[seconds], logger=False,
                    enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False,
                )  # fmt: skip
                dataset: Any = [
                    {entry: x[row] for entry, x in batch.items()} for row in range(ROWS)
                ]
                trainer.fit(module, DataLoader(6 * dataset, batch_size=ROWS))
                values.append(statistics.median(seconds.values[1:]))
    return found


def _page(facts: Mapping[str, Any], size: Size, found: Mapping[str, Any], ratio: Ratio) -> str:
    rows, steps = found["rows_per_s"], found["step_s"]
    replay = ratio_of_medians(steps["policy"], steps["fine-tuning"])
    corrected = ratio_of_medians(steps["with a correction"], steps["policy"])
    lines = [
        f"# Post-training, {facts['date'][:10]}",
        "",
        f"{machine.headline(facts)}.",
        "",
        f"Llama of {size.layers} layers x {size.hidden}; {GENERATIONS} generations of {ROWS} rows, "
        f"{ITERATIONS} updates each, answers of {size.answer} tokens. A fit and a generator, each "
        f"with one thread. The environment waits {found['wait_s']:.2f} s, as the updates of a "
        "generation take.",
        "",
        "| `max_staleness` | rows/s, median of the fits |",
        "| --- | --- |",
        *(f"| {name} | {statistics.median(values):.2f} |" for name, values in rows.items()),
        "",
        f"1 over 0: {ratio} (goal: at least {GOAL}; "
        f"{'met' if ratio.low >= GOAL else 'not met'} by the whole interval).",
        "",
        f"Steps on the same {ROWS} x {8 * size.answer} tokens, processor seconds:",
        "",
        "| step | s, median of the fits |",
        "| --- | --- |",
        *(f"| {name} | {statistics.median(values):.3f} |" for name, values in steps.items()),
        "",
        f"Policy over fine-tuning: {replay} (limit {REPLAY_LIMIT}; "
        f"{'kept' if replay.keeps(REPLAY_LIMIT) else 'not kept'}). With a correction over "
        f"without: {corrected} (limit {CORRECTION_LIMIT}; "
        f"{'kept' if corrected.keeps(CORRECTION_LIMIT) else 'not kept'}).",
    ]
    return "\n".join(lines) + "\n"


def run(size: Size, num_rounds: int, folder: Path | None) -> str:
    """Measure, write a page into ``folder``, and return the page."""
    facts = machine.describe()
    found = {"step_s": measure_replay(size, num_rounds), **measure_ahead(size, num_rounds)}
    rows = found["rows_per_s"]
    ratio = ratio_of_medians(rows["1"], rows["0"])
    facts["load_average_at_end"] = machine.describe()["load_average"]
    page = _page(facts, size, found, ratio)
    if folder is not None:
        machine.keep(folder, "post_training_cpu", facts, page, json.loads(json.dumps(found)))
    return page


def main() -> None:
    """Read the command line and run."""
    options = parser_of(__doc__).parse_args()
    size, rounds = Size(256, 4, 32), options.rounds
    if options.quick:
        size, rounds = Size(64, 2, 8), 2
    print(run(size, rounds, options.results))


if __name__ == "__main__":
    main()
