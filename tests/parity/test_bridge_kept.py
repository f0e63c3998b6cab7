"""Checkpoints keep the folder that a model came from, so that nothing else needs it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from megatron_lightning.bridge import commands
from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.folders.folder_record import read_kept
from megatron_lightning.checkpoint import open_checkpoint
from megatron_lightning.checkpoint.kept_files import KEPT, KeptFiles, read_kept_files
from megatron_lightning.errors import CheckpointError
from megatron_lightning.modules import HuggingFaceModule
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

pytest.importorskip("transformers")
from tests.helpers.hf_folders import VOCABULARY, make_folder, model_class

SEQUENCE, BATCH, STEPS = 12, 4, 4
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
LICENCE = "All of it is yours.\n" * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as the Hub has them: a tensor that the class ignores, a tokenizer, a licence,
    and the same weights in another format.
    """
    path = make_folder("gpt2", tmp_path)
    state = model_class("gpt2").from_pretrained(path).state_dict()
    for file in path.glob("model*"):
        file.unlink()
    weights = {key: value.clone() for key, value in state.items() if key != "lm_head.weight"}
    masks = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 4, 4) for layer in range(4)}
    save_file(masks | weights, path / "model.safetensors", metadata={"format": "pt", "by": "me"})
    (path / "LICENSE").write_text(LICENCE)
    (path / "vocab.bpe").write_bytes(bytes(range(256)))
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (path / "pytorch_model.bin").write_bytes(b"weights of before")
    return path


def _rows() -> Any:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, VOCABULARY, (STEPS * BATCH, SEQUENCE + 1), generator=generator)
    return [{"tokens": line[:-1], "labels": line[1:]} for line in text]


class SaveHalfway(pl.Callback):
    """Saves after the second step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def _fit(
    path: Path, options: dict[str, Any] | None, resumed: Path | None, target: Path
) -> list[float]:
    module = HuggingFaceModule(str(path), learning_rate=1e-2, eps=1e-3)
    halfway = SaveHalfway(target.with_name("half.ckpt"))
    of_trainer = {"max_epochs": 1, "callbacks": [halfway], "ckpt_path": resumed}
    run = fit(options, module, DataLoader(_rows(), batch_size=BATCH), **of_trainer)
    run.trainer.save_checkpoint(target)
    return run.losses


def _hub_files(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in files
        if file.suffix not in (".safetensors", ".bin")
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [TP2, None], ids=["tp2", "plain"])
def test_export_and_resume_need_no_folder(
    folder: Path, tmp_path: Path, options: dict[str, Any] | None
) -> None:
    num_ranks = 1 if options is None else 2
    full, half, last = (tmp_path / f"{name}.ckpt" for name in ("full", "half", "last"))
    (expected, *_) = run_ranks(num_ranks, _fit, folder, options, None, full)
    commands.export(str(full), str(tmp_path / "with"), like=str(folder))
    content = load_file(folder / "model.safetensors")
    files = _hub_files(folder)
    shutil.rmtree(folder)

    commands.export(str(full), str(tmp_path / "without"))
    commands.compare(str(tmp_path / "with"), str(tmp_path / "without"))
    found = load_file(tmp_path / "without" / "model.safetensors")
    assert torch.equal(found["transformer.h.1.attn.bias"], content["transformer.h.1.attn.bias"])
    assert _hub_files(tmp_path / "without") == files
    assert not (tmp_path / "without" / "pytorch_model.bin").exists()
    kept = read_kept_files(full)
    assert kept is not None
    with kept.unpacked() as unpacked:
        assert (unpacked / "LICENSE").read_text() == LICENCE

    path = folder if options is not None else half  # a plain Trainer says too late what it loads
    (losses, *_) = run_ranks(num_ranks, _fit, path, options, half, last)
    if options is None:  # which begins its pass over the data anew
        assert len(losses) == 2
    else:
        assert losses == expected[2:]
    _equal_models(tmp_path / "without", full)


def _equal_models(folder: Path, checkpoint: Path) -> None:
    """A checkpoint is a folder, too."""
    bridges = (AutoBridge.from_hf_pretrained(path) for path in (folder, checkpoint))
    expected, found = (bridge.to_model().state_dict() for bridge in bridges)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_pickles_come_back_as_safetensors(tmp_path: Path) -> None:
    path = make_folder("llama", tmp_path)
    tensors = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    for file in path.glob("model*"):
        file.unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    run_ranks(1, _fit, path, {}, None, tmp_path / "c.ckpt")
    shutil.rmtree(path)
    commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "out"))
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"model.safetensors"}
    _equal_models(tmp_path / "out", tmp_path / "c.ckpt")


def test_what_a_checkpoint_keeps_is_hashed(folder: Path, tmp_path: Path) -> None:
    run_ranks(1, _fit, folder, {}, None, tmp_path / "c.ckpt")
    state = open_checkpoint(tmp_path / "c.ckpt").state()
    entry = state[KEPT]["model"]
    assert entry["origin"] == str(folder)
    assert len(entry["ignored"]) == 4
    assert len(entry["contents"]) == 1  # equal masks are kept once
    license = {**entry["files"]["LICENSE"], "sha256": "0" * 64}
    with pytest.raises(CheckpointError, match="LICENSE is not what was saved"):
        KeptFiles.from_state({**entry["files"], "LICENSE": license}, "c.ckpt")
    for name in ("../outside", "/etc/passwd", "a/b", ".."):
        hostile = {name: entry["files"]["config.json"]}
        with pytest.raises(CheckpointError, match="is no plain file name"):
            KeptFiles.from_state(hostile, "c.ckpt")
    bomb = {**entry["files"]["config.json"], "bytes": 10}
    with pytest.raises(CheckpointError, match="is not what was saved"):
        KeptFiles.from_state({"config.json": bomb}, "c.ckpt")
    torch.save({"state_dict": {}, KEPT: {"model": entry}}, tmp_path / "good.ckpt")
    read_kept(tmp_path / "good.ckpt")
    [(digest, values)] = entry["contents"].items()
    changed = {digest: bytes([values[0] ^ 1]) + values[1:]}
    for damage in (
        {"contents": changed},
        {"contents": {"0": b"1"}},
        {"tables": {"../a": b""}},
        {"tables": {"a": b"1"}},
    ):
        torch.save({"state_dict": {}, KEPT: {"model": entry | damage}}, tmp_path / "bad.ckpt")
        with pytest.raises(CheckpointError, match=r"bad\.ckpt"):
            read_kept(tmp_path / "bad.ckpt")
