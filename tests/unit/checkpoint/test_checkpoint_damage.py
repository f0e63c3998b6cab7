"""Damaged, incomplete and hostile checkpoints are refused, and nothing in them runs."""

from __future__ import annotations

import errno
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.checkpoint import is_committed, open_checkpoint
from megatron_lightning.checkpoint.listing import read_manifest
from megatron_lightning.checkpoint.tools.verification import verify
from megatron_lightning.errors import CheckpointError
from tests.helpers.checkpoints import (
    assert_equal,
    load_tensors,
    rewrite_manifest,
    save_tensors,
    some_tensors,
)


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a")
    body = json.loads((tmp_path / "a" / "manifest.json").read_text())
    names = list(body["files"])
    held = [
        (names[s[0]], s[1], np.prod(s[3]) * getattr(torch, t["dtype"]).itemsize)
        for t in body["tensors"].values()
        for s in t["shards"]
    ]
    places = [(file, start + i) for file, start, size in held for i in (0, int(size) - 1)]
    places += [(body["state"]["file"], i) for i in (0, 100, 300)] + [
        ("manifest.json", i) for i in (5, 60, 200, 400)
    ]
    for file, position in places:
        content = (tmp_path / "a" / file).read_bytes()
        flipped = bytearray(content)
        flipped[position] ^= 4
        (tmp_path / "a" / file).write_bytes(flipped)
        with pytest.raises(CheckpointError):
            load_tensors(tmp_path / "a")
        (tmp_path / "a" / file).write_bytes(content)
    assert_equal(load_tensors(tmp_path / "a"), some_tensors())


def test_truncated_missing_swapped_and_linked_files(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a", max_file_bytes=100)
    first, second = sorted((tmp_path / "a").glob("*.safetensors"))[:2]
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"bytes, and the manifest says .* truncated"):
        load_tensors(tmp_path / "a")
    first.unlink()
    with pytest.raises(CheckpointError, match=f"{first.name} cannot be read"):
        load_tensors(tmp_path / "a")
    (tmp_path / "outside").write_bytes(content)
    first.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tensors(tmp_path / "a")
    first.unlink()
    first.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError):
        load_tensors(tmp_path / "a")


