"""Folders as the Hub has them, and not only as ``save_pretrained`` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.cli import main
from megatron_lightning.errors import CheckpointError

pytest.importorskip("transformers")
from tests.helpers.hf_folders import make_folder


def _merged(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder, whose files are deleted."""
    files = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    tensors = {name: value for file in files for name, value in file.items()}
    for file in path.glob("model*"):
        file.unlink()
    return tensors


def _prefix(path: Path) -> dict[str, Tensor]:
    """As gpt2: the bare model's names, and masks."""
    tensors = {name.removeprefix("transformer."): x for name, x in _merged(path).items()}
    return tensors | {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8).tril() for i in range(4)}


def _twice(path: Path) -> dict[str, Tensor]:
    """A tied parameter under both of its names."""
    tensors = _merged(path)
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def _untied(path: Path) -> dict[str, Tensor]:
    """Two parameters that the configuration says are one: transformers does not tie them."""
    tensors = _merged(path)
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}


CASES = {"prefix": ("gpt2", _prefix), "twice": ("tied", _twice), "untied": ("tied", _untied)}


@pytest.mark.spread(1)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_the_hub_comes_back_byte_by_byte(tmp_path: Path, case: str) -> None:
    name, change = CASES[case]
    path = make_folder(name, tmp_path)
    save_file(change(path), path / "model.safetensors", metadata={"format": "pt"})
    content = {file.name: file.read_bytes() for file in path.iterdir()}
    commands.verify(str(path))
    commands.import_(str(path), str(tmp_path / "c.ckpt"))
    path.rename(tmp_path / "gone")
    commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "out"))
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == content
    folders = (tmp_path / "gone", tmp_path / "c.ckpt")
    expected, found = (AutoBridge.from_hf_pretrained(f).to_model().state_dict() for f in folders)
    assert all(torch.equal(value, found[key]) for key, value in expected.items())


def test_a_pickle_with_buffers_of_earlier_versions_is_written_in_full(tmp_path: Path) -> None:
    """As the first Llamas. Every way to a folder writes all that ``transformers`` reads."""
    path = make_folder("llama", tmp_path)
    tensors = _merged(path)
    stale = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(4)}
    torch.save({**tensors, **stale}, path / "pytorch_model.bin")
    with pytest.warns(UserWarning, match="4 buffers"):
        bridge = AutoBridge.from_hf_pretrained(path)
        model = bridge.to_model()
    bridge.save_hf_pretrained(model, tmp_path / "model")
    with pytest.warns(UserWarning, match="4 buffers"):
        commands.verify(str(path), to="gpt")
    for kind in ("hf", "gpt"):
        with pytest.warns(UserWarning, match="4 buffers"):
            commands.import_(str(path), str(tmp_path / f"{kind}.ckpt"), to=kind)
        commands.export(str(tmp_path / f"{kind}.ckpt"), str(tmp_path / kind))
    for name in ("model", "hf", "gpt"):
        written = _merged(tmp_path / name)
        assert written.keys() == tensors.keys()
        assert all(torch.equal(written[key], value) for key, value in tensors.items())


EXPERT = "model.layers.1.block_sparse_moe.experts.1"
DROPPED: dict[str, tuple[str, tuple[str, ...]]] = {
    "matrix": ("llama", ("model.layers.1.mlp.down_proj.weight",)),
    "gate": ("experts", (f"{EXPERT}.w1.weight",)),
    "up": ("experts", (f"{EXPERT}.w3.weight",)),  # the gates have the shape of all experts
    "down": ("experts", (f"{EXPERT}.w2.weight",)),
    "expert": ("experts", tuple(f"{EXPERT}.w{n}.weight" for n in (1, 2, 3))),
    "misshapen": ("experts", (f"{EXPERT}.w3.weight",)),
}


@pytest.mark.parametrize("case", DROPPED)
def test_a_dropped_or_misshapen_tensor_is_named(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, dropped_names = DROPPED[case]
    path = make_folder(name, tmp_path)
    tensors = _merged(path)
    for dropped in dropped_names:
        if "misshapen" in case:
            tensors[dropped] = tensors[dropped][1:].clone()
        else:
            del tensors[dropped]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for command in (["verify", str(path)], ["import", str(path), str(tmp_path / "c.ckpt")]):
        with pytest.raises((SystemExit, CheckpointError)) as ended:
            main(["convert", *command])
        text = capsys.readouterr().err + str(ended.value)
        assert all(dropped in text for dropped in dropped_names)
    assert not (tmp_path / "c.ckpt").exists()
