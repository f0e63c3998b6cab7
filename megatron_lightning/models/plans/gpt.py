"""Sharding plans: tables that split models over tensor-parallel ranks.

Users write their tables likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.layer_kinds import GROUPS, LAYER_KINDS
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.state_space.mamba import MambaMixer
from megatron_lightning.layers.styles import (
    ColumnParallel,
    ContextAttention,
    ContextGroup,
    DeltaNetHeads,
    ExpertLinear,
    ExpertParallel,
    ExpertRouter,
    GatherLogits,
    GroupedHeads,
    HeadParallel,
    HeadsNorm,
    KeyOrValue,
    ParallelInput,
    ParameterShards,
    QueryKeyValue,
    RowParallel,
    SequenceParallel,
    ShardSequence,
    Split,
    StreamDropout,
    VocabParallel,
    VocabParallelLoss,
    local_heads_per_group,
)
from megatron_lightning.models.blueprint import (
    FINAL_NORM,
    LAYER,
    PREDICTING,
    Weight,
    attention_config,
    depth_layers,
    embedding_weights,
    has_attention,
    kind_weights,
    predicting_weights,
    unit_weights,
)
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style

_PREDICTING = f"{PREDICTING}*"
_Layer = tuple[TransformerConfig, str]


def gpt_plan(config: TransformerConfig) -> ShardingPlan:
    """Return the plan of :class:`GPTModel`."""
    layers = {
        f"{LAYER}{index}": (attention_config(config, index), kind)
        for index, kind in enumerate(config.layer_kinds)
    }
    # Rows are made of one layer of each kind, and apply to all layers by a pattern.
    lists = {f"{LAYER}*": layers}
    if config.num_predicting_layers:
        lists[_depth_pattern(config)] = _depth_layers(config)
    return ShardingPlan(
        modules={
            **_embedding_rows(config, "embedding"),
            **_layer_rows(config, f"{LAYER}*", layers),
            **_weight_rows(config, FINAL_NORM, unit_weights(config, FINAL_NORM)),
            **(_predicting_rows(config) if config.num_predicting_layers else {}),
            "output_layer": VocabParallel(),
            "output_gather": GatherLogits(config.vocab_size),
            "loss": VocabParallelLoss(config.vocab_size),
        },
        positions="position_ids",
        documents="document_ids",
        takes_deals=True,
        lengths=None if config.longest_short_document is None else "lengths",
        attributes={
            f"{pattern}.self_attention.heads_per_group": partial(
                local_heads_per_group, config.query_groups
            )
            for pattern, layers_of_list in lists.items()
            if config.mla is None
            and any(has_attention(kind_weights(*layer)) for layer in layers_of_list.values())
        },
    )


def _weight_rows(
    config: TransformerConfig, path: str, weights: Iterable[Weight]
) -> dict[str, Style]:
    """Return a row for each module with weights in a module at ``path``."""
    return {
        ".".join(filter(None, (path, weight.module))): _style_of(config, weight)
        for weight in weights
        if weight.kind not in ("bias", "sink") and not _is_in_delta_net(weight)
    }


def _is_in_delta_net(weight: Weight) -> bool:
    """Return whether a weight is a direct parameter of the mixer of gated delta net. Attention may
    have the mixer's path in other layers.
    """
    return weight.kind == "head" and weight.module.endswith("self_attention")


def _style_of(config: TransformerConfig, weight: Weight) -> Style:
    """Return the style of the module with the weight."""
    if weight.kind == "router":
        return ExpertRouter()
    if weight.kind in ("head", "convolution"):
        return _state_space_style(config, weight)
    if weight.kind == "head_norm":
        is_shared = config.qk_layernorm_per_head or weight.module.endswith("out_norm")
        return HeadParallel() if is_shared else HeadsNorm()
    if weight.split is None:  # every rank computes its sequence shard
        return SequenceParallel()
    if weight.kind == "embedding":
        return VocabParallel()
    return _linear_style(config, weight)


def _linear_style(config: TransformerConfig, weight: Weight) -> Style:
    by_rows = weight.split == "rows"
    if weight.experts is not None:
        return ExpertLinear(1, weight.blocks) if by_rows else ExpertLinear(2)
    if not by_rows:
        return RowParallel()
    if weight.module.endswith("linear_qkv"):
        return QueryKeyValue(
            config.query_groups, config.heads_per_group, config.attention_output_gate
        )
    return ColumnParallel(num_blocks=weight.blocks, parts=weight.parts, num_heads=weight.heads)


def _state_space_style(config: TransformerConfig, weight: Weight) -> Style:
    """Return the style of a convolution, or of a module with head weights."""
    if weight.kind == "convolution":
        names = ("weight", "bias") if weight.module.endswith("mixer.conv1d") else ("weight",)
        return ParameterShards(dict.fromkeys(names, Split(parts=weight.parts)))
    if config.mamba is None:
        raise ConfigError(f"mamba is not set, and {weight.path} belongs to its heads. Set mamba.")
    sizes = config.mamba.sizes(config.hidden_size)
    params = ("weight",) if weight.path.endswith("norm.weight") else MambaMixer.precise
    return GroupedHeads(params, sizes.heads, sizes.groups)


def _embedding_rows(config: TransformerConfig, embedding: str) -> dict[str, Style]:
    """Return the rows of the embeddings with paths ``embedding``."""
    rows = _weight_rows(config, embedding, embedding_weights(config))
    return {**rows, f"{embedding}.dropout": StreamDropout()}


def _layer_rows(
    config: TransformerConfig, pattern: str, layers: Mapping[str, _Layer]
) -> dict[str, Style]:
    """Return the rows of layers.

    Args:
        config: The model.
        pattern: Pattern of the paths of all layers.
        layers: Path of a layer -> configuration and kind of the layer.
    """
    rows: dict[str, Style] = {}
    for path, (layer, kind) in layers.items():
        weights = kind_weights(layer, kind)
        rows |= _weight_rows(config, pattern, weights)
        if any(map(_is_in_delta_net, weights)):
            rows[f"{path}.self_attention"] = _delta_net_heads(config)
        if has_attention(weights):
            rows |= _attention_rows(config, f"{pattern}.self_attention")
        if kind in LAYER_KINDS:
            rows[f"{pattern}.dropout"] = StreamDropout()
        if kind in GROUPS["moe"]:
            rows[f"{path}.mlp"] = ExpertParallel()
    return rows


def _delta_net_heads(config: TransformerConfig) -> Style:
    if config.delta_net is None:
        raise ConfigError("delta_net is not set, and a layer has its mixer. Set delta_net.")
    return DeltaNetHeads(config.delta_net.num_key_heads, config.delta_net.num_value_heads)


def _attention_rows(config: TransformerConfig, attention: str) -> dict[str, Style]:
    """Return the rows of modules of attention without weights."""
    shared_rows: dict[str, Style] = {f"{attention}.shared_key": ParallelInput()}
    sinks = ParameterShards({"softmax_offset": Split()}) if config.num_sinks else None
    return {
        **({} if config.mla is None else shared_rows),
        f"{attention}.core_attention": ContextAttention(also=sinks),
        f"{attention}.core_attention.dropout": StreamDropout(always=True),
    }


def _depth_pattern(config: TransformerConfig) -> str:
    """Return the pattern of the paths of all layers of multi-token prediction."""
    layer = f"{_PREDICTING}.transformer_layer"
    return layer if config.hybrid is None else f"{layer}.layers.*"


def _depth_layers(config: TransformerConfig) -> dict[str, _Layer]:
    """Return path -> configuration and kind of the layers of multi-token prediction."""
    layer = attention_config(config, config.num_layers)
    return {f"{_PREDICTING}.{path}": (layer, kind) for path, kind in depth_layers(config)}


def _predicting_rows(config: TransformerConfig) -> dict[str, Style]:
    """Return the rows of multi-token prediction.

    The input of ``eh_proj`` is gathered and, under sequence parallelism, split again.
    """
    layer = f"{_PREDICTING}.transformer_layer"
    outer = (w for w in predicting_weights(config, 0) if not w.path.startswith("transformer_layer"))
    return {
        **_weight_rows(config, _PREDICTING, outer),
        "mtp.shift": ContextGroup(),
        **_embedding_rows(config, f"{_PREDICTING}.embedding"),
        f"{_PREDICTING}.eh_proj": ColumnParallel(gather_output=True),
        layer: ShardSequence("hidden"),
        **_layer_rows(config, _depth_pattern(config), _depth_layers(config)),
        "mtp.loss": ContextGroup(),
    }


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
