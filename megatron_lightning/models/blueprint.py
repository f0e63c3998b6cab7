"""The weights of a :class:`GPTModel`, declared once: one row a parameter. No torch here.

Sharding plans, parameter counts, FLOPs, quantized weights and conversion rules are folds over the
rows. A test compares the rows with ``GPTModel(config).named_parameters()``.

Notation: ``h`` hidden, ``n`` query heads, ``g`` query groups, ``d`` head dim, ``f`` feed-forward
size, ``v`` vocabulary, ``E`` experts. A matrix is [outputs, inputs], as in ``nn.Linear``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from types import MappingProxyType
from typing import Literal

from megatron_lightning.config import LatentAttentionConfig, MoEConfig, TransformerConfig
from megatron_lightning.config.layer_kinds import entry_of

WeightKind = Literal[
    "matrix", "bias", "norm", "head_norm", "router", "gate", "embedding", "sink", "convolution",
    "head",
]  # fmt: skip
Split = Literal["rows", "columns"]

EMBEDDING, FINAL_NORM, OUTPUT = "embedding", "decoder.final_layernorm", "output_layer"
LAYER, PREDICTING = "decoder.layers.", "mtp.layers."
_DEPTH = "transformer_layer"  # in a layer of multi-token prediction


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of a layer."""

    path: str
    """Path in the layer, such as ``mlp.linear_fc1.weight``."""
    shape: tuple[int, ...]
    """Shape on one device."""
    kind: WeightKind
    """A matrix is a GEMM operand and may be quantized by a recipe.

    Router, gate and embedding are matrices that no recipe quantizes. A convolution has a row for
    each channel. Head weights are numbers, or channels, of heads of a state-space layer.
    """
    split: Split | None = None
    """Dim sharded by tensor-parallel ranks: outputs (rows) or inputs (columns).

    None: every rank has the full parameter.
    """
    blocks: int = 1
    """Matrices of equal size stacked in the rows, such as gate and up."""
    parts: tuple[int, ...] = ()
    """Rows of unequal matrices stacked in the rows, each sharded. (): equal blocks."""
    heads: int | None = None
    """Indivisible units of the split dim: heads, or query groups. None: single rows."""
    experts: int | None = None
    """Experts in dim 0, sharded by expert-parallel ranks.

    Expert-tensor-parallel ranks shard the split dim. None: a dense parameter.
    """

    @property
    def module(self) -> str:
        """Path of the module with the parameter."""
        return self.path.rpartition(".")[0]

    @property
    def size(self) -> int:
        """Elements on one device."""
        return prod(self.shape)

    def inside(self, path: str) -> Weight:
        """Return the weight of a module at ``path``."""
        return replace(self, path=f"{path}.{self.path}")


# ------------------------------------------------------------------------------------ small parts


def linear(
    path: str,
    rows: int,
    columns: int,
    split: Split | None,
    *,
    bias: bool = False,
    blocks: int = 1,
    heads: int | None = None,
    experts: int | None = None,
) -> tuple[Weight, ...]:
    """Return weight and bias of a linear layer, or of all experts' linear layers."""
    stack = () if experts is None else (experts,)
    weight = Weight(
        path=f"{path}.weight", shape=(*stack, rows, columns), kind="matrix", split=split,
        blocks=blocks, heads=heads, experts=experts,
    )  # fmt: skip
    if not bias:
        return (weight,)
    # The bias of a row-parallel layer is added after the sum over the ranks.
    own_split: Split | None = "rows" if split == "rows" else None
    return weight, replace(
        weight, path=f"{path}.bias", shape=(*stack, rows), kind="bias", split=own_split
    )


def norm(
    config: TransformerConfig, path: str, size: int, kind: WeightKind = "norm"
) -> tuple[Weight, ...]:
    """Return the parameters of a norm, or nothing if ``size`` is 0."""
    has_bias = config.normalization == "LayerNorm" and config.layernorm_bias
    names = ("weight", "bias") if has_bias else ("weight",)
    return tuple(Weight(path=f"{path}.{name}", shape=(size,), kind=kind) for name in names if size)


