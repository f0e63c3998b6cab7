"""Sharded checkpoints in one process: round trips, damage, hostile content, commits."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

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
from megatron_lightning.checkpoint.manifest import BLOCK_BYTES, DTYPE_CODES, Manifest, Shard, TensorEntry, check_tiling
from megatron_lightning.checkpoint.naming import join_tensors, name_optimizer_state, number_optimizer_state, split_tensors
from megatron_lightning.checkpoint.state import dump_state, load_state
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel import ShardSpec


def _tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "state_dict.weight": torch.randn(8, 6),
        "state_dict.half": torch.randn(5, 3, 2).bfloat16(),
        "state_dict.count": torch.tensor(7),
        "state_dict.empty": torch.zeros(0, 4),
    }


def _save(path: Path, tensors: dict[str, Tensor] | None = None, state: dict[str, Any] | None = None, **options: Any) -> None:
    tensors = _tensors() if tensors is None else tensors
    save_sharded(path, [TensorShards.whole(name, t) for name, t in tensors.items()], state or {"epoch": 1}, **options)


def _load(path: Path) -> dict[str, Tensor]:
    source = open_checkpoint(path)
    tensors = {name: torch.full(info.shape, 99, dtype=info.dtype) for name, info in source.tensors().items()}
    load_sharded(source, [TensorShards.whole(name, t) for name, t in tensors.items()])
    return tensors


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def _rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a manifest as an attacker would: with a right checksum."""
    body = json.loads((path / "manifest.json").read_text())
    del body["checksum"]
    change(body)
    body["checksum"] = zlib.crc32(json.dumps(body, separators=(",", ":")).encode())
    (path / "manifest.json").write_text(json.dumps(body, separators=(",", ":")))


# Round trips


