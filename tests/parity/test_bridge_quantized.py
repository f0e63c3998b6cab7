"""Folders in 8 and 4 bits are trained dequantized, and come back in bf16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.parallel.shards.spec import Box

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 67, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}


def _save(path: Path, model: Any, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Path:
    model.save_pretrained(path)
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return path


def _fp8_folder(path: Path) -> Path:
    """Quantize as DeepSeek does: blocks of two dims; embedding, norms and head are not."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16)
    tensors = {}
    for name, value in model.state_dict().items():
        tensors[name] = value.clone()
        if "proj" not in name:
            continue
        rows, columns = (-(-n // b) for n, b in zip(value.shape, (16, 32), strict=True))
        scale = torch.rand(rows, columns) * 0.01 + 0.001
        factors = scale.repeat_interleave(16, 0).repeat_interleave(32, 1)
        factors = factors[: value.shape[0], : value.shape[1]]
        tensors[name] = (value.float() / factors).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    return _save(path, model, tensors, FP8)


def _mxfp4_folder(path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    tensors = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value.clone()
            continue
        experts, columns, rows = value.shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return _save(path, model, tensors, settings)


MAKERS = {"fp8": _fp8_folder, "mxfp4": _mxfp4_folder}


def _expected(path: Path) -> dict[str, Tensor]:
    """Return the parameters as transformers dequantizes them, element by element."""
    tensors = load_file(path / "model.safetensors")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made = {}
    for name, value in tensors.items():
        if name + "_scale_inv" in tensors:
            scale = tensors[name + "_scale_inv"]
            made[name] = Fp8Dequantize(None)._dequantize_one(value, scale, torch.float32)
        elif name.endswith("_blocks"):
            short = name.removesuffix("_blocks")
            scale = tensors[f"{short}_scales"]
            made[short] = convert_moe_packed_tensors(value, scale, dtype=torch.float32)
        elif not name.endswith(("_scale_inv", "_scales")):
            made[name] = value.float()
    return made


@pytest.mark.parametrize("method", MAKERS)
def test_quantized_folders_are_dequantized_as_transformers_does(
    tmp_path: Path, method: str
) -> None:
    path = MAKERS[method](tmp_path / "folder")
    with pytest.warns(UserWarning, match=f"weights in {method}"):
        bridge = AutoBridge.from_hf_pretrained(path)
        model: Any = bridge.to_model()
    expected = _expected(path)
    found = model.state_dict()
    assert set(found) == set(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert not hasattr(model.config, "quantization_config")
    # Any box, at the price of the blocks that it touches.
    for name, lazy in bridge.folder.tensors.items():
        box = Box(tuple(n // 3 for n in lazy.shape), tuple(n - n // 3 - n // 5 for n in lazy.shape))
        values = torch.empty(box.shape)
        lazy.fill(box, values)
        assert torch.equal(values, expected[name][box.slices]), name
    bridge.save_hf_pretrained(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    again = bridge.model_class.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


def test_a_quantized_folder_goes_through_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _mxfp4_folder(tmp_path / "folder")
    for kind in ("hf", "gpt"):
        commands.verify(str(path), to=kind)  # type: ignore[arg-type]
        assert "come back equal" in capsys.readouterr().out
    commands.import_(str(path), str(tmp_path / "c.ckpt"))
    expected = _expected(path)
    shutil.rmtree(path)
    commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in expected.items())


def test_what_is_no_quantized_folder_is_refused(tmp_path: Path) -> None:
    path = _fp8_folder(tmp_path / "folder")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    save_file({k: v for k, v in tensors.items() if k != name}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is in .* and has no"):
        AutoBridge.from_hf_pretrained(path).to_model()
    save_file(tensors | {name: tensors[name][:-1].clone()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="which are not those of blocks"):
        AutoBridge.from_hf_pretrained(path).to_model()
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="quantized by 'gptq', and fp8, mxfp4, compressed-tensors"
    ):
        AutoBridge.from_hf_pretrained(path).to_model()
