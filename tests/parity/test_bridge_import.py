"""Hugging Face folders become checkpoints that any layout reads, and come back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.checkpoint.format import storage
from megatron_lightning.checkpoint.reading.source import open_checkpoint
from megatron_lightning.checkpoint.writing.commit import is_committed
from megatron_lightning.cli import main
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.modules import HuggingFaceModule
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

pytest.importorskip("transformers")
from tests.helpers.hf_folders import MODELS, VOCABULARY, make_folder, model_class


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("folders")
    return {name: make_folder(name, parent) for name in MODELS}


def _content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_goes_into_a_checkpoint_and_comes_back(
    folders: dict[str, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, source = tmp_path / "c.ckpt", tmp_path / "source"
    shutil.copytree(folders[name], source)
    main(["convert", "import", str(source), str(checkpoint)])
    assert "c.ckpt holds" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"c\.ckpt exists"):
        commands.import_(str(source), str(checkpoint))
    shutil.rmtree(source)
    main(["convert", "export", str(checkpoint), str(tmp_path / "out")])
    assert _content(tmp_path / "out") == _content(folders[name])
    expected = model_class(name).from_pretrained(folders[name]).state_dict()
    module = HuggingFaceModule.load_from_checkpoint(checkpoint)
    for key, value in module.model.state_dict().items():
        assert torch.equal(value, expected[key]), key


def _fit(path: Path, checkpoint: Path | None) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, VOCABULARY, (8, 13), generator=generator)
    rows: Any = [{"tokens": line[:-1], "labels": line[1:]} for line in text]
    module = HuggingFaceModule(str(path), learning_rate=1e-2)
    loader = DataLoader(rows, batch_size=4)
    return fit("tp2", module, loader, max_epochs=1, ckpt_path=checkpoint).losses


@pytest.mark.slow
def test_a_fit_starts_from_an_imported_checkpoint(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = tmp_path / "c.ckpt"
    AutoBridge.import_ckpt(folders["tied"], checkpoint, dtype=torch.float32)
    expected, *_ = run_ranks(2, _fit, folders["tied"], None)
    found, *_ = run_ranks(2, _fit, tmp_path / "gone", checkpoint)
    assert found == expected
    AutoBridge.from_hf_pretrained(folders["tied"]).export_ckpt(checkpoint, tmp_path / "out")
    assert _content(tmp_path / "out") == _content(folders["tied"])


def test_an_import_that_is_killed_leaves_the_old_checkpoint(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, write = tmp_path / "c.ckpt", storage.write_file
    bridge = AutoBridge.from_hf_pretrained(folders["gpt2"])
    AutoBridge.import_ckpt(folders["llama"], target)
    before = _content(target)
    num_writes = 0

    def fail(path: Path, chunks: Any, at: int) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes > at:
            raise KeyboardInterrupt
        return write(path, chunks)

    for at in range(10):
        num_writes = 0
        with monkeypatch.context() as patch:
            patch.setattr(storage, "write_file", lambda path, chunks, at=at: fail(path, chunks, at))
            try:
                AutoBridge.import_ckpt(folders["gpt2"], target, overwrite=True)
            except KeyboardInterrupt:
                assert _content(target) == before
                assert list(tmp_path.iterdir()) == [target]
                continue
        break
    assert at >= 3  # state, tensors, manifest
    assert is_committed(target)
    bridge.export_ckpt(target, tmp_path / "out")
    assert _content(tmp_path / "out") == _content(folders["gpt2"])


def test_weights_of_a_folder_are_read_into_a_model(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    bridge = AutoBridge.from_hf_pretrained(folders["experts"])
    model: Any = bridge.to_model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    bridge.load_hf_weights(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    assert "LlamaForCausalLM" in AutoBridge.list_supported_models()
    config = json.loads((folders["experts"] / "config.json").read_text())
    assert config["architectures"][0] in AutoBridge.list_supported_models()


def test_modules_start_from_folders_and_from_their_checkpoints(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint, again = tmp_path / "c.ckpt", tmp_path / "again.ckpt"
    AutoBridge.import_ckpt(folders["llama"], checkpoint)
    expected = AutoBridge.from_hf_pretrained(folders["llama"]).to_model("gpt").state_dict()
    for path in (folders["llama"], checkpoint):
        module = AutoBridge.from_hf_pretrained(path).to_module(learning_rate=1e-3)
        module.configure_model()
        for name, value in module.model.state_dict().items():
            assert torch.equal(value, expected[name]), name
    AutoBridge.import_ckpt(checkpoint, again)
    assert open_checkpoint(again).state()["hyper_parameters"]["path"] == str(checkpoint)
    bridge = AutoBridge.from_hf_pretrained(folders["llama"])
    with pytest.raises(ConfigError, match="a configuration has none"):
        AutoBridge.from_hf_config(bridge.config).to_module()