def attention(config: TransformerConfig) -> tuple[Weight, ...]:
    """Return the weights of grouped, latent or linear attention, in registration order."""
    if config.has_linear_attention:
        return _delta_net(config)
    if config.mla is not None:
        return _latent_attention(config, config.mla)
    h, width = config.hidden_size, config.num_attention_heads * config.head_dim
    q_size, k_size = config.qk_norm_sizes
    sink = Weight(
        path="core_attention.softmax_offset", shape=(config.num_sinks,), kind="sink", split="rows"
    )
    return (
        *linear(
            "linear_qkv", config.qkv_rows, h, "rows",
            bias=config.add_bias_linear or config.add_qkv_bias, heads=config.query_groups,
        ),
        *norm(config, "q_layernorm", q_size, "head_norm"),
        *norm(config, "k_layernorm", k_size, "head_norm"),
        *((sink,) if config.num_sinks else ()),
        *linear("linear_proj", h, width, "columns", bias=config.add_bias_linear),
    )  # fmt: skip


def _delta_net(config: TransformerConfig) -> tuple[Weight, ...]:
    """Return the weights of gated delta net, in registration order."""
    sizes, h = config.delta_net, config.hidden_size
    if sizes is None:
        return ()
    (projection,) = linear("in_proj", sum(sizes.in_parts), h, "rows", heads=sizes.num_key_heads)
    convolution = Weight(
        path="conv1d.weight", shape=(sum(sizes.conv_parts), 1, sizes.conv_kernel_dim),
        kind="convolution", split="rows", parts=sizes.conv_parts,
    )  # fmt: skip
    return (
        *(head_weight(name, sizes.num_value_heads) for name in ("dt_bias", "A_log")),
        replace(projection, parts=sizes.in_parts),
        convolution,
        Weight(path="out_norm.weight", shape=(sizes.value_head_dim,), kind="head_norm"),
        *linear("out_proj", h, sizes.value_width, "columns"),
    )


def _latent_attention(config: TransformerConfig, mla: LatentAttentionConfig) -> tuple[Weight, ...]:
    h, n, rank = config.hidden_size, config.num_attention_heads, mla.q_lora_rank
    latents = mla.kv_lora_rank
    if rank is None:
        queries = linear("linear_q_proj", n * mla.q_head_dim, h, "rows", heads=n)
    else:
        queries = (
            *linear("linear_q_down_proj", rank, h, None),
            *norm(config, "q_layernorm", rank * config.qk_layernorm),
            *linear("linear_q_up_proj", n * mla.q_head_dim, rank, "rows", heads=n),
        )
    expanded = n * (mla.qk_head_dim + mla.v_head_dim)
    return (
        *queries,
        *linear("linear_kv_down_proj", latents + mla.qk_pos_emb_head_dim, h, None),
        *norm(config, "kv_layernorm", latents * config.qk_layernorm),
        *linear("linear_kv_up_proj", expanded, latents, "rows", heads=n),
        *linear("linear_proj", h, n * mla.v_head_dim, "columns"),
    )


def mlp(config: TransformerConfig, f: int, experts: int | None = None) -> tuple[Weight, ...]:
    """Return the two linear layers of a feed-forward of width ``f``, or of all experts."""
    h = config.hidden_size if experts is None else config.expert_hidden_size
    blocks, bias = 2 if config.gated else 1, config.add_bias_linear
    return (
        *linear("linear_fc1", blocks * f, h, "rows", bias=bias, blocks=blocks, experts=experts),
        *linear("linear_fc2", h, f, "columns", bias=bias, experts=experts),
    )


# ------------------------------------------------------------------------------------------ layers


def _dense(config: TransformerConfig) -> tuple[Weight, ...]:
    return mlp(config, config.ffn_size)


def _expert(config: TransformerConfig) -> tuple[Weight, ...]:
    moe, h = config.moe, config.hidden_size
    if moe is None:
        return _dense(config)
    router = Weight(path="router.weight", shape=(moe.num_experts, h), kind="router")
    gate = Weight(path="shared_experts.gate.weight", shape=(1, h), kind="gate")
    bias = Weight(path="router.bias", shape=(moe.num_experts,), kind="bias")
    shared_size = moe.shared_expert_intermediate_size
    return (
        router,
        *((bias,) if moe.router_bias else ()),
        *_inside("experts", mlp(config, config.expert_ffn_size, moe.num_experts)),
        *_latent_projections(config, moe),
        *_inside("shared_experts", () if shared_size is None else mlp(config, shared_size)),
        *((gate,) if moe.shared_expert_gate else ()),
    )


