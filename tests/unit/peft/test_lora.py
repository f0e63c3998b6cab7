"""Which layers get adapters, their initial values, and what is refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adapter_layers import (
    adapted_layers,
    adapters_for_all_rows,
    adapters_for_second_half,
)
from megatron_lightning.models import GPTModel
from megatron_lightning.optim.param_groups import (
    NO_DECAY,
    ParamGroup,
    check_rows,
    make_param_groups,
)
from megatron_lightning.parallel.shards.materialize import materialize
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.peft import LoRA, adapters_disabled
from megatron_lightning.precision.assignment import apply_recipe, recipes_of_layers
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.precision.transformer_engine.fusion import find_fusions
from tests.helpers.layouts import tiny_config

CONFIG = tiny_config(num_query_groups=2, ffn_hidden_size=48, vocab_size=50, init_method_std=0.02)
_QKV = "self_attention.linear_qkv"
TOKENS = torch.arange(16).view(2, 8)


def _trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_a_fused_layer_has_an_adapter_for_each_matrix() -> None:
    model = LoRA(r=4).apply(GPTModel(CONFIG))
    qkv = "decoder.layers.0.self_attention.linear_qkv.adapters"
    shapes = {n.removeprefix(qkv): tuple(p.shape) for n, p in _trained(model).items() if qkv in n}
    assert shapes == {
        ".q.lora_A.weight": (4, 32),
        ".q.lora_B.weight": (32, 4),
        ".k.lora_A.weight": (4, 32),
        ".k.lora_B.weight": (16, 4),
        ".v.lora_A.weight": (4, 32),
        ".v.lora_B.weight": (16, 4),
    }
    assert all(".adapters." in name for name in _trained(model))
    assert not any("output_layer" in name for name in _trained(model))


def test_the_parts_are_rows_of_their_matrix() -> None:
    """Each part changes its own rows of every query group."""
    model = LoRA(target_modules=["linear_qkv"]).apply(GPTModel(CONFIG))
    layer = model.decoder.layers["0"].self_attention.linear_qkv
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with adapters_disabled(model):
        base = layer(x)
    nn.init.ones_(layer.adapters.k.lora_B.weight)
    changed = (layer(x) - base).abs().amax(0) > 0
    assert changed.view(2, -1, 8)[:, 2].all() and changed.sum() == 16  # [groups, heads, channels]


def test_a_fresh_adapter_changes_nothing_and_trains() -> None:
    model = GPTModel(CONFIG)
    expected = model(TOKENS)
    LoRA().apply(model)
    torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=0)
    model(TOKENS, labels=TOKENS).mean().backward()
    assert all(p.grad is not None for p in _trained(model).values())
    assert all(p.grad is None for n, p in model.named_parameters() if n not in _trained(model))


def test_copies_and_pickles_keep_their_adapters() -> None:
    model = LoRA().apply(GPTModel(CONFIG))
    for name, parameter in _trained(model).items():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(TOKENS), model(TOKENS), rtol=0, atol=0)


def test_initial_values_follow_from_names_on_every_device() -> None:
    built = LoRA().apply(GPTModel(CONFIG))
    torch.rand(7)  # another state of the default generator
    with torch.device("meta"):
        later = LoRA().apply(GPTModel(CONFIG))
    assert all(p.is_meta for p in later.parameters())
    materialize(later, "cpu")
    for name, value in built.state_dict().items():
        torch.testing.assert_close(later.state_dict()[name], value, rtol=0, atol=0, msg=name)
    values = torch.cat([p.flatten() for n, p in _trained(built).items() if "lora_A" in n])
    assert 0 < values.abs().max() <= 32**-0.5
    assert not any(p.any() for n, p in _trained(built).items() if "lora_B" in n)


def test_patterns_set_ranks_and_scales() -> None:
    model = LoRA(
        r=4,
        lora_alpha=8,
        target_modules=["linear_fc1", "linear_fc2"],
        exclude_modules=["layers.1.mlp.linear_fc1"],
        rank_pattern={"linear_fc2": 2},
        alpha_pattern={r"layers\.0\..*linear_fc2": 6.0},
        fused="one",
    ).apply(GPTModel(CONFIG))
    found = {
        name: (part.lora_A.weight.shape[0], part.scale)
        for name, part in model.named_modules()
        if name.endswith("adapters.all")
    }
    mlp = "decoder.layers.{}.mlp.linear_{}.adapters.all".format
    expected = {mlp(0, "fc1"): (4, 2.0), mlp(0, "fc2"): (2, 3.0), mlp(1, "fc2"): (2, 4.0)}
    assert found == expected


def test_rslora_divides_by_the_root() -> None:
    assert LoRA(r=16, lora_alpha=8, use_rslora=True).scale_of("any") == 2.0


def test_modules_to_save_are_trained() -> None:
    model = LoRA(modules_to_save=["output_layer"]).apply(GPTModel(CONFIG))
    assert "output_layer.weight" in _trained(model)
    assert "embedding.word_embeddings.weight" not in _trained(model)


def _tied() -> GPTModel:
    return GPTModel(replace(CONFIG, share_embeddings_and_output_weights=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["linear_qvk"]}, "'linear_qvk'.*did you mean 'linear_qkv'"),
        ({"target_modules": "linear_qkv"}, "a text is a regular expression"),
        ({"target_modules": "linear_(qkv"}, "it is none"),
        ({"target_modules": ["output_layer"]}, "an output layer.*modules_to_save"),
        ({"target_modules": ["input_layernorm"]}, "input_layernorm is a RMSNorm"),
        ({"exclude_modules": ["linear_fc3"]}, "exclude_modules has 'linear_fc3'"),
        ({"exclude_modules": ".*"}, "finds no layer to adapt"),
        ({"rank_pattern": {"linear_fc3": 4}}, "rank_pattern has 'linear_fc3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save has 'lm_head'"),
        ({"modules_to_save": "output_layer"}, "Set a list"),
        ({"r": 0}, "r of LoRA is 0"),
        ({"lora_dropout": 1.0}, "probability below 1"),
    ],
)
def test_what_matches_nothing_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoRA(**options).apply(GPTModel(CONFIG))


def test_half_of_a_tied_pair_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tied weights.*embedding\.word_embeddings"):
        LoRA(modules_to_save=["output_layer"]).apply(_tied())
    LoRA(modules_to_save=["output_layer", "word_embeddings"]).apply(_tied())


def test_a_second_set_is_refused() -> None:
    model = LoRA().apply(GPTModel(CONFIG))
    with pytest.raises(ConfigError, match="has adapters already"):
        LoRA().apply(model)


def test_a_divided_module_is_refused() -> None:
    """Each rank would train adapters of its own."""
    layer = nn.Linear(8, 8)
    layer.shard_specs = {"weight": ShardSpec.split((16, 8), dim=0, size=2, rank=0, axis="tp")}
    with pytest.raises(ConfigError, match=r"divided over ranks already.* in configure_model"):
        LoRA().apply(nn.Sequential(layer))


def test_an_ordinary_module_takes_adapters() -> None:
    """Layers of torch's encoder call the fused kernel no more, which would leave adapters out."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    LoRA(r=2).apply(layer)
    assert all(name.startswith(("linear1", "linear2")) for name in _trained(layer))
    for name, parameter in _trained(layer).items():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    expected = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), expected)


