"""Every way in which the ranks of a job come to life: our own launchers, torchrun on two nodes, and
Slurm."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.multiprocessing import ProcessRaisedException

from megatron_lightning.checkpoint.reading.source import open_checkpoint
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.popen_launcher import ScriptLauncher
from megatron_lightning.launch.spawn_launcher import WorkerLauncher
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.slurm import free_port, two_tasks
from tests.helpers.toy import ToyData, ToyModule

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(240)  # every process of a job imports torch and lightning
JOB = ["-m", "tests.faults.job"]


def _run_all(commands: list[list[str]], environments: list[dict[str, str]]) -> str:
    """Run one process a node or task; return their joint output."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return "\n".join(outputs)


def _trainer(strategy: MegatronStrategy, devices: int, **options: int) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        logger=False,
        enable_checkpointing=False,
        **options,
    )


def test_the_start_method_chooses_the_launcher() -> None:
    popen = _trainer(MegatronStrategy(), 2).strategy.launcher
    spawn = _trainer(MegatronStrategy(start_method="spawn"), 2).strategy.launcher
    fork = _trainer(MegatronStrategy(start_method="fork"), 2).strategy.launcher
    assert isinstance(popen, ScriptLauncher) and not popen.is_interactive_compatible
    assert isinstance(spawn, WorkerLauncher) and not spawn.is_interactive_compatible
    assert isinstance(fork, WorkerLauncher) and fork.is_interactive_compatible


@pytest.mark.parametrize("start_method", ["popen", "spawn"])
def test_a_notebook_is_told_to_fork(start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    message = rf"start_method='{start_method}' .* a notebook .*\(start_method=\"fork\"\)"
    with pytest.raises(ConfigError, match=message):
        _trainer(MegatronStrategy(start_method=start_method), 2)  # type: ignore[arg-type]
    _trainer(MegatronStrategy(start_method=start_method), 1)  # type: ignore[arg-type]
    _trainer(MegatronStrategy(start_method="fork"), 2)


def test_one_rank_needs_no_processes_and_works_in_a_notebook() -> None:
    launcher = _trainer(MegatronStrategy(), 1).strategy.launcher
    assert isinstance(launcher, ScriptLauncher) and launcher.is_interactive_compatible


def test_spawned_workers_can_be_sent_the_strategy() -> None:
    """With its launcher, by which Lightning's loops see that they run in a worker."""
    strategy = pickle.loads(
        pickle.dumps(_trainer(MegatronStrategy(start_method="spawn"), 2).strategy)
    )
    assert isinstance(strategy, MegatronStrategy) and isinstance(strategy.launcher, WorkerLauncher)


def test_one_rank_of_spawn_stays_in_this_process() -> None:
    launcher = _trainer(MegatronStrategy(start_method="spawn"), 1).strategy.launcher
    assert launcher is not None and launcher.launch(os.getpid) == os.getpid()


def test_workers_end_with_what_waits_for_them() -> None:
    """Interrupt the wait, as a handler of SIGALRM does; else this process would wait for its
    workers at its own end."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    launcher = _trainer(MegatronStrategy(start_method="fork"), 2).strategy.launcher
    assert launcher is not None
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.alarm(1)
        with pytest.raises(TimeoutError):
            launcher.launch(time.sleep, 60)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert multiprocessing.active_children() == []


def test_popen_refuses_what_is_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["-c"])
    launcher = _trainer(MegatronStrategy(), 2).strategy.launcher
    assert isinstance(launcher, ScriptLauncher)
    # What "-" or "-c" defines cannot be imported by a spawned process.
    message = r"'-c' is not a script file. Set start_method to 'fork', or save the program"
    with pytest.raises(ConfigError, match=message):
        launcher.launch(os.getpid)


@pytest.mark.slow  # two agents and two ranks import torch
def test_torchrun_with_two_agents_as_two_nodes() -> None:
    rendezvous = [
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-backend=c10d",
        "--rdzv-id=job",
    ]
    command = [
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--local-addr=127.0.0.1",
        *rendezvous,
    ]
    output = _run_all([[*command, *JOB, "popen", "none", "0", "1", "2"]] * 2, [{}] * 2)
    assert re.search("DONE 0 16", output) and re.search("DONE 1 16", output), output


def test_a_launcher_with_another_number_of_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    for name, value in {**ranks, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, value)
    trainer = pl.Trainer(strategy=MegatronStrategy(), accelerator="cpu", devices=2, logger=False)
    with pytest.raises(ConfigError, match=r"world size \(3\).* Set devices to .*--nproc-per-node"):
        trainer.fit(ToyModule(), ToyData())


@pytest.mark.slow  # four processes import torch
def test_slurm_variables() -> None:
    output = _run_all([[*JOB, "popen", "none", "0", "1", "2"]] * 2, two_tasks())
    assert re.search("DONE 0 16", output) and re.search("DONE 1 16", output), output


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_workers_train(start_method: str, tmp_path: Path) -> None:
    """The process that started them continues with what they return; the Trainer's counters stay
    theirs, as in Lightning."""
    output = _run_all([[*JOB, start_method, "none", "0", "2", "1", str(tmp_path)]], [{}])
    assert re.search("DONE 0 0", output), output
    assert open_checkpoint(tmp_path / "last.ckpt").state()["global_step"] == 16


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_workers_predict(start_method: Literal["spawn", "fork"]) -> None:
    """As in Lightning, workers return no predictions, which may be large; a callback writes
    them."""
    trainer = _trainer(MegatronStrategy(start_method=start_method), 2)
    assert trainer.predict(ToyModule(), datamodule=ToyData()) is None
    with pytest.raises(
        MisconfigurationException, match="`return_predictions` should be set to `False`"
    ):
        trainer.predict(ToyModule(), datamodule=ToyData(), return_predictions=True)


class RefusesModule(ToyModule):
    def __init__(self, error: type[Exception], ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.error, self.ranks = error, ranks

    def on_fit_start(self) -> None:
        if self.trainer.global_rank in self.ranks:
            raise self.error("3 was found; set 4")


@pytest.mark.parametrize(
    ("start_method", "error", "ranks"),
    [
        ("fork", ConfigError, (0, 1)),
        ("fork", ConfigError, (1,)),
        pytest.param("spawn", ConfigError, (1,), marks=pytest.mark.slow),
        pytest.param("fork", RuntimeError, (0, 1), marks=pytest.mark.slow),
    ],
)
def test_a_failure_of_workers_is_said_once(
    start_method: Literal["spawn", "fork"],
    error: type[Exception],
    ranks: tuple[int, ...],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error whose message suffices is itself in the process that has started the workers."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    caught = ConfigError if error is ConfigError else ProcessRaisedException
    with pytest.raises(caught, match="3 was found; set 4") as raised:
        _trainer(MegatronStrategy(start_method=start_method), 2).fit(
            RefusesModule(error, ranks), datamodule=ToyData()
        )
    printed = capfd.readouterr().err
    assert printed.count("3 was found; set 4") == 1 and "Traceback" not in printed, printed
    assert "its process" not in printed, printed
    sys.excepthook(raised.type, raised.value, raised.tb)
    printed = capfd.readouterr().err
    assert printed == "" if error is ConfigError else "on_fit_start" in printed
