"""Hugging Face folders of models whose parts the ranks hold, and in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.bridge import commands
from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.folders import export
from megatron_lightning.checkpoint.tools.pruning import find_prunable, prune
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import EXPORT_FOLDER
from megatron_lightning.modules import HuggingFaceModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

pytest.importorskip("transformers")
from tests.helpers.hf_folders import MODELS, VOCABULARY, make_folder, model_class

SEQUENCE, BATCH, STEPS = 12, 4, 4
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 4, {"tensor_model_parallel_size": 2} | PIPELINE),
    "tied": ("tied", 2, {"data_parallel": "fsdp"}),
    "experts": ("experts", 2, {"expert_model_parallel_size": 2}),
    "gpt2": ("gpt2", 2, PIPELINE),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("folders")
    return {name: make_folder(name, parent) for name in MODELS}


def _rows() -> Any:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, VOCABULARY, (STEPS * BATCH, SEQUENCE + 1), generator=generator)
    return [{"tokens": line[:-1], "labels": line[1:]} for line in text]


def _fit(
    path: Path, options: dict[str, Any], saving: CheckpointOptions, target: Path
) -> pl.Trainer:
    strategy = MegatronStrategy(**options, checkpoint_options=saving)
    saver = ModelCheckpoint(target, "{step}", every_n_train_steps=2, save_top_k=-1)
    fit = trainer(strategy, max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    module = HuggingFaceModule(str(path), learning_rate=1e-2)
    fit.fit(module, DataLoader(_rows(), batch_size=2 if _num_data(options) == 2 else BATCH))
    return fit


def _num_data(options: dict[str, Any]) -> int:
    return 2 if {"data_parallel", "expert_model_parallel_size"} & set(options) else 1


def _give_back(
    path: Path, options: dict[str, Any], saving: CheckpointOptions, target: Path
) -> dict[str, Tensor]:
    """Train; save by all ways; return the weights that this rank sees."""
    fit = _fit(path, options, saving, target)
    strategy: Any = fit.strategy
    fit.save_checkpoint(target / "after.ckpt")
    strategy.save_hf_pretrained(target / "live")
    with pytest.raises(CheckpointError, match="live exists"):
        strategy.save_hf_pretrained(target / "live")
    strategy.module.save_hf_pretrained(target / "half", dtype=torch.bfloat16)
    weights = dict(strategy.export_hf_weights())
    if options.get("pipeline_model_parallel_size", 1) > 1:
        with pytest.raises(ConfigError, match=r"strategy\.save_hf_pretrained"):
            model = strategy.module.model
            AutoBridge.from_hf_pretrained(path).save_hf_pretrained(model, target / "never")
    return weights


def _content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_live_parts_and_checkpoints_give_the_folder_that_export_gives(
    folders: dict[str, Path], tmp_path: Path, case: str
) -> None:
    name, num_ranks, options = CASES[case]
    saving = CheckpointOptions(also_save_hf="every", async_save=case == "llama")
    ranks = run_ranks(num_ranks, _give_back, folders[name], options, saving, tmp_path)
    commands.export(str(tmp_path / "after.ckpt"), str(tmp_path / "out"))
    expected = _content(tmp_path / "out")
    assert _content(tmp_path / "live") == expected
    assert _content(tmp_path / "after.ckpt" / EXPORT_FOLDER) == expected
    stored = {
        k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()
    }
    for weights in ranks:
        assert set(weights) == set(stored)
        assert all(torch.equal(value, stored[key]) for key, value in weights.items())
    half = model_class(name).from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    # Every checkpoint has the weights of its step.
    for checkpoint in tmp_path.glob("step=*.ckpt"):
        commands.export(str(checkpoint), str(tmp_path / "other"), overwrite=True)
        assert _content(tmp_path / "other") == _content(checkpoint / EXPORT_FOLDER)
    assert _content(tmp_path / "step=2.ckpt" / EXPORT_FOLDER) != expected
    if case == "llama":
        _prunes(tmp_path)


def _prunes(folder: Path) -> None:
    """Pruning frees the folder in a checkpoint, and what a killed export left in one."""
    left = folder / "step=4.ckpt" / f"{EXPORT_FOLDER}.tmp-0123456789ab"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"1" * 100)
    found = {Path(entry.path).name: entry for entry in find_prunable(folder, min_age_s=0.0)}
    assert found[left.name].size_bytes == 100
    found = {
        Path(entry.path).name: entry for entry in find_prunable(folder, keep_last=1, min_age_s=0.0)
    }
    size = sum(f.stat().st_size for f in (folder / "step=2.ckpt").rglob("*") if f.is_file())
    assert found["step=2.ckpt"].size_bytes == size
    prune(list(found.values()))
    assert not left.exists()
    assert not (folder / "step=2.ckpt").exists()


def _save_twice(path: Path, target: Path) -> list[str]:
    """Save a name again; the second export fails."""
    fit = _fit(path, {}, CheckpointOptions(also_save_hf="end"), target)
    saved = sorted(file.name for file in target.glob("*.ckpt") if (file / EXPORT_FOLDER).exists())
    fit.save_checkpoint(target / "again.ckpt")
    assert (target / "again.ckpt" / EXPORT_FOLDER).exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "write_file", _fail)
        with pytest.raises(CheckpointError, match="no space"):
            fit.save_checkpoint(target / "again.ckpt")
    return saved


def _fail(*_: Any) -> int:
    raise OSError("no space")


def test_the_last_checkpoint_of_a_fit_gets_a_folder(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    (saved,) = run_ranks(1, _save_twice, folders["llama"], tmp_path)
    assert saved == ["step=4.ckpt"]
    # New shards never stand beside old weights.
    assert sorted(path.name for path in (tmp_path / "again.ckpt").iterdir() if path.is_dir()) == []
    commands.export(str(tmp_path / "again.ckpt"), str(tmp_path / "out"))


def _refused(target: str, make: Callable[[], pl.LightningModule]) -> None:
    strategy = MegatronStrategy(checkpoint_options=CheckpointOptions(also_save_hf="every"))
    saver = ModelCheckpoint(target)
    trainer(strategy, callbacks=[saver], enable_checkpointing=True).fit(
        make(), DataLoader(_rows(), batch_size=2)
    )


class NoFolder(pl.LightningModule):
    """A model of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.layer.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_folders_that_cannot_be_written_are_refused_before_training(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="also_save_hf is 'never', which is unknown"):
        CheckpointOptions(also_save_hf="never")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="NoFolder has none"):
        _refused(str(tmp_path), NoFolder)
    with pytest.raises(ConfigError, match="file systems only"):
        _refused("memory://folder", lambda: HuggingFaceModule(str(folders["llama"])))


def test_a_model_of_one_device_is_written_by_the_bridge(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    bridge = AutoBridge.from_hf_pretrained(folders["experts"])
    model = bridge.to_model()
    bridge.save_hf_pretrained(model, tmp_path / "out")
    assert _content(tmp_path / "out") == _content(folders["experts"])
    module = HuggingFaceModule(str(folders["llama"]))
    module.configure_model()
    module.save_hf_pretrained(str(tmp_path / "plain"))
    assert _content(tmp_path / "plain") == _content(folders["llama"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    weights = dict(bridge.export_hf_weights(model))
    before = dict(bridge.folder.tensors)
    assert list(weights) == list(before)
    assert all(torch.equal(value, 2 * before[name].read()) for name, value in weights.items())
