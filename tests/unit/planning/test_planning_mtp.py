"""Plans of models with multi-token prediction: FLOPs and Megatron's estimate equal what its own
functions return (``tests/oracles/multi_token_prediction.json``), parameters those of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning import planning
from megatron_lightning.config import (
    LatentAttentionConfig,
    MoEConfig,
    PipelineOptions,
    TransformerConfig,
)
from megatron_lightning.models import GPTModel, num_parameters
from megatron_lightning.models.costs import pipeline_units
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.planning.ledger.rank_parameters import count_rank, split_stages

FACTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "oracles" / "multi_token_prediction.json").read_text()
)["facts"]


def config_of(model: str, mtp_num_layers: int | None) -> TransformerConfig:
    given = FACTS["models"][model]
    moe = mla = None
    if "num_experts" in given:
        moe = MoEConfig(
            num_experts=given["num_experts"],
            router_topk=given["moe_router_topk"],
            ffn_hidden_size=given["moe_ffn_hidden_size"],
            shared_expert_intermediate_size=given.get("moe_shared_expert_intermediate_size"),
            layer_freq=tuple(given.get("moe_layer_freq", [1] * given["num_layers"])),
        )
    if given.get("multi_latent_attention"):
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        mla = LatentAttentionConfig(**{name: given[name] for name in names})
    gpt2 = model.startswith("gpt2")
    return TransformerConfig(
        num_layers=given["num_layers"],
        hidden_size=given["hidden_size"],
        ffn_hidden_size=given["ffn_hidden_size"],
        num_attention_heads=given["num_attention_heads"],
        num_query_groups=given.get("num_query_groups"),
        vocab_size=given["padded_vocab_size"],
        max_sequence_length=given["seq_length"],
        normalization="LayerNorm" if gpt2 else "RMSNorm",
        activation="gelu" if gpt2 else "swiglu",
        add_bias_linear=gpt2,
        share_embeddings_and_output_weights=gpt2,
        qk_layernorm=mla is not None,
        moe=moe,
        mla=mla,
        mtp_num_layers=mtp_num_layers,
    )


def test_flops_equal_megatrons() -> None:
    for row in FACTS["flops"]:
        counted = planning.flops(
            config_of(row["model"], row["mtp_num_layers"]),
            batch_size=row["global_batch_size"],
            sequence_length=FACTS["models"][row["model"]]["seq_length"],
        )
        assert counted == row["flops_per_iteration"], row


def test_megatrons_estimate_equals_its_own() -> None:
    for row in FACTS["memory"]:
        sizes = dict(row["parallel"])
        world_size = sizes.pop("world_size")
        distributed = sizes.pop("use_distributed_optimizer", False)
        estimate = planning.megatron_memory(
            config_of(row["model"], row["mtp_num_layers"]),
            ParallelLayout(**sizes),
            world_size=world_size,
            sequence_length=FACTS["models"][row["model"]]["seq_length"],
            distributed_optimizer=distributed,
        )
        assert estimate.weight_and_optimizer_bytes == pytest.approx(
            row["weight_and_optimizer_bytes"], rel=1e-12
        ), row


SIZES: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50,
    "max_sequence_length": 16, "mtp_num_layers": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {
        "share_embeddings_and_output_weights": True,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
    },
    "experts": {"moe": MoEConfig(num_experts=4, layer_freq=(0, 1, 1))},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [None, "Et|tt|mm|L", "Et|ttmm|L"])
def test_parameters_of_a_stage_are_those_of_its_units(model: str, layout: str | None) -> None:
    config = TransformerConfig(**SIZES, **MODELS[model])
    with torch.device("meta"):
        full = GPTModel(config)
    assert full.pipeline_units() == pipeline_units(config)
    assert sum(parameter.numel() for parameter in full.parameters()) == num_parameters(config)
    stages = layout.count("|") + 1 if layout else 2
    options = PipelineOptions(pipeline_model_parallel_layout=layout)
    for units in split_stages(config, Placement.loop(stages), options):
        held = {id(p): p.numel() for unit in units for p in full.get_submodule(unit).parameters()}
        counted = count_rank(config, ParallelLayout(), [units])
        assert counted.total == sum(held.values()), units
