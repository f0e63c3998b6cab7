"""Folders with scales of inputs, keys and values, by the statistics of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.bridge.low_bit import fixed_scales
from megatron_lightning.bridge.low_bit.schemes import Recipe, config_entry
from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.callbacks.statistics.sums import Division, LayerSums
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.parallel.grid.context import ALONE
from megatron_lightning.precision.served.input_scales import input_scale
from megatron_lightning.precision.served.inputs import InputName, rounded_inputs
from megatron_lightning.precision.served.values import ServedFormat
from tests.helpers.gpt_folders import make_folder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*has weights in")

TOKENS = torch.randint(0, 67, (2, 20), generator=torch.Generator().manual_seed(4))
SIZES = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16}


def take_statistics(folder: Path, path: Path, moments: bool = False) -> None:
    model: Any = AutoBridge.from_hf_pretrained(folder).to_model("gpt").eval()
    blocks = {f"decoder.layers.{n}": layer for n, layer in model.decoder.layers.items()}
    sums = LayerSums(blocks, "", Division(ALONE, False, {}))
    sums.takes_moments = moments
    with torch.no_grad():
        model(TOKENS)
    sums.close()
    Statistics(sums.entries, path).save(path)


def _stored(path: Path) -> dict[str, Tensor]:
    return {k: x for file in path.glob("*.safetensors") for k, x in load_file(file).items()}


def _largest(folder: Path) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """The amax of the inputs of a model of transformers, and of its cache, layer by layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[str, float] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(
                lambda _, args, path=path: found.__setitem__(path, float(args[0].abs().max()))
            )
    with torch.no_grad():
        cache = model(TOKENS, use_cache=True).past_key_values
    cached = [(float(x.keys.abs().max()), float(x.values.abs().max())) for x in cache.layers]
    return found, cached


def test_scales_are_those_of_the_inputs_and_of_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder("llama", tmp_path, **SIZES)
    take_statistics(folder, tmp_path / "file")
    inputs, cached = _largest(folder)
    for scheme, name in (
        ("compressed-tensors", "nvfp4"), ("modelopt", "nvfp4"),
        ("compressed-tensors", "fp8_tensor"), ("modelopt", "fp8_tensor"),
    ):  # fmt: skip
        out, form = tmp_path / f"{scheme}-{name}", ServedFormat.of(name)
        commands.export(
            str(folder), str(out), quantize=name, scheme=scheme, activations=name,  # type: ignore[arg-type]
            statistics=str(tmp_path / "file"), kv_cache="fp8", dtype="bfloat16",
        )  # fmt: skip
        printed = capsys.readouterr().out
        assert "inputs of 14 layers" in printed
        assert "Keys and values of 2 layers" in printed
        stored = _stored(out)
        layers = [path for path in inputs if path != "lm_head"]
        key = "input_global_scale" if scheme != "modelopt" and name == "nvfp4" else "input_scale"
        for path in layers:
            own = stored[f"{path}.{key}"]
            scale = float(own.reciprocal() if key == "input_global_scale" else own)
            assert scale == float(input_scale(torch.tensor(inputs[path]), form)), path
            largest = scale * (448.0 * 6.0 if name == "nvfp4" else 448.0)
            assert largest / 2 < inputs[path] * (1 + 1e-5) <= largest * (1 + 2e-5)
        for number, both in enumerate(cached):
            attention = f"model.layers.{number}.self_attn"
            for own, amax in zip("kv", both, strict=True):
                place = f"{attention}.{own}_proj" if scheme == "modelopt" else attention
                scale = float(stored[f"{place}.{own}_scale"])
                assert scale * 224.0 < amax * (1 + 1e-5) <= scale * 448.0 * (1 + 2e-5)
        settings = json.loads((out / "config.json").read_text())["quantization_config"]
        assert settings["kv_cache_scheme"]["num_bits"] == 8
        if scheme == "modelopt":
            assert settings["quant_algo"] == ("NVFP4" if name == "nvfp4" else "FP8")
            own_file = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
            assert own_file["kv_cache_quant_algo"] == "FP8"
    values = [
        AutoBridge.from_hf_pretrained(tmp_path / f"{scheme}-fp8_tensor").folder.tensors
        for scheme in ("compressed-tensors", "modelopt")
    ]
    assert all(torch.equal(x.read(), values[1][name].read()) for name, x in values[0].items())
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    converter = converters.ModelOptNvfp4Converter(ignore=["lm_head"], targets=["re:.*proj$"])
    own = {k: x for k, x in _stored(tmp_path / "modelopt-nvfp4").items() if k[-8:] not in KV}
    expected = _stored(tmp_path / "compressed-tensors-nvfp4")
    converted = converter.process(own)
    assert {*converted} == {k for k in expected if k[-8:] not in KV}
    assert all(torch.equal(x.view(expected[k].shape), expected[k]) for k, x in converted.items())
    for name in ("nvfp4", "fp8_tensor"):
        out = tmp_path / f"compressed-tensors-{name}"
        settings = json.loads((out / "config.json").read_text())["quantization_config"]
        quantization.QuantizationConfig.model_validate(settings)
        dequantized = transformers.AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32,
            quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        )  # fmt: skip
        ours: Any = AutoBridge.from_hf_pretrained(out).to_model(dtype=torch.float32)
        assert torch.equal(
            dequantized.model.layers[0].mlp.up_proj.weight, ours.model.layers[0].mlp.up_proj.weight
        )


