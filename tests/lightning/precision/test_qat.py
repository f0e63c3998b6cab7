"""Rounded weights in a training: the forward, its checkpoints, the folders of them, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.bridge.low_bit.schemes import Recipe, config_entry
from megatron_lightning.checkpoint import open_checkpoint
from megatron_lightning.config import CheckpointOptions, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Engine, load_engine
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.layers.adapters.adapter_layers import adapters_for_second_half
from megatron_lightning.models import GPTModel
from megatron_lightning.modules import (
    DistillationModule,
    DPOModule,
    GPTLightningModule,
    HuggingFaceModule,
)
from megatron_lightning.peft import LoRA, adapters_disabled
from megatron_lightning.peft.commands import export as adapters_export
from megatron_lightning.peft.commands import merge as adapters_merge
from megatron_lightning.precision import QAT
from megatron_lightning.precision.served import gemm as served_gemm
from megatron_lightning.precision.served.inputs import (
    INPUT_NAMES,
    InputName,
    rounded_inputs,
)
from megatron_lightning.precision.served.qat import qat_of, read_qat
from megatron_lightning.precision.served.values import ServedFormat, encode, fused_with
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import token_rows
from tests.helpers.trainers import trainer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*has weights in")

VOCABULARY = 67
LEFT = "**.layers.1.self_attn.o_proj"
HELIUM = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
    "num_key_value_heads", "vocab_size", "initializer_range", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistral")
    config = transformers.MistralConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY, initializer_range=0.1,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(10)
            layer.mlp.up_proj.weight.mul_(10)
    model.save_pretrained(path)
    return path


def _rows(count: int = 8) -> DataLoader[Any]:
    return DataLoader(token_rows(count, 16, VOCABULARY), batch_size=4)


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A checkpoint in bf16-mixed, and the loss of its validation."""
    path = tmp_path_factory.mktemp("qat") / "run.ckpt"
    qat = QAT("nvfp4", modules={LEFT: "bf16"})
    module = HuggingFaceModule(str(source), qat=qat, learning_rate=1e-3)
    run = trainer(max_steps=2, precision="bf16-mixed")
    run.fit(module, _rows())
    run.save_checkpoint(path)
    # In fp32, of the weights as autocast casts them before they are rounded.
    again = HuggingFaceModule(str(source), qat=qat)
    again.configure_model()
    again.load_state_dict(module.state_dict())
    for name, weight in again.named_parameters():
        if "proj" in name and "layers.1.self_attn.o_proj" not in name:
            weight.data = weight.data.bfloat16().float()
    (metrics,) = trainer().validate(again, _rows(), verbose=False)
    return path, metrics["val_loss"]


