"""State of a checkpoint's name before, during and after a save."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megatron_lightning.checkpoint import (
    consolidate,
    is_committed,
    open_checkpoint,
    remove_checkpoint,
)
from megatron_lightning.checkpoint.writing import commit
from megatron_lightning.errors import CheckpointError
from tests.helpers.checkpoints import assert_equal, load_tensors, save_tensors, some_tensors


def test_overwriting_keeps_the_name_and_other_files(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a", state={"epoch": 1})
    (tmp_path / "a" / "notes.txt").write_text("mine")
    new = {"state_dict.weight": torch.ones(3)}
    save_tensors(tmp_path / "a", new, state={"epoch": 2})
    assert_equal(load_tensors(tmp_path / "a"), new)
    assert open_checkpoint(tmp_path / "a").state() == {"epoch": 2}
    assert len(os.listdir(tmp_path / "a")) == 4 and os.listdir(tmp_path) == ["a"]


def test_a_forked_process_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of a data loader that are forked during a save have its files too, and may live as
    long as the training."""
    inherited: list[int] = []
    monkeypatch.setattr(fcntl, "flock", _noting_duplicates(inherited, fcntl.flock))
    # The second and the third replace what is there, for which they wait for a lock.
    for value in (1.0, 2.0, 3.0):
        save_tensors(tmp_path / "a", {"t": torch.full((3,), value)})
        descriptor = os.open(tmp_path / "a", os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    assert len(inherited) > 3
    for duplicate in inherited:
        os.close(duplicate)


def _noting_duplicates(
    found: list[int], lock: Callable[[int, int], None]
) -> Callable[[int, int], None]:
    def locked(descriptor: int, kind: int) -> None:
        if kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            found.append(os.dup(descriptor))  # what a fork does
        lock(descriptor, kind)

    return locked


def test_files_and_links_of_that_name_step_aside(tmp_path: Path) -> None:
    save_tensors(tmp_path / "target")
    (tmp_path / "last.ckpt").symlink_to("target")
    save_tensors(tmp_path / "last.ckpt", {"t": torch.ones(2)})
    assert_equal(load_tensors(tmp_path / "last.ckpt"), {"t": torch.ones(2)})
    assert_equal(load_tensors(tmp_path / "target"), some_tensors())
    (tmp_path / "file.ckpt").write_text("old")
    save_tensors(tmp_path / "file.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["file.ckpt", "last.ckpt", "target"]


def test_a_directory_of_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "precious").write_text("data")
    with pytest.raises(CheckpointError, match="directory with other files"):
        save_tensors(tmp_path / "runs")
    assert (tmp_path / "runs" / "precious").read_text() == "data"
    # A web application's, say.
    (tmp_path / "runs" / "precious").rename(tmp_path / "runs" / "manifest.json")
    with pytest.raises(CheckpointError, match="directory with other files"):
        save_tensors(tmp_path / "runs")
    assert (tmp_path / "runs" / "manifest.json").read_text() == "data"


@pytest.mark.parametrize("name", ["x" * 250 + ".ckpt", "ü" * 127, "a b'\"\n%[1]*.ckpt"])
def test_names_as_long_and_as_odd_as_the_file_system_allows(tmp_path: Path, name: str) -> None:
    for value in (1.0, 2.0):
        save_tensors(tmp_path / name, {"t": torch.full((3,), value)})
        assert_equal(load_tensors(tmp_path / name), {"t": torch.full((3,), value)})
    (tmp_path / "link").symlink_to(name)
    save_tensors(tmp_path / "link")
    consolidate(tmp_path / name, tmp_path / f"y{name[1:]}")
    assert len(os.listdir(tmp_path)) == 3
    remove_checkpoint(tmp_path / name)
    assert len(os.listdir(tmp_path)) == 2


def test_a_file_system_that_cannot_flush_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, refused = os.fsync, []

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    save_tensors(tmp_path / "a")
    assert_equal(load_tensors(tmp_path / "a"), some_tensors())
    assert refused


def test_a_failed_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tensors(tmp_path / "a")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(CheckpointError, match="No space left"):
            save_tensors(tmp_path / "a", {"t": torch.ones(1)})
    assert_equal(load_tensors(tmp_path / "a"), some_tensors())
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("failing", [False, True])
def test_where_names_cannot_be_swapped_a_failed_save_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    """As on NFS: what has the name steps aside first."""
    rename = os.rename

    def fails(old: Path, new: Path) -> None:
        if failing and ".tmp-" in str(old) and not (tmp_path / "last.ckpt").exists():
            raise OSError(errno.EIO, "Input/output error")
        rename(old, new)

    (tmp_path / "last.ckpt").write_text("old")
    monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(CheckpointError, match="Input/output error") if failing else nullcontext():
        save_tensors(tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == ["last.ckpt"] and (tmp_path / "last.ckpt").is_file() == failing


def test_directories_of_other_files_are_not_deleted(tmp_path: Path) -> None:
    """Callbacks delete by names from the checkpoint that they resume from, which may come from
    anywhere."""
    (tmp_path / "home" / "thesis").mkdir(parents=True)
    with pytest.warns(UserWarning, match="is not deleted: it is a directory with other files"):
        remove_checkpoint(tmp_path / "home")
    assert (tmp_path / "home" / "thesis").is_dir()


def test_remove_and_abandoned_directories(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    remove_checkpoint(tmp_path / "link")
    assert is_committed(tmp_path / "a")
    remove_checkpoint(tmp_path / "a")
    remove_checkpoint(tmp_path / "a")
    (tmp_path / "b.tmp-0123456789ab").mkdir()
    (tmp_path / "b.tmp-0123456789ab" / "tensors").write_text("half")
    (tmp_path / "mine.tmp-x").mkdir()
    save_tensors(tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["c", "mine.tmp-x"]