def test_round_trip_is_exact_and_reports_its_info(tmp_path: Path) -> None:
    _save(
        tmp_path / "a.ckpt", state={"epoch": 3, "loops": {"x": [1, (2, None)]}}, info={"layout": {"tp": 2}, "lr": float("inf")}
    )
    _assert_equal(_load(tmp_path / "a.ckpt"), _tensors())
    source = open_checkpoint(tmp_path / "a.ckpt")
    assert source.state() == {"epoch": 3, "loops": {"x": [1, (2, None)]}}
    body = json.loads((tmp_path / "a.ckpt" / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert body["info"]["layout"] == {"tp": 2} and body["info"]["lr"] == "Infinity"
    assert body["info"]["versions"]["torch"] == torch.__version__
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_every_listed_dtype_survives_and_safetensors_reads_the_files(tmp_path: Path) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    tensors = {f"t.{name}": raw.view(getattr(torch, name)) for name in DTYPE_CODES if name != "bool"}
    tensors["t.bool"] = raw % 2 == 0
    _save(tmp_path / "a", tensors, max_file_bytes=100)
    loaded = _load(tmp_path / "a")
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 5
    foreign: dict[str, Tensor] = {}
    for file in files:
        foreign.update(safetensors.torch.load_file(file))
    assert len(foreign) == len(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert torch.equal(foreign[f"{name}[0:{len(tensor)}]"].view(torch.uint8), tensor.view(torch.uint8)), name


def test_pieces_larger_than_a_read_and_unaligned_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lightning.checkpoint.shard_file._CHUNK_BYTES", 2 * BLOCK_BYTES)
    full = torch.arange(1300 * 999, dtype=torch.float32).reshape(1300, 999)
    _save(tmp_path / "a", {"w": full})
    whole, columns = torch.zeros_like(full), torch.zeros(1300, 7)
    rows = torch.zeros(3, 999)
    source = open_checkpoint(tmp_path / "a")
    load_sharded(source, [TensorShards("w", (1300, 999), torch.float32, [((0, 501), columns), ((777, 0), rows)])])
    load_sharded(source, [TensorShards.whole("w", whole)])
    assert torch.equal(whole, full) and torch.equal(columns, full[:, 501:508]) and torch.equal(rows, full[777:780])


def test_only_the_needed_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.arange(16 * BLOCK_BYTES // 4, dtype=torch.float32).reshape(16, -1)
    _save(tmp_path / "a", {"w": full})
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: (read.append(len(buffers[0])), preadv(fd, buffers, at))[1])
    source = open_checkpoint(tmp_path / "a")
    read.clear()
    row = torch.zeros(1, full.shape[1])
    load_sharded(source, [TensorShards("w", tuple(full.shape), torch.float32, [((5, 0), row)])])
    assert torch.equal(row[0], full[5])
    assert sum(read) == BLOCK_BYTES  # one row of the 16 is one block


def test_flat_ranges_of_a_fused_shard(tmp_path: Path) -> None:
    full = torch.randn(12, 5)
    specs = [ShardSpec.split((12, 5), dim=0, size=2, rank=rank, blocks=2) for rank in range(2)]
    flats = [spec.shard(full).reshape(-1) for spec in specs]
    shards = [
        TensorShards.flat("w", spec, flat[a:b], a)
        for spec, flat in zip(specs, flats, strict=True)
        for a, b in ((0, 13), (13, 30))
    ]
    merged = TensorShards("w", (12, 5), torch.float32, [piece for s in shards for piece in s.pieces])
    save_sharded(tmp_path / "a", [merged], {})
    assert torch.equal(_load(tmp_path / "a")["w"], full)
    column = ShardSpec.split((12, 5), dim=1, size=5, rank=3)
    local = torch.zeros(12, 1, dtype=torch.float64)  # floating dtypes are converted
    load_sharded(open_checkpoint(tmp_path / "a"), [TensorShards.local("w", column, local)])
    assert torch.equal(local.float(), full[:, 3:4])


# What does not fit


def test_missing_unexpected_and_misshaped_are_listed(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    source, untouched = open_checkpoint(tmp_path / "a"), torch.full((8, 6), 5.0)
    asked = [TensorShards.whole("state_dict.weight", untouched), TensorShards.whole("state_dict.other", torch.zeros(2))]
    with pytest.raises(CheckpointError, match=r"(?s)missing.*state_dict\.other.*unexpected.*state_dict\.half.*strict=False"):
        load_sharded(source, asked)
    assert (untouched == 5).all()  # nothing is read before everything fits
    report = load_sharded(source, asked, strict=False)
    assert report.missing == ("state_dict.other",) and "state_dict.half" in report.unexpected
    assert torch.equal(untouched, _tensors()["state_dict.weight"])
    with pytest.raises(CheckpointError, match=r"weight: \(8, 6\) in the checkpoint, \(8, 7\) in the model"):
        load_sharded(source, [TensorShards.whole("state_dict.weight", torch.zeros(8, 7))], strict=False)
    with pytest.raises(CheckpointError, match=r"count: torch\.int64 in the checkpoint, torch\.float32 in the model"):
        load_sharded(source, [TensorShards.whole("state_dict.count", torch.zeros(()))], strict=False)
    assert load_sharded(source, [], prefix="optimizer_states.0.").unexpected == ()


def test_tensors_that_are_not_tiled_once_are_not_saved(tmp_path: Path) -> None:
    top, bottom = torch.zeros(2, 3), torch.zeros(2, 3)
    for pieces in ([((0, 0), top)], [((0, 0), top), ((1, 0), bottom)], [((0, 0), top), ((0, 0), top)]):
        with pytest.raises(CheckpointError, match=r"w: its \d parts hold \d+ elements .* 12 elements"):
            save_sharded(tmp_path / "a", [TensorShards("w", (4, 3), torch.float32, pieces)], {})
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match="does not fit"):
        TensorShards("w", (4, 3), torch.float32, [((3, 0), top)])
    with pytest.raises(CheckpointError, match="complex128 cannot be stored"):
        _save(tmp_path / "a", {"w": torch.zeros(2, dtype=torch.complex128)})


def test_tiling_agrees_with_counting_every_element() -> None:
    generator = np.random.default_rng(0)
    agreed = {True: 0, False: 0}
    for _ in range(300):
        cut, other = sorted(generator.integers(1, 4, size=2))
        boxes = [((0, 0), (cut, 4)), ((cut, 0), (4 - cut, other)), ((cut, other), (4 - cut, 4 - other))]
        if generator.random() < 0.5:
            boxes[generator.integers(3)] = (tuple(generator.integers(0, 2, 2)), tuple(generator.integers(1, 3, 2)))  # type: ignore[call-overload]
        counts = np.zeros((4, 4), dtype=int)
        for (row, column), (height, width) in boxes:
            counts[row : row + height, column : column + width] += 1
        shards = [Shard("f", 0, tuple(map(int, o)), tuple(map(int, s)), ()) for o, s in boxes if 0 not in s]
        valid = bool((counts == 1).all())
        agreed[valid] += 1
        if valid:
            check_tiling("w", (4, 4), shards)
        else:
            with pytest.raises(CheckpointError):
                check_tiling("w", (4, 4), shards)
    assert min(agreed.values()) > 50


# Damage and hostile content


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    body = json.loads((tmp_path / "a" / "manifest.json").read_text())
    names = list(body["files"])
    held = [
        (names[s[0]], s[1], np.prod(s[3]) * getattr(torch, t["dtype"]).itemsize)
        for t in body["tensors"].values()
        for s in t["shards"]
    ]
    places = [(file, start + i) for file, start, size in held for i in (0, int(size) - 1)]
    places += [(body["state"]["file"], i) for i in (0, 100, 300)] + [("manifest.json", i) for i in (5, 60, 200, 400)]
    for file, position in places:
        content = (tmp_path / "a" / file).read_bytes()
        flipped = bytearray(content)
        flipped[position] ^= 4
        (tmp_path / "a" / file).write_bytes(flipped)
        with pytest.raises(CheckpointError):
            _load(tmp_path / "a")
        (tmp_path / "a" / file).write_bytes(content)
    _assert_equal(_load(tmp_path / "a"), _tensors())


def test_truncated_missing_swapped_and_linked_files(tmp_path: Path) -> None:
    _save(tmp_path / "a", max_file_bytes=100)
    first, second = sorted((tmp_path / "a").glob("*.safetensors"))[:2]
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"bytes, and the manifest says .* truncated"):
        _load(tmp_path / "a")
    first.unlink()
    with pytest.raises(CheckpointError, match=f"{first.name} cannot be read"):
        _load(tmp_path / "a")
    (tmp_path / "outside").write_bytes(content)
    first.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="cannot be read"):
        _load(tmp_path / "a")
    first.unlink()
    first.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError):
        _load(tmp_path / "a")