def _loss(model: Any) -> float:
    losses = []
    with torch.no_grad():
        for batch in _rows():
            logits = model(batch["tokens"]).logits
            losses.append(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
    return float(torch.stack(losses).mean())


def test_the_exported_folder_has_the_loss_of_the_trained_forward(
    trained: tuple[Path, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, loss = trained
    commands.export(str(checkpoint), str(tmp_path / "served"))
    assert "13 layers in nvfp4" in capsys.readouterr().out
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    left = "model.layers.1.self_attn.o_proj"
    assert config["quantization_config"]["ignore"] == ["lm_head", left]
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "served")
    assert _loss(bridge.to_model(dtype=torch.float32)) == pytest.approx(loss, rel=1e-5)
    commands.export(str(checkpoint), str(tmp_path / "plain"), quantize="none")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    stored = load_file(tmp_path / "served" / "model.safetensors")
    form = ServedFormat.of("nvfp4")
    for name, values in bridge.folder.tensors.items():
        path = name.removesuffix(".weight")
        if f"{path}.weight_packed" not in stored:
            continue
        parent, _, own = path.rpartition(".")
        names = [f"{parent}.{n}.weight" for n in fused_with(own)]
        parts = [plain[n].bfloat16() for n in names if n in plain and left not in n]
        amax = torch.stack([x for p in parts if (x := form.shared_amax(p)) is not None]).amax(0)
        expected = encode(plain[name].bfloat16(), form, amax).values(form)
        assert torch.equal(values.read().float(), expected), name


@pytest.mark.slow
def test_readers_of_the_checkpoint_compute_with_the_rounding(
    trained: tuple[Path, float], tmp_path: Path
) -> None:
    checkpoint, loss = trained
    commands.export(str(checkpoint), str(tmp_path / "served"))
    prompt = torch.arange(5).tolist()
    scores = [
        Engine.load(str(path)).score([prompt], [prompt[1:]])
        for path in (checkpoint, tmp_path / "served")
    ]
    assert scores[0] == scores[1]
    rounded: Any = AutoBridge.from_checkpoint(checkpoint, rounds=True).to_model(dtype=torch.float32)
    assert _loss(rounded) == pytest.approx(loss, rel=1e-5)


def test_another_rounding_at_a_resume_is_refused(trained: tuple[Path, float], source: Path) -> None:
    checkpoint, _ = trained
    for qat, found in ((None, "no qat"), ("int8", "qat=int8")):
        module = HuggingFaceModule(str(source), qat=qat)
        with pytest.raises(ConfigError, match=f"trained with qat=nvfp4.*has {found}"):
            trainer(max_steps=3).fit(module, _rows(), ckpt_path=str(checkpoint))
    again = HuggingFaceModule.load_from_checkpoint(checkpoint)
    with pytest.raises(ConfigError, match="trained with qat, and without a strategy"):
        again.save_hf_pretrained(checkpoint.parent / "unrounded")
    assert again.qat == QAT("nvfp4", modules={LEFT: "bf16"})


def test_gradients_are_those_of_the_rounded_layer_passed_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 48)))
    layer: Any = model[0][0]
    x, dy = torch.randn(3, 64, requires_grad=True), torch.randn(3, 48)
    QAT("mxfp4").apply(model)
    y = layer(x)
    form = ServedFormat.of("mxfp4")
    rounded = encode(layer.weight, form).values(form)
    assert torch.equal(y, F.linear(x, rounded, layer.bias))
    y.backward(dy)
    assert torch.equal(layer.weight.grad, dy.t() @ x.detach())
    assert torch.equal(x.grad, dy @ rounded)  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        first = encode(layer.weight.bfloat16(), form).values(form).bfloat16()
        expected = F.linear(x.bfloat16(), first, layer.bias.bfloat16())
        assert torch.equal(layer(x), expected)


