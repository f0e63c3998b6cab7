"""Tools and ``ckpt_path="last"`` where checkpoints are in an object store: the same results and the
same care as on a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.callbacks import RescueCheckpoint
from megatron_lightning.checkpoint import TensorShards, consolidate, open_checkpoint, save_sharded
from megatron_lightning.checkpoint.listing import list_checkpoints
from megatron_lightning.checkpoint.tools import consolidation
from megatron_lightning.checkpoint.tools.pruning import find_prunable, prune
from megatron_lightning.cli import main
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.arguments import with_last_checkpoint
from megatron_lightning.strategies import ShardedCheckpointIO
from tests.helpers.trainers import trainer

RUN = "memory://tools-run"


@pytest.fixture(autouse=True)
def store() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def _save(name: str, step: int, **state: Any) -> torch.Tensor:
    weight = torch.full((6, 4), float(step))
    url = f"{RUN}/{name}"
    save_sharded(
        url,
        [TensorShards.full("state_dict.weight", weight)],
        {"global_step": step, **state},
        info={"global_step": step},
    )
    return weight


def test_a_plain_trainer_reads_a_directory_at_a_url(store: Any) -> None:
    weight = _save("a.ckpt", 2)
    loaded = ShardedCheckpointIO().load_checkpoint(f"{RUN}/a.ckpt")
    assert loaded["global_step"] == 2 and torch.equal(loaded["state_dict"]["weight"], weight)


def test_every_tool_reads_and_writes_urls(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    weight = _save("a.ckpt", 2)
    _save("b.ckpt", 4)
    main(["checkpoint", "inspect", f"{RUN}/a.ckpt", "--tensors", "*"])
    main(["checkpoint", "verify", f"{RUN}/a.ckpt"])
    page = capsys.readouterr()
    assert "state_dict.weight  6x4    float32  1" in page.out and "is sound: 1 tensors" in page.out
    assert "inspecting" in page.err and "verifying" in page.err
    main(["checkpoint", "reshard", f"{RUN}/a.ckpt", f"{RUN}/c.ckpt", "--num-files", "2"])
    main(["checkpoint", "average", f"{RUN}/mean.ckpt", f"{RUN}/a.ckpt", f"{RUN}/b.ckpt"])
    for name, value in (("c.ckpt", 2.0), ("mean.ckpt", 3.0)):
        main(["checkpoint", "consolidate", f"{RUN}/{name}", f"{RUN}/{name}.safetensors"])
        main(["checkpoint", "consolidate", f"{RUN}/{name}", f"{RUN}/{name}.pt"])
        found = safetensors.torch.load(store.cat_file(f"/tools-run/{name}.safetensors"))["weight"]
        assert torch.equal(found, torch.full_like(weight, value))
        with store.open(f"/tools-run/{name}.pt") as file:
            assert torch.equal(torch.load(file, weights_only=True)["weight"], found)
    main(["checkpoint", "prune", RUN, "--keep-last", "1", "--keep", "mean*"])
    page = capsys.readouterr()
    assert "nothing deleted" in page.out and len(list_checkpoints(RUN)) == 4
    assert all(title in page.err for title in ("resharding", "averaging", "consolidating"))
    main(["checkpoint", "prune", RUN, "--keep-last", "1", "--keep", "mean*", "--delete"])
    assert "deleting" in capsys.readouterr().err
    assert [os.path.basename(found.path) for found in list_checkpoints(RUN)] == [
        "mean.ckpt",
        "b.ckpt",
    ]


def test_a_damaged_object_is_named(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _save("a.ckpt", 2)
    (path,) = store.glob("/tools-run/a.ckpt/*.safetensors")
    data = bytearray(store.cat_file(path))
    data[-1] ^= 1
    store.pipe_file(path, bytes(data))
    with pytest.raises(SystemExit):
        main(["checkpoint", "verify", f"{RUN}/a.ckpt"])
    assert (
        f"{os.path.basename(path)}: bytes {len(data) - 96} to {len(data)} do not match"
        in capsys.readouterr().err
    )


def test_an_interrupted_consolidation_leaves_no_object(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save("a.ckpt", 2)
    monkeypatch.setattr(
        consolidation, "_bytes", lambda *_: (_ for _ in ()).throw(OSError("the network is down"))
    )
    with pytest.raises(OSError, match="network"):
        consolidate(f"{RUN}/a.ckpt", f"{RUN}/a.safetensors", format="safetensors")
    assert not store.exists("/tools-run/a.safetensors")


def test_leftovers_of_killed_saves_are_found_when_they_are_old(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"ModelCheckpoint{}": {"best_model_path": f"{RUN}/step=2.ckpt", "best_k_models": {}}}
    for step in (2, 4, 6):
        _save(f"step={step}.ckpt", step, callbacks=kept)
    stray, never = "tensors.0123456789ab.00000.000.safetensors", "/tools-run/never.ckpt"
    store.pipe_file(f"/tools-run/step=6.ckpt/{stray}", b"half")
    store.pipe_file(f"{never}/{stray}", b"half")
    store.pipe_file("/tools-run/mine/notes.txt", b"mine")
    assert find_prunable(RUN) == []
    hour_ago = datetime.now(tz=timezone.utc) - timedelta(hours=2)
    monkeypatch.setattr(type(store), "modified", lambda self, path: hour_ago)
    found = find_prunable(RUN, keep_last=1)
    assert {(os.path.basename(entry.path), entry.files) for entry in found} == {
        ("step=6.ckpt", (stray,)),
        ("never.ckpt", ()),
        ("step=4.ckpt", ()),
    }
    prune(found)
    assert [checkpoint.step for checkpoint in list_checkpoints(RUN)] == [2, 6]
    assert not store.glob(f"{never}/*") and not store.exists(f"/tools-run/step=6.ckpt/{stray}")
    assert open_checkpoint(f"{RUN}/step=6.ckpt").state()["global_step"] == 6
    with pytest.raises(ConfigError, match="not a directory"):
        find_prunable("memory://no-such-run")


def test_last_is_the_newest_committed_of_all_callbacks(store: Any, tmp_path: Path) -> None:
    fit = trainer(
        callbacks=[ModelCheckpoint(RUN), RescueCheckpoint(RUN)], enable_checkpointing=True
    )
    arguments: tuple[Any, ...] = ("module", None, None, None, "last", None)
    # Nothing yet: Lightning says so and starts from the beginning.
    assert with_last_checkpoint(fit, arguments, {}) == (arguments, {})
    _save("last.ckpt", 2)
    _save("rescue.ckpt", 4)
    store.pipe_file(
        "/tools-run/last-v1.ckpt/tensors.0123456789ab.00000.000.safetensors", b"never committed"
    )
    assert with_last_checkpoint(fit, arguments, {})[0][4] == f"{RUN}/rescue.ckpt"
    assert with_last_checkpoint(fit, (), {"ckpt_path": "last", "model": "a"})[1] == {
        "ckpt_path": f"{RUN}/rescue.ckpt",
        "model": "a",
    }
    _save("last.ckpt", 6)
    assert with_last_checkpoint(fit, arguments, {})[0][4] == f"{RUN}/last.ckpt"
    local = trainer(callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True)
    assert with_last_checkpoint(local, arguments, {}) == (arguments, {})
    root = pl.Trainer(
        default_root_dir=RUN,
        callbacks=[ModelCheckpoint()],
        logger=False,
        accelerator="cpu",
        devices=1,
    )
    _save("checkpoints/last.ckpt", 8)
    assert with_last_checkpoint(root, arguments, {})[0][4] == f"{RUN}/checkpoints/last.ckpt"
