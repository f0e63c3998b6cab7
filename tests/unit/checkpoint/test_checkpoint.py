"""Sharded checkpoints in one process: round trips, tilings, and what does not fit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from megatron_lightning.checkpoint import (
    TensorShards,
    load_sharded,
    open_checkpoint,
    read_full,
    save_sharded,
)
from megatron_lightning.checkpoint.format.manifest import (
    BLOCK_BYTES,
    DTYPE_CODES,
    Manifest,
    StoredShard,
    TensorInfo,
    check_tiling,
)
from megatron_lightning.checkpoint.tools.verification import verify
from megatron_lightning.checkpoint.writing.background import HostBuffer
from megatron_lightning.checkpoint.writing.saving import take_snapshot, write_snapshot
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel import ShardSpec
from megatron_lightning.parallel.shards.spec import Box, Shard
from tests.helpers.checkpoints import assert_equal, load_tensors, save_tensors, some_tensors


def test_round_trip_is_exact_and_reports_its_info(tmp_path: Path) -> None:
    save_tensors(
        tmp_path / "a.ckpt",
        state={"epoch": 3, "loops": {"x": [1, (2, None)]}},
        info={"layout": {"tp": 2}, "lr": float("inf")},
    )
    assert_equal(load_tensors(tmp_path / "a.ckpt"), some_tensors())
    source = open_checkpoint(tmp_path / "a.ckpt")
    assert source.state() == {"epoch": 3, "loops": {"x": [1, (2, None)]}}
    body = json.loads(
        (tmp_path / "a.ckpt" / "manifest.json").read_text(), parse_constant=pytest.fail
    )
    assert body["info"]["layout"] == {"tp": 2} and body["info"]["lr"] == "Infinity"
    assert body["info"]["versions"]["torch"] == torch.__version__
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_every_listed_dtype_survives_and_safetensors_reads_the_files(tmp_path: Path) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    tensors = {
        f"t.{name}": raw.view(getattr(torch, name)) for name in DTYPE_CODES if name != "bool"
    }
    tensors["t.bool"] = raw % 2 == 0
    save_tensors(tmp_path / "a", tensors, max_file_bytes=100)
    loaded = load_tensors(tmp_path / "a")
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 5
    foreign: dict[str, Tensor] = {}
    for file in files:
        foreign.update(safetensors.torch.load_file(file))
    assert len(foreign) == len(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert torch.equal(
            foreign[f"{name}[0:{len(tensor)}]"].view(torch.uint8), tensor.view(torch.uint8)
        ), name


def test_views_of_every_kind_are_saved_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(5, 6),
        "flipped": torch.complex(base, base).conj(),  # lazily conjugated, and lazily negated
        "negated": torch.complex(base, base).conj().imag,
        "scalar": base.sum(),
        "nothing": base[:, 3:3],
        "one": base.reshape(1, 1, 4, 1, 6).permute(4, 0, 2, 1, 3),
        "flags": (base > 3)[:, ::2],
        "": base[0],
        'näme with "quotes"\n/..' * 30: base[1],
    }
    save_tensors(tmp_path / "a", tensors, max_file_bytes=50)
    assert_equal(load_tensors(tmp_path / "a"), tensors)
    buffer = HostBuffer()
    for _ in range(2):  # copied for a save in the background, into memory that is used again
        snapshot = buffer.copy_of(
            take_snapshot(tmp_path / "b", [TensorShards.full(n, t) for n, t in tensors.items()], {})
        )
        write_snapshot(snapshot)
        assert_equal(load_tensors(tmp_path / "b"), tensors)
    assert verify(tmp_path / "a") == verify(tmp_path / "b") == []


def test_pieces_larger_than_a_read_and_unaligned_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = "megatron_lightning.checkpoint.format.shard_file._CHUNK_BYTES"
    monkeypatch.setattr(chunk, 2 * BLOCK_BYTES)
    full = torch.arange(1300 * 999, dtype=torch.float32).reshape(1300, 999)
    save_tensors(tmp_path / "a", {"w": full})
    whole, columns = torch.zeros_like(full), torch.zeros(1300, 7)
    rows = torch.zeros(3, 999)
    source = open_checkpoint(tmp_path / "a")
    load_sharded(
        source,
        [
            TensorShards(
                "w", (1300, 999), torch.float32, [Shard((0, 501), columns), Shard((777, 0), rows)]
            )
        ],
    )
    load_sharded(source, [TensorShards.full("w", whole)])
    assert (
        torch.equal(whole, full)
        and torch.equal(columns, full[:, 501:508])
        and torch.equal(rows, full[777:780])
    )


def test_only_the_needed_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.arange(16 * BLOCK_BYTES // 4, dtype=torch.float32).reshape(16, -1)
    save_tensors(tmp_path / "a", {"w": full})
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, buffers, at: (read.append(len(buffers[0])), preadv(fd, buffers, at))[1],
    )
    source = open_checkpoint(tmp_path / "a")
    read.clear()
    row = torch.zeros(1, full.shape[1])
    load_sharded(
        source, [TensorShards("w", tuple(full.shape), torch.float32, [Shard((5, 0), row)])]
    )
    assert torch.equal(row[0], full[5])
    header = source.manifest.tensors["w"].shards[0].start
    assert sorted(read) == [header, BLOCK_BYTES]  # one row of the 16 is one block


def test_flat_ranges_of_a_fused_shard(tmp_path: Path) -> None:
    full = torch.randn(12, 5)
    specs = [ShardSpec.split((12, 5), dim=0, size=2, rank=rank, blocks=2) for rank in range(2)]
    flats = [spec.shard(full).reshape(-1) for spec in specs]
    shards = [
        TensorShards.flat("w", spec, flat[a:b], a)
        for spec, flat in zip(specs, flats, strict=True)
        for a, b in ((0, 13), (13, 30))
    ]
    merged = TensorShards(
        "w", (12, 5), torch.float32, [shard for s in shards for shard in s.shards]
    )
    save_sharded(tmp_path / "a", [merged], {})
    assert torch.equal(load_tensors(tmp_path / "a")["w"], full)
    column = ShardSpec.split((12, 5), dim=1, size=5, rank=3)
    local = torch.zeros(12, 1, dtype=torch.float64)  # floating dtypes are converted
    load_sharded(open_checkpoint(tmp_path / "a"), [TensorShards.local("w", column, local)])
    assert torch.equal(local.float(), full[:, 3:4])


def test_missing_unexpected_and_misshaped_are_listed(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a")
    source, untouched = open_checkpoint(tmp_path / "a"), torch.full((8, 6), 5.0)
    asked = [
        TensorShards.full("state_dict.weight", untouched),
        TensorShards.full("state_dict.other", torch.zeros(2)),
    ]
    with pytest.raises(
        CheckpointError,
        match=r"(?s)missing.*state_dict\.other.*unexpected.*state_dict\.half.*strict=False",
    ):
        load_sharded(source, asked)
    assert (untouched == 5).all()  # nothing is read before everything fits
    report = load_sharded(source, asked, strict=False)
    assert report.missing == ("state_dict.other",) and "state_dict.half" in report.unexpected
    assert torch.equal(untouched, some_tensors()["state_dict.weight"])
    with pytest.raises(
        CheckpointError, match=r"weight: \(8, 6\) in the checkpoint, \(8, 7\) in the model"
    ):
        load_sharded(
            source, [TensorShards.full("state_dict.weight", torch.zeros(8, 7))], strict=False
        )
    with pytest.raises(
        CheckpointError, match=r"count: torch\.int64 in the checkpoint, torch\.float32 in the model"
    ):
        load_sharded(source, [TensorShards.full("state_dict.count", torch.zeros(()))], strict=False)
    assert load_sharded(source, [], prefix="optimizer_states.0.").unexpected == ()
    step = TensorShards.full("optimizer_states.0.state.w.step", torch.zeros(()))
    with pytest.raises(CheckpointError, match=r"(?s)w\.step.*load the weights alone") as error:
        load_sharded(source, [step], prefix="optimizer_states.0.state.")
    assert "strict=False" not in str(error.value)  # an optimizer takes all or nothing


def test_tensors_that_are_not_tiled_once_are_not_saved(tmp_path: Path) -> None:
    top, bottom = torch.zeros(2, 3), torch.zeros(2, 3)
    for held in (
        [((0, 0), top)],
        [((0, 0), top), ((1, 0), bottom)],
        [((0, 0), top), ((0, 0), top)],
    ):
        with pytest.raises(
            CheckpointError, match=r"w: its \d shards hold \d+ elements .* 12 elements"
        ):
            save_sharded(
                tmp_path / "a",
                [TensorShards("w", (4, 3), torch.float32, [Shard(*s) for s in held])],
                {},
            )
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match="does not fit"):
        TensorShards("w", (4, 3), torch.float32, [Shard((3, 0), top)])
    with pytest.raises(CheckpointError, match=r"w is sparse_coo, and a checkpoint holds dense"):
        save_tensors(tmp_path / "a", {"w": top.to_sparse()})
    with pytest.raises(CheckpointError, match="complex128 cannot be stored"):
        save_tensors(tmp_path / "a", {"w": torch.zeros(2, dtype=torch.complex128)})


def test_tiling_agrees_with_counting_every_element() -> None:
    generator = np.random.default_rng(0)
    agreed = {True: 0, False: 0}
    for _ in range(300):
        cut, other = sorted(generator.integers(1, 4, size=2))
        boxes = [
            ((0, 0), (cut, 4)),
            ((cut, 0), (4 - cut, other)),
            ((cut, other), (4 - cut, 4 - other)),
        ]
        if generator.random() < 0.5:
            boxes[generator.integers(3)] = (
                tuple(generator.integers(0, 2, 2)),
                tuple(generator.integers(1, 3, 2)),
            )  # type: ignore[call-overload]
        counts = np.zeros((4, 4), dtype=int)
        for (row, column), (height, width) in boxes:
            counts[row : row + height, column : column + width] += 1
        tiles = [Box(tuple(map(int, o)), tuple(map(int, s))) for o, s in boxes if 0 not in s]
        valid = bool((counts == 1).all())
        agreed[valid] += 1
        if valid:
            check_tiling("w", (4, 4), tiles)
        else:
            with pytest.raises(CheckpointError):
                check_tiling("w", (4, 4), tiles)
    assert min(agreed.values()) > 50


def test_the_manifest_of_many_ranks_stays_small() -> None:
    shards = [
        StoredShard(
            f"tensors.0123456789ab.{i:05d}.000.safetensors", 8, Box((i, 0), (1, 256)), (2**31,)
        )
        for i in range(2048)
    ]
    entry = TensorInfo((2048, 256), torch.float32, tuple(shards))
    other = TensorInfo(
        (2048, 256), torch.float32, tuple(replace(shard, start=1032) for shard in shards)
    )
    files = {s.file: 2056 for s in shards} | {"state.pt": 1}
    manifest = Manifest(
        tensors={"w": entry, "v": other}, files=files, state_file="state.pt", state_checksum=1
    )
    text = manifest.dumps()
    assert len(text) / (2 * len(shards)) < 80  # bytes a shard
    loaded = Manifest.loads(text)
    assert loaded == manifest and loaded.tensors["w"].shards == entry.shards


def test_optimizer_tensors_need_their_parameter_groups(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a", {"optimizer_states.0.state.w.exp_avg": torch.ones(1)})
    with pytest.raises(
        CheckpointError, match=r"optimizer_states\.0\.state\.w\.exp_avg .* no optimizer 0"
    ):
        read_full(tmp_path / "a")


def test_read_full_of_weights_alone(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a")
    checkpoint = read_full(tmp_path / "a")
    assert checkpoint["epoch"] == 1 and "optimizer_states" not in checkpoint
    assert checkpoint["state_dict"].keys() == {"weight", "half", "count", "empty"}