class Own(pl.LightningModule):
    """A user's module, with a rounded model or without."""

    def __init__(self, qat: str | None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)))
        if qat is not None:
            QAT(qat).apply(self.model)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a loss."""
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_users_own_module_resumes_with_its_rounding(tmp_path: Path) -> None:
    data, path = DataLoader(torch.randn(8, 64), batch_size=4), str(tmp_path / "own.ckpt")
    run = trainer(MegatronStrategy(), max_steps=1)
    run.fit(Own("mxfp4"), data)
    run.save_checkpoint(path)
    with pytest.raises(ConfigError, match=r"trained with qat=mxfp4.*has no qat"):
        trainer(MegatronStrategy(), max_steps=2).fit(Own(None), data, ckpt_path=path)


def test_an_engine_rounds_what_training_rounded() -> None:
    """Weights in the recorded dtype, whatever the engine computes in."""
    torch.manual_seed(0)
    model, form = nn.Sequential(nn.Sequential(nn.Linear(64, 48))), ServedFormat.of("int4", 32)
    x, weight = torch.randn(3, 64), model[0][0].weight.detach()
    QAT("int4", 32).apply(model, rounded_as=torch.bfloat16)
    recorded = encode(weight.bfloat16(), form).values(form).float()
    assert torch.equal(model(x), F.linear(x, recorded, model[0][0].bias))
    assert not torch.equal(recorded, encode(weight, form).values(form))


@pytest.mark.spread(1)
@pytest.mark.parametrize("strategy", [None, "megatron"])
def test_rounding_begins_at_its_step_in_nested_layers(source: Path, strategy: str | None) -> None:
    """Before it, weights are those of a plain training; evaluations always round."""
    weights, losses = [], []
    for qat in (None, QAT("int8", fake_quant_after_n_steps=2), QAT("int8")):
        for steps in (2, 3):
            torch.manual_seed(0)
            module = HuggingFaceModule(str(source), qat=qat, learning_rate=1e-3)
            chosen = MegatronStrategy() if strategy else "auto"
            run = trainer(chosen, max_steps=steps)
            run.fit(module, _rows(16))
            weights.append({n: p.detach().clone() for n, p in module.named_parameters()})
            losses.append(run.validate(module, _rows(), verbose=False)[0]["val_loss"])
    plain2, plain3, late2, late3, early2, _ = weights
    assert all(torch.equal(x, late2[n]) for n, x in plain2.items())
    assert not all(torch.equal(x, early2[n]) for n, x in plain2.items())
    assert not all(torch.equal(x, late3[n]) for n, x in plain3.items())
    assert losses[2] != losses[0]


def test_a_run_rounds_each_weight_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count: list[int] = []
    original = served_gemm.encode
    monkeypatch.setattr(served_gemm, "encode", lambda *a: count.append(0) or original(*a))
    of_batch = LambdaCallback(on_train_batch_start=lambda *_: count.clear())
    results = []
    for micro_batch_size in (4, 1):
        module = HuggingFaceModule(str(source), qat="int8", learning_rate=1e-3)
        strategy = MegatronStrategy(micro_batch_size=micro_batch_size)
        run = trainer(strategy, max_steps=2, callbacks=[of_batch])
        run.fit(module, _rows())
        assert len(count) == 14
        results.append(module.model.model.layers[0].mlp.up_proj.weight.detach())
        rounding = qat_of(module)["model"].rounding
        assert rounding is not None
        assert not rounding._kept
    assert torch.allclose(*results, atol=1e-5)


def test_several_formats_are_trained_and_exported(source: Path, tmp_path: Path) -> None:
    modules = {"**.down_proj": "int4", "**.self_attn.*": "fp8_channel", "**.1.mlp.*": "bf16"}
    qat = QAT("nvfp4", group_size=32, modules=modules)
    module = HuggingFaceModule(str(source), qat=qat, learning_rate=1e-3)
    run = trainer(MegatronStrategy(), max_steps=1)
    run.fit(module, _rows())
    run.save_checkpoint(tmp_path / "run.ckpt")
    (metrics,) = run.validate(module, _rows(), verbose=False)
    commands.export(str(tmp_path / "run.ckpt"), str(tmp_path / "served"))
    config = json.loads((tmp_path / "served" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    targets = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    mlp = "model.layers.0.mlp"
    assert targets["nvfp4-pack-quantized"] == [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    assert len(targets["naive-quantized"]) == 8
    assert len(targets["pack-quantized"]) == 2  # the first pattern decides
    model: Any = AutoBridge.from_hf_pretrained(tmp_path / "served").to_model(dtype=torch.float32)
    assert _loss(model) == pytest.approx(metrics["val_loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="scheme is modelopt with"):
        commands.export(str(tmp_path / "run.ckpt"), str(tmp_path / "m"), scheme="modelopt")


@pytest.mark.slow
def test_experts_that_a_folder_stacks_are_exported_one_by_one(tmp_path: Path) -> None:
    config = transformers.Mistral4Config(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=VOCABULARY, n_routed_experts=4,
        num_experts_per_tok=2, q_lora_rank=32, kv_lora_rank=32, first_k_dense_replace=0,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Mistral4ForCausalLM(config).save_pretrained(tmp_path / "plain")
    module = HuggingFaceModule(str(tmp_path / "plain"), qat="nvfp4", learning_rate=1e-3)
    run = trainer(MegatronStrategy(), max_steps=1)
    run.fit(module, _rows())
    run.save_checkpoint(tmp_path / "run.ckpt")
    (metrics,) = run.validate(module, _rows(), verbose=False)
    commands.export(str(tmp_path / "run.ckpt"), str(tmp_path / "served"))
    stored = load_file(tmp_path / "served" / "model.safetensors")
    experts = "model.layers.0.mlp.experts"
    assert {f"{experts}.3.{n}_proj.weight_packed" for n in ("gate", "up", "down")} <= {*stored}
    assert not any(x.ndim == 3 for x in stored.values())
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "served")
    assert bridge.folder.tensors[f"{experts}.gate_up_proj"].shape == (4, 64, 64)
    assert _loss(bridge.to_model(dtype=torch.float32)) == pytest.approx(
        metrics["val_loss"], rel=1e-5
    )
    rounded: Any = AutoBridge.from_checkpoint(tmp_path / "run.ckpt", rounds=True)
    assert _loss(rounded.to_model(dtype=torch.float32)) == pytest.approx(
        metrics["val_loss"], rel=1e-5
    )


@pytest.mark.parametrize("name", [n for n in INPUT_NAMES if not ServedFormat.of(n).is_of_matrix])
def test_inputs_are_rounded_as_servers_round_them(
    source: Path, tmp_path: Path, name: InputName
) -> None:
    """By the scheme of the exported folder, in compressed-tensors."""
    torch.manual_seed(0)
    layer: Any = nn.Linear(128, 16)
    x, dy = torch.randn(2, 3, 128, requires_grad=True), torch.randn(2, 3, 16)
    QAT(name, activations=name).apply(nn.Sequential(layer))
    rounded = rounded_inputs(x, ServedFormat.of(name))
    weight = encode(layer.weight, ServedFormat.of(name)).values(ServedFormat.of(name))
    y = layer(x)
    assert torch.equal(y, F.linear(rounded, weight, layer.bias))
    y.backward(dy)
    assert torch.equal(layer.weight.grad, dy.view(-1, 16).t() @ rounded.view(-1, 128))
    assert torch.equal(x.grad, dy @ weight)  # type: ignore[arg-type]
    error = float((rounded - x).detach().norm() / x.detach().norm())
    assert error < (0.13 if name == "mxfp4" else 0.03)
    settings = config_entry({"layers.0.q_proj": Recipe.of(name, activations=name)}, [])
    quantization = pytest.importorskip("compressed_tensors.quantization")
    formats = pytest.importorskip("compressed_tensors.compressors.format")
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    config = quantization.QuantizationConfig.model_validate(settings)
    (scheme,) = config.config_groups.values()
    assert formats.infer_module_format(nn.Linear, scheme) == scheme.format
    quantized: Any = nn.Linear(128, 16)
    quantized.quantization_status = quantization.QuantizationStatus.CALIBRATION
    theirs = lifecycle.forward_quantize(quantized, x.detach(), "input", scheme.input_activations)
    # Servers divide by amax / 127, and compressed-tensors' range is -128 to 127: up to a step.
    assert torch.allclose(theirs, rounded, rtol=1e-6, atol=0.04 if name == "int8" else 1e-6)


def test_a_folder_with_rounded_inputs_returns(source: Path, tmp_path: Path) -> None:
    module = HuggingFaceModule(str(source), qat=QAT("int8", activations="int8"), learning_rate=1e-3)
    run = trainer(MegatronStrategy(), max_steps=1)
    run.fit(module, _rows())
    run.save_checkpoint(tmp_path / "run.ckpt")
    (metrics,) = run.validate(module, _rows(), verbose=False)
    commands.export(str(tmp_path / "run.ckpt"), str(tmp_path / "served"))
    stored = load_file(tmp_path / "served" / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    model: Any = AutoBridge.from_hf_pretrained(tmp_path / "served").to_model(dtype=torch.float32)
    weights_only = _loss(model)
    rounded: Any = AutoBridge.from_checkpoint(tmp_path / "run.ckpt", rounds=True)
    assert _loss(rounded.to_model(dtype=torch.float32)) == pytest.approx(weights_only, rel=1e-5)
    QAT("int8", activations="int8").apply(model)
    assert _loss(model) == pytest.approx(metrics["val_loss"], rel=1e-5)
    assert weights_only != pytest.approx(metrics["val_loss"], rel=1e-5)
    with pytest.raises(ConfigError, match=r"activations are to be in int8, and weights are in nvf"):
        commands.export(str(source), str(tmp_path / "x"), quantize="nvfp4", activations="int8")


@pytest.mark.parametrize("family", ["mistral", "helium"])
def test_an_engine_rounds_inputs_and_the_sum_with_adapters(
    source: Path, tmp_path: Path, family: str
) -> None:
    """As a GPTModel, or as the model of transformers that has no rules."""
    if family == "helium":
        settings = json.loads((source / "config.json").read_text())
        config = transformers.HeliumConfig(**{k: settings[k] for k in HELIUM})
        torch.manual_seed(0)
        transformers.HeliumForCausalLM(config).save_pretrained(tmp_path / "source")
        source = tmp_path / "source"
    checkpoint, prompt, want = str(tmp_path / "run.ckpt"), [1, 5, 9, 13], [21, 30]
    qat = QAT("mxfp8", activations="mxfp8", modules={"**.down_proj": "int8"})
    module = HuggingFaceModule(str(source), qat=qat, peft=LoRA(r=4), learning_rate=3e-2)
    run = trainer(MegatronStrategy(), max_steps=3)
    run.fit(module, _rows(12))
    run.save_checkpoint(checkpoint)
    with torch.no_grad():
        rows = module.model(torch.tensor([prompt + want[:-1]])).logits[0, -2:].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(rows, want, strict=True)]
    engine = load_engine(checkpoint)
    assert isinstance(engine, OwnGenerate) == (family == "helium")
    (score,) = engine.score([prompt], [want])
    assert score.logprobs == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ConfigError, match=r"inside of the rounding.*adapters merge"):
        load_engine(str(source), adapters=checkpoint)


def test_adapters_are_inside_the_rounding() -> None:
    """Gradients of the factors are those of autograd through the rounded sum."""
    torch.manual_seed(0)
    for num_groups in (0, 2):
        model = nn.Sequential(nn.Sequential(nn.Linear(64, 48, bias=False)))
        layer: Any = model[0][0]
        QAT("mxfp4").apply(model)
        if num_groups:  # rows of a group: 4 queries and 2 keys and values each of 3
            layer.fused_rows = (12, 6, 6)
        LoRA(r=4, lora_alpha=8).apply(model)
        factors = dict(layer.adapters.named_parameters())
        for factor in factors.values():
            nn.init.normal_(factor, std=0.1)
        x, dy = torch.randn(3, 64), torch.randn(3, 48)
        y = layer(x)
        (delta,) = _deltas(layer, num_groups)
        total = layer.weight + delta
        form = ServedFormat.of("mxfp4")
        value = total + (encode(total, form).values(form) - total).detach()
        expected = F.linear(x, value)
        assert torch.equal(y, expected)
        mine = torch.autograd.grad(y, list(factors.values()), dy)
        theirs = torch.autograd.grad(expected, list(factors.values()), dy)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)
        assert layer.weight.grad is None
        assert "weight" not in vars(layer)


def test_a_layer_keeps_one_rounded_weight() -> None:
    """Of its current adapters, also after a reference without them in the same micro-batch."""
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)))
    LoRA(r=2).apply(QAT("mxfp4").apply(model))
    rounding, x = qat_of(model)[""].rounding, torch.randn(3, 64)
    assert rounding is not None
    seen = []
    with rounding.keeping():
        for _ in range(3):
            seen.append(model(x))
            with adapters_disabled(model):
                model(x)
            for factor in model[0][0].adapters.parameters():  # type: ignore[union-attr,index]
                nn.init.normal_(factor)
        assert len(rounding._kept) == 1
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def _deltas(layer: Any, num_groups: int) -> list[torch.Tensor]:
    parts = [
        (p.lora_B.weight.float() * p.scale) @ p.lora_A.weight for p in layer.adapters.parts.values()
    ]
    if not num_groups:
        return parts
    grouped = [part.view(num_groups, -1, 64) for part in parts]
    return [torch.cat(grouped, 1).flatten(0, 1)]


CODE = """
from transformers import MistralConfig, MistralForCausalLM

