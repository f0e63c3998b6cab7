"""Maximal updates: factors as of ``mup`` 1.0.0, and the coordinate check.

The oracle holds factors of learning rates and weight decays that MuAdamW and MuSGD give a small
transformer at several widths, and the standard deviations of ``mup.init.normal_``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from benchmarks.maximal_update import change_slopes
from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import MaximalUpdate, base_shapes, make_param_groups, scale_eps
from megatron_lightning.optim.maximal_update import GroupScaling, Scaling, scale_of
from tests.helpers.layouts import tiny_config

ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "mup.json").read_text())
NAMES = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.layers.0.input_layernorm.weight",
    "qkv.weight": "decoder.layers.0.self_attention.linear_qkv.weight",
    "proj.bias": "decoder.layers.0.self_attention.linear_proj.bias",
    "fc1.weight": "decoder.layers.0.mlp.linear_fc1.weight",
    "fc2.weight": "decoder.layers.0.mlp.linear_fc2.weight",
    "out.weight": "output_layer.weight",
}


def config(width: int = 64, **options: Any) -> TransformerConfig:
    return tiny_config(
        hidden_size=width,
        num_attention_heads=width // 16,
        num_query_groups=width // 32,
        ffn_hidden_size=2 * width,
        **options,
    )


class Net(nn.Module):
    """The oracle's model."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.out = nn.Linear(width, 100, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.proj(self.qkv(self.norm(x)).chunk(3, -1)[2])
        return self.out(x + self.fc2(self.fc1(x).relu()))


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("case", ORACLE["cases"], ids=["256", "512", "wide"])
def test_factors_are_those_of_mup(case: Any, kind: Any) -> None:
    inner, width = case["shapes"]["fc1.weight"]
    with torch.device("meta"):
        growth = base_shapes(Net(width, inner), Net(64, 256))
    for name, expected in case[kind].items():
        scale = scale_of(growth[name], kind)  # with mup's readout, which divides its input
        assert (scale.lr, scale.weight_decay) == (expected["lr"], expected["weight_decay"]), name
    assert case["output_divided_by"] == width / 64
    if inner == 4 * width:  # GPTModel's names
        model = config(width)
        scaling = Scaling(MaximalUpdate(base_width=64), width=width / 64)
        for name, own in NAMES.items():
            scale = scaling.scale(own, len(case["shapes"][name]), kind)
            assert scale.lr == case[kind][name]["lr"], name
        scaled = MaximalUpdate(base_width=64).scaled(model)
        assert scaled.logits_scaling == case["output_divided_by"]


def test_initial_values() -> None:
    rule, std = MaximalUpdate(base_width=64), 0.02
    model = GPTModel(config(256, num_layers=2, init_method_std=std), rule)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert not values["output_layer.weight"].any()
    assert values["embedding.word_embeddings.weight"].std() == pytest.approx(std, rel=0.05)
    factor = ORACLE["cases"][0]["std"]["fc1"]
    found = values["decoder.layers.0.mlp.linear_fc1.weight"].std()
    assert found == pytest.approx(std * factor, rel=0.05)
    qkv = values["decoder.layers.1.self_attention.linear_qkv.weight"].view(8, 4, 16, 256)
    assert not qkv[:, :2].any() and qkv[:, 2:].all()  # of each group: two queries, key, value
    tied = GPTModel(
        config(256, share_embeddings_and_output_weights=True, init_method_std=std), rule
    )
    assert tied.output_layer.weight.detach().std() == pytest.approx(std, rel=0.05)


