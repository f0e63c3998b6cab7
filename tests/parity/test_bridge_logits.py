"""``convert verify`` compares logits with one block in memory, and names the first that differs."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers", "5")

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.bridge.hf_models import logits
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.errors import CheckpointError
from megatron_lightning.models import GPTModel
from tests.helpers.gpt_folders import make_folder
from tests.helpers.hf_models import build


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder") / "qwen3"
    model: Any = build("qwen3").to(getattr(torch, request.param))
    model.save_pretrained(path, max_shard_size="40KB")
    return path


@pytest.mark.parametrize("to", ["hf", "gpt"])
def test_one_block_is_in_memory_at_a_time(
    folder: Path, to: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live, most = [0], [0]

    def counted(value: Tensor) -> Tensor:
        if value.numel():
            live[0] += value.numel()
            most[0] = max(most[0], live[0])
            weakref.finalize(value, release, value.numel())
        return value

    def release(count: int) -> None:
        live[0] -= count

    class Counted(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            read = super().__getitem__(name)
            return lambda: counted(read().clone())

    begin = logits.Streamed.__init__
    monkeypatch.setattr(
        logits.Streamed, "__init__", lambda self, model, values: begin(self, model, Counted(values))
    )
    commands.verify(str(folder), to)
    assert "one block in memory at a time" in capsys.readouterr().out
    parameters = dict(AutoBridge.from_hf_pretrained(folder).to_model().named_parameters())
    block = sum(p.numel() for name, p in parameters.items() if ".layers.1." in name)
    words = parameters["model.embed_tokens.weight"].numel()
    assert 0 < most[0] <= max(block, words)


def _changed(values: Any, name: str) -> Any:
    read = values[name]
    return {**values, name: lambda: read() * 1.01}


@pytest.mark.parametrize(
    ("to", "name", "block"),
    [
        ("hf", "model.layers.2.mlp.up_proj.weight", "model.layers.2 on"),
        ("hf", "model.norm.weight", "model.norm on"),
        ("gpt", "decoder.layers.1.mlp.linear_fc2.weight", "model.layers.1 on"),
    ],
)
def test_the_first_block_that_differs_is_named(
    folder: Path, to: Any, name: str, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = logits.Streamed.__init__

    def changed(self: Any, model: Any, values: Any) -> None:
        found = [key for key in values if key.endswith(name.removeprefix("decoder."))]
        is_ours = isinstance(next(model.parameters()), Lazy) or isinstance(model, GPTModel)
        begin(self, model, _changed(values, found[0]) if found and is_ours else values)

    monkeypatch.setattr(logits.Streamed, "__init__", changed)
    with pytest.raises(CheckpointError, match=f"from block {block}"):
        commands.verify(str(folder), to)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every layer is a part of its own, so that a block that reads a layer's weight sees NaN."""

    def units(module: Any, path: str = "") -> Any:
        for name, child in module.named_modules():
            if name and not any(True for _ in child.children()):
                yield name, child

    monkeypatch.setattr(logits, "_units", units)
    monkeypatch.setattr(
        "transformers.models.qwen3.modeling_qwen3.Qwen3MLP.forward",
        lambda self, x: self.down_proj(
            self.act_fn(x @ self.gate_proj.weight.t()) * self.up_proj(x)
        ),
    )
    yield


@pytest.mark.usefixtures("in_parts")
def test_a_model_that_does_not_run_in_parts_is_compared_as_a_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.verify(str(folder))
    assert "(all weights in memory)" in capsys.readouterr().out


def test_a_wrong_buffer_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = AutoBridge.stock_model

    def changed(self: AutoBridge) -> Any:
        model = make(self)
        model.model.rotary_emb.inv_freq.mul_(1.01)
        return model

    monkeypatch.setattr(AutoBridge, "stock_model", changed)
    with pytest.raises(CheckpointError, match=r"buffer model\.rotary_emb\.inv_freq"):
        commands.verify(str(folder))


def test_logits_of_nan_are_no_difference_of_buffers(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = folder / index["model.norm.weight"]
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="look for NaN in the folder's weights"):
        commands.verify(str(folder))


def test_experts_of_any_width_are_compared(tmp_path: Path) -> None:
    folder = make_folder("qwen3-moe", tmp_path, moe_intermediate_size=14)
    commands.verify(str(folder), "hf")  # torch's grouped GEMM takes multiples of 4
    commands.verify(str(folder), "gpt")


def _other_model(name: str) -> Any:
    """Return a model of ``transformers`` that takes something other than tokens, or has no head."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }  # fmt: skip
    picture: dict[str, Any] = sizes | {"image_size": 28, "patch_size": 14}
    text: dict[str, Any] = sizes | {"vocab_size": 67, "pad_token_id": 0, "eos_token_id": 2}
    if name == "picture":
        return transformers.ViTForImageClassification(transformers.ViTConfig(**picture))
    if name == "towers":
        towers = {"text_config": text, "vision_config": picture}
        return transformers.CLIPModel(transformers.CLIPConfig(**towers, projection_dim=20))
    if name == "no head":
        return transformers.LlamaModel(transformers.LlamaConfig(**text))
    # A weight computed from two tensors of the folder, by an operation with two results.
    convolutions: Any = {"conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,)}
    positions: Any = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    config = transformers.Wav2Vec2Config(**sizes, **convolutions, **positions, vocab_size=40)
    return transformers.Wav2Vec2ForCTC(config)


@pytest.mark.parametrize(
    "name", ["picture", *(pytest.param(n, marks=pytest.mark.slow) for n in ("towers", "no head")),
             "sound"],
)  # fmt: skip
def test_models_that_take_no_tokens_alone_come_back_and_are_compared(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _other_model(name).save_pretrained(tmp_path / "folder")
    commands.verify(str(tmp_path / "folder"))
    assert "logits differ by" in capsys.readouterr().out
    commands.import_(str(tmp_path / "folder"), str(tmp_path / "c.ckpt"))
    commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "out"))
    commands.compare(str(tmp_path / "folder"), str(tmp_path / "out"))