class Config(MistralConfig):
    model_type = "house"

class Model(MistralForCausalLM):
    config_class = Config
"""


def _with_code(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    (target / "code.py").write_text(CODE)
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    config |= {"model_type": "house", "architectures": ["Model"]}
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", ["hf", "gpt", "code"])
def test_merged_adapters_are_the_trained_forward(
    source: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trusts = {"trust_remote_code": True} if kind == "code" else {}
    if kind == "code":
        source = _with_code(source, tmp_path / "source")
    options: dict[str, Any] = {
        "qat": QAT("int4", group_size=32), "peft": LoRA(r=4), "learning_rate": 3e-2,
    }  # fmt: skip
    module: Any = (
        GPTLightningModule(init_from_hf=str(source), **options)
        if kind == "gpt"
        else HuggingFaceModule(str(source), **options, **trusts)
    )
    also = CheckpointOptions(also_save_hf="every" if kind == "code" else None)
    run = trainer(MegatronStrategy(checkpoint_options=also), max_steps=3)
    run.fit(module, _rows(12))
    (metrics,) = run.validate(module, _rows(), verbose=False)
    path = str(tmp_path / "run.ckpt")
    run.save_checkpoint(path)
    run.strategy.save_hf_pretrained(tmp_path / "live")
    adapters_merge(path, str(tmp_path / "served"), base=str(source), **trusts)
    assert "without the rounding" not in capsys.readouterr().out
    if kind == "hf":
        adapters_merge(path, str(tmp_path / "plain"), base=str(source), dtype="float32")
        assert "is without the rounding of the training (qat=int4, group" in capsys.readouterr().out
        with pytest.raises(ConfigError, match=r"qat=int4.* inside of the rounding.*adapters merge"):
            adapters_export(path, str(tmp_path / "apart"))
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    written = ["served", "live", *(["run.ckpt/hugging_face"] if kind == "code" else [])]
    for folder in written:
        bridge = AutoBridge.from_hf_pretrained(tmp_path / folder, **trusts)
        model: Any = bridge.to_model(dtype=torch.float32)
        assert _loss(model) == pytest.approx(metrics["val_loss"], rel=1e-5), folder


def test_a_gpt_merged_into_its_base_rounds_as_the_adapters_did(tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    config = TransformerConfig(**sizes, vocab_size=VOCABULARY, max_sequence_length=16)  # type: ignore[arg-type]
    losses = {}
    for name, options in {
        "base": {"learning_rate": 0.0},
        "adapted": {"learning_rate": 3e-2, "peft": LoRA(r=4), "qat": QAT("mxfp4")},
    }.items():
        torch.manual_seed(0)
        module = GPTLightningModule(config, **options)  # type: ignore[arg-type]
        run = trainer(MegatronStrategy(), max_steps=2)
        run.fit(module, _rows())
        (losses[name],) = run.validate(module, _rows(), verbose=False)
        run.save_checkpoint(tmp_path / name)
    base, merged = str(tmp_path / "base"), str(tmp_path / "merged")
    adapters_merge(str(tmp_path / "adapted"), merged, base=base)
    module = GPTLightningModule.load_from_checkpoint(merged)
    assert module.qat == QAT("mxfp4")
    assert read_qat(open_checkpoint(merged).state())["model"].qat == module.qat
    (metrics,) = trainer().validate(module, _rows(), verbose=False)
    assert metrics["val_loss"] == pytest.approx(losses["adapted"]["val_loss"], rel=1e-5)


def test_a_reference_in_half_of_the_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without gradients, where the rows of the reference would be those of the policy."""
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)))
    LoRA(r=2).apply(QAT("mxfp4").apply(model))
    half = pytest.raises(ConfigError, match="half of the rows here are those of a reference")
    with torch.no_grad(), adapters_for_second_half(model, 0), half:
        model(torch.randn(2, 3, 64))
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    config = TransformerConfig(**sizes, max_sequence_length=16)  # type: ignore[arg-type]
    policy = GPTLightningModule(config, peft=LoRA(r=2), qat="mxfp4")
    DPOModule(policy).configure_model()  # on one pipeline rank, where the reference is a call
    monkeypatch.setattr(DPOModule, "num_pipeline_ranks", 2)
    with pytest.raises(ConfigError, match=r"on 2 pipeline ranks.*qat adds adapters to the weight"):
        DPOModule(policy).configure_model()


