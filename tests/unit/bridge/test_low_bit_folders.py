"""Folders in few bits: what another library reads, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.parallel.shards.spec import Box
from megatron_lightning.precision.quantization import dequantize, quantize
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.precision.served.trained_codes import SCALINGS
from megatron_lightning.precision.served.values import NAMES, ServedFormat, encode
from tests.helpers.gpt_folders import make_folder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*has weights in")

TRIED = [(name, "compressed-tensors") for name in NAMES] + [("nvfp4", "modelopt")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama whose fused weights differ tenfold, with rows that are no multiple of 128."""
    path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=128, intermediate_size=384, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=67, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(10)
            layer.mlp.up_proj.weight.mul_(10)
            layer.mlp.down_proj.weight[3] = 0.0
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    parent = tmp_path_factory.mktemp("served")
    made = {}
    for name, scheme in TRIED:
        made[name, scheme] = parent / f"{name}-{scheme}"
        commands.export(
            str(source), str(made[name, scheme]), quantize=name, scheme=scheme  # type: ignore[arg-type]
        )  # fmt: skip
    return made


def _weights(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def _settings(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((path / "config.json").read_text())
    return settings["quantization_config"]  # type: ignore[no-any-return]


def _layers(tensors: Mapping[str, Tensor]) -> list[str]:
    return [n.removesuffix(".weight_scale") for n in tensors if n.endswith(".weight_scale")]


@pytest.mark.parametrize("name", NAMES)
def test_compressed_tensors_reads_the_values_that_we_read(
    source: Path, folders: dict[tuple[str, str], Path], name: str
) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    path = folders[name, "compressed-tensors"]
    config = quantization.QuantizationConfig.model_validate(_settings(path))
    (scheme,) = config.config_groups.values()
    assert compressors.format.infer_module_format(nn.Linear, scheme) == scheme.format
    reader = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    stored, plain = _weights(path), _weights(source)
    ours = AutoBridge.from_hf_pretrained(path).folder.tensors
    assert len(_layers(stored)) == 14
    for layer in _layers(stored):
        parts = {n.removeprefix(f"{layer}."): x for n, x in stored.items() if n.startswith(layer)}
        theirs = reader.decompress(parts, scheme)["weight"].float()
        assert torch.equal(theirs, ours[f"{layer}.weight"].read().float()), layer
        assert torch.equal(theirs, theirs.bfloat16().float()), layer
        error = (theirs - plain[f"{layer}.weight"]).norm() / plain[f"{layer}.weight"].float().norm()
        assert error < (0.13 if "4" in name else 0.03), layer


def test_transformers_dequantizes_the_folder(folders: dict[tuple[str, str], Path]) -> None:
    pytest.importorskip("compressed_tensors")
    for name in ("nvfp4", "int8", "fp8_block"):
        path = folders[name, "compressed-tensors"]
        settings = transformers.CompressedTensorsConfig(dequantize=True)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            path, quantization_config=settings, dtype=torch.float32
        )
        ours: Any = AutoBridge.from_hf_pretrained(path).to_model(dtype=torch.float32)
        tokens = torch.arange(12).view(1, 12)
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits), name


def test_both_schemes_have_equal_values(folders: dict[tuple[str, str], Path]) -> None:
    first, second = (folders["nvfp4", scheme] for scheme in ("compressed-tensors", "modelopt"))
    values = [AutoBridge.from_hf_pretrained(path).folder.tensors for path in (first, second)]
    for name, x in values[0].items():
        assert torch.equal(x.read(), values[1][name].read()), name
    own = json.loads((second / "hf_quant_config.json").read_text())["quantization"]
    assert own["quant_algo"] == _settings(second)["quant_algo"] == "W4A16_NVFP4"
    assert own["exclude_modules"] == _settings(first)["ignore"] == ["lm_head"]
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    stored = _weights(second)
    converter = converters.ModelOptNvfp4Converter(ignore=["lm_head"], targets=["re:.*proj$"])
    converted = converter.process(dict(stored))
    expected = _weights(first)
    assert {*converted} == {*expected}
    assert all(torch.equal(converted[n].view(x.shape), x) for n, x in expected.items())


