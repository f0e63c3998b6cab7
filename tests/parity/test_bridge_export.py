"""Checkpoints of any layout become Hugging Face folders that stock ``transformers`` loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.bridge import commands
from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.folders import export
from megatron_lightning.bridge.tensors.inverse import assembled
from megatron_lightning.errors import CheckpointError
from megatron_lightning.modules import HuggingFaceModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

pytest.importorskip("transformers")
from tests.helpers.hf_folders import MODELS, VOCABULARY, make_folder, model_class

SEQUENCE, BATCH, STEPS = 12, 4, 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 x pp2": (4, {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 2,
    }),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
}  # fmt: skip
CASES = [("llama", "tp2 x pp2"), ("gpt2", "tp2 x pp2"), ("tied", "fsdp"), ("experts", "ep2")]
"""The usual run has the third."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("folders")
    return {name: make_folder(name, parent) for name in MODELS}


def _fit(path: Path, options: dict[str, Any] | None, target: Path, batch_size: int) -> None:
    """Train, and save a checkpoint; in plain Lightning a folder."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, VOCABULARY, (STEPS * BATCH, SEQUENCE + 1), generator=generator)
    rows: Any = [{"tokens": line[:-1], "labels": line[1:]} for line in text]
    module: pl.LightningModule = HuggingFaceModule(
        str(path),
        learning_rate=1e-2,
        eps=1e-3,  # Adam would make steps of gradients that are 0 but for rounding (key biases)
    )
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    fit = trainer(strategy, max_epochs=1)
    fit.fit(module, DataLoader(rows, batch_size=batch_size))
    if options is None:
        module.model.save_pretrained(target)
    else:
        fit.save_checkpoint(target)


def _weights(name: str, path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = model_class(name).from_pretrained(path).state_dict()
    return state


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_checkpoint_is_given_back(
    folders: dict[str, Path], tmp_path: Path, name: str, layout: str
) -> None:
    num_ranks, options = LAYOUTS[layout]
    num_data_ranks = 1 if "tp2" in layout else 2
    run_ranks(1, _fit, folders[name], None, tmp_path / "plain", BATCH)
    run_ranks(num_ranks, _fit, folders[name], options, tmp_path / "c.ckpt", BATCH // num_data_ranks)
    commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "out"))
    expected, found = (_weights(name, tmp_path / folder) for folder in ("plain", "out"))
    before = _weights(name, folders[name])
    assert list(found) == list(expected)
    for key, value in found.items():
        # fp32, sums in another order.
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    assert max(float((found[key] - before[key]).abs().max()) for key in found) > 1e-3


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", MODELS)
def test_an_untrained_folder_comes_back_byte_by_byte(
    folders: dict[str, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.verify(str(folders[name]))
    assert "logits differ by 0.0e+00" in capsys.readouterr().out
    folder, parameters, pieces = AutoBridge.from_hf_pretrained(folders[name]).plan()
    fills = {key: lazy.fill for key, lazy in parameters.items()}
    made = assembled(folder, pieces, fills)
    export.write_folder(tmp_path / "out", folder, made)
    commands.compare(str(folders[name]), str(tmp_path / "out"))
    files = {file.name: file.read_bytes() for file in folders[name].iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == files


def test_a_folder_is_compared_with_a_hub_id(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(folders["gpt2"])
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: path)
    commands.compare("org/tiny", path)
    assert "tensors are equal" in capsys.readouterr().out


def test_tensors_that_a_class_ignores_are_carried(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in folders of GPT-2 on the Hub, and others are an error that names them."""
    path = tmp_path / "gpt2"
    shutil.copytree(folders["gpt2"], path)
    for file in path.glob("model*"):
        file.unlink()
    state = model_class("gpt2").from_pretrained(folders["gpt2"]).state_dict()
    weights = {key: value.clone() for key, value in state.items() if key != "lm_head.weight"}
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    save_file(weights | mask, path / "model.safetensors", metadata={"format": "pt"})
    folder, parameters, pieces = AutoBridge.from_hf_pretrained(path).plan()
    made = assembled(folder, pieces, {k: lazy.fill for k, lazy in parameters.items()})
    export.write_folder(tmp_path / "out", folder, made)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["transformer.h.0.attn.bias"], mask["transformer.h.0.attn.bias"])
    save_file(weights | {"other": torch.ones(2)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors are unexpected \(other\)"):
        commands.verify(str(path))


def test_a_dtype_is_named_in_the_configuration(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, parameters, pieces = AutoBridge.from_hf_pretrained(folders["llama"]).plan()
    fills = {key: lazy.fill for key, lazy in parameters.items()}
    made = assembled(folder, pieces, fills, torch.bfloat16)
    export.write_folder(tmp_path / "out", folder, made)
    loaded = model_class("llama").from_pretrained(tmp_path / "out", dtype="auto")
    expected = model_class("llama").from_pretrained(folders["llama"]).to(torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    for key, value in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_an_export_that_is_killed_leaves_the_old_folder(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    folder, parameters, pieces = AutoBridge.from_hf_pretrained(folders["llama"]).plan()
    made = assembled(folder, pieces, {k: lazy.fill for k, lazy in parameters.items()})
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(CheckpointError, match="out exists"):
        export.write_folder(target, folder, made)
    write, num_files = export.write_file, len(list(folders["llama"].iterdir()))
    for last in range(num_files):
        written: list[Path] = []

        def fail(path: Path, chunks: Any, last: int = last, written: Any = written) -> int:
            if len(written) == last:
                raise KeyboardInterrupt
            written.append(path)
            return write(path, chunks)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(export, "write_file", fail)
            export.write_folder(target, folder, made, overwrite=True)
        assert [file.name for file in target.iterdir()] == ["old"]
        assert list(tmp_path.iterdir()) == [target]
    export.write_folder(target, folder, made, overwrite=True)
    assert {file.name for file in target.iterdir()} == {f.name for f in folders["llama"].iterdir()}
    assert list(tmp_path.iterdir()) == [target]


def test_a_checkpoint_of_another_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    torch.save({"state_dict": {"model.other": torch.ones(2)}}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="does not say which folder"):
        commands.export(str(tmp_path / "other.ckpt"), str(tmp_path / "out"))
    with pytest.raises(CheckpointError, match="holds no model of the folder's class"):
        commands.export(str(tmp_path / "other.ckpt"), str(tmp_path / "out"), str(folders["llama"]))
