"""ThroughputMonitor: what counts as training time, whose samples, tokens and FLOPs, equal values on
every rank, progress bars, loggers and resumes."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from megatron_lightning.callbacks import MemoryMonitor, SpeedMonitor, ThroughputMonitor
from megatron_lightning.callbacks.counting import num_tokens
from megatron_lightning.data import BatchSizeSchedule, ScheduledBatchSampler
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.planning import flops
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import SEQUENCE, VOCABULARY, small_gpt
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer
from tests.lightning.support import Lines

BATCH = {"tokens": torch.zeros(4, 16, dtype=torch.long)}
SIZES = {"vocab_size": 30}
CONFIG = tiny_config(**SIZES)
KEYS = {
    "step_time", "samples_per_second", "tokens_per_second", "tokens_per_second_per_device",
    "tflops_per_device", "mfu", "consumed_samples", "consumed_tokens", "time_to_finish_s",
}  # fmt: skip


class _Module(SimpleNamespace):
    """A module without parts."""

    def modules(self) -> list[Any]:
        return [self]


class _Run:
    """Drives the hooks as one of two ranks of a plain strategy would, with a clock of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, monitor: ThroughputMonitor, **module: Any
    ) -> None:
        self.now, self.monitor, self.accumulating = 0.0, monitor, False
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        for place in ("clock", "throughput"):
            monkeypatch.setattr(f"megatron_lightning.callbacks.{place}.time", clock)
        monkeypatch.setattr(
            "megatron_lightning.callbacks.throughput.values_of_ranks",
            lambda trainer, own: [own, own],
        )
        monkeypatch.setattr(
            "megatron_lightning.callbacks.throughput.is_accumulating",
            lambda trainer: self.accumulating,
        )
        monkeypatch.setattr(
            "megatron_lightning.callbacks.throughput.is_logging_step", lambda trainer: True
        )
        self.trainer: Any = SimpleNamespace(
            strategy=SimpleNamespace(root_device=torch.device("cpu"), precision_plugin=None),
            precision="32-true", world_size=2, datamodule=None, global_step=0,
            estimated_stepping_batches=100, loggers=[], callback_metrics={},
            progress_bar_metrics={},
        )  # fmt: skip
        self.module: Any = _Module(**module)
        monitor.on_train_start(self.trainer, self.module)

    @property
    def logged(self) -> dict[str, float]:
        metrics = self.trainer.callback_metrics.items()
        return {key.removeprefix("throughput/"): float(value) for key, value in metrics}

    def batch(self, seconds: float, batch: Any = BATCH, accumulates: bool = False) -> None:
        self.monitor.on_train_batch_start(self.trainer, self.module, batch, 0)
        self.now += seconds
        self.accumulating = accumulates
        self.trainer.global_step += not accumulates
        self.monitor.on_train_batch_end(self.trainer, self.module, None, batch, 0)

    def validate(self, seconds: float) -> None:
        self.monitor.on_validation_start(self.trainer, self.module)
        self.now += seconds

    def save(self, seconds: float) -> None:
        self.monitor.on_save_checkpoint(self.trainer, self.module, {})
        self.now += seconds


def test_the_first_step_validation_and_saving_take_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = _Run(monkeypatch, ThroughputMonitor(), sequence_dims={"tokens": 1})
    run.batch(30.0)
    assert run.logged == {"consumed_samples": 8.0, "consumed_tokens": 128.0}
    run.batch(2.0)
    run.validate(100.0)
    run.batch(2.0)
    run.now += 1.0  # waiting for data counts
    run.batch(1.0)
    run.save(50.0)
    run.batch(2.0)
    assert run.logged == {
        "step_time": 2.0,
        "samples_per_second": 4.0,
        "tokens_per_second": 64.0,
        "tokens_per_second_per_device": 32.0,
        "consumed_samples": 40.0,
        "consumed_tokens": 640.0,
        "time_to_finish_s": 95 * (2.0 + 150.0 / 4),  # with as many pauses
    }
    assert run.trainer.progress_bar_metrics.keys() == {
        "step_time",
        "tokens_per_second",
        "time_to_finish_s",
    }
    assert run.monitor.overhead == 0.0


