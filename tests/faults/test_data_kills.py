"""Kills of preprocess, trainers and workers of loaders at random moments. On any number of
data-parallel ranks, every sample of the run is read once, in the order of a run without kills.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.faults.data_job import GLOBAL_BATCH, VOCABULARY, WEIGHTS, Kill, blend, rows_of, train
from tests.faults.processes import ROOT
from tests.helpers.ranks import run_ranks

DOCUMENTS = {"a": 9000, "b": 40, "c": 25}
PATIENCE_S = 120.0


def tokenize(folder: Path, name: str, workers: int) -> subprocess.Popen[bytes]:
    """Start a tokenization of texts of ids."""
    command = [
        sys.executable, "-m", "megatron_lightning", "preprocess", f"--input={folder}/{name}.jsonl",
        f"--output-prefix={folder}/{name}", "--tokenizer-type=null",
        f"--tokenizer-model={VOCABULARY - 1}", f"--workers={workers}",
    ]  # fmt: skip
    log = (folder / "preprocess.log").open("ab")
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def files_of(folder: Path, name: str) -> list[bytes]:
    return [Path(f"{folder}/{name}_text_document.{end}").read_bytes() for end in ("bin", "idx")]


def write_texts(folder: Path) -> None:
    folder.mkdir()
    draws = np.random.default_rng(0)
    for name, count in DOCUMENTS.items():
        lines = [
            json.dumps({"text": " ".join(map(str, draws.integers(0, VOCABULARY - 1, size)))})
            for size in draws.integers(5, 90, count).tolist()
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


def kill_preprocess(folder: Path, dice: random.Random, workers: int, before: int) -> int:
    """Kill a tokenization when some more pieces are complete. Return their number."""
    process, target = tokenize(folder, "a", workers), before + dice.randint(1, 2)
    deadline = time.monotonic() + PATIENCE_S
    while len(complete := list((folder / "a.pieces").glob("*-0.idx"))) < target:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not Path(f"{folder}/a_text_document.idx").exists()
    return len(complete)


class Run(NamedTuple):
    """A run of a job: it is killed, or ends."""

    folder: Path
    number: int
    replicas: int

    def batches(self) -> dict[int, list[list[int]]]:
        """Return the samples of every step that all ranks have begun."""
        shares: dict[int, dict[int, list[list[int]]]] = {}
        for line in (self.folder / f"{self.number}.jsonl").read_text().splitlines():
            step, rank, rows = json.loads(line)
            shares.setdefault(step, {})[rank] = rows
        return {
            step: sorted(row for rows in of_rank.values() for row in rows)
            for step, of_rank in shares.items()
            if len(of_rank) == self.replicas
        }

    def start(self, steps: int, kill: Kill | None) -> None:
        """Run to the end of the job, or to a kill, which ends the job."""
        arguments = (str(self.folder), self.number, steps, kill)
        if kill is None:
            run_ranks(self.replicas, train, *arguments, timeout_s=PATIENCE_S)
            return
        ended = "exit code -9" if kill.victim == "trainer" else "dataloader.py"
        with pytest.raises(AssertionError, match=ended):
            run_ranks(self.replicas, train, *arguments, timeout_s=PATIENCE_S)


def check_samples(folder: Path, runs: list[Run], steps: int) -> None:
    """Every run reads the samples of a run without kills, and begins before or at the end of the
    run before."""
    data = blend(str(folder), steps)
    data.setup("fit")
    samples = [row for sample in data.train_dataset() for row in rows_of(sample)]
    read: dict[int, list[list[int]]] = {}
    for number, run in enumerate(runs):
        batches = run.batches()
        first, last = min(batches), max(batches)
        assert list(batches) == list(range(first, last + 1)), number
        assert first <= max(read, default=-1) + 1, number  # none is left out
        read = {step: rows for step, rows in read.items() if step < first} | batches
        for step, rows in batches.items():
            share = samples[GLOBAL_BATCH * step : GLOBAL_BATCH * (step + 1)]
            assert rows == sorted(share), (number, step)
    # With the weights: each data set has given the share of the rule.
    assert list(read) == list(range(steps))
    counts = np.bincount([row[0] for rows in read.values() for row in rows])
    shares = np.array([*WEIGHTS.values()]) * GLOBAL_BATCH * steps
    assert np.abs(counts - shares).max() <= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "num_preprocess", "sizes"),
    [
        (0, 1, [2, 1]),
        pytest.param(1, 2, [2, 2, 2, 1, 1, 4, 4, 4, 4], marks=pytest.mark.slow),
        pytest.param(2, 3, [2, 2, 1, 1, 4, 4, 4, 4], marks=pytest.mark.slow),
    ],
)
def test_every_sample_of_a_run_is_accounted_for(
    seed: int, num_preprocess: int, sizes: list[int], tmp_path: Path
) -> None:
    """10 kills in the long cases. The last size runs to the end."""
    dice, folder, whole = random.Random(seed), tmp_path / "run", tmp_path / "whole"
    write_texts(folder)
    write_texts(whole)
    num_pieces = 0
    for _ in range(num_preprocess):
        num_pieces = kill_preprocess(folder, dice, dice.randint(1, 3), num_pieces)
    writers = [tokenize(folder, name, dice.randint(1, 3)) for name in DOCUMENTS]
    writers.append(tokenize(whole, "a", 1))
    assert [writer.wait(PATIENCE_S) for writer in writers] == [0] * 4
    assert files_of(folder, "a") == files_of(whole, "a")
    victims = [("worker", "trainer")[number % 2] for number in range(len(sizes) - 1)]
    dice.shuffle(victims)
    kills = [
        Kill(victim, dice.randrange(size), dice.randint(2, 4), dice.uniform(0, 0.03))  # type: ignore[arg-type]
        for victim, size in zip(victims, sizes, strict=False)
    ]
    steps = 4 * len(sizes) + 2
    runs = [Run(folder, number, size) for number, size in enumerate(sizes)]
    for run, kill in zip(runs, [*kills, None], strict=True):
        run.start(steps, kill)
    check_samples(folder, runs, steps)
