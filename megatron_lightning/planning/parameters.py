"""Parameters of a :class:`GPTModel` on one rank: how many of each unit, and over which ranks they
are replicated. No torch here.

Notation: ``h`` hidden, ``f`` feed-forward size, ``v`` vocabulary. A *unit* is an element of
``GPTModel.pipeline_units()``: the embedding, a layer, the final norm or the output layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.pipeline.actions import Placement
from megatron_lightning.pipeline.layouts import split_units

EMBEDDING, FINAL_NORM, OUTPUT = "embedding", "decoder.final_layernorm", "output_layer"
_LAYER = "decoder.layers."


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one rank."""

    dense: int = 0
    """Those that the data- and context-parallel ranks have as well."""
    experts: int = 0
    """Those that the expert-data-parallel ranks have as well."""

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def pipeline_units(config: TransformerConfig) -> list[str]:
    """Return the units of the model in order."""
    layers = [f"{_LAYER}{index}" for index in range(config.num_layers)]
    return [EMBEDDING, *layers, FINAL_NORM, OUTPUT]


def split_stages(
    config: TransformerConfig, placement: Placement, options: PipelineOptions
) -> tuple[tuple[str, ...], ...]:
    """Return the units of every stage.

    Raises:
        ConfigError: If the options do not fit the model.
    """
    return split_units(pipeline_units(config), placement, options)


def layer_of(unit: str) -> int | None:
    """Return the number of the layer that a unit is; None: it is none."""
    return int(unit.removeprefix(_LAYER)) if unit.startswith(_LAYER) else None


def count_unit(config: TransformerConfig, layout: ParallelLayout, unit: str) -> ParameterCount:
    """Return the parameters of a unit on tensor-parallel rank 0, which has the most."""
    h, norms = config.hidden_size, _norm_size(config)
    rows = -(-config.vocab_size // layout.tp)
    layer = layer_of(unit)
    if layer is not None:
        attention = ParameterCount(_attention(config, layout.tp) + 2 * h * norms)
        return attention + _feed_forward(config, layout, layer)
    if unit == FINAL_NORM:
        return ParameterCount(h * norms)
    if unit == OUTPUT:
        return ParameterCount(rows * h)
    learned = config.position_embedding_type == "learned_absolute"
    return ParameterCount(rows * h + (config.max_sequence_length * h if learned else 0))


def count_rank(
    config: TransformerConfig, layout: ParallelLayout, stages: Sequence[Sequence[str]]
) -> ParameterCount:
    """Return the parameters of a rank that holds ``stages``; a tied weight counts once."""
    units = [unit for stage in stages for unit in stage]
    total = sum((count_unit(config, layout, unit) for unit in units), ParameterCount())
    if config.share_embeddings_and_output_weights and {EMBEDDING, OUTPUT} <= set(units):
        total += ParameterCount(-count_unit(config, layout, OUTPUT).total)
    return total


def _norm_size(config: TransformerConfig) -> int:
    """Return the parameters a channel of a norm."""
    return 2 if config.normalization == "LayerNorm" else 1


def _attention(config: TransformerConfig, tp: int) -> int:
    h, n, mla = config.hidden_size, config.num_attention_heads, config.mla
    norms = _norm_size(config) * config.qk_layernorm
    if mla is None:
        rows = config.qkv_rows
        sharded = h * (rows + n * config.head_dim)
        sharded += rows * (config.add_bias_linear or config.add_qkv_bias)
        full = h * config.add_bias_linear + sum(config.qk_norm_sizes) * _norm_size(config)
        return sharded // tp + full
    # Projections to latents and the norms of these are on every rank.
    full = h * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    full += norms * ((mla.q_lora_rank or 0) + mla.kv_lora_rank)
    everything = mla.num_parameters(h, n, norms=norms)
    return full + (everything - full) // tp


def _feed_forward(config: TransformerConfig, layout: ParallelLayout, layer: int) -> ParameterCount:
    moe, h = config.moe, config.hidden_size
    if moe is None or config.layer_kinds[layer] == "dense":
        return ParameterCount(_mlp(config, config.ffn_size, layout.tp))
    experts = moe.num_experts // layout.ep * _mlp(config, config.expert_ffn_size, layout.etp)
    shared = moe.shared_expert_intermediate_size
    dense = h * moe.num_experts + h * moe.shared_expert_gate
    return ParameterCount(dense + (_mlp(config, shared, layout.tp) if shared else 0), experts)


def _mlp(config: TransformerConfig, f: int, tp: int) -> int:
    """Return the parameters of two linear layers, of which the second has a full bias."""
    h, fc1 = config.hidden_size, (2 if config.gated else 1) * f
    bias = int(config.add_bias_linear)
    return (h * (fc1 + f) + fc1 * bias) // tp + h * bias