def test_fused_matrices_share_an_outer_scale(
    source: Path, folders: dict[tuple[str, str], Path]
) -> None:
    groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    for name, key in (("nvfp4", "weight_global_scale"), ("fp8_tensor", "weight_scale")):
        stored = _weights(folders[name, "compressed-tensors"])
        for group, part in zip(groups, ("self_attn", "mlp"), strict=True):
            scales = {float(stored[f"model.layers.0.{part}.{n}.{key}"]) for n in group}
            assert len(scales) == 1, (name, group)
            (scale,) = scales
            assert scale == 2.0 ** round(torch.tensor(scale).log2().item())
    # The small matrix of a group is rounded to the codes of the large one's scale.
    stored = _weights(folders["nvfp4", "compressed-tensors"])
    q, k = (f"model.layers.0.self_attn.{n}_proj.weight" for n in "qk")
    assert stored[f"{q}_scale"].float().max() < stored[f"{k}_scale"].float().max() / 4
    assert _weights(source)[q].abs().max() < _weights(source)[k].abs().max() / 4


@pytest.mark.parametrize("name", NAMES)
def test_any_box_is_read_and_a_second_export_has_equal_values(
    folders: dict[tuple[str, str], Path], name: str, tmp_path: Path
) -> None:
    path = folders[name, "compressed-tensors"]
    tensors = AutoBridge.from_hf_pretrained(path).folder.tensors
    for weight, lazy in tensors.items():
        box = Box(tuple(n // 3 for n in lazy.shape), tuple(n - n // 3 - n // 5 for n in lazy.shape))
        assert torch.equal(lazy.read(box), lazy.read()[box.slices]), weight
    commands.export(str(path), str(tmp_path / "again"), quantize=name)  # type: ignore[arg-type]
    again = AutoBridge.from_hf_pretrained(tmp_path / "again").folder.tensors
    assert all(torch.equal(again[weight].read(), x.read()) for weight, x in tensors.items())


def test_a_second_rounding_by_the_same_scales_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    for name, fit in [(n, f) for n in NAMES for f in ("max", "mse")] + [("nvfp4", "4over6")]:
        form = ServedFormat.of(name, 32 if name == "int4" else None)
        weight = torch.randn(64, 128, generator=generator)
        weight[3] *= 9.0
        values = encode(weight.bfloat16(), form, fit=fit).values(form)  # type: ignore[arg-type]
        again = encode(values.bfloat16(), form, fit=fit).values(form)  # type: ignore[arg-type]
        assert torch.equal(again, values), (name, fit)


def test_a_folder_comes_back_through_a_checkpoint_in_bf16(
    folders: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    path = folders["nvfp4", "modelopt"]
    commands.import_(str(path), str(tmp_path / "c.ckpt"))
    commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "plain"))
    commands.export(str(path), str(tmp_path / "direct"), quantize="none")
    commands.compare(str(tmp_path / "plain"), str(tmp_path / "direct"))
    commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "again"), quantize="nvfp4")
    values = AutoBridge.from_hf_pretrained(tmp_path / "again").folder.tensors
    plain = _weights(tmp_path / "plain")
    assert all(torch.equal(values[name].read(), x) for name, x in plain.items())
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()


def test_every_expert_is_quantized_and_no_router(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("moe_intermediate_size", "intermediate_size", "head_dim")
    path = make_folder("qwen3-moe", tmp_path, **dict.fromkeys(sizes, 32))
    commands.export(str(path), str(tmp_path / "out"), quantize="mxfp8", dtype="bfloat16")
    stored = _weights(tmp_path / "out")
    experts = [layer for layer in _layers(stored) if ".experts." in layer]
    assert len(experts) == 4 * 3
    ignored = _settings(tmp_path / "out")["ignore"]
    assert ignored == ["lm_head", "model.layers.1.mlp.gate"]
    assert "lm_head, model.layers.1.mlp.gate" in capsys.readouterr().out
    linears = {name.removesuffix(".weight") for name, x in stored.items() if x.ndim == 2}
    left = {n for n in linears if f"{n}.weight_scale" not in stored and "_scale" not in n}
    assert left - {"model.embed_tokens"} == {*ignored}


def test_a_search_of_scales_errs_less(source: Path) -> None:
    weight = _weights(source)["model.layers.0.mlp.down_proj.weight"].float()
    weight[0, ::7] *= 9.0
    for name in NAMES:
        form = ServedFormat.of(name)
        errors = [
            (encode(weight, form, fit=fit).values(form) - weight).square().mean()
            for fit in ("max", "mse")
        ]
        assert errors[1] <= errors[0], name
        if name in ("nvfp4", "int4"):
            assert errors[1] < 0.95 * errors[0], name
    nvfp4 = ServedFormat.of("nvfp4")
    first, second = (encode(weight, nvfp4, fit=fit) for fit in ("max", "4over6"))
    blocks = [(x.values(nvfp4) - weight).square().view(-1, 16).sum(1) for x in (first, second)]
    assert blocks[1].sum() < 0.9 * blocks[0].sum()
    assert torch.equal(second.values(nvfp4), second.values(nvfp4).bfloat16().float())
    largest = second.codes.abs().view(-1, 16).amax(1)
    assert {*largest.unique().tolist()} == {0.0, 4.0, 6.0}  # a row of zeros


def test_a_training_in_8_bits_has_the_codes_of_its_export(source: Path) -> None:
    weight = _weights(source)["model.layers.0.mlp.down_proj.weight"].float()
    for name, scaling in (("fp8_block", "blockwise"), ("mxfp8", "mxfp8")):
        data, scales = quantize(weight, FP8Recipe(scaling=scaling), "weight")  # type: ignore[arg-type]
        own = encode(weight, ServedFormat.of(name))
        assert torch.equal(data.float(), own.codes), name
        assert torch.equal(scales.float(), own.scales), name  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [*SCALINGS])
