"""Checkpoints in object stores, and two jobs that save at once: the same guarantee as in a
directory of one's own."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor

from megatron_lightning.checkpoint import (
    TensorShards,
    consolidate,
    is_committed,
    load_sharded,
    open_checkpoint,
    read_full,
    remove_checkpoint,
    save_sharded,
)
from megatron_lightning.checkpoint.format.storage import completed_file
from megatron_lightning.checkpoint.writing.commit import pending_save
from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.file_names import MANIFEST

URL = "memory://bucket/run/step=1.ckpt"


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    """The memory of fsspec, emptied; like an object store it cannot rename."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


def _save(path: Any, version: int, **options: Any) -> None:
    weight = torch.full((64, 5), float(version))
    save_sharded(
        path, [TensorShards.full("state_dict.weight", weight)], {"version": version}, **options
    )


def _version(path: Any) -> int:
    """Load everything and return the version, of which there must be one."""
    source, weight = open_checkpoint(path), torch.zeros(64, 5)
    load_sharded(source, [TensorShards.full("state_dict.weight", weight)])
    version = int(source.state()["version"])
    assert torch.equal(weight, torch.full((64, 5), float(version)))
    return version


def _names(store: MemoryFileSystem) -> list[str]:
    return sorted(name.rpartition("/")[2] for name in store.store)


def test_an_object_store_holds_the_same_format(store: MemoryFileSystem, tmp_path: Path) -> None:
    _save(URL, 1, max_file_bytes=64)
    assert is_committed(URL) and _version(URL) == 1
    for path in store.store:
        target = tmp_path / path.rpartition("/")[2]
        target.write_bytes(store.cat_file(path))
    assert _version(tmp_path) == 1  # copied as it is
    consolidate(URL, tmp_path / "whole.ckpt")
    assert torch.load(tmp_path / "whole.ckpt", weights_only=True)["version"] == 1
    store.put_file(str(tmp_path / "whole.ckpt"), "/bucket/plain.ckpt")
    assert open_checkpoint("memory://bucket/plain.ckpt").state()["version"] == 1
    _save(URL, 2)
    # Manifest, tensors, state, and the plain file.
    assert _version(URL) == 2 and len(store.store) == 4
    remove_checkpoint(URL)
    remove_checkpoint(URL)
    remove_checkpoint("memory://bucket/plain.ckpt")
    assert not store.store
    with pytest.raises(MissingCheckpointError, match="Checkpoint file not found: memory://bucket"):
        open_checkpoint(URL)


def test_file_urls_are_local_paths(tmp_path: Path) -> None:
    _save(f"file://{tmp_path}/a.ckpt", 1)
    assert is_committed(tmp_path / "a.ckpt") and _version(f"file://{tmp_path}/a.ckpt") == 1
    remove_checkpoint(f"file://{tmp_path}/a.ckpt")
    assert os.listdir(tmp_path) == []


