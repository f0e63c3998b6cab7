"""Sharding plans, tables by which models are split over tensor-parallel ranks; users write theirs
likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_lightning.config import LatentAttentionConfig, LayerKind, TransformerConfig
from megatron_lightning.layers.styles import (
    ColumnParallel,
    ContextAttention,
    ContextGroup,
    ExpertLinear,
    ExpertParallel,
    ExpertRouter,
    GatherLogits,
    HeadParallel,
    HeadsNorm,
    KeyOrValue,
    ParallelInput,
    QueryKeyValue,
    RowParallel,
    SequenceParallel,
    ShardSequence,
    StreamDropout,
    VocabParallel,
    VocabParallelLoss,
    local_heads_per_group,
)
from megatron_lightning.parallel.sharding import ShardingPlan, Style

_PREDICTING = "mtp.layers.*"


def gpt_plan(config: TransformerConfig) -> ShardingPlan:
    """Return the plan of :class:`GPTModel`."""
    kinds = {f"decoder.layers.{i}": kind for i, kind in enumerate(config.layer_kinds)}
    lists = ["decoder.layers.*"]
    if config.num_predicting_layers:
        lists.append(f"{_PREDICTING}.transformer_layer")
    return ShardingPlan(
        modules={
            **_embedding_rows(config, "embedding"),
            **_layer_rows(config, "decoder.layers.*", kinds),
            "decoder.final_layernorm": SequenceParallel(),
            **(_predicting_rows(config) if config.num_predicting_layers else {}),
            "output_layer": VocabParallel(),
            "output_gather": GatherLogits(config.vocab_size),
            "loss": VocabParallelLoss(config.vocab_size),
        },
        positions="position_ids",
        documents="document_ids",
        attributes={}
        if config.mla is not None
        else {
            f"{layer}.self_attention.heads_per_group": partial(
                local_heads_per_group, config.query_groups
            )
            for layer in lists
        },
    )


def _embedding_rows(config: TransformerConfig, embedding: str) -> dict[str, Style]:
    """Return the rows of the embeddings with paths ``embedding``."""
    learned = {f"{embedding}.position_embeddings": SequenceParallel()}
    return {
        f"{embedding}.word_embeddings": VocabParallel(),
        **(learned if config.position_embedding_type == "learned_absolute" else {}),
        f"{embedding}.dropout": StreamDropout(),
    }


def _layer_rows(
    config: TransformerConfig, layer: str, kinds: Mapping[str, LayerKind]
) -> dict[str, Style]:
    """Return the rows of the layers with paths ``layer``; ``kinds``: by patterns, each of
    layers of one kind.
    """
    return {
        f"{layer}.input_layernorm": SequenceParallel(),
        **_attention_rows(config, f"{layer}.self_attention"),
        f"{layer}.pre_mlp_layernorm": SequenceParallel(),
        **_feed_forward_rows(config, layer, kinds),
        f"{layer}.dropout": StreamDropout(),
    }


def _predicting_rows(config: TransformerConfig) -> dict[str, Style]:
    """Return the rows of multi-token prediction.

    What ``eh_proj`` joins is gathered and, under sequence parallelism, divided again.
    """
    layer = f"{_PREDICTING}.transformer_layer"
    norms = (f"{_PREDICTING}.{name}" for name in ("enorm", "hnorm", "final_layernorm"))
    return {
        "mtp.shift": ContextGroup(),
        **_embedding_rows(config, f"{_PREDICTING}.embedding"),
        **dict.fromkeys(norms, SequenceParallel()),
        f"{_PREDICTING}.eh_proj": ColumnParallel(gather_output=True),
        layer: ShardSequence("hidden"),
        **_layer_rows(config, layer, {layer: config.layer_kinds[-1]}),
        "mtp.loss": ContextGroup(),
    }


def _attention_rows(config: TransformerConfig, attention: str) -> dict[str, Style]:
    """Return the rows of the attention modules with paths ``attention``."""
    if config.mla is None:
        norm: Style = HeadParallel() if config.qk_layernorm_per_head else HeadsNorm()
        head_norms = dict.fromkeys((f"{attention}.q_layernorm", f"{attention}.k_layernorm"), norm)
        rows: dict[str, Style] = {
            f"{attention}.linear_qkv": QueryKeyValue(config.query_groups, config.heads_per_group),
            **(head_norms if config.qk_layernorm else {}),
        }
    else:
        rows = _latent_rows(config, config.mla, attention)
    return rows | {
        f"{attention}.core_attention": ContextAttention(),
        f"{attention}.core_attention.dropout": StreamDropout(always=True),
        f"{attention}.linear_proj": RowParallel(),
    }


def _latent_rows(
    config: TransformerConfig, mla: LatentAttentionConfig, attention: str
) -> dict[str, Style]:
    """Return the rows from the hidden states to the heads.

    Ranks compute all of the latents, under sequence parallelism for their tokens only; of the heads
    each has its share.
    """
    heads = ColumnParallel(num_heads=config.num_attention_heads)
    rows: dict[str, Style] = {
        f"{attention}.linear_kv_down_proj": SequenceParallel(),
        f"{attention}.linear_kv_up_proj": heads,
        f"{attention}.shared_key": ParallelInput(),
    }
    norms = ["kv_layernorm"]
    if mla.q_lora_rank is None:
        rows[f"{attention}.linear_q_proj"] = heads
    else:
        rows[f"{attention}.linear_q_down_proj"] = SequenceParallel()
        rows[f"{attention}.linear_q_up_proj"] = heads
        norms.append("q_layernorm")
    if config.qk_layernorm:
        rows |= {f"{attention}.{name}": SequenceParallel() for name in norms}
    return rows


def _feed_forward_rows(
    config: TransformerConfig, layer: str, kinds: Mapping[str, LayerKind]
) -> dict[str, Style]:
    """Return the rows of the dense layers and of those with experts."""
    mlp, num_blocks = f"{layer}.mlp", 2 if config.gated else 1
    moe = config.moe if "expert" in kinds.values() else None
    dense: dict[str, Style] = {
        f"{mlp}.linear_fc1": ColumnParallel(num_blocks=num_blocks),
        f"{mlp}.linear_fc2": RowParallel(),
    }
    if moe is None:
        return dense
    layers = [f"{pattern}.mlp" for pattern, kind in kinds.items() if kind == "expert"]
    rows: dict[str, Style] = {
        **(dense if "dense" in kinds.values() else {}),
        **dict.fromkeys(layers, ExpertParallel()),
        f"{mlp}.router": ExpertRouter(),
        f"{mlp}.experts.linear_fc1": ExpertLinear(1, num_blocks),
        f"{mlp}.experts.linear_fc2": ExpertLinear(2),
    }
    shared = f"{mlp}.shared_experts"
    if moe.shared_expert_intermediate_size is not None:
        rows[f"{shared}.linear_fc1"] = ColumnParallel(num_blocks=num_blocks)
        rows[f"{shared}.linear_fc2"] = RowParallel()
    if moe.shared_expert_gate:
        rows[f"{shared}.gate"] = SequenceParallel()
    return rows


def llama_hf_plan(config: Any) -> ShardingPlan:
    """Return the plan of an unmodified ``transformers.LlamaForCausalLM`` with configuration
    ``config``.
    """
    column = ColumnParallel(copy_input=False)
    key_or_value = KeyOrValue(config.num_key_value_heads, copy_input=False)
    return ShardingPlan(
        sequence_dim=1,
        positions="position_ids",
        documents="documents",
        packed_positions=True,
        modules={
            "model.embed_tokens": VocabParallel(shard_sequence=False),
            "model.layers.0": ShardSequence(),
            "model.layers.*.self_attn": ContextAttention(also=ParallelInput()),
            "model.layers.*.self_attn.q_proj": ColumnParallel(
                copy_input=False, num_heads=config.num_attention_heads
            ),
            "model.layers.*.self_attn.k_proj": key_or_value,
            "model.layers.*.self_attn.v_proj": key_or_value,
            "model.layers.*.self_attn.o_proj": RowParallel(),
            "model.layers.*.mlp": ParallelInput(),
            "model.layers.*.mlp.gate_proj": column,
            "model.layers.*.mlp.up_proj": column,
            "model.layers.*.mlp.down_proj": RowParallel(),
            "**norm": SequenceParallel(),
            "lm_head": VocabParallel(gather_output=True),
        },
        attributes={
            "model.layers.*.self_attn.num_key_value_groups": partial(
                local_heads_per_group, config.num_key_value_heads
            )
        },
    )