def test_groups_have_the_factors_of_their_parameters() -> None:
    rule = MaximalUpdate(base_width=64)
    module = GPTLightningModule(config(256), maximal_update=rule, eps=1e-8)
    module.configure_model()
    assert module.config.logits_scaling == 4.0
    names = {id(p): name for name, p in module.named_parameters()}
    groups = module._optimizer().param_groups
    assert {group["name"] for group in groups} == {
        f"{row}/{scale}"
        for row in ("default", "no_decay")
        for scale in ("eps x0.25", "lr x0.25, wd x4, eps x0.25")
    }
    for group in groups:
        for parameter in group["params"]:
            is_hidden = ".layers." in names[id(parameter)] and parameter.dim() > 1
            assert group["lr"] == 3e-4 * (0.25 if is_hidden else 1.0)
            assert group["eps"] == 1e-8 * 0.25
            decay = 0.1 if parameter.dim() > 1 else 0.0
            assert group["lr"] * group["weight_decay"] == pytest.approx(3e-4 * decay)
    # A rank without hidden matrices has the same groups, some of them empty.
    scaling = GroupScaling(Scaling.of(module, rule), torch.optim.AdamW)
    stage = nn.ModuleDict({"embedding": module.model.embedding})
    assert [g["name"] for g in make_param_groups(stage, lr=3e-4, scaling=scaling)] == [
        group["name"] for group in groups
    ]
    chain = {
        "class_path": "ChainedOptimizer",
        "init_args": {
            "optimizers": [
                {"class_path": "Muon", "init_args": {"adjust_lr_fn": "match_rms_adamw"}},
                {"class_path": "SGD", "init_args": {"lr": 0.1}},
            ]
        },
    }
    other = GPTLightningModule(config(256), maximal_update=rule, optimizer=chain)
    other.configure_model()
    rates = {group["name"]: group["lr"] for group in other._optimizer().param_groups}
    assert rates["Muon/default/lr x0.5, wd x2"] == 3e-4 / 2  # spectral norms of one size
    assert rates["SGD/default/lr x4, wd x0.25"] == pytest.approx(0.4)


def test_depth() -> None:
    rule = MaximalUpdate(base_width=64, base_depth=2, base_head_dim=8)
    deep = rule.scaled(config(64, num_layers=8))
    assert deep.residual_multiplier == 0.25 and deep.logits_scaling == 1.0
    assert deep.softmax_scale == pytest.approx(math.sqrt(8) / 16)
    scaling = Scaling(rule, width=2.0, depth=4.0)
    hidden = scaling.scale("model.decoder.layers.3.mlp.linear_fc1.weight", 2, "adam")
    assert hidden == (0.5, 2.0, 1 / 8) and scaling.scale("embedding.x", 2, "adam").eps == 0.5
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    values = [
        dict(GPTModel(config(64, num_layers=layers), rule).named_parameters())[name]
        for layers in (2, 8)
    ]
    assert torch.equal(*values)  # a deeper model begins as the base model, and adds less per block


def test_coordinates_of_a_model() -> None:
    slopes = change_slopes(MaximalUpdate(base_width=128))
    standard = change_slopes(None)
    assert len(slopes) > 10 and slopes.keys() < standard.keys()
    assert {key: slope for key, slope in slopes.items() if abs(slope) > 0.1} == {}
    assert {key: slope for key, slope in standard.items() if key in slopes and slope < 0.3} == {}