def test_incomplete_and_absent_directories_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    assert is_committed(tmp_path / "a") and not is_committed(tmp_path / "b")
    (tmp_path / "a" / "manifest.json").unlink()
    assert not is_committed(tmp_path / "a")
    with pytest.raises(CheckpointError, match="save was never completed"):
        open_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        open_checkpoint(tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["files"].update({"../../etc/passwd": 10}), "leads out"),
        (lambda b: b["files"].update({"/etc/passwd": 10}), "leads out"),
        (lambda b: b["state"].update(file="../state.pt"), "not among the files"),
        (lambda b: b["tensors"]["state_dict.weight"]["shards"][0].__setitem__(1, 10**9), "not inside"),
        (lambda b: b["tensors"]["state_dict.weight"]["shards"][0].__setitem__(1, -1), "malformed"),
        (lambda b: b["tensors"]["state_dict.weight"]["shards"][0].__setitem__(0, 77), "malformed"),
        (lambda b: b["tensors"]["state_dict.weight"]["shards"][0].__setitem__(2, [1, 0]), "not inside shape"),
        (lambda b: b["tensors"]["state_dict.weight"]["shards"][0].__setitem__(4, []), "number of checksums"),
        (lambda b: b["tensors"]["state_dict.weight"].update(shards=[]), "exactly once"),
        (lambda b: b["tensors"]["state_dict.weight"].update(dtype="load"), "unknown dtype"),
        (lambda b: b["tensors"].update(x=5), "malformed"),
        (lambda b: b["tensors"].update(x=b["tensors"]["state_dict.weight"]), "belong to two tensors"),
        (lambda b: b["tensors"].update(x={"shape": [1] * 60, "dtype": "int8", "shards": []}), "60 dims are more"),
        (lambda b: b.update(version=2), "version 2"),
        (lambda b: b.update(format="other"), "not a megatron_lightning manifest"),
    ],
)
def test_hostile_manifests_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    _save(tmp_path / "a")
    _rewrite_manifest(tmp_path / "a", change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "a")