def _logits(folder: Path) -> Tensor:
    model: Any = AutoBridge.from_hf_pretrained(folder).to_model(dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    return logits


def test_codes_by_second_moments_lose_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder("qwen3-moe", tmp_path, **SIZES)
    take_statistics(folder, tmp_path / "file", moments=True)
    take_statistics(folder, tmp_path / "without")
    options: dict[str, Any] = {"quantize": "int4", "group_size": 32, "dtype": "bfloat16"}
    gptq: dict[str, Any] = {**options, "scales": "gptq"}
    commands.export(str(folder), str(tmp_path / "max"), **options)
    capsys.readouterr()
    found = str(tmp_path / "file")
    with mock.patch.object(fixed_scales, "factor", wraps=fixed_scales.factor) as factored:
        commands.export(str(folder), str(tmp_path / "gptq"), statistics=found, **gptq)
    # Once for q, k and v, the output, gate and up, down; the second layer has experts.
    assert factored.call_count == 4 + 2
    assert "12 layers without second moments, such as experts" in capsys.readouterr().out
    expected = _logits(folder)
    errors = [float((_logits(tmp_path / n) - expected).square().mean()) for n in ("max", "gptq")]
    assert errors[1] < 0.9 * errors[0]
    with pytest.raises(ConfigError, match="scales gptq: an evaluation finds them"):
        commands.export(str(folder), str(tmp_path / "x"), **gptq)
    with pytest.raises(CheckpointError, match=r"LayerStatistics\(path, second_moments=True\)"):
        commands.export(
            str(folder), str(tmp_path / "x"), statistics=str(tmp_path / "without"), **gptq
        )
    with pytest.raises(ConfigError, match="scales is gptq with nvfp4"):
        commands.export(str(folder), str(tmp_path / "x"), quantize="nvfp4", scales="gptq")


def test_second_moments_are_exact_under_autocast() -> None:
    block = nn.Sequential(nn.Linear(16, 16))
    x = torch.randn(32, 4, 16, generator=torch.Generator().manual_seed(0)) + 100.0
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # 100^2 x 128 overflows fp16
        sums = LayerSums({"decoder.layers.0": block}, "", Division(ALONE, False, {}))
        sums.takes_moments = True
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            block(x)
        sums.close()
        found[dtype] = sums.entries["decoder.layers.0.0/moments"]
    assert all(torch.equal(x, found[torch.float32]) for x in found.values())


KV = (".k_scale", ".v_scale")


@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensor"])
def test_inputs_are_rounded_as_servers_round_them(name: InputName) -> None:
    """By the scheme of the folder, in compressed-tensors. Larger values saturate."""
    generator = torch.Generator().manual_seed(0)
    x, form = torch.randn(2, 3, 64, generator=generator), ServedFormat.of(name)
    amax = x.abs().max() * 0.8
    scale = input_scale(amax, form)
    quantization = pytest.importorskip("compressed_tensors.quantization")
    formats = pytest.importorskip("compressed_tensors.compressors.format")
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    settings = config_entry({"layers.0.q_proj": Recipe.of(name, activations=name)}, [])
    (scheme,) = quantization.QuantizationConfig.model_validate(settings).config_groups.values()
    assert formats.infer_module_format(nn.Linear, scheme) == scheme.format
    layer: Any = nn.Linear(64, 8)
    layer.quantization_status = quantization.QuantizationStatus.CALIBRATION
    if name == "nvfp4":
        layer.input_global_scale = nn.Parameter(scale.reciprocal().reshape(1), requires_grad=False)
    else:
        layer.input_scale = nn.Parameter(scale.reshape(1), requires_grad=False)
    theirs = lifecycle.forward_quantize(layer, x, "input", scheme.input_activations)
    ours = rounded_inputs(x, form, amax.reshape(1, 1))
    assert torch.equal(theirs, ours)
    assert float((ours - x).norm() / x.norm()) < 0.15


def test_experts_without_tokens_have_the_largest_scale_of_their_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder("qwen3-moe", tmp_path, **SIZES)
    take_statistics(folder, tmp_path / "file")
    found = Statistics.load(tmp_path / "file")
    # As if no token had reached expert 2, and few of expert 1.
    for layer in ("linear_fc1", "linear_fc2"):
        amax = found.entries[f"decoder.layers.1.mlp.experts.{layer}/amax"]
        assert tuple(amax.shape) == (4,) and bool((amax > 0).any())
        amax.copy_(torch.tensor([3.0, 0.01, 0.0, 24.0]))
    found.save(tmp_path / "file")
    options: dict[str, Any] = {"quantize": "nvfp4", "activations": "nvfp4", "dtype": "bfloat16"}
    commands.export(
        str(folder), str(tmp_path / "out"), statistics=str(tmp_path / "file"), **options
    )
    printed = capsys.readouterr().out
    assert "3 matrices of experts that no token reached have the largest" in printed
    stored = _stored(tmp_path / "out")
    experts = "model.layers.1.mlp.experts"
    for name in ("gate_proj", "up_proj", "down_proj"):
        scales = [float(stored[f"{experts}.{e}.{name}.input_global_scale"]) for e in range(4)]
        assert scales[2] == scales[3] < scales[0] < scales[1]
    every = [x for name, x in stored.items() if name.endswith("scale")]
    assert all(bool((x.float() > 0).all() & x.float().isfinite().all()) for x in every)
    for layer in ("linear_fc1", "linear_fc2"):
        found.entries[f"decoder.layers.1.mlp.experts.{layer}/amax"].zero_()
    found.save(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj and 11 more have no scale"):
        commands.export(
            str(folder), str(tmp_path / "x"), statistics=str(tmp_path / "none"), **options
        )


def test_what_has_no_statistics_says_how_to_take_them(tmp_path: Path) -> None:
    folder, export = str(make_folder("llama", tmp_path, **SIZES)), commands.export
    out = str(tmp_path / "out")
    with pytest.raises(
        ConfigError, match=r"activations nvfp4: an evaluation finds.*--statistics FILE"
    ):
        export(folder, out, quantize="nvfp4", activations="nvfp4")
    with pytest.raises(ConfigError, match=r"kv_cache fp8: .*LayerStatistics"):
        export(folder, out, quantize="int8", kv_cache="fp8")
    with pytest.raises(ConfigError, match="none of them is set"):
        export(folder, out, quantize="mxfp8", activations="mxfp8", statistics="file")
    with pytest.raises(ConfigError, match="and quantize is None"):
        export(folder, out, statistics="file")
    Statistics({}, tmp_path / "empty").save(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="has none for amax"):
        export(folder, out, quantize="int8", kv_cache="fp8", statistics=str(tmp_path / "empty"))
    latent = make_folder("deepseek-v2-lite", tmp_path, **SIZES)
    with pytest.raises(ConfigError, match="latent attention keeps one tensor"):
        export(
            str(latent), out, quantize="fp8_channel", kv_cache="fp8",
            statistics=str(tmp_path / "empty"),
        )  # fmt: skip