def test_frozen_weights_are_in_no_group() -> None:
    model = LoRA().apply(GPTModel(CONFIG))
    groups = make_param_groups(model, (NO_DECAY,), lr=1.0)
    assert [len(group["params"]) for group in groups] == [len(_trained(model)), 0]
    check_rows(model, (NO_DECAY,))


def test_a_recipe_quantizes_the_base_and_no_adapter() -> None:
    model = GPTModel(CONFIG)
    before = set(apply_recipe(copy.deepcopy(model), FP8Recipe()).quantized)
    assignment = apply_recipe(LoRA().apply(model), FP8Recipe())
    assert set(assignment.quantized) == before
    assert not [name for name in (*assignment.in_bf16, *assignment.others) if "adapters" in name]


@pytest.mark.parametrize(
    ("target", "fused"),
    [
        ("linear_qkv", {("pre_mlp_layernorm", "mlp")}),
        # The feed-forward layer as a whole would call neither of its linear layers.
        ("linear_fc1", {("input_layernorm", _QKV)}),
        ("linear_fc2", {("input_layernorm", _QKV), ("pre_mlp_layernorm", "mlp.linear_fc1")}),
    ],
)
def test_no_engine_goes_past_an_adapter(target: str, fused: set[tuple[str, str]]) -> None:
    """An adapter reads what comes out of the norm, and its layer has to be called."""
    model = LoRA(target_modules=[target]).apply(GPTModel(CONFIG))
    fusions = find_fusions(dict(model.named_modules()), recipes_of_layers(model, FP8Recipe()))
    layer = "decoder.layers.0."
    found = {
        (f.norm.removeprefix(layer), f.target.removeprefix(layer))
        for f in fusions
        if f.norm.startswith(layer)
    }
    assert found == fused


def test_lora_plus_gives_b_a_rate_of_its_own() -> None:
    model = LoRA().apply(GPTModel(CONFIG))
    row = ParamGroup(name="lora_B", params=["**.lora_B.weight"], lr_mult=16.0)
    check_rows(model, [row])
    first, second = make_param_groups(model, [row], lr=1e-4)
    names = {id(p): name for name, p in model.named_parameters()}
    assert second["lr"] == pytest.approx(1.6e-3)
    assert all("lora_B" in names[id(p)] for p in second["params"])
    assert len(first["params"]) == len(second["params"]) == 2 * 7


def test_dora_is_refused_where_rows_have_no_lengths() -> None:
    with pytest.raises(ConfigError, match=r"lora_dropout is 0\.1 beside use_dora"):
        LoRA(use_dora=True, lora_dropout=0.1)
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    with pytest.raises(ConfigError, match="c_attn is a layer of GPT-2's Conv1D"):
        LoRA(use_dora=True).apply(gpt2)


def test_rows_of_a_reference_are_left_out_inside_the_block_alone() -> None:
    model = LoRA(r=2, target_modules=["0"]).apply(nn.Sequential(nn.Linear(4, 4)))
    x = torch.randn(4, 3, 4)
    base = model(x)
    for adapters in adapted_layers(model).values():
        nn.init.ones_(adapters.parts["all"].lora_B.weight)  # type: ignore[arg-type]
    adapted = model(x)
    with torch.no_grad(), adapters_for_second_half(model, 0):
        both = model(x)
    assert torch.equal(both, torch.cat([base[:2], adapted[2:]]))
    assert not torch.equal(base, adapted)
    assert torch.equal(model(x), adapted)
    with (
        pytest.raises(ConfigError, match="without a batch dim"),
        adapters_for_second_half(model, 0),
    ):
        model(x[0])
    assert torch.equal(model(x), adapted)
    with adapters_for_second_half(model, 0):
        model(x)
    assert torch.equal(model(x), both)  # a recomputation needs the setting
    adapters_for_all_rows(model)
    assert torch.equal(model(x), adapted)