def test_a_training_by_a_recipe_exports_its_own_codes(
    source: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of fused matrices in blocks: 16 divides the heads, and 128 does not."""
    recipe = FP8Recipe(scaling=SCALINGS[name])  # type: ignore[index]
    checkpoint, out = str(tmp_path / "c.ckpt"), tmp_path / "out"
    commands.import_(str(source), checkpoint, to="gpt")
    export: Any = partial(commands.export, quantize=name, scales="trained")
    if name == "fp8_block":
        with pytest.raises(ConfigError, match=r"scales are of 128 rows.* in parts of 32"):
            export(checkpoint, str(out))
        export(str(source), str(out))
    else:
        export(checkpoint, str(out))
    assert f"scaling={SCALINGS[name]}) with its defaults" in capsys.readouterr().out  # type: ignore[index]
    if name in ("nvfp4", "fp8_tensor"):
        with pytest.raises(ConfigError, match=r"up_proj were trained with a scale each"):
            export(str(source), str(tmp_path / "x"))
    own = AutoBridge.from_hf_pretrained(source).to_model("gpt")
    qkv: Any = own.get_submodule("decoder.layers.0.self_attention.linear_qkv")
    parts = _weights(source)
    ours = AutoBridge.from_hf_pretrained(out).folder.tensors
    down = "model.layers.0.mlp.down_proj.weight"
    q = "model.layers.0.self_attn.q_proj.weight"
    for path, weight in ((down, parts[down]), (q, qkv.weight)):
        if path == q and name == "fp8_block":
            weight = parts[q]
        value = dequantize(
            *quantize(weight.detach().bfloat16(), recipe, "weight"), recipe, "weight"
        )
        if path == q and weight is not parts[q]:  # 4 heads in 2 groups of 2, with a key and a value
            value = value.view(2, 4, 32, 128)[:, :2].reshape(128, 128)
        torch.testing.assert_close(
            ours[path].read().float(), value.bfloat16().float(), rtol=2e-2 * 0.25, atol=0.0
        )
    stored = _weights(out)
    if name == "nvfp4":
        scales = stored["model.layers.0.mlp.down_proj.weight_scale"].view(torch.uint8)
        assert torch.equal(scales[::16].repeat_interleave(16, 0), scales)


def test_what_cannot_be_written_is_refused(source: Path, tmp_path: Path) -> None:
    export: Any = commands.export
    out = str(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"'nvfp5'.*Set one of nvfp4, mxfp4"):
        export(str(source), out, quantize="nvfp5")
    with pytest.raises(ConfigError, match="scheme is modelopt with int4"):
        export(str(source), out, quantize="int4", scheme="modelopt")
    with pytest.raises(ConfigError, match="group_size is 48 with int4"):
        export(str(source), out, quantize="int4", group_size=48)
    with pytest.raises(ConfigError, match=r"group_size.*and quantize is None"):
        export(str(source), out, group_size=32)
    with pytest.raises(ConfigError, match="scales is 4over6 with mxfp4"):
        export(str(source), out, quantize="mxfp4", scales="4over6")
    with pytest.raises(ConfigError, match="scales is trained with int4, which no recipe"):
        export(str(source), out, quantize="int4", scales="trained")
    with pytest.raises(ConfigError, match="like is 'x'"):
        export(str(source), out, like="x")
    narrow = make_folder("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"as in \d+ other layers.*multiple of 32.*fp8_channel"):
        export(str(narrow), out, quantize="mxfp8")
    with pytest.raises(ConfigError, match="no linear layer in its blocks"):
        export(str(make_folder("gpt2", tmp_path)), out, quantize="int8")
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.model.layers[1].mlp.up_proj.weight.data[2, 5] = torch.inf
    model.save_pretrained(tmp_path / "inf")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp.*NaN or infinite"):
        export(str(tmp_path / "inf"), out, quantize="nvfp4")
    assert not Path(out).exists()