def test_accumulated_batches_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, ThroughputMonitor())
    run.batch(20.0, accumulates=True)
    run.batch(20.0)  # ends the first step
    for _ in range(2):
        run.batch(1.0, accumulates=True)
        run.validate(9.0)
        run.batch(2.0)
    assert run.logged["step_time"] == 3.0
    assert run.logged["samples_per_second"] == pytest.approx(16 / 3.0)
    assert run.logged["consumed_samples"] == 48.0


def test_a_window_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, ThroughputMonitor(window=2))
    for seconds in (9.0, 9.0, 9.0, 1.0, 1.0):
        run.batch(seconds)
    assert run.logged["step_time"] == 1.0 and run.logged["samples_per_second"] == 8.0


def test_flops_by_the_model_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, ThroughputMonitor(peak_tflops=1e-6), config=CONFIG)
    longer = {"input_ids": torch.zeros(2, 32, dtype=torch.long)}
    run.batch(9.0)
    run.batch(2.0)
    run.batch(3.0, longer)
    expected = flops(CONFIG, batch_size=4, sequence_length=16)
    expected += flops(CONFIG, batch_size=2, sequence_length=32)
    speed = 2 * expected / 5.0 / 2  # two ranks, each with a batch
    assert run.logged["tflops_per_device"] * 1e12 == pytest.approx(speed)
    assert run.logged["mfu"] == pytest.approx(speed / 1e6)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("options", "module", "expected"),
    [
        ({"flops_per_token": 3.0}, {"config": CONFIG}, 3.0 * 64),
        ({"flops_per_token": 3.0, "tokens": "mask"}, {}, 3.0 * 8),
        ({}, {"flops_per_batch": 50.0, "config": CONFIG}, 50.0),
    ],
)
def test_flops_that_a_user_knows(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    module: dict[str, Any],
    expected: float,
) -> None:
    run = _Run(monkeypatch, ThroughputMonitor(peak_tflops=1e-10, **options), **module)
    batch = BATCH | {"mask": torch.zeros(8)}
    run.batch(9.0, batch)
    run.batch(2.0, batch)
    assert run.logged["mfu"] == pytest.approx(expected / 2.0 / 100.0)


