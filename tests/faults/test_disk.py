"""A disk that is full, a directory that is read-only, a rank that raises while it saves, two jobs
on one directory."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.checkpoint import read_full
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.strategies import MegatronStrategy
from tests.faults.saving import alone, run_two, save, sound_version_of, version_of, wait_all
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer

pytestmark = pytest.mark.timeout(300)
CALLS = ("fsync", "write", "writev", "pwrite", "mkdir", "rename", "replace")


class _BrokenDisk:
    """Lets the ``fail_at``-th change of the file system in this process fail.

    Args:
        fail_at: Which call, counted from 1.
        number: The error.
    """

    def __init__(self, fail_at: int, number: int = errno.ENOSPC) -> None:
        self.count, self._fail_at, self._number = 0, fail_at, number

    def install(self, patch: Callable[[object, str, Any], None]) -> None:
        for name in CALLS:
            patch(os, name, self._failing(getattr(os, name)))

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self._fail_at:
                raise OSError(self._number, os.strerror(self._number))
            return function(*args, **kwargs)

        return call


def test_a_disk_that_is_full_at_any_moment_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    save(path, 1, alone())
    for fail_at in range(1, 200):
        with pytest.MonkeyPatch.context() as patch:
            disk = _BrokenDisk(fail_at)
            disk.install(patch.setattr)
            try:
                save(path, 2, alone())
                failed = False
            except CheckpointError as error:
                assert "No space left on device" in str(error)
                failed = True
        found = sound_version_of(path)
        if disk.count < fail_at:
            break
        assert (failed and found == 1) or found == 2, fail_at  # after the commit it is the new one
        if found == 2:
            save(path, 1, alone())
        assert os.listdir(tmp_path) == ["a.ckpt"], "a failed save leaves nothing"
    assert fail_at > 10 and found == 2


def _save_with_a_rank_whose_disk_fails(
    folder: str, victim: int
) -> list[tuple[int, list[int], int | None]]:
    outcomes: list[tuple[int, list[int], int | None]] = []
    for fail_at in range(1, 100):
        path = f"{folder}/a.ckpt"
        save(path, 1, alone())

        def job(rank: int, group: AxisGroup, fail_at: int = fail_at, path: str = path) -> None:
            disk = _BrokenDisk(fail_at)
            if rank == victim:
                disk.install(setattr)
            save(path, 2, group)
            if rank == victim and disk.count < fail_at:
                Path(folder, "all").touch()

        ends = run_two(job)
        if Path(folder, "all").exists():
            break
        outcomes.append((fail_at, ends, sound_version_of(path)))
    return outcomes


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_rank_that_raises_while_saving_ends_the_save_on_all(
    tmp_path: Path, victim: int
) -> None:
    (outcomes,) = run_ranks(
        1, _save_with_a_rank_whose_disk_fails, str(tmp_path), victim, timeout_s=200
    )
    least = 4 if victim == 0 else 0  # another rank than the first only writes its files
    assert len(outcomes) > least
    for fail_at, ends, found in outcomes:
        # Together, and neither hung.
        assert ends in ([0, 0], [3, 3]), f"at call {fail_at} the ranks ended with {ends}"
        assert found == 2 if ends == [0, 0] else found in (1, 2), fail_at
    assert sum(ends == [3, 3] and found == 1 for _, ends, found in outcomes) > least


def _in_child(job: Callable[[], None]) -> int:
    """Run ``job`` in a forked process: 0 when it returned, 3 for a CheckpointError, 4 for any other
    error."""
    child = os.fork()
    if child == 0:
        code = 4
        try:
            job()
            code = 0
        except CheckpointError:
            code = 3
        finally:
            os._exit(code)
    return wait_all([child])[0]


def _save_with_a_small_file_limit(path: str) -> int:
    def job() -> None:
        # As in a shell with ulimit -f: writes fail with EFBIG.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        save(path, 2, alone())

    return _in_child(job)


def test_a_real_limit_of_the_file_size(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    save(path, 1, alone())
    assert run_ranks(1, _save_with_a_small_file_limit, path) == [3]
    assert sound_version_of(path) == 1 and os.listdir(tmp_path) == ["a.ckpt"]


def _save_into_a_read_only_directory(path: str) -> list[int]:
    def job() -> None:
        if os.geteuid() == 0:  # nothing is read-only for root
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        save(path, 2, alone())

    return [_in_child(job), _in_child(lambda: _check_readable(path))]


def _check_readable(path: str) -> None:
    assert version_of(path) == 1


def test_a_read_only_directory(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents):  # the other user must be able to get there
        if parent.owner() == "root" or os.geteuid() == parent.stat().st_uid:
            parent.chmod(
                parent.stat().st_mode | 0o111
            ) if parent.stat().st_uid == os.geteuid() else None
    folder = tmp_path / "run"
    save(str(folder / "a.ckpt"), 1, alone())
    folder.chmod(0o555)
    try:
        assert run_ranks(1, _save_into_a_read_only_directory, str(folder / "a.ckpt")) == [[3, 0]]
    finally:
        folder.chmod(0o755)
    assert os.listdir(folder) == ["a.ckpt"] and sound_version_of(folder / "a.ckpt") == 1


# Two jobs


def _jobs(folder: str, seconds: float) -> tuple[list[int], list[int]]:
    """Run three jobs that save under one name and one of their own each, and a fourth that reads;
    return ends and versions."""
    path, until, over = f"{folder}/a.ckpt", time.monotonic() + seconds, Path(f"{folder}.over")

    def saver(version: int) -> Callable[[], None]:
        def job() -> None:
            save(f"{folder}/{version}.ckpt", version, alone())
            while not over.exists():
                save(path, version, alone())
            assert sound_version_of(f"{folder}/{version}.ckpt") == version

        return job

    save(path, 1, alone())
    children = []
    for version in (1, 2, 3):
        child = os.fork()
        if child == 0:
            code = 3
            try:
                saver(version)()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    seen: list[int | None] = []
    # Longer, where the machine is so busy that not every job has had its turn.
    while time.monotonic() < until or not ({1, 2, 3} <= set(seen) or time.monotonic() > until + 20):
        try:
            seen.append(version_of(path))
        except CheckpointError:
            seen.append(0)  # replaced while it was read: an error, never a mixture
    over.touch()
    return wait_all(children), [version or 0 for version in seen]


@pytest.mark.slow
def test_jobs_on_one_directory(tmp_path: Path) -> None:
    ((ends, seen),) = run_ranks(1, _jobs, str(tmp_path), 4.0, timeout_s=120)
    assert ends == [0, 0, 0]
    assert {1, 2, 3} <= set(seen), seen
    assert sound_version_of(tmp_path / "a.ckpt") in (1, 2, 3)
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "2.ckpt", "3.ckpt", "a.ckpt"]
    save(str(tmp_path / "a.ckpt"), 4, alone())
    assert sound_version_of(tmp_path / "a.ckpt") == 4


def _train_beside_another(folder: str, job: int) -> None:
    """Train with a learning rate that tells the jobs apart, and write down the content of what
    should be saved."""
    options: dict[str, Any] = {"monitor": "step", "mode": "max", "save_top_k": 2, "save_last": True}
    keep = ModelCheckpoint(f"{folder}/run", "{step}", every_n_train_steps=1, **options)
    fit = trainer(
        MegatronStrategy(),
        max_steps=12,
        callbacks=[keep, _Contents(folder)],
        enable_checkpointing=True,
    )
    fit.fit(
        ToyModule(lr=0.01 * (1 + job), num_layers=1),
        datamodule=ToyData(batch_size=4, num_samples=64),
    )


class _Contents(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        name = f"{module.hparams.lr}-{trainer.global_step}.pt"
        torch.save(dict(module.state_dict()), Path(self.folder, name))


def _train_at_once(folder: str) -> list[int]:
    children = []
    for job in range(2):
        child = os.fork()
        if child == 0:
            code = 3
            try:
                _train_beside_another(folder, job)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return wait_all(children)


@pytest.mark.slow
def test_training_jobs_in_one_directory(tmp_path: Path) -> None:
    """Two runs under the same names, each of which deletes its own: every checkpoint is whole, and
    of one run."""
    assert run_ranks(1, _train_at_once, str(tmp_path), timeout_s=200) == [[0, 0]]
    found = sorted((tmp_path / "run").glob("*.ckpt"))
    assert "last.ckpt" in [path.name for path in found]
    assert len(found) == len(os.listdir(tmp_path / "run"))
    for path in found:
        whole = read_full(path)
        expected = torch.load(
            tmp_path / f"{whole['hyper_parameters']['lr']}-{whole['global_step']}.pt",
            weights_only=True,
        )
        assert all(
            torch.equal(whole["state_dict"][name], tensor) for name, tensor in expected.items()
        ), path