class _Bomb:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.target,))


def test_a_hostile_state_file_does_not_run(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    file = next((tmp_path / "a").glob("state.*.pt"))
    torch.save({"epoch": _Bomb(str(tmp_path / "ran"))}, file)
    hostile = [file.read_bytes(), pickle.dumps(_Bomb(str(tmp_path / "ran")), protocol=2)]
    for content in hostile:
        file.write_bytes(content)

        def forge(body: dict[str, Any], content: bytes = content) -> None:
            body["files"][file.name] = len(content)
            body["state"]["checksum"] = zlib.crc32(content)

        _rewrite_manifest(tmp_path / "a", forge)
        source = open_checkpoint(tmp_path / "a")
        with pytest.raises(CheckpointError, match="would run code"):
            source.state()
        file.rename(tmp_path / "plain.ckpt")
        with pytest.raises(CheckpointError, match="would run code"):
            open_checkpoint(tmp_path / "plain.ckpt")
        (tmp_path / "plain.ckpt").rename(file)
    assert not (tmp_path / "ran").exists()


# State


class _Colour(Enum):
    RED = "red"


class _Text(str):
    pass


@dataclass(frozen=True)
class _Config:
    width: int
    path: Path


def test_state_becomes_plain() -> None:
    base = torch.arange(1000.0)
    state = {
        "atoms": [None, True, 3, 2.5, 1j, "x", b"y", torch.float16, torch.device("cpu"), torch.Size([2])],
        "converted": [Path("a/b"), _Colour.RED, np.float64(1.5), np.int32(4), np.arange(3), _Text("t")],
        "mappings": [
            SimpleNamespace(a=1),
            _Config(3, Path("p")),
            defaultdict(list, {"k": [1]}),
            OrderedDict(a=1),
            Counter([5]),
        ],
        "rest": [(1, 2), {1, 2}, frozenset([3])],
        "tensor": nn.Parameter(base[:2]),
    }
    data = dump_state(state)
    assert len(data) < 5000  # the view's 4000-byte storage is not dragged along
    loaded = load_state(data, "test")
    assert loaded["atoms"] == state["atoms"]
    assert loaded["converted"][:4] == ["a/b", "red", 1.5, 4] and torch.equal(loaded["converted"][4], torch.arange(3))
    assert [type(v) for v in loaded["converted"]] == [str, str, float, int, Tensor, str]
    assert loaded["mappings"] == [{"a": 1}, {"width": 3, "path": "p"}, {"k": [1]}, OrderedDict(a=1), Counter([5])]
    assert [type(v) for v in loaded["mappings"]] == [dict, dict, dict, OrderedDict, Counter]
    assert loaded["rest"] == [(1, 2), {1, 2}, {3}]
    assert type(loaded["tensor"]) is Tensor and torch.equal(loaded["tensor"], base[:2])


@pytest.mark.parametrize("value", [print, object(), int, np.array([object()]), lambda: None, range(3)])
def test_state_that_needs_code_is_refused_by_place(tmp_path: Path, value: object) -> None:
    state = {"hyper_parameters": {"loss": [0, value]}}
    with pytest.raises(CheckpointError, match=r"checkpoint\['hyper_parameters'\]\['loss'\]\[1\] is a .*ignore="):
        _save(tmp_path / "a", state=state)
    assert os.listdir(tmp_path) == []


# Commits


def test_overwriting_keeps_the_name_and_other_files(tmp_path: Path) -> None:
    _save(tmp_path / "a", state={"epoch": 1})
    (tmp_path / "a" / "notes.txt").write_text("mine")
    new = {"state_dict.weight": torch.ones(3)}
    _save(tmp_path / "a", new, state={"epoch": 2})
    _assert_equal(_load(tmp_path / "a"), new)
    assert open_checkpoint(tmp_path / "a").state() == {"epoch": 2}
    assert len(os.listdir(tmp_path / "a")) == 4 and os.listdir(tmp_path) == ["a"]


def test_files_and_links_of_that_name_step_aside(tmp_path: Path) -> None:
    _save(tmp_path / "target")
    (tmp_path / "last.ckpt").symlink_to("target")
    _save(tmp_path / "last.ckpt", {"t": torch.ones(2)})
    _assert_equal(_load(tmp_path / "last.ckpt"), {"t": torch.ones(2)})
    _assert_equal(_load(tmp_path / "target"), _tensors())
    (tmp_path / "file.ckpt").write_text("old")
    _save(tmp_path / "file.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["file.ckpt", "last.ckpt", "target"]


def test_a_directory_of_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "precious").write_text("data")
    with pytest.raises(CheckpointError, match="directory with other files"):
        _save(tmp_path / "runs")
    assert (tmp_path / "runs" / "precious").read_text() == "data"


def test_a_failed_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "a")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(CheckpointError, match="No space left"):
            _save(tmp_path / "a", {"t": torch.ones(1)})
    _assert_equal(_load(tmp_path / "a"), _tensors())
    assert os.listdir(tmp_path) == ["a"]