def test_distillation_rounds_the_student_alone(source: Path, tmp_path: Path) -> None:
    student = HuggingFaceModule(str(source), qat="nvfp4", learning_rate=1e-2)
    module = DistillationModule(student, HuggingFaceModule(str(source)))
    run = trainer(MegatronStrategy(), max_steps=2)
    run.fit(module, _rows())
    (path,) = qat_of(module)
    pair: Any = module.model
    assert module.get_submodule(path) is pair.trained
    run.save_checkpoint(tmp_path / "run.ckpt")
    commands.export(str(tmp_path / "run.ckpt"), str(tmp_path / "served"), model=path)
    served: Any = AutoBridge.from_hf_pretrained(tmp_path / "served").to_model(dtype=torch.float32)
    with torch.no_grad():
        tokens = torch.arange(12).view(1, 12)
        expected = pair.trained(tokens).logits
        teacher = AutoBridge.from_hf_pretrained(source).to_model(dtype=torch.float32)
        frozen = next(m for n, m in pair.named_children() if n != "trained")
        assert torch.allclose(served(tokens).logits, expected, atol=1e-5)
        assert torch.allclose(frozen(tokens).logits, teacher(tokens).logits, atol=1e-5)
    with pytest.raises(ConfigError, match="the teacher has qat=nvfp4"):
        DistillationModule(HuggingFaceModule(str(source)), student)