class _FailingStore:
    """Lets the n-th change of the memory store fail, as a lost connection does, or a killed
    process: no clean-up follows."""

    def __init__(self, patch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
        self.calls = 0
        for name in ("open", "pipe_file", "rm", "rm_file"):
            patch.setattr(
                MemoryFileSystem,
                name,
                self._failing(getattr(MemoryFileSystem, name), name, call, error),
            )

    def _failing(self, function: Any, name: str, call: int, error: BaseException) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or "wb" in (*args, *kwargs.values()):
                self.calls += 1
                if self.calls >= call:
                    raise error
            return function(*args, **kwargs)

        return replacement


@pytest.mark.parametrize("exists", [True, False])
def test_a_save_cut_off_anywhere_in_an_object_store(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    for call in range(1, 12):
        store.store.clear()
        if exists:
            _save(URL, 1)
        with monkeypatch.context() as patch:
            # Clean-up fails as well: as if the process was killed.
            failing = _FailingStore(patch, call, KeyboardInterrupt())
            try:
                _save(URL, 2, max_file_bytes=64)
                finished = failing.calls < call
            except KeyboardInterrupt:
                finished = False
        if is_committed(URL):
            assert _version(URL) in ((1, 2) if exists else (2,))
        else:
            assert not exists
            if store.store:
                with pytest.raises(CheckpointError, match="was never completed"):
                    open_checkpoint(URL)
        if finished:
            assert _version(URL) == 2
            return
    pytest.fail("the save never came to its end")


@pytest.mark.parametrize("carried_out", [False, True])
def test_one_lost_request_loses_no_checkpoint(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    """Also after the commit, and if the store does what it is asked to and only its answer is
    lost."""
    for lost in range(1, 60):
        store.store.clear()
        _save(URL, 1)
        calls = count()

        def once(function: Any, lost: int = lost, calls: Iterator[int] = calls) -> Any:
            def request(*args: Any, **kwargs: Any) -> Any:
                is_lost = next(calls) == lost
                result = function(*args, **kwargs) if carried_out or not is_lost else None
                if is_lost:
                    raise OSError("connection lost")
                return result

            return request

        with monkeypatch.context() as patch:
            for name in ("open", "cat_file", "pipe_file", "ls", "info", "rm_file", "makedirs"):
                patch.setattr(MemoryFileSystem, name, once(getattr(MemoryFileSystem, name)))
            try:
                _save(URL, 2)
                expected = {2}
            except CheckpointError:
                expected = {1, 2}
        assert _version(URL) in expected, lost
        if next(calls) < lost:
            return
    pytest.fail("the save never came to its end")


def test_a_store_that_does_not_answer_is_not_an_empty_one(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise OSError("connection lost")

    _save(URL, 1)
    monkeypatch.setattr(MemoryFileSystem, "info", lost)
    monkeypatch.setattr(MemoryFileSystem, "ls", lost)
    with pytest.raises(OSError, match="connection lost"):
        is_committed(URL)


def test_a_failed_save_to_an_object_store_leaves_nothing(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(URL, 1)
    before = _names(store)
    with monkeypatch.context() as patch:
        patch.setattr(
            MemoryFileSystem,
            "pipe_file",
            lambda *_, **__: (_ for _ in ()).throw(OSError("connection lost")),
        )
        with pytest.raises(CheckpointError, match="connection lost"):
            _save(URL, 2)
    assert _names(store) == before and _version(URL) == 1


def test_leftovers_in_an_object_store_go_when_they_are_old(store: MemoryFileSystem) -> None:
    _save(URL, 1)
    abandoned, running = (
        "tensors.0123456789ab.00000.000.safetensors",
        "tensors.ba9876543210.00000.000.safetensors",
    )
    for name in (abandoned, running):
        store.pipe_file(f"/bucket/run/step=1.ckpt/{name}", b"half")
    store.store[f"/bucket/run/step=1.ckpt/{abandoned}"].modified = datetime.now(
        timezone.utc
    ) - timedelta(days=2)
    _save(URL, 2)
    assert running in _names(store) and abandoned not in _names(store) and _version(URL) == 2


def test_other_objects_are_not_overwritten(store: MemoryFileSystem) -> None:
    store.pipe_file("/bucket/run/step=1.ckpt/precious.txt", b"data")
    with pytest.raises(CheckpointError, match="directory with other files"):
        _save(URL, 1)
    assert _names(store) == ["precious.txt"]


def test_a_truncated_and_a_flipped_object_are_found(store: MemoryFileSystem) -> None:
    _save(URL, 1)
    path = next(name for name in store.store if name.endswith(".safetensors"))
    content = store.cat_file(path)
    store.pipe_file(path, content[:-1])
    with pytest.raises(CheckpointError, match="truncated or replaced"):
        open_checkpoint(URL)
    store.pipe_file(path, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"memory://bucket.*is damaged: bytes \d+ to \d+"):
        _version(URL)
    store.rm_file(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(URL)


# Two jobs


@pytest.mark.parametrize("where", ["local", "memory"])
def test_jobs_that_save_under_one_name_at_once(
    where: str, tmp_path: Path, store: MemoryFileSystem
) -> None:
    """Whoever is last is there, whole; nobody fails and nothing of the others is left (a local
    folder knows what is left)."""
    path = str(tmp_path / "last.ckpt") if where == "local" else URL
    errors: list[BaseException] = []

    def job(version: int) -> None:
        pause = random.Random(version)
        for _ in range(4):
            try:
                _save(path, version, max_file_bytes=100 * pause.randint(1, 20))
            except BaseException as error:
                errors.append(error)

    jobs = [threading.Thread(target=job, args=(version,)) for version in (1, 2, 3)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    assert not errors, errors
    assert _version(path) in (1, 2, 3)
    if where == "local":
        assert os.listdir(tmp_path) == ["last.ckpt"] and len(os.listdir(path)) == 3


def test_a_running_save_of_another_job_keeps_its_files(tmp_path: Path) -> None:
    running = pending_save(tmp_path / "a.ckpt", "0123456789ab")
    running.begin(b"state")
    _save(tmp_path / "b.ckpt", 1)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt.tmp-0123456789ab", "b.ckpt"]
    assert (
        not is_committed(tmp_path / "a.ckpt")
        and not (tmp_path / "a.ckpt.tmp-0123456789ab" / MANIFEST).exists()
    )
    del running


def test_a_link_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no time is nothing there: ``last.ckpt`` is the link's target or the new checkpoint."""
    _save(tmp_path / "best.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    rename = os.rename

    def watched(*args: Any) -> None:
        rename(*args)
        assert is_committed(tmp_path / "last.ckpt")

    monkeypatch.setattr(os, "rename", watched)
    _save(tmp_path / "last.ckpt", 2)
    assert (_version(tmp_path / "best.ckpt"), _version(tmp_path / "last.ckpt")) == (1, 2)


def test_read_full_from_a_store(store: MemoryFileSystem) -> None:
    _save(URL, 3)
    whole: dict[str, Tensor] = read_full(URL)["state_dict"]
    assert torch.equal(whole["weight"], torch.full((64, 5), 3.0))


@pytest.mark.parametrize("url", ["no-such-protocol://run/a.ckpt", "dask://run/a.ckpt"])
def test_a_store_that_cannot_be_reached_is_named(url: str) -> None:
    for use in (
        open_checkpoint,
        lambda path: _save(path, 1),
        remove_checkpoint,
        lambda path: completed_file(path).__enter__(),
    ):
        with pytest.raises(CheckpointError, match=f"{url} cannot be reached"):
            use(url)
