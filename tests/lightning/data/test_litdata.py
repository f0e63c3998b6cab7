"""The example of litData: stopped and resumed to the sample, also on other data-parallel sizes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

litdata = pytest.importorskip("litdata")  # pip install --no-deps litdata, and what it imports

EXAMPLE = Path(__file__).parents[3] / "examples" / "streaming.py"
NUM_SAMPLES, BATCH = 96, 8
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
                    "micro_batch_size": 4}),
    "dp1": (1, {}),
    "dp2": (2, {}),
    "tp2-dp2": (4, {"tensor_model_parallel_size": 2}),
}  # fmt: skip


class Numbers(pl.Callback):
    """Collects the numbers of the samples of every step."""

    def __init__(self) -> None:
        self.numbers: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self.numbers.append(batch["number"].tolist())


def train(
    folder: str, options: dict[str, Any], num_workers: int, steps: int, begin: str | None, end: str
) -> tuple[int, list[list[int]]]:
    """Return the data-parallel rank, and the samples of every step."""
    names = runpy.run_path(str(EXAMPLE))
    pl.seed_everything(1, verbose=False)
    record = Numbers()
    run = trainer(MegatronStrategy(**options), max_steps=steps, callbacks=[record])
    data = names["Stream"](f"{folder}/stream", BATCH, num_workers)
    run.fit(names["model"](), data, ckpt_path=begin)
    run.save_checkpoint(end)
    return run.strategy.distributed_sampler_kwargs["rank"], record.numbers


def global_steps(ranks: list[tuple[int, list[list[int]]]]) -> list[list[int]]:
    """Return the samples of every step over all replicas. Ranks of a replica read the same."""
    replicas = dict(ranks)
    assert all(numbers == replicas[rank] for rank, numbers in ranks)
    steps = zip(*replicas.values(), strict=True)
    return [sorted(number for batch in step for number in batch) for step in steps]


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write samples as ``litdata.optimize`` does, in this process."""
    from litdata.streaming import Cache

    folder = tmp_path_factory.mktemp("litdata")
    names = runpy.run_path(str(EXAMPLE))
    cache = Cache(str(folder / "stream"), chunk_size=8)
    for number in range(NUM_SAMPLES):
        cache[number] = names["sample"](number)
    cache.done()
    cache.merge()
    return str(folder)


def _run(size: int, *args: Any) -> list[tuple[int, list[list[int]]]]:
    return run_ranks(size, train, *args, timeout_s=180)  # loaders start worker processes


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("before", "after", "num_workers", "store"),
    [
        ("tp2-pp2", "tp2-pp2", 0, ""),
        ("tp2-pp2", "dp2", 0, ""),
        ("dp2", "dp1", 0, ""),
        # A store on this disk: chunks are downloaded into litData's cache, as of s3://.
        pytest.param("dp2", "dp1", 0, "local:", marks=pytest.mark.slow),
        pytest.param("dp2", "tp2-pp2", 0, "", marks=pytest.mark.slow),
        pytest.param("dp2", "dp2", 2, "", marks=pytest.mark.slow),
        pytest.param("tp2-dp2", "dp1", 0, "", marks=pytest.mark.slow),
    ],
)
def test_resumed_to_the_sample(
    before: str, after: str, num_workers: int, store: str, stream: str, tmp_path: Path
) -> None:
    stream = f"{store}{stream}"
    middle, end = str(tmp_path / "middle.ckpt"), str(tmp_path / "end.ckpt")
    size, options = LAYOUTS[before]
    first = global_steps(_run(size, stream, options, num_workers, 5, None, middle))
    size, options = LAYOUTS[after]
    second = global_steps(_run(size, stream, options, num_workers, 9, middle, end))
    assert len(first) == 5 and len(second) == 4
    read = [number for step in first + second for number in step]
    assert len(set(read)) == len(read) == 9 * BATCH  # none twice
    last = global_steps(_run(size, stream, options, num_workers, 12, end, end))
    read += [number for step in last for number in step]
    assert sorted(read) == list(range(NUM_SAMPLES))  # all of an epoch