@pytest.mark.parametrize(
    ("module", "batch", "advice"),
    [
        ({}, BATCH, "Set flops_per_token, or set flops_per_batch on the module."),
        ({"config": CONFIG}, torch.zeros(4, 3), "Set tokens to the batch entry that holds them."),
    ],
)
def test_without_flops_there_is_advice_once(
    monkeypatch: pytest.MonkeyPatch, module: dict[str, Any], batch: Any, advice: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr("megatron_lightning.callbacks.throughput.rank_zero_info", said.append)
    run = _Run(monkeypatch, ThroughputMonitor(), **module)
    for _ in range(3):
        run.batch(1.0, batch)
    assert not {"mfu", "tflops_per_device"} & run.logged.keys() and len(said) == 1
    assert said[0].endswith(advice)


def test_wrong_options(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = (
        {"window": 0},
        {"window": 1.5},
        {"flops_per_token": 0.0},
        {"peak_tflops": -1.0},
        {"progress_bar": "mfu"},
        {"progress_bar": ["tokens"]},
    )
    for options in wrong:
        with pytest.raises(ConfigError, match=next(iter(options))):
            ThroughputMonitor(**options)
    run = _Run(monkeypatch, ThroughputMonitor(tokens="ids"))
    with pytest.raises(ConfigError, match=r"tokens is 'ids', and the batch has no tensor.*tokens"):
        run.batch(1.0)


def test_a_gpu_is_waited_for_at_logging_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a GPU that is half a second behind the host."""
    run = _Run(monkeypatch, ThroughputMonitor())
    waits: list[float] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.at = run.now + 0.5

        def synchronize(self) -> None:
            waits.append(self.at)
            run.now = max(run.now, self.at)

        def elapsed_time(self, end: Event) -> float:
            assert waits and end.at <= waits[-1], "the device has not come there"
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    run.trainer.strategy.root_device = torch.device("cuda", 0)
    run.monitor.on_train_start(run.trainer, run.module)
    for step in range(1, 7):
        monkeypatch.setattr(
            "megatron_lightning.callbacks.throughput.is_logging_step",
            lambda trainer, step=step: step % 3 == 0,
        )
        run.batch(2.0)
    assert len(waits) == 2
    assert run.logged["step_time"] == pytest.approx((2.0 * 5 + 0.5) / 5)
    assert run.monitor.overhead == pytest.approx(0.0)  # the wait is not the monitor's


# ------------------------------------------------------------------------------------------- fits


def _rows(num: int, length: int = SEQUENCE) -> Any:
    text = torch.randint(0, VOCABULARY, (num, length + 1))
    return [{"tokens": t[:-1], "labels": t[1:]} for t in text]


class _Ragged(Dataset[Any]):
    """Two data-parallel ranks read sequences of 8 and of 6 tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return _rows(1, 8 - 2 * (index % 2))[0]


def _fit(options: dict[str, Any], batch_size: int, accumulated: int) -> dict[str, float]:
    ragged = options.pop("ragged", False)
    strategy = MegatronStrategy(**options) if options.pop("ours", True) else "ddp"
    monitor = ThroughputMonitor()
    fit = trainer(
        strategy, max_steps=4, log_every_n_steps=2, callbacks=[monitor],
        accumulate_grad_batches=accumulated,
    )  # fmt: skip
    rows = _Ragged() if ragged else _rows(64)
    fit.fit(GPTLightningModule(small_gpt(4)), DataLoader(rows, batch_size=batch_size))
    logged = fit.callback_metrics.items()
    return {k.split("/")[1]: float(v) for k, v in logged if k.startswith("throughput/")}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("ranks", "options", "batch_size", "accumulated"),
    [
        pytest.param(1, {"micro_batch_size": 2}, 8, 1, id="one"),
        pytest.param(2, {"micro_batch_size": 2}, 4, 2, id="dp2-accumulated"),
        pytest.param(
            4,
            {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "micro_batch_size": 2,
            },
            8,
            1,
            id="tp2-pp2",
        ),
        pytest.param(2, {"ragged": True}, 4, 1, id="ragged", marks=pytest.mark.slow),
        pytest.param(2, {"context_parallel_size": 2}, 8, 1, id="cp2", marks=pytest.mark.slow),
    ],
)
def test_values_are_equal_on_every_rank(
    ranks: int, options: dict[str, Any], batch_size: int, accumulated: int
) -> None:
    """The model's FLOPs of a step are those of the global batch, however it is divided."""
    values, *others = run_ranks(ranks, _fit, dict(options), batch_size, accumulated)
    assert values.keys() == KEYS and all(other == values for other in others)
    assert values["consumed_samples"] == 8 * accumulated * 4
    length = 7 if "ragged" in options else SEQUENCE
    assert values["consumed_tokens"] == values["consumed_samples"] * length
    samples = values["samples_per_second"] * values["step_time"]
    assert samples == pytest.approx(8 * accumulated)
    tokens = values["tokens_per_second"] * values["step_time"]
    assert tokens == pytest.approx(8 * accumulated * length)
    assert values["tokens_per_second_per_device"] * ranks == pytest.approx(
        values["tokens_per_second"]
    )
    if "ragged" not in options:
        expected = flops(small_gpt(4), batch_size=8 * accumulated, sequence_length=SEQUENCE)
        actual = values["tflops_per_device"] * 1e12 * ranks * values["step_time"]
        assert actual == pytest.approx(expected)
    assert 0 < values["mfu"] < 1 and values["time_to_finish_s"] == 0


def _resumed(folder: str, strategy: str) -> list[tuple[int, int]]:
    """Return the samples and tokens that two fits count, the second from the first's checkpoint."""
    counts = []
    for steps, checkpoint in ((3, None), (5, f"{folder}/last.ckpt")):
        monitor = ThroughputMonitor()
        fit = trainer(
            MegatronStrategy() if strategy == "ours" else strategy,
            max_steps=steps, log_every_n_steps=2, enable_checkpointing=True,
            callbacks=[
                monitor, ModelCheckpoint(folder, save_last=True, every_n_train_steps=1),
            ],
        )  # fmt: skip
        fit.fit(
            GPTLightningModule(small_gpt(1)), DataLoader(_rows(64), batch_size=4),
            ckpt_path=checkpoint,
        )  # fmt: skip
        state = monitor.state_dict()
        counts.append((state["consumed_samples"], state["consumed_tokens"]))
    return counts


@pytest.mark.spread(1)
@pytest.mark.parametrize("strategy", ["ours", "auto"])
def test_a_resume_continues_the_counts(strategy: str, tmp_path: Path) -> None:
    assert _resumed(str(tmp_path), strategy) == [(12, 12 * SEQUENCE), (20, 20 * SEQUENCE)]


class _Growing(pl.LightningDataModule):
    """Batches of 2, 2, 4, 6 and 8 samples."""

    def train_dataloader(self) -> Any:
        rows = _rows(40)
        schedule = BatchSizeSchedule(global_batch_size=8, rampup_batch_size=(2, 2, 12))
        sampler = ScheduledBatchSampler(SequentialSampler(rows), schedule)
        return DataLoader(rows, batch_sampler=sampler)


def test_a_growing_batch() -> None:
    strategy = MegatronStrategy(micro_batch_size=2)
    fit = trainer(
        strategy, max_steps=5, log_every_n_steps=1, callbacks=[ThroughputMonitor(window=2)]
    )
    fit.fit(GPTLightningModule(small_gpt(1)), _Growing())
    values = {key: float(value) for key, value in fit.callback_metrics.items()}
    consumed = values["throughput/consumed_samples"]
    assert consumed == strategy.consumed_samples == 2 + 2 + 4 + 6 + 8
    samples = values["throughput/samples_per_second"] * values["throughput/step_time"]
    assert samples == pytest.approx((6 + 8) / 2)


class _Slow(ToyModule):
    """Takes 150 ms a step, so that the hooks are compared with a step of usual length."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.15)


@pytest.mark.slow
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bar_metrics_csv_and_overhead(
    bar: type[pl.Callback],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monitor, memory, lines = (
        SpeedMonitor(flops_per_token=1e6, tokens="ids"),
        MemoryMonitor(),
        Lines(),
    )
    assert isinstance(monitor, ThroughputMonitor)
    fit = trainer(
        "auto", max_steps=16, log_every_n_steps=8, callbacks=[monitor, memory, bar()],
        logger=[CSVLogger(tmp_path), lines], enable_progress_bar=True, limit_val_batches=0,
    )  # fmt: skip
    fit.fit(_Slow(), ToyData(batch_size=4))
    assert isinstance(fit.logger, CSVLogger)
    with open(Path(fit.logger.log_dir, "metrics.csv")) as file:
        rows = [row for row in csv.DictReader(file) if row["throughput/mfu"]]
    assert [row["step"] for row in rows] == ["7", "15"]
    other = [values for _, values in lines.lines if "throughput/mfu" in values]
    assert [float(row["throughput/mfu"]) for row in rows] == [v["throughput/mfu"] for v in other]
    assert {name for name in rows[0] if name.startswith("throughput/")} == {
        f"throughput/{key}" for key in KEYS
    }
    assert float(rows[0]["throughput/time_to_finish_s"]) == pytest.approx(
        8 * float(rows[0]["throughput/step_time"])
    )
    shown = {"step_time", "tokens_per_second", "tflops_per_device", "time_to_finish_s"}
    assert shown <= fit.progress_bar_metrics.keys()
    assert "mfu" not in fit.progress_bar_metrics, "it depends on what else the CPU does"
    assert "tokens_per_second" in "".join(capsys.readouterr())
    assert 0 < monitor.overhead < 0.01, monitor.overhead
    assert 0 < memory.overhead < 0.01, memory.overhead


def test_a_tuple_has_the_tokens_of_its_declared_sequence() -> None:
    batch = (torch.zeros(2, 5, 3), torch.zeros(2))
    trainer: Any = SimpleNamespace(datamodule=None)
    for of_kind in (batch, list(batch)):
        module: Any = _Module(sequence_dims={0: 1})
        assert num_tokens(trainer, module, of_kind, None) == 10
    assert num_tokens(trainer, _Module(), batch, None) == 0  # type: ignore[arg-type]
    data: Any = SimpleNamespace(datamodule=SimpleNamespace(sequence_dims={0: 1}))
    assert num_tokens(data, _Module(), batch, None) == 10  # type: ignore[arg-type]