def _latent_projections(config: TransformerConfig, moe: MoEConfig) -> tuple[Weight, ...]:
    h, latent, bias = config.hidden_size, moe.latent_size, config.add_bias_linear
    if latent is None:
        return ()
    return (
        *linear("fc1_latent_proj", latent, h, None, bias=bias),
        *linear("fc2_latent_proj", h, latent, None, bias=bias),
    )


def _transformer_layer(
    config: TransformerConfig, feed_forward: Callable[[TransformerConfig], tuple[Weight, ...]]
) -> tuple[Weight, ...]:
    norms = (config.norms_inputs, config.norms_middle, config.norms_outputs)
    before, middle, behind = (config.hidden_size * there for there in norms)
    return (
        *norm(config, "input_layernorm", before),
        *_inside("self_attention", attention(config)),
        *norm(config, "post_self_attn_layernorm", behind),
        *norm(config, "pre_mlp_layernorm", middle),
        *_inside("mlp", feed_forward(config)),
        *norm(config, "post_mlp_layernorm", behind),
    )


def _attention_layer(config: TransformerConfig) -> tuple[Weight, ...]:
    inner = _inside("self_attention", attention(config))
    return (*norm(config, "input_layernorm", config.hidden_size), *inner)


def _delta_net_layer(config: TransformerConfig) -> tuple[Weight, ...]:
    inner = _inside("self_attention", _delta_net(config))
    return (*norm(config, "input_layernorm", config.hidden_size), *inner)


def _feed_forward_layer(
    config: TransformerConfig, feed_forward: Callable[[TransformerConfig], tuple[Weight, ...]]
) -> tuple[Weight, ...]:
    inner = _inside("mlp", feed_forward(config))
    return (*norm(config, "pre_mlp_layernorm", config.hidden_size), *inner)


def _mamba_layer(config: TransformerConfig) -> tuple[Weight, ...]:
    mamba, h = config.mamba, config.hidden_size
    if mamba is None:
        return ()
    sizes = mamba.sizes(h)
    channels = sum(sizes.conv_parts)
    convolution = Weight(
        path="conv1d.weight", shape=(channels, 1, mamba.conv_kernel), kind="convolution",
        split="rows", parts=sizes.conv_parts,
    )  # fmt: skip
    (projection,) = linear("in_proj", sum(sizes.in_parts), h, "rows")
    mixer = (
        *(head_weight(name, sizes.heads) for name in ("A_log", "D", "dt_bias")),
        replace(projection, parts=sizes.in_parts),
        convolution,
        replace(convolution, path="conv1d.bias", shape=(channels,)),
        head_weight("norm.weight", sizes.inner),
        *linear("out_proj", h, sizes.inner, "columns"),
    )
    return (*norm(config, "norm", h), *_inside("mixer", mixer))


def head_weight(path: str, size: int) -> Weight:
    """Return a vector sharded by heads."""
    return Weight(path=path, shape=(size,), kind="head", split="rows")


LAYER_WEIGHTS: Mapping[str, Callable[[TransformerConfig], tuple[Weight, ...]]] = MappingProxyType(
    {
        "dense": partial(_transformer_layer, feed_forward=_dense),
        "expert": partial(_transformer_layer, feed_forward=_expert),
        "attention": _attention_layer,
        "delta_net": _delta_net_layer,
        "mlp": partial(_feed_forward_layer, feed_forward=_dense),
        "moe": partial(_feed_forward_layer, feed_forward=_expert),
        "mamba": _mamba_layer,
    }
)
"""Kind of a layer -> function that lists the weights."""


def layer_weights(config: TransformerConfig, index: int) -> tuple[Weight, ...]:
    """Return the weights of layer ``index``, in registration order."""
    return kind_weights(attention_config(config, index), config.layer_kinds[index])


def attention_config(config: TransformerConfig, index: int) -> TransformerConfig:
    """Return a configuration with the attention of layer ``index``: the layer's, or the model's if
    all layers have the same weights.
    """
    return config if config.linear_attention_freq is None else config.of_layer(index)


@lru_cache(maxsize=64)  # layers of a kind are equal, and plans ask for each
def kind_weights(config: TransformerConfig, kind: str) -> tuple[Weight, ...]:
    """Return the weights of a layer of a kind, in registration order."""
    return entry_of(kind, LAYER_WEIGHTS, "weights")(config)


def has_attention(weights: Iterable[Weight]) -> bool:
    """Return whether a layer with these weights has softmax attention."""
    return any(weight.module.endswith("self_attention.linear_proj") for weight in weights)