def test_what_cannot_be_rounded_is_refused(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nvfp5'.*Set one of nvfp4"):
        HuggingFaceModule(str(source), qat="nvfp5")  # type: ignore[arg-type]
    for option in ({"lora_dropout": 0.1}, {"base": "nvfp4"}, {"use_dora": True}):
        (name,) = option
        with pytest.raises(ConfigError, match=f"{name} of LoRA is .* beside qat"):
            HuggingFaceModule(str(source), qat="nvfp4", peft=LoRA(r=2, **option))  # type: ignore[arg-type]
    adapted = LoRA(r=2).apply(nn.Sequential(nn.Sequential(nn.Linear(64, 64))))
    with pytest.raises(ConfigError, match="Apply it before LoRA"):
        QAT("mxfp4").apply(adapted)
    with pytest.raises(ConfigError, match=r"gives '\*\*.o_proj' the value 'int9'.*bf16, nvfp4"):
        QAT(modules={"**.o_proj": "int9"})
    with pytest.raises(ConfigError, match=r"k_proj in int8 and .*q_proj in nvfp4|q_proj in nvfp4"):
        HuggingFaceModule(str(source), qat=QAT(modules={"**.k_proj": "int8"})).configure_model()
    with pytest.raises(ConfigError, match="fake_quant_after_n_steps of qat is -1"):
        QAT(fake_quant_after_n_steps=-1)
    with pytest.raises(ConfigError, match=r"match no module of .*'\*\*.oo_proj'"):
        HuggingFaceModule(str(source), qat=QAT(modules={"**.oo_proj": "bf16"})).configure_model()
    with pytest.raises(ConfigError, match=r"rows of 64 values.*group_size 64"):
        HuggingFaceModule(str(source), qat="int4").configure_model()
    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    config = TransformerConfig(**sizes, max_sequence_length=16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"linear_qkv.*lie between one another"):
        QAT("fp8_block").apply(GPTModel(config))
    assert GPTLightningModule(config, qat="fp8_channel").hparams["qat"]["weights"] == "fp8_channel"