def test_a_disk_that_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tensors(tmp_path / "a")
    source, read = open_checkpoint(tmp_path / "a"), os.preadv

    def bad_sector(descriptor: int, buffers: list[memoryview], position: int) -> int:
        if len(buffers[0]) == 8 * 6 * 4:  # the matrix
            raise OSError(errno.EIO, "Input/output error")
        return read(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", bad_sector)
    shard = read_manifest(tmp_path / "a").tensors["state_dict.weight"].shards[0]
    with pytest.raises(
        CheckpointError,
        match=(
            rf"{shard.file}: bytes {shard.start} to {shard.start + 192} cannot be read "
            r".*Input/output"
        ),
    ):
        load_tensors(tmp_path / "a")
    assert [str(damage) for damage in verify(tmp_path / "a")] == [
        f"{shard.file}: bytes {shard.start} to {shard.start + 192} cannot be read "
        "(state_dict.weight)"
    ]
    assert source.state() == {"epoch": 1}


def test_incomplete_and_absent_directories_are_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a")
    assert is_committed(tmp_path / "a") and not is_committed(tmp_path / "b")
    (tmp_path / "a" / "manifest.json").unlink()
    assert not is_committed(tmp_path / "a")
    with pytest.raises(CheckpointError, match="save was never completed"):
        open_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="Checkpoint file not found"):
        open_checkpoint(tmp_path / "b")
    for name, command in (("config.json", "convert"), ("adapter_config.json", "adapters")):
        (tmp_path / "a" / name).write_text("{}")
        with pytest.raises(CheckpointError, match=rf"it has {name}.*-lightning {command} "):
            open_checkpoint(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["files"].update({"../../etc/passwd": 10}), "leads out"),
        (lambda b: b["files"].update({"/etc/passwd": 10}), "leads out"),
        (lambda b: b["state"].update(file="../state.pt"), "not among the files"),
        (
            lambda b: b["tensors"]["state_dict.weight"]["shards"][0].__setitem__(1, 10**9),
            "not inside",
        ),
        (lambda b: b["tensors"]["state_dict.weight"]["shards"][0].__setitem__(1, -1), "malformed"),
        (lambda b: b["tensors"]["state_dict.weight"]["shards"][0].__setitem__(0, 77), "malformed"),
        (
            lambda b: b["tensors"]["state_dict.weight"]["shards"][0].__setitem__(2, [1, 0]),
            "not inside shape",
        ),
        (
            lambda b: b["tensors"]["state_dict.weight"]["shards"][0].__setitem__(4, []),
            "number of checksums",
        ),
        (lambda b: b["tensors"]["state_dict.weight"].update(shards=[]), "exactly once"),
        (lambda b: b["tensors"]["state_dict.weight"].update(dtype="load"), "unknown dtype"),
        (lambda b: b["tensors"].update(x=5), "malformed"),
        (
            lambda b: b["tensors"].update(x=b["tensors"]["state_dict.weight"]),
            "belong to two tensors",
        ),
        (
            lambda b: b["tensors"].update(x={"shape": [1] * 60, "dtype": "int8", "shards": []}),
            "60 dims are more",
        ),
        (lambda b: b.update(version=2), "version 2"),
        (lambda b: b.update(format="other"), "not a megatron_lightning manifest"),
    ],
)
def test_hostile_manifests_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    save_tensors(tmp_path / "a")
    rewrite_manifest(tmp_path / "a", change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("boxes", [1, 1000])
def test_a_dtype_that_contradicts_the_file_s_own_is_refused(tmp_path: Path, boxes: int) -> None:
    """The bytes and their checksums are the same; with 1,000 tensors the header is longer than what
    is read of it at first."""
    tensors = {f"state_dict.{i}": torch.arange(6, dtype=torch.int32) for i in range(boxes)}
    save_tensors(tmp_path / "a", tensors)
    assert_equal(load_tensors(tmp_path / "a"), tensors)
    name = f"state_dict.{boxes - 1}"
    rewrite_manifest(tmp_path / "a", lambda body: body["tensors"][name].update(dtype="float32"))
    file = read_manifest(tmp_path / "a").tensors[name].shards[0].file
    with pytest.raises(
        CheckpointError, match=rf"{file} .* its header says that {name} is I32, .* it is float32"
    ):
        load_tensors(tmp_path / "a")


@pytest.mark.parametrize("position", [0, 3, 8, 12])
def test_a_damaged_header_is_refused(tmp_path: Path, position: int) -> None:
    save_tensors(tmp_path / "a", {"state_dict.weight": torch.ones(3)})
    (file,) = (tmp_path / "a").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[position] ^= 255
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=f"{file.name} is damaged: its header says that state_dict.weight is not there",
    ):
        load_tensors(tmp_path / "a")


class _Bomb:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.target,))


def test_a_hostile_state_file_does_not_run(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a")
    file = next((tmp_path / "a").glob("state.*.pt"))
    torch.save({"epoch": _Bomb(str(tmp_path / "ran"))}, file)
    hostile = [file.read_bytes(), pickle.dumps(_Bomb(str(tmp_path / "ran")), protocol=2)]
    for content in hostile:
        file.write_bytes(content)

        def forge(body: dict[str, Any], content: bytes = content) -> None:
            body["files"][file.name] = len(content)
            body["state"]["checksum"] = zlib.crc32(content)

        rewrite_manifest(tmp_path / "a", forge)
        source = open_checkpoint(tmp_path / "a")
        with pytest.raises(CheckpointError, match="would run code"):
            source.state()
        file.rename(tmp_path / "plain.ckpt")
        with pytest.raises(CheckpointError, match="would run code"):
            open_checkpoint(tmp_path / "plain.ckpt")
        (tmp_path / "plain.ckpt").rename(file)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [(torch.ones(3).to_sparse(), "sparse_coo"), (torch.ones(3, device="meta"), "without values")],
)
def test_a_plain_file_of_tensors_that_cannot_be_read(
    tensor: torch.Tensor, kind: str, tmp_path: Path
) -> None:
    torch.save({"state_dict": {"w": tensor}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=f"state_dict.w is {kind}"):
        open_checkpoint(tmp_path / "x.ckpt")


def test_a_plain_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_text("hello")
    with pytest.raises(CheckpointError, match="cannot be read as plain data"):
        open_checkpoint(tmp_path / "x.ckpt")
    with zipfile.ZipFile(tmp_path / "y.ckpt", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(CheckpointError, match="cannot be read as plain data"):
        open_checkpoint(tmp_path / "y.ckpt")