def test_remove_and_abandoned_directories(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    remove_checkpoint(tmp_path / "link")
    assert is_committed(tmp_path / "a")
    remove_checkpoint(tmp_path / "a")
    remove_checkpoint(tmp_path / "a")
    (tmp_path / "b.tmp-0123456789ab").mkdir()
    (tmp_path / "b.tmp-0123456789ab" / "tensors").write_text("half")
    (tmp_path / "mine.tmp-x").mkdir()
    _save(tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["c", "mine.tmp-x"]


# Plain Lightning checkpoints


class _Module(pl.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() == 1]
        return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def _trainer(folder: Path, steps: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def _data() -> Any:
    torch.manual_seed(1)
    return torch.utils.data.DataLoader(torch.randn(40, 3), batch_size=4)


def test_plain_to_sharded_to_plain_and_lightning_reads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, trainer = _Module(width=6), _trainer(tmp_path, 3)
    trainer.fit(module, _data())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    optimizer = trainer.optimizers[0]
    by_id = {id(p): name for name, p in module.named_parameters()}
    names = [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]

    source = open_checkpoint(tmp_path / "plain.ckpt", optimizer_parameters=[names])
    infos = source.tensors()
    assert "state_dict.net.0.weight" in infos and "optimizer_states.0.state.net.0.weight.exp_avg" in infos
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
    load_sharded(source, [TensorShards.whole(name, t) for name, t in tensors.items()])
    half = torch.zeros(3, 3)
    load_sharded(source, [TensorShards("state_dict.net.0.weight", (6, 3), torch.float32, [((3, 0), half)])], strict=False)
    assert torch.equal(half, module.net[0].weight[3:])
    with pytest.raises(CheckpointError, match="has 6 parameters, and this model's optimizer has 1"):
        open_checkpoint(tmp_path / "plain.ckpt", optimizer_parameters=[["a"]])

    save_sharded(tmp_path / "dir.ckpt", [TensorShards.whole(name, t) for name, t in tensors.items()], source.state())
    consolidate(tmp_path / "dir.ckpt", tmp_path / "again.ckpt")
    original = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    assert again.keys() == original.keys()
    torch.testing.assert_close(dict(again["state_dict"]), dict(original["state_dict"]), rtol=0, atol=0)
    torch.testing.assert_close(again["optimizer_states"], original["optimizer_states"], rtol=0, atol=0)
    assert again["loops"] == original["loops"] and again["hyper_parameters"] == {"width": 6}

    restored = _Module.load_from_checkpoint(tmp_path / "again.ckpt")
    assert restored.hparams["width"] == 6 and torch.equal(restored.net[2].weight, module.net[2].weight)
    finals = []
    for file in ("plain.ckpt", "again.ckpt"):
        continued = _Module(width=6)
        _trainer(tmp_path, 7).fit(continued, _data(), ckpt_path=tmp_path / file)
        finals.append([p.detach() for p in continued.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_names_divide_and_join() -> None:
    tensor = torch.ones(2)
    checkpoint = {
        "epoch": 1,
        "state_dict": {"a.b": tensor, "extra": "text"},
        "current_model_state": {"a.b": tensor},
        "callbacks": {"x": {"best": tensor}},
        "nothing": {},
        "optimizer_states": [
            {"state": {"a.b": {"step": 3, "exp_avg": tensor}}, "param_groups": [{"lr": 0.1, "params": ["a.b"]}]},
            {"state": {}, "param_groups": [{"lr": 0.2, "params": []}]},
        ],
    }
    tensors, state = split_tensors(checkpoint)
    assert list(tensors) == ["state_dict.a.b", "current_model_state.a.b", "optimizer_states.0.state.a.b.exp_avg"]
    assert state["optimizer_states"][0]["state"] == {"a.b": {"step": 3}}
    assert state["callbacks"] is checkpoint["callbacks"]
    assert join_tensors(tensors, load_state(dump_state(state), "test"))["optimizer_states"][0]["state"]["a.b"]["step"] == 3
    assert join_tensors(tensors, state) == checkpoint


def test_optimizer_ids_follow_the_parameter_groups() -> None:
    numbered = {
        "state": {0: {"m": 1}, 2: {"m": 3}},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
    }
    named = name_optimizer_state(numbered, ["c", "a", "b"])
    assert named["state"] == {"c": {"m": 1}, "b": {"m": 3}}
    assert [group["params"] for group in named["param_groups"]] == [["c", "a"], ["b"]]
    assert number_optimizer_state(named) == numbered


def test_a_plain_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_text("hello")
    with pytest.raises(CheckpointError, match="cannot be read as plain data"):
        open_checkpoint(tmp_path / "x.ckpt")
    with zipfile.ZipFile(tmp_path / "y.ckpt", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(CheckpointError, match="cannot be read as plain data"):
        open_checkpoint(tmp_path / "y.ckpt")


def test_the_manifest_of_many_ranks_stays_small() -> None:
    shards = [Shard(f"tensors.0123456789ab.{i:05d}.000.safetensors", 8, (i, 0), (1, 256), (2**31,)) for i in range(2048)]
    entry = TensorEntry((2048, 256), torch.float32, tuple(shards))
    other = TensorEntry((2048, 256), torch.float32, tuple(replace(shard, start=1032) for shard in shards))
    files = {s.file: 2056 for s in shards} | {"state.pt": 1}
    manifest = Manifest(tensors={"w": entry, "v": other}, files=files, state_file="state.pt", state_checksum=1)
    text = manifest.dumps()
    assert len(text) / (2 * len(shards)) < 80  # bytes a shard
    assert Manifest.loads(text) == manifest


def test_optimizer_tensors_need_their_parameter_groups(tmp_path: Path) -> None:
    _save(tmp_path / "a", {"optimizer_states.0.state.w.exp_avg": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"optimizer_states\.0\.state\.w\.exp_avg .* no optimizer 0"):
        read_full(tmp_path / "a")


def test_read_full_of_weights_alone(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    checkpoint = read_full(tmp_path / "a")
    assert checkpoint["epoch"] == 1 and "optimizer_states" not in checkpoint
    assert checkpoint["state_dict"].keys() == {"weight", "half", "count", "empty"}
