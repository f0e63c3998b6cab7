"""Megatron-LM's estimate of memory (``theoretical_memory_utils.py``), for comparison with plans of
Megatron-LM's users. No torch here.

The estimate is for bf16 weights with fp32 gradients and Adam, for the fullest rank, and simplified.
The embedding counts only for the first stage. Biases are left out. Multi-token prediction counts
only layer weights. Activations assume layers with a feed-forward size of ``ffn_hidden_size``.
Recomputation and the attention backend do not matter (https://arxiv.org/abs/2205.05198, equations 2
and 5). :func:`planning.memory` has no such limits.

Notation: ``s`` sequence, ``b`` samples of a micro-batch, ``h`` hidden, ``f`` feed-forward size,
``v`` vocabulary, ``L`` layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.layer_kinds import GROUPS
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.parallel.grid.layout import ParallelLayout


class MegatronMemory(NamedTuple):
    """Megatron-LM's estimate for the fullest rank, in bytes."""

    weight_and_optimizer_bytes: float
    """Weights, gradients, main params and moments."""
    activation_bytes_sp_selective: float
    """Activations with sequence parallelism and selective recomputation."""
    activation_bytes_no_sp: float
    """Activations without sequence parallelism."""


def megatron_memory(
    config: TransformerConfig,
    layout: ParallelLayout,
    *,
    world_size: int,
    sequence_length: int,
    micro_batch_size: int = 1,
    num_microbatches: int = 1,
    distributed_optimizer: bool = True,
) -> MegatronMemory:
    """Return the numbers that Megatron-LM would print for the model and layout.

    Args:
        config: The model.
        layout: Sizes of the parallel axes.
        world_size: Number of ranks.
        sequence_length: Tokens of a sample.
        micro_batch_size: Samples of a micro-batch.
        num_microbatches: Micro-batches of a step.
        distributed_optimizer: Whether the optimizer's state is sharded over data-parallel ranks.

    Raises:
        ConfigError: If the layout does not fit the world.
    """
    grid = RankGrid(layout, world_size)
    tokens, h, v = sequence_length * micro_batch_size, config.hidden_size, config.vocab_size
    scale = _in_flight(layout, num_microbatches)
    selective = _all_stages(config, layout, 18 * h + 4 * config.ffn_size) * scale
    plain_bytes = _all_stages(config, layout, h * (10 + 24 / layout.tp)) * scale
    if layout.pp == 1:  # the output layer's input and the logits
        selective += 4 * (h + v)
        plain_bytes += 2 * (h + v / layout.tp)
    return MegatronMemory(
        _weights(config, grid, distributed_optimizer),
        tokens * selective / layout.tp,
        tokens * plain_bytes * 1.05,
    )


def _all_stages(config: TransformerConfig, layout: ParallelLayout, per_layer: float) -> float:
    """Return the bytes a token of all layers, and of a stage's embedding for every stage."""
    return config.num_layers * per_layer + layout.pp * (8 + config.hidden_size)


def _in_flight(layout: ParallelLayout, num_microbatches: int) -> float:
    """Return the first stage's activations, in units of one micro-batch's activations on all
    stages.
    """
    if layout.vpp > 1:
        return 1 + (layout.pp - 1) / (layout.pp * layout.vpp)
    return min(1.0, num_microbatches / layout.pp)


def _weights(config: TransformerConfig, grid: RankGrid, distributed_optimizer: bool) -> float:
    h, layout = config.hidden_size, grid.layout
    depths = config.depth_kinds * config.num_predicting_layers
    layers, predicting = (_layers(config, kinds) for kinds in (config.layer_kinds, depths))
    embedding, norm = config.vocab_size * h, h if config.normalization == "RMSNorm" else 2 * h
    # Each stage has part of the layers, and one stage the layers of multi-token prediction.
    dense = (layers.split / layout.pp + predicting.split + embedding) / layout.tp
    dense += (layers.replicated + norm) / layout.pp + predicting.replicated
    if layout.pp == 1 and not config.share_embeddings_and_output_weights:
        dense += embedding / layout.tp

    def bytes_per_parameter(num_copies: int) -> float:
        return 6 + 12 / num_copies if distributed_optimizer else 18

    own_experts = (layers.experts / layout.pp + predicting.experts) / (layout.etp * layout.ep)
    return dense * bytes_per_parameter(grid.size("dp")) + own_experts * bytes_per_parameter(
        grid.size("edp")
    )


class _Parameters(NamedTuple):
    split: float
    """Divided over tensor-parallel ranks."""
    replicated: int
    experts: float


def _layers(config: TransformerConfig, kinds: Sequence[str]) -> _Parameters:
    """Return the parameters of layers."""
    h, moe = config.hidden_size, config.moe
    gate = 3 / 2 if config.gated else 1
    num_expert_layers = sum(kind in GROUPS["moe"] for kind in kinds)
    transformers = kinds.count("dense") + kinds.count("expert")
    split: float = (transformers + kinds.count("attention")) * _attention(config)
    split += (kinds.count("dense") + kinds.count("mlp")) * 2 * h * config.ffn_size * gate
    if config.mamba is not None:
        rows = sum(config.mamba.sizes(h).in_parts) + config.mamba.sizes(h).inner
        split += kinds.count("mamba") * h * rows
    # Layers with a single mixer have one norm, as parallel layers.
    num_norms = len(kinds) + transformers * (config.norm_placement != "parallel")
    has_bias = config.normalization == "LayerNorm" and config.layernorm_bias
    replicated = num_norms * (2 * h if has_bias else h)
    if moe is None:
        return _Parameters(split, replicated, 0.0)
    shared_size = moe.shared_expert_intermediate_size or 0
    split += num_expert_layers * 2 * h * shared_size * gate
    replicated += num_expert_layers * h * moe.num_experts
    replicated += num_expert_layers * 2 * h * (moe.latent_size or 0)
    expert = 2 * config.expert_hidden_size * config.expert_ffn_size * gate
    experts = expert * num_expert_layers * moe.num_experts
    return _Parameters(split, replicated, experts)


def _attention(config: TransformerConfig) -> int:
    """Return the weights of a layer's attention, without norms of heads."""
    h, n, mla = config.hidden_size, config.num_attention_heads, config.mla
    if mla is None:
        return 2 * h * config.head_dim * (n + config.query_groups)
    return mla.num_parameters(h, n, norms=1)
