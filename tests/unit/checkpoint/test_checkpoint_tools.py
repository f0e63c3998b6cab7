"""The tools for checkpoints: what they write is exact, what they find is right, and they never hold
a whole model."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megatron_lightning.checkpoint import (
    TensorShards,
    consolidate,
    open_checkpoint,
    read_full,
    save_sharded,
)
from megatron_lightning.checkpoint.format import streaming
from megatron_lightning.checkpoint.format.manifest import BLOCK_BYTES, TensorInfo
from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.format.streaming import slabs
from megatron_lightning.checkpoint.listing import list_checkpoints, read_manifest
from megatron_lightning.checkpoint.tools.averaging import average
from megatron_lightning.checkpoint.tools.pruning import find_prunable, prune
from megatron_lightning.checkpoint.tools.resharding import reshard
from megatron_lightning.checkpoint.tools.verification import verify
from megatron_lightning.cli import main
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.parallel.shards.spec import Box, Shard


def _tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "state_dict.embed": torch.randn(96, 64, generator=generator),
        "state_dict.half": torch.randn(5, 3, 2, generator=generator).bfloat16(),
        "state_dict.count": torch.tensor(7 + seed),
        "state_dict.empty": torch.zeros(0, 4),
        "optimizer_states.0.state.embed.exp_avg": torch.randn(96, 64, generator=generator),
    }


def _state(step: int, **more: Any) -> dict[str, Any]:
    groups = [{"lr": 0.1, "params": ["embed", "half"]}]
    return {
        "epoch": 1,
        "global_step": step,
        "state_dict": {"note": "text"},
        "optimizer_states": [{"state": {}, "param_groups": groups}],
        OWN: {"tied": {"head": "embed"}},
        **more,
    }


def _save(path: Path, seed: int = 0, step: int = 3, **more: Any) -> dict[str, Tensor]:
    """Save with matrices cut into quarters, as four ranks would."""
    tensors = _tensors(seed)
    shards = [
        TensorShards.full(name, t) for name, t in tensors.items() if t.dim() != 2 or not t.numel()
    ]
    for name, t in tensors.items():
        if t.dim() == 2 and t.numel():
            corners = product((0, t.shape[0] // 2), (0, t.shape[1] // 2))
            parts = [
                Shard((r, c), t[r : r + t.shape[0] // 2, c : c + t.shape[1] // 2])
                for r, c in corners
            ]
            shards.append(TensorShards(name, tuple(t.shape), t.dtype, parts))
    save_sharded(
        path, shards, _state(step, **more), info={"global_step": step, "layout": {"tp": 4}}
    )
    return tensors


def _load(path: Path) -> dict[str, Tensor]:
    source = open_checkpoint(path)
    stored = source.tensors().items()
    return {
        name: streaming.read_box(source, name, e.dtype, Box.full(e.shape)) for name, e in stored
    }


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (3, 1, 5), (2, 3, 4, 2), (0, 3)])
@pytest.mark.parametrize("limit", [1, 2, 5, 12, 1000])
def test_slabs_are_the_rows_of_the_tensor_in_order(shape: tuple[int, ...], limit: int) -> None:
    whole = torch.arange(int(torch.Size(shape).numel())).reshape(shape)
    parts = []
    for offset, extent in slabs(TensorInfo(shape, torch.uint8), limit):
        part = whole[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
        assert part.shape == extent and part.numel() <= limit
        parts.append(part.reshape(-1))
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.long), *parts]), whole.reshape(-1))


# Verify


def test_verify_finds_every_bad_range_and_nothing_else(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    done: list[int] = []
    assert verify(tmp_path / "a", advance=done.append) == []
    manifest = read_manifest(tmp_path / "a")
    (file,) = (name for name in manifest.files if name.endswith(".safetensors"))
    assert sum(done) <= sum(manifest.files.values())
    content = bytearray((tmp_path / "a" / file).read_bytes())
    shards = {name: entry.shards for name, entry in manifest.tensors.items()}
    bad = [
        ("state_dict.embed", 0),
        ("state_dict.embed", 3),
        ("optimizer_states.0.state.embed.exp_avg", 1),
    ]
    for name, index in bad:
        content[shards[name][index].start + 5] ^= 1
    content[20] ^= 1  # in the header, which no checksum covers
    (tmp_path / "a" / file).write_bytes(content)
    state = tmp_path / "a" / manifest.state_file
    state.write_bytes(state.read_bytes()[:-3])
    found = verify(tmp_path / "a")
    ranges = {(d.first, d.stop) for d in found if d.file == file and d.first}
    quarter = 48 * 32 * 4
    assert ranges == {(shards[n][i].start, shards[n][i].start + quarter) for n, i in bad}
    assert [d.problem for d in found if d.file == file and not d.first] == [
        "are not the header that the manifest describes"
    ]
    assert any(d.file == manifest.state_file and "truncated" in d.problem for d in found)
    assert len(found) == 5
    (tmp_path / "a" / file).unlink()
    assert [d.file for d in verify(tmp_path / "a") if "cannot be read" in d.problem] == [file]


def test_verify_names_single_blocks_of_a_large_tensor(tmp_path: Path) -> None:
    save_sharded(
        tmp_path / "a", [TensorShards.full("w", torch.zeros(20 * BLOCK_BYTES // 4 + 3))], {}
    )
    shard = read_manifest(tmp_path / "a").tensors["w"].shards[0]
    with open(tmp_path / "a" / shard.file, "r+b") as file:
        for at in (shard.start + 11 * BLOCK_BYTES, shard.start + 20 * BLOCK_BYTES + 11):
            file.seek(at)
            file.write(b"\1")
    first = shard.start + 11 * BLOCK_BYTES, shard.start + 12 * BLOCK_BYTES
    last = shard.start + 20 * BLOCK_BYTES, shard.start + 20 * BLOCK_BYTES + 12
    assert [(d.first, d.stop) for d in verify(tmp_path / "a")] == [first, last]


# Reshard


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_resharded_checkpoint_holds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int
) -> None:
    monkeypatch.setattr("megatron_lightning.checkpoint.tools.resharding.CHUNK_BYTES", 3000)
    monkeypatch.setattr("megatron_lightning.checkpoint.tools.resharding.BLOCK_BYTES", 256)
    tensors = _save(tmp_path / "a")
    done: list[int] = []
    reshard(
        tmp_path / "a",
        tmp_path / "b",
        num_files=num_files,
        tensor_model_parallel_size=4,
        advance=done.append,
    )
    _assert_equal(_load(tmp_path / "b"), tensors)
    before, after = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert before.state() == after.state() and verify(tmp_path / "b") == []
    assert max(done) <= 3000 and sum(done) == sum(t.nbytes for t in tensors.values())
    manifest = read_manifest(tmp_path / "b")
    sizes = [size for name, size in manifest.files.items() if name.endswith(".safetensors")]
    assert len(sizes) == num_files and max(sizes) < 1.3 * min(sizes) + 3000
    embed = manifest.tensors["state_dict.embed"].shards
    assert {(s.box.offset[1], s.box.shape[1]) for s in embed} == {
        (0, 16),
        (16, 16),
        (32, 16),
        (48, 16),
    }
    assert manifest.info == read_manifest(tmp_path / "a").info
    reshard(tmp_path / "b", tmp_path / "b")  # in place
    _assert_equal(_load(tmp_path / "b"), tensors)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_resharding_a_damaged_checkpoint_writes_nothing(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    shard = read_manifest(tmp_path / "a").tensors["state_dict.embed"].shards[0]
    with open(tmp_path / "a" / shard.file, "r+b") as file:
        file.seek(shard.start)
        file.write(b"\1\2\3")
    for target in ("b", "a"):
        with pytest.raises(CheckpointError, match="is damaged: bytes"):
            reshard(tmp_path / "a", tmp_path / target)
    assert os.listdir(tmp_path) == ["a"] and len(verify(tmp_path / "a")) == 1
    with pytest.raises(ConfigError, match="num_files is 0"):
        reshard(tmp_path / "a", tmp_path / "b", num_files=0)


def _boxes_of_files(path: Path) -> list[set[tuple[Any, ...]]]:
    files: dict[str, set[tuple[Any, ...]]] = {}
    for name, entry in read_manifest(path).tensors.items():
        for shard in entry.shards:
            files.setdefault(shard.file.partition(".")[2].partition(".")[2], set()).add(
                (name, shard.box)
            )
    return [files[file] for file in sorted(files)]


def test_a_checkpoint_is_cut_like_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = _save(tmp_path / "a", seed=1, step=8)
    _save(tmp_path / "b")
    reshard(tmp_path / "b", tmp_path / "ranks", num_files=2)
    main(
        [
            "checkpoint",
            "reshard",
            str(tmp_path / "a"),
            str(tmp_path / "c"),
            "--like",
            str(tmp_path / "ranks"),
        ]
    )
    _assert_equal(_load(tmp_path / "c"), tensors)
    assert len(_boxes_of_files(tmp_path / "c")) == 2 and _boxes_of_files(
        tmp_path / "c"
    ) == _boxes_of_files(tmp_path / "ranks")
    save_sharded(tmp_path / "other", [TensorShards.full("state_dict.embed", torch.zeros(2))], {})
    with pytest.raises(
        CheckpointError,
        match=r"of another model: 5 tensors differ, .*exp_avg: None there, \(96, 64\)",
    ):
        reshard(tmp_path / "a", tmp_path / "d", like=tmp_path / "other")
    with pytest.raises(ConfigError, match="Leave the numbers out"):
        reshard(tmp_path / "a", tmp_path / "d", like=tmp_path / "ranks", num_files=2)


# Consolidate


def test_three_plain_forms_hold_the_same_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_lightning.checkpoint.tools.consolidation.CHUNK_BYTES", 1000)
    tensors = _save(tmp_path / "a")
    expected = {
        name.removeprefix("state_dict."): t
        for name, t in tensors.items()
        if name.startswith("state_dict.")
    }
    expected["head"] = expected["embed"]  # tied: stored once
    done: list[int] = []
    for file in ("m.ckpt", "m.pt", "m.safetensors"):
        main(["checkpoint", "consolidate", str(tmp_path / "a"), str(tmp_path / file)])
    consolidate(
        tmp_path / "a", tmp_path / "again.safetensors", format="safetensors", advance=done.append
    )
    assert max(done) <= 1000
    assert (tmp_path / "again.safetensors").read_bytes() == (
        tmp_path / "m.safetensors"
    ).read_bytes()
    _assert_equal(safetensors.torch.load_file(tmp_path / "m.safetensors"), expected)
    _assert_equal(torch.load(tmp_path / "m.pt", weights_only=True), expected)
    lightning = torch.load(tmp_path / "m.ckpt", weights_only=True)
    _assert_equal({k: v for k, v in lightning["state_dict"].items() if k != "note"}, expected)
    assert lightning["global_step"] == 3 and 0 in lightning["optimizer_states"][0]["state"]
    assert len(os.listdir(tmp_path)) == 5


def test_an_interrupted_consolidation_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path / "a")
    (tmp_path / "m.ckpt").write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        consolidate(tmp_path / "a", tmp_path / "m.ckpt")
    assert (tmp_path / "m.ckpt").read_text() == "old" and len(os.listdir(tmp_path)) == 2


# Average


def test_the_mean_is_taken_in_float32_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_lightning.checkpoint.tools.averaging.CHUNK_BYTES", 1000)
    seeds = (0, 1, 2)
    stored = [_save(tmp_path / str(seed), seed, step=seed) for seed in seeds]
    torch.save(read_full(tmp_path / "1"), tmp_path / "1.ckpt")
    done: list[int] = []
    average(
        tmp_path / "mean",
        [tmp_path / "0", tmp_path / "1.ckpt", tmp_path / "2"],
        advance=done.append,
    )
    assert max(done) <= 1000
    found = _load(tmp_path / "mean")
    assert found.keys() == {name for name in stored[0] if name.startswith("state_dict.")}
    for name in ("state_dict.embed", "state_dict.half"):
        mean = sum(t[name].float() for t in stored) / 3
        assert torch.equal(found[name], mean.to(stored[0][name].dtype)), name
    assert found["state_dict.count"] == 9  # the last one's
    assert torch.equal(
        read_full(tmp_path / "mean")["state_dict"]["head"], found["state_dict.embed"]
    )
    state = open_checkpoint(tmp_path / "mean").state()
    assert state["global_step"] == 2 and "optimizer_states" not in state


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.float8_e4m3fn])
def test_every_kind_of_weight_has_a_mean(dtype: torch.dtype, tmp_path: Path) -> None:
    for value in (1, 3):
        whole = TensorShards.full("state_dict.w", torch.full((2,), value).to(dtype))
        save_sharded(tmp_path / str(value), [whole], {})
    average(tmp_path / "mean", [tmp_path / "1", tmp_path / "3"])
    assert torch.equal(
        _load(tmp_path / "mean")["state_dict.w"].to(torch.complex64), torch.full((2,), 2.0 + 0j)
    )


def test_checkpoints_of_two_models_have_no_mean(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    save_sharded(tmp_path / "b", [TensorShards.full("state_dict.embed", torch.zeros(96, 63))], {})
    with pytest.raises(CheckpointError, match=r"not of one model: 4 tensors differ"):
        average(tmp_path / "mean", [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ConfigError, match="no checkpoints to average"):
        average(tmp_path / "mean", [])
    assert not (tmp_path / "mean").exists()


# Prune


def test_only_what_no_rule_keeps_is_pruned(tmp_path: Path) -> None:
    best = {
        "ModelCheckpoint{}": {"best_model_path": "/elsewhere/step=20.ckpt", "best_k_models": {}}
    }
    for step in (10, 20, 30, 40, 50):
        _save(tmp_path / f"step={step}.ckpt", step=step, callbacks=best)
    (tmp_path / "last.ckpt").symlink_to("step=10.ckpt")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mine").mkdir()
    leftovers = ["step=60.ckpt.tmp-0123456789ab", "never", "step=50.ckpt.old-0123456789ab"]
    for name in leftovers[:2]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors.0123456789ab.00000.000.safetensors").write_text("half")
    (tmp_path / leftovers[2]).write_text("stepped aside")
    (tmp_path / "gone.ckpt.old-0123456789ab").write_text("all that is left of it")
    assert find_prunable(tmp_path) == []  # younger than an hour
    assert {Path(entry.path).name for entry in find_prunable(tmp_path, min_age_s=0)} == set(
        leftovers
    )
    old = find_prunable(tmp_path, keep_last=1, min_age_s=0, keep=["*=40*"])
    # 10 is linked, 20 best, 40 named, 50 newest
    assert {Path(entry.path).name for entry in old} == {*leftovers, "step=30.ckpt"}
    by_step = find_prunable(tmp_path, keep_every=30)
    assert {Path(entry.path).name for entry in by_step} == {"step=40.ckpt", "step=50.ckpt"}
    (whole,) = tmp_path.glob("step=40.ckpt/state.*")
    aside = whole.rename(tmp_path / "aside")  # without it nobody can resume from 40
    by_count = find_prunable(tmp_path, keep_last=2)
    assert {Path(entry.path).name for entry in by_count} == set()  # 50 and 30
    aside.rename(whole)
    prune(old)
    assert [c.step for c in list_checkpoints(tmp_path)] == [10, 20, 40, 50]
    assert {"notes.txt", "mine", "gone.ckpt.old-0123456789ab", "last.ckpt"} <= set(
        os.listdir(tmp_path)
    )


def test_what_another_process_is_writing_is_not_pruned(tmp_path: Path) -> None:
    import fcntl

    running = tmp_path / "a.tmp-0123456789ab"
    running.mkdir()
    descriptor = os.open(running, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    assert find_prunable(tmp_path, min_age_s=0) == []
    os.close(descriptor)
    assert [entry.path for entry in find_prunable(tmp_path, min_age_s=0)] == [str(running)]


# Command line


def _fails(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["checkpoint", *args])
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("megatron-lightning: error:")
    ]
    assert exit_.value.code == 2 and len(lines) == 1
    return lines[0]


def test_the_commands_say_what_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")
    _save(tmp_path / "a.ckpt")
    main(["checkpoint", "inspect", a, "--tensors", "state_dict.*"])
    page = capsys.readouterr().out
    assert "committed" in page and '"tp": 4' in page and "optimizer_states.0: exp_avg  1" in page
    assert (
        "state_dict.embed  96x64   float32   4" in page
        and "state.embed.exp_avg" not in page.split("boxes")[1]
    )
    main(["checkpoint", "verify", a])
    captured = capsys.readouterr()
    assert "is sound: 5 tensors in 2 files" in captured.out and "verifying" in captured.err
    main(["checkpoint", "verify", a, "--json"])
    sound = json.loads(capsys.readouterr().out)
    assert (sound["num_tensors"], sound["num_files"], sound["damages"]) == (5, 2, [])
    main(["checkpoint", "inspect", a, "--tensors", "*.embed", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == sound["bytes"] and found["info"]["layout"]["tp"] == 4
    assert found["groups"]["all"]["tensors"] == 5
    embed = {"name": "state_dict.embed", "shape": [96, 64], "dtype": "float32", "boxes": 4}
    assert embed in found["tensors"]
    main(["checkpoint", "reshard", a, b, "--num-files", "2"])
    main(["checkpoint", "average", str(tmp_path / "mean.ckpt"), a, b])
    assert torch.equal(
        _load(tmp_path / "mean.ckpt")["state_dict.embed"], _tensors()["state_dict.embed"]
    )
    capsys.readouterr()
    main(["checkpoint", "prune", str(tmp_path), "--keep_last=1"])
    assert "3 entries" not in capsys.readouterr().out and len(os.listdir(tmp_path)) == 3
    main(["checkpoint", "prune", "--delete", "--keep-last", "1", str(tmp_path), "--keep", "mean*"])
    assert "1 entries" in capsys.readouterr().out and sorted(os.listdir(tmp_path)) == [
        "b.ckpt",
        "mean.ckpt",
    ]


def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, folder, file = str(tmp_path / "a.ckpt"), tmp_path / "folder", tmp_path / "file"
    _save(tmp_path / "a.ckpt")
    (folder / "inside").mkdir(parents=True)
    file.write_text("text")
    for command in (["consolidate", a], ["reshard", a], ["average"]):
        rest = [a] if command == ["average"] else []
        # A directory of other things, a name below a file, and what nobody may write: the message
        # says what is in the way.
        for target, named in (
            (folder, folder),
            (file / "b.ckpt", file),
            ("/proc/b.ckpt", "/proc/b.ckpt"),
        ):
            assert str(named) in _fails([*command, str(target), *rest], capsys)
    assert (
        sorted(os.listdir(tmp_path)) == ["a.ckpt", "file", "folder"] and file.read_text() == "text"
    )
    assert "is a directory; the output is one file" in _fails(
        ["consolidate", a, str(folder)], capsys
    )
    for command in (
        ["verify", str(file)],
        ["inspect", str(file)],
        ["consolidate", str(file), a],
        ["prune", str(file)],
    ):
        assert str(file) in _fails(command, capsys)
    assert verify(a) == []


def test_wrong_commands_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(tmp_path / "a.ckpt")
    _save(tmp_path / "a.ckpt")
    shard = read_manifest(a).tensors["state_dict.embed"].shards[2]
    with open(tmp_path / "a.ckpt" / shard.file, "r+b") as file:
        file.seek(shard.start)
        file.write(b"\1\2\3")
    assert f"{shard.file}: bytes {shard.start} to {shard.start + 48 * 32 * 4}" in _fails(
        ["verify", a], capsys
    )
    with pytest.raises(SystemExit):
        main(["checkpoint", "verify", a, "--json"])
    damage = json.loads(capsys.readouterr().out)["damages"][0]
    assert (damage["file"], damage["first"]) == (shard.file, shard.start)
    for command in (
        ["verify"],
        ["inspect"],
        ["reshard", "--num_files=2"],
        ["consolidate"],
        ["average"],
        ["prune"],
    ):
        missing = [
            *command[:1],
            "/no/such",
            *(["/tmp/x"] if command[0] in ("reshard", "consolidate", "average") else []),
        ]
        message = _fails([*missing, *command[1:]], capsys)
        assert "/no/such" in message or "/tmp/x" in message
    torch.save({"epoch": 1}, tmp_path / "plain.ckpt")
    assert "has neither manifest nor checksums" in _fails(
        ["verify", str(tmp_path / "plain.ckpt")], capsys
    )
    assert "holds no weights" in _fails(
        ["average", str(tmp_path / "mean.ckpt"), str(tmp_path / "plain.ckpt")], capsys
    )
    assert "num_files" in _fails(["reshard", a, a, "--num_files=many"], capsys)
    assert "pipeline" in _fails(["reshard", a, a, "--pipeline-model-parallel-size", "2"], capsys)
    assert "prune" in _fails(["shrink", a], capsys)