def depth_layers(config: TransformerConfig) -> tuple[tuple[str, str], ...]:
    """Return path and kind of every layer in a depth of multi-token prediction.

    The letters of a pattern are a list of layers, even a single letter.
    """
    if config.hybrid is None:
        return tuple((_DEPTH, kind) for kind in config.depth_kinds)
    return tuple((f"{_DEPTH}.layers.{i}", kind) for i, kind in enumerate(config.depth_kinds))


def predicting_weights(config: TransformerConfig, depth: int) -> tuple[Weight, ...]:
    """Return the weights of a depth of multi-token prediction, without shared embeddings."""
    h, layer = config.hidden_size, attention_config(config, config.num_layers)
    inner = (
        weight.inside(path)
        for path, kind in depth_layers(config)
        for weight in kind_weights(layer, kind)
    )
    return (
        *norm(config, "enorm", h),
        *norm(config, "hnorm", h),
        *linear("eh_proj", h, 2 * h, "rows"),
        *inner,
        *norm(config, "final_layernorm", h),
    )


def embedding_weights(config: TransformerConfig) -> tuple[Weight, ...]:
    """Return the tables of words and of learned positions."""
    learned = config.position_embedding_type == "learned_absolute"
    h = config.hidden_size
    words = Weight(
        path="word_embeddings.weight", shape=(config.vocab_size, h), kind="embedding", split="rows"
    )
    positions = Weight(
        path="position_embeddings.weight", shape=(config.max_sequence_length, h), kind="embedding"
    )
    return (words, positions) if learned else (words,)


def unit_weights(config: TransformerConfig, unit: str) -> tuple[Weight, ...]:
    """Return the weights of a unit of ``GPTModel.pipeline_units()``, shared weights included."""
    if unit == EMBEDDING:
        return embedding_weights(config)
    if unit == FINAL_NORM:
        return _final_norm(config)
    if unit == OUTPUT:
        words = embedding_weights(config)[0]
        return (replace(words, path="weight"),)
    for prefix, weights in ((LAYER, layer_weights), (PREDICTING, predicting_weights)):
        if unit.startswith(prefix):
            return weights(config, int(unit.removeprefix(prefix)))
    return ()


def matrix_at(config: TransformerConfig, module: str) -> Weight:
    """Return the matrix of the linear layer or table at ``module``, a path in the model.

    Raises:
        KeyError: If the blueprint has no matrix there.
    """
    unit = _unit_of(module)
    path = module[len(unit) + 1 :]
    for weight in unit_weights(config, unit):
        if weight.module == path and len(weight.shape) > 1:
            return weight
    raise KeyError(module)


def _unit_of(module: str) -> str:
    for prefix in (LAYER, PREDICTING):
        if module.startswith(prefix):
            return prefix + module.removeprefix(prefix).partition(".")[0]
    return OUTPUT if module == OUTPUT else module.partition(".")[0]


def _final_norm(config: TransformerConfig) -> tuple[Weight, ...]:
    weights = norm(config, "norm", config.hidden_size)
    return tuple(replace(weight, path=weight.path.removeprefix("norm.")) for weight in weights)


def unit_names(config: TransformerConfig) -> list[str]:
    """Return the names of the units with parameters, in order."""
    layers = [f"{LAYER}{index}" for index in range(config.num_layers)]
    predicting = [f"{PREDICTING}{depth}" for depth in range(config.num_predicting_layers)]
    return [EMBEDDING, *layers, FINAL_NORM, *predicting, OUTPUT]


def model_weights(config: TransformerConfig) -> Iterator[Weight]:
    """Yield every parameter of the model once, with the path in the model."""
    tied = config.share_embeddings_and_output_weights
    for unit in unit_names(config):
        if not (tied and unit == OUTPUT):
            yield from _inside(unit, unit_weights(config, unit))


def saved_tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every parameter, and of the buffers in checkpoints."""
    for weight in model_weights(config):
        yield weight.path, weight.shape
        moe = config.moe
        if weight.kind == "router" and moe is not None and moe.router_enable_expert_bias:
            yield f"{weight.module}.expert_bias", (moe.num_experts,)


def num_parameters(config: TransformerConfig) -> int:
    """Return the number of parameters of the model."""
    return sum(weight.size for weight in model_weights(config))


def _inside(path: str, weights: Iterable[Weight]) -> tuple[Weight, ...]:
    return tuple(weight.inside(path) for weight in weights)