class Own(nn.Module):
    """A module of a user, with nothing in its forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = Net(width, 2 * width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


def _change(width: int, *, scales: bool) -> float:
    torch.manual_seed(0)
    model = Own(width)
    nn.init.zeros_(model.net.out.weight)
    scaling = None
    if scales:
        with torch.device("meta"):
            model.base_shapes = base_shapes(Own(width), Own(256))  # type: ignore[assignment]
        scaling = GroupScaling(Scaling.of(model, MaximalUpdate()), torch.optim.Adam)
    groups = make_param_groups(model, (), lr=1e-3, scaling=scaling)
    optimizer = torch.optim.Adam(groups)
    scale_eps(optimizer)
    scale_eps(optimizer)  # once only
    hidden = next(
        g for g in optimizer.param_groups if any(p is model.net.fc1.weight for p in g["params"])
    )
    assert hidden["eps"] == (1e-8 * 256 / width if scales else 1e-8)
    tokens = torch.randint(0, 100, (64,), generator=torch.Generator().manual_seed(1))
    first = model(tokens).detach()
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:]).backward()
        optimizer.step()
    return float((model(tokens) - first).abs().mean().detach())


def test_coordinates_of_a_module_with_base_shapes() -> None:
    for scales, low, high in ((True, -0.1, 0.1), (False, 0.3, 9.0)):
        sizes = [_change(width, scales=scales) for width in (256, 1024)]
        assert low < math.log(sizes[1] / sizes[0]) / math.log(4) < high, sizes


class Images(nn.Module):
    def __init__(self, width: int, kernel: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, kernel)
        self.inner = nn.Conv2d(width, width, kernel)
        self.depthwise = nn.Conv1d(width, width, kernel, groups=width)
        self.up = nn.ConvTranspose2d(width, 3, kernel)


def test_convolutions() -> None:
    growths = base_shapes(Images(64), Images(16))
    hidden, vector, output = (0.25, 4.0, 0.25), (1.0, 1.0, 0.25), (0.25, 4.0, 1.0)
    for name, expected in (
        ("stem", vector),
        ("inner", hidden),
        ("depthwise", vector),
        ("up", output),
    ):
        scale = scale_of(growths[f"{name}.weight"], "adam", multiplied=False)
        assert scale == expected, name
    with pytest.raises(ConfigError, match=r"stem.weight of Conv2d grows by .*last two dims"):
        base_shapes(Images(64, 5), Images(16))


def test_weights_stored_as_in_and_out() -> None:
    def gpt2(width: int) -> nn.Module:
        sizes = {"n_layer": 1, "n_embd": width, "n_head": width // 8, "n_positions": 8}
        return GPT2LMHeadModel(GPT2Config(vocab_size=32, **sizes))

    with torch.device("meta"), pytest.warns(UserWarning, match="wte.weight .* Divide the logits"):
        growths = base_shapes(gpt2(64), gpt2(16))
    layer = "transformer.h.0"
    hidden, vector, head = (0.25, 4.0, 0.25), (1.0, 1.0, 0.25), (0.25, 4.0, 1.0)
    wider = nn.ModuleDict({"a": Conv1D(12, 64), "b": Conv1D(64, 12)})  # a: 64 to 12 features
    wider_base = nn.ModuleDict({"a": Conv1D(12, 16), "b": Conv1D(16, 12)})
    for growth, expected in (
        (growths[f"{layer}.attn.c_attn.weight"], hidden),
        (growths[f"{layer}.mlp.c_proj.weight"], hidden),
        (growths["transformer.wpe.weight"], vector),
        (base_shapes(wider, wider_base)["a.weight"], head),
        (base_shapes(wider, wider_base)["b.weight"], vector),
    ):
        assert scale_of(growth, "adam", multiplied=False) == expected


@pytest.mark.parametrize(("head", "rate"), [(None, 1.0), (8, 2.0)])
def test_norms_of_heads_grow_with_a_head(head: int | None, rate: float) -> None:
    rule = MaximalUpdate(base_width=64, base_head_dim=head)
    module = GPTLightningModule(
        config(256, qk_layernorm=True),
        maximal_update=rule,
        optimizer={"class_path": "SGD", "init_args": {"lr": 0.1}},
    )
    module.configure_model()
    rates = {id(p): g["lr"] for g in module._optimizer().param_groups for p in g["params"]}
    for name, parameter in module.named_parameters():
        if "self_attention.q_layernorm" in name or "self_attention.k_layernorm" in name:
            assert rates[id(parameter)] == pytest.approx(0.1 * rate), name
        elif "input_layernorm" in name:
            assert rates[id(parameter)] == pytest.approx(0.1 * 4)


def test_refusals() -> None:
    class Unknown(torch.optim.SGD):
        pass

    class Mine(torch.optim.Optimizer):
        pass

    assert MaximalUpdate().kind_of(Unknown) == "sgd"
    assert MaximalUpdate(kind="adam").kind_of(Mine) == "adam"
    with pytest.raises(ConfigError, match=r"rule of Mine .*kind=\"adam\""):
        MaximalUpdate().kind_of(Mine)
    with pytest.raises(ConfigError, match="base_width=0 is not positive"):
        MaximalUpdate(base_width=0)
    with pytest.raises(ConfigError, match="kind='lion'"):
        MaximalUpdate(kind="lion")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs base_width"):
        GPTLightningModule(config(), maximal_update=MaximalUpdate())
    latents = config(moe=MoEConfig(num_experts=4, latent_size=8))
    with pytest.raises(ConfigError, match="latents of experts"):
        GPTLightningModule(latents, maximal_update=MaximalUpdate(base_width=64))
    with pytest.raises(ConfigError, match="beside init_from_hf"):
        GPTLightningModule(
            config(), init_from_hf="none", maximal_update=MaximalUpdate(base_width=64)
        )
    with pytest.raises(ConfigError, match="maximal updates of Linear need base_shapes"):
        Scaling.of(nn.Linear(2, 2), MaximalUpdate())
    module = nn.Linear(2, 2)
    module.base_shapes = base_shapes(module, module)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="base_depth=2, a size of a GPTModel, beside base_shapes"):
        Scaling.of(module, MaximalUpdate(base_depth=2))
    with pytest.raises(ConfigError, match="is in one of the model and its base only"):
        base_shapes(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    with pytest.raises(ConfigError, match="base_shapes has no other"):
        Scaling(MaximalUpdate(), {"weight": (1.0, 2.0)}).growth("other", 2)
