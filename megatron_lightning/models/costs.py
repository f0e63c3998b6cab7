"""Multiply-adds of the units of a :class:`GPTModel`, and the weights of units in the partition into
stages. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from megatron_lightning.config import TransformerConfig
from megatron_lightning.models.blueprint import (
    LAYER,
    OUTPUT,
    PREDICTING,
    Weight,
    has_attention,
    kind_weights,
    unit_names,
    unit_weights,
)
from megatron_lightning.pipeline.schedules.partition import STAGE_END, Unit


def multiply_adds(config: TransformerConfig, unit: str, lengths: Sequence[int]) -> float:
    """Return the multiply-adds of a unit's forward for a sample.

    Args:
        config: The model.
        unit: An element of ``GPTModel.pipeline_units()``.
        lengths: Tokens of every document of the sample.
    """
    tokens, depths = sum(lengths), config.num_predicting_layers
    if unit == OUTPUT:
        return float(tokens * (1 + depths) * config.hidden_size * config.vocab_size)
    if unit.startswith(LAYER):
        index = int(unit.removeprefix(LAYER))
        kinds, layer, norms = config.layer_kinds[index : index + 1], config.of_layer(index), 0
    elif unit.startswith(PREDICTING):
        kinds, layer = config.depth_kinds, config.of_layer(config.num_layers)
        norms = 3 * config.hidden_size  # that Megatron counts
    else:
        return 0.0
    per_token = active_size(config, unit_weights(config, unit)) + norms
    return tokens * per_token + sum(mixing(layer, kind, lengths) for kind in kinds)


def mixing(config: TransformerConfig, kind: str, lengths: Sequence[int]) -> float:
    """Return the multiply-adds that mix the tokens in a layer of a kind, beside the matrices."""
    if kind in MIXING:
        return MIXING[kind](config, lengths)
    if not has_attention(kind_weights(config, kind)):
        return _delta_mixing(config, lengths) if config.has_linear_attention else 0.0
    mla = config.mla
    # Megatron counts the norms of latents.
    latents = 0 if mla is None else (mla.q_lora_rank or 0) + mla.kv_lora_rank
    pairs = sum(visible_pairs(length, config.window_size) for length in lengths)
    return sum(lengths) * latents + pairs * pair_channels(config)


def visible_pairs(length: int, window_size: tuple[int, int] | None = None) -> float:
    """Return the number of visible (query, key) pairs of a causal sequence, as the area below the
    diagonal. Without a window the area is half of the square, equal to Megatron's number.
    """
    reach = length if window_size is None else min(length, window_size[0] + 1)
    return length * reach - reach * reach / 2


def pair_channels(config: TransformerConfig) -> int:
    """Return the multiply-adds of a query and a key in one layer: the dot product, and the product
    of the probability with the value.
    """
    mla = config.mla
    key, value = (
        (config.head_dim, config.head_dim) if mla is None else (mla.q_head_dim, mla.v_head_dim)
    )
    return config.num_attention_heads * (key + value)


def active_size(config: TransformerConfig, weights: Iterable[Weight]) -> int:
    """Return the elements of the matrices. Of experts, only the experts of one token count."""
    size = 0
    for weight in weights:
        if weight.kind != "matrix":
            continue
        if weight.experts is None or config.moe is None:
            size += weight.size
        else:
            size += weight.size // weight.experts * config.moe.router_topk
    return size


def _mamba_mixing(config: TransformerConfig, lengths: Sequence[int]) -> float:
    """Return the multiply-adds of the scan, by Megatron's estimate: 7 operations in forward for
    each element of the state.
    """
    mamba = config.mamba
    inner = 0 if mamba is None else mamba.sizes(config.hidden_size).inner * mamba.state_dim
    return sum(lengths) * 3.5 * inner


def _delta_mixing(config: TransformerConfig, lengths: Sequence[int]) -> float:
    """Return the multiply-adds of convolution and delta rule, as Megatron counts them: four
    products of a key and a value for each token and state.
    """
    sizes = config.delta_net
    if sizes is None:
        return 0.0
    state = sizes.num_value_heads * sizes.key_head_dim * sizes.value_head_dim
    return float(sum(lengths) * (4 * state + sum(sizes.conv_parts) * sizes.conv_kernel_dim))


MIXING: Mapping[str, Callable[[TransformerConfig, Sequence[int]], float]] = MappingProxyType(
    {"mamba": _mamba_mixing, "delta_net": _delta_mixing}
)
"""Kind of a layer without attention -> function that returns the multiply-adds that mix tokens, of
a config and the tokens of every document of a sample."""


def pipeline_units(config: TransformerConfig) -> list[Unit]:
    """Return the units of the model in order, with partition weights.

    Transformer layers weigh the same. Layers of a pattern of letters, and the output layer, weigh
    by their multiply-adds for a longest sequence, in units of the mean layer.
    """
    names, depths = unit_names(config), config.num_predicting_layers
    own_units, predicting = names[: len(names) - 1 - depths], names[len(names) - 1 - depths : -1]
    behind = ["mtp.loss"] if depths else []
    hybrid = config.hybrid
    if hybrid is None:
        # All depths are on one stage: the first depth carries the weight of all depths.
        ahead: list[Unit] = [(n, 0.0 if i else float(depths)) for i, n in enumerate(predicting)]
        return [*own_units, *ahead, OUTPUT, *behind]
    sample = [config.max_sequence_length]
    # Units of the mean layer keep the weights comparable to models whose layers weigh 1.
    mean = sum(multiply_adds(config, name, sample) for name in own_units) / config.num_layers
    costs = {name: multiply_adds(config, name, sample) / mean for name in names}
    for index, name in enumerate(predicting):
        costs[name] = 0.0 if index else depths * costs[name]
    first, *layers = own_units[: 1 + config.num_layers]
    units: list[Unit] = [(first, costs[first])]
    for index, segment in enumerate(hybrid.segments):
        units += [STAGE_END] if index else []
        stage, layers = layers[: len(segment)], layers[len(segment) :]
        units += [(name, costs[name]) for name in stage]
    further_units = [*own_units[1 + config.num_layers :], *predicting, OUTPUT]
    return [
        *units,
        *((name, costs[name]) for name in further_units),
        *((name, 0.0) for name in behind),
    ]
