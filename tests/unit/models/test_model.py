"""GPTModel on one process: names, initial weights, the parameters of stages, training; and its
LightningModule."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.models import GPTModel, TransformerConfig, num_parameters
from megatron_lightning.models.transformer import rounded
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardingPlan, parallelize
from megatron_lightning.parallel.shards.materialize import materialize
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.parallel.shards.ties import record_ties
from megatron_lightning.pipeline.stages.stage import StagePartition
from tests.helpers.layouts import tiny_config

CONFIG = tiny_config(hidden_size=16, num_attention_heads=2, vocab_size=20, max_sequence_length=12)
TIED = TransformerConfig(**(CONFIG.to_dict() | {"share_embeddings_and_output_weights": True}))  # type: ignore[arg-type]


def tokens(*shape: int) -> Tensor:
    return torch.randint(CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def test_names_and_count() -> None:
    model = GPTModel(CONFIG)
    layer = "decoder.layers.1"
    assert {
        name for name, _ in model.named_parameters() if not name.startswith("decoder.layers.0")
    } == {
        "embedding.word_embeddings.weight",
        f"{layer}.input_layernorm.weight",
        f"{layer}.self_attention.linear_qkv.weight",
        f"{layer}.self_attention.linear_proj.weight",
        f"{layer}.pre_mlp_layernorm.weight",
        f"{layer}.mlp.linear_fc1.weight",
        f"{layer}.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    assert not list(model.buffers())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_bias_linear": True, "normalization": "LayerNorm", "activation": "gelu"},
        {"position_embedding_type": "learned_absolute"},
        {"qk_layernorm": True, "add_qkv_bias": True, "num_query_groups": 1, "kv_channels": 6},
        {"qk_layernorm": True, "qk_layernorm_per_head": False, "num_query_groups": 1},
        {"share_embeddings_and_output_weights": True, "ffn_hidden_size": 24},
    ],
    ids=str,
)
def test_the_configuration_counts_the_parameters(changes: dict[str, Any]) -> None:
    config = TransformerConfig(**(CONFIG.to_dict() | changes))  # type: ignore[arg-type]
    assert num_parameters(config) == sum(p.numel() for p in GPTModel(config).parameters())


def test_initial_weights() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    config = tiny_config(
        num_layers=8, hidden_size=64, vocab_size=200, add_bias_linear=True, init_method_std=0.02
    )
    model = GPTModel(config)
    assert torch.equal(torch.get_rng_state(), before)
    layer = model.decoder.layers["3"]
    assert layer.mlp.linear_fc1.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert layer.mlp.linear_fc2.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert layer.self_attention.linear_proj.weight.std().item() == pytest.approx(
        0.02 / math.sqrt(16), rel=0.03
    )
    assert (layer.input_layernorm.weight == 1).all()
    assert not layer.mlp.linear_fc1.bias.any()
    assert not torch.equal(
        layer.mlp.linear_fc1.weight, model.decoder.layers["4"].mlp.linear_fc1.weight
    )
    other = GPTModel(TransformerConfig(**(config.to_dict() | {"init_seed": 1})))  # type: ignore[arg-type]
    assert not torch.equal(other.output_layer.weight, model.output_layer.weight)


def test_a_low_precision_model_is_the_rounded_model() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        low = GPTModel(CONFIG)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in GPTModel(CONFIG).named_parameters():
        assert torch.equal(low.get_parameter(name), parameter.to(torch.bfloat16)), name


def stage(model: GPTModel, own: int) -> GPTModel:
    """Return one of two stages of a copy, as a pipeline rank holds it."""
    part = copy.deepcopy(model)
    record_ties(part)
    units = part.pipeline_units()
    StagePartition(part, [units[:2], units[2:]], [own])
    return part


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_stages_have_the_parameters_of_the_model(config: TransformerConfig) -> None:
    model = GPTModel(config)
    units = model.pipeline_units()
    assert units == [
        "embedding",
        "decoder.layers.0",
        "decoder.layers.1",
        "decoder.final_layernorm",
        "output_layer",
    ]
    first, last = stage(model, 0), stage(model, 1)
    assert {*named_shard_specs(first), *named_shard_specs(last)} >= set(named_shard_specs(model))
    spec = named_shard_specs(last)["output_layer.weight"]
    assert spec.tied_to == ("embedding.word_embeddings.weight" if config is TIED else None)


def test_a_meta_stage_materialises_to_the_same_weights() -> None:
    whole = GPTModel(TIED)
    with torch.device("meta"):
        meta = GPTModel(TIED)
    assert all(p.is_meta for p in meta.parameters())
    last = stage(meta, 1)
    outer = nn.ModuleDict({"model": last})
    materialize(outer, "cpu")
    assert torch.equal(last.output_layer.weight, whole.embedding.word_embeddings.weight)
    materialize(meta, "cpu")
    assert meta.output_layer.weight is meta.embedding.word_embeddings.weight
    for name, parameter in whole.named_parameters():
        assert torch.equal(meta.get_parameter(name), parameter), name


def test_a_meta_model_without_init_weights_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(
        ConfigError, match=r"0.weight is on the meta device.*init_weights\(name, tensor\)"
    ):
        materialize(model, "cpu")


def test_tied_modules_of_unlike_styles_are_refused() -> None:
    class HalfTable:
        def apply(
            self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
        ) -> nn.Module:
            half = nn.Embedding(10, 16)
            half.shard_specs = {"weight": ShardSpec.split((20, 16), dim=0, size=2, rank=0)}  # type: ignore[assignment]
            return half

    plan = ShardingPlan(modules={"embedding.word_embeddings": HalfTable()})
    with pytest.raises(
        ShardingError,
        match=r"output_layer.weight and embedding.word_embeddings.weight were one parameter",
    ):
        parallelize(GPTModel(TIED), ParallelContext(ParallelLayout()), plan)


def test_labels_and_positions() -> None:
    model = GPTModel(CONFIG)
    x, labels = tokens(3, 8), tokens(3, 8).flip(1).clone()
    labels[0, :4] = -100
    losses, logits = model(x, labels=labels), model(x)
    assert logits.shape == (3, 8, 20)
    assert logits.is_contiguous()
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    ).view(3, 8)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(model(x, position_ids=torch.arange(8).expand(3, 8)), logits)
    changed = x.clone()
    changed[:, 5] = (x[:, 5] + 1) % 20
    assert torch.equal(model(changed)[:, :5], logits[:, :5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_factor_of_embeddings_is_a_number_of_their_dtype(dtype: torch.dtype) -> None:
    """As Gemma of ``transformers`` has it."""
    for factor in (1152**0.5, 640**0.5, 12.0, 0.1, 3.0):
        assert rounded(factor, dtype) == pytest.approx(
            float(torch.tensor(factor, dtype=torch.float64).to(dtype)),
            rel=1e-12 if dtype != torch.float32 else 1e-7,
        )
