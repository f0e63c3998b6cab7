"""Parameters of a :class:`GPTModel` on one rank: how many of each unit, and over which ranks they
are replicated. No torch here.

Notation: ``h`` hidden, ``f`` feed-forward size, ``v`` vocabulary. A *unit* is an element of
``GPTModel.pipeline_units()``: the embedding, a layer, the final norm, a layer of multi-token
prediction, the output layer, or the losses of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lightning.config import LayerKind, PipelineOptions, TransformerConfig
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.pipeline.actions import Placement
from megatron_lightning.pipeline.layouts import split_units
from megatron_lightning.pipeline.partition import Unit

EMBEDDING, FINAL_NORM, OUTPUT = "embedding", "decoder.final_layernorm", "output_layer"
_LAYER, _PREDICTING = "decoder.layers.", "mtp.layers."


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


def pipeline_units(config: TransformerConfig) -> list[Unit]:
    """Return the units of the model in order, with its weights."""
    layers = [f"{_LAYER}{index}" for index in range(config.num_layers)]
    depths = config.num_predicting_layers
    predicting = [(f"{_PREDICTING}{i}", 0.0 if i else float(depths)) for i in range(depths)]
    behind = ["mtp.loss"] if depths else []
    return [EMBEDDING, *layers, FINAL_NORM, *predicting, OUTPUT, *behind]


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


def predicting_layer_of(unit: str) -> int | None:
    """Return the number of the layer of multi-token prediction that a unit is; None: it is none."""
    return int(unit.removeprefix(_PREDICTING)) if unit.startswith(_PREDICTING) else None


def kind_of(config: TransformerConfig, unit: str) -> LayerKind | None:
    """Return the kind of the layer that a unit is, or holds; None: there is none."""
    layer, predicting = layer_of(unit), predicting_layer_of(unit)
    if layer is not None:
        return config.layer_kinds[layer]
    return None if predicting is None else config.predicting_kinds[predicting]


def count_unit(config: TransformerConfig, layout: ParallelLayout, unit: str) -> ParameterCount:
    """Return the parameters of a unit on tensor-parallel rank 0, which has the most; without copies
    of the embedding.
    """
    h, norms = config.hidden_size, _norm_size(config)
    words, positions = _embedding(config, layout)
    kind = kind_of(config, unit)
    if kind is not None:
        attention = ParameterCount(_attention(config, layout.tp) + 2 * h * norms)
        layer = attention + _feed_forward(config, layout, kind)
        if predicting_layer_of(unit) is None:
            return layer
        return layer + ParameterCount(2 * h * h // layout.tp + 3 * h * norms)
    counts = {FINAL_NORM: h * norms, OUTPUT: words, EMBEDDING: words + positions}
    return ParameterCount(counts.get(unit, 0))


def _embedding(config: TransformerConfig, layout: ParallelLayout) -> tuple[int, int]:
    """Return the parameters of words and of positions."""
    h, learned = config.hidden_size, config.position_embedding_type == "learned_absolute"
    words = -(-config.vocab_size // layout.tp) * h
    return words, config.max_sequence_length * h if learned else 0


def count_rank(
    config: TransformerConfig, layout: ParallelLayout, stages: Sequence[Sequence[str]]
) -> ParameterCount:
    """Return the parameters of a rank that holds ``stages``; a tied weight counts once."""
    units = [unit for stage in stages for unit in stage]
    total = sum((count_unit(config, layout, unit) for unit in units), ParameterCount())
    words, positions = _embedding(config, layout)
    shared = config.share_embeddings_and_output_weights and OUTPUT in units
    if shared and EMBEDDING in units:
        total += ParameterCount(-words)
    if any(predicting_layer_of(unit) is not None for unit in units) and EMBEDDING not in units:
        total += ParameterCount((0 if shared else words) + positions)
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


def _feed_forward(
    config: TransformerConfig, layout: ParallelLayout, kind: LayerKind
) -> ParameterCount:
    moe, h = config.moe, config.hidden_size
    if moe is None or kind == "dense":
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
