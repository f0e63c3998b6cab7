"""Sizes and choices of a transformer.

Names are Megatron-Core's, if Megatron-Core has the option. Notation of the package's model files:
``s`` sequence, ``b`` batch, ``h`` hidden, ``n`` attention heads, ``g`` query groups, ``d`` head dim
(``kv_channels``), ``f`` feed-forward size, ``v`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass
from typing import Literal, get_args

from megatron_lightning.config.attention_kernels import AttentionBackend, check_scores
from megatron_lightning.config.by_layer import (
    check_delta_net,
    check_rotary,
    check_windows,
    layer_config,
)
from megatron_lightning.config.delta_net import DeltaNetConfig, linear_layers
from megatron_lightning.config.hybrid_pattern import (
    HybridPattern,
    hybrid_pattern,
    parse_hybrid_pattern,
    refuse_ratios,
)
from megatron_lightning.config.latent_attention import (
    LatentAttentionConfig,
    check_latent_attention,
)
from megatron_lightning.config.layer_kinds import (
    GROUPS,
    SINGLE_MIXER_KINDS,
    WITHOUT_ATTENTION,
    WITHOUT_FEED_FORWARD,
    check_layer_kinds,
)
from megatron_lightning.config.mamba import MambaConfig
from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.config.rope_scaling import RopeScaling
from megatron_lightning.config.transformer_checks import (
    check_activation,
    check_head_norms,
    check_heads,
    check_numbers,
    check_residual_stream,
    restore_group,
)
from megatron_lightning.config.value_checks import check_choice, check_counts

Normalization = Literal["RMSNorm", "LayerNorm"]
NormPlacement = Literal["pre", "post", "sandwich", "parallel"]
PositionEmbedding = Literal["rope", "learned_absolute", "none"]
Activation = Literal[
    "swiglu", "geglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_tanh", "silu",
    "squared_relu",
]  # fmt: skip
SoftmaxType = Literal["vanilla", "learnable"]

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "normalization": get_args(Normalization),
    "norm_placement": get_args(NormPlacement),
    "position_embedding_type": get_args(PositionEmbedding),
    "activation": get_args(Activation),
    "attention_backend": get_args(AttentionBackend),
    "softmax_type": get_args(SoftmaxType),
}
_BY_LAYER = ("window_size", "window_attn_skip_freq", "no_rope_freq", "linear_attention_freq")
_COUNTS = (
    "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_sequence_length",
    "num_query_groups", "kv_channels", "ffn_hidden_size", "mtp_num_layers",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of a decoder-only transformer."""

    num_layers: int = 0
    """Layers of the model. 0: as many as layer_pattern has letters."""
    hidden_size: int
    """Width of the residual stream (h)."""
    num_attention_heads: int
    """Query heads (n)."""
    vocab_size: int
    """Entries of the vocabulary (v), of any size."""
    max_sequence_length: int = 2048
    """Longest sequence in tokens, and the number of learned positions."""
    num_query_groups: int | None = None
    """Key and value heads (g). None: a head for each query head. 1: multi-query attention."""
    kv_channels: int | None = None
    """Size of a head (d). None: hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer (f). None: 4 x hidden_size."""
    normalization: Normalization = "RMSNorm"
    """Kind of the norms."""
    norm_placement: NormPlacement = "pre"
    """Norms of attention and feed-forward: of their inputs, of their outputs before these join the
    residual stream (OLMo 2), or of both (sandwich). parallel: attention and feed-forward read one
    norm of the layer's input, and join the stream together (Cohere)."""
    layernorm_zero_centered_gamma: bool = False
    """Whether norms multiply by 1 + weight, with weights around 0 (Gemma, Nemotron)."""
    layernorm_bias: bool = True
    """Whether a LayerNorm has a bias (Cohere's has none). Without meaning for RMSNorm."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance in the norms."""
    position_embedding_type: PositionEmbedding | None = None
    """Rotary positions in attention, learned positions added to the word embeddings, or none. None:
    rope, but none if layer_pattern is a string without latent attention, as in Megatron-Core's
    hybrid models."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = 1.0
    """Rotated part of each head."""
    rotary_interleaved: bool = False
    """Rotate pairs of neighboring channels 2i and 2i + 1 (GPT-J, GLM) instead of i and i + half of
    the rotated channels."""
    rope_scaling: RopeScaling | None = None
    """Rotary frequencies for longer sequences (Llama 3.1, YaRN, LongRoPE). None: frequencies of
    rotary_base."""
    window_rotary_base: float | None = None
    """Base of the rotary frequencies in layers with a sliding window, without rope_scaling (Gemma
    3). None: rotary_base and rope_scaling."""
    no_rope_freq: int | Sequence[int] | None = None
    """Layers without rotary positions (SmolLM 3): every n-th layer, or a list with 1 (no rotary
    positions) or 0 for each layer. None: every layer has rotary positions."""
    activation: Activation = "swiglu"
    """Feed-forward activation. swiglu, geglu, geglu_tanh (Gemma) and quick_geglu (gpt-oss) are
    gated: linear_fc1 holds gate and up, gate first. gelu_tanh is GPT-2's, squared_relu
    Nemotron's. silu is swiglu without up."""
    activation_func_clamp_value: float | None = None
    """Largest gate, and largest absolute value of up, in gated activations (gpt-oss: 7). None:
    unlimited."""
    glu_linear_offset: float = 0.0
    """Added to up in gated activations (gpt-oss: 1)."""
    add_bias_linear: bool = False
    """Whether the linear layers (but not the output layer) have a bias."""
    add_qkv_bias: bool = False
    """Whether linear_qkv has a bias even if the other linear layers have none (Qwen2)."""
    qk_layernorm: bool = False
    """Normalize every query and key head before the rotation (Qwen3). With mla, normalize the
    latents of queries and of keys and values (DeepSeek)."""
    qk_layernorm_per_head: bool = True
    """False: with qk_layernorm, a norm over all heads of the queries and a norm over all heads of
    the keys (OLMoE)."""
    attention_output_gate: bool = False
    """Multiply the context of each query head by the sigmoid of a gate from linear_qkv, before
    linear_proj (Qwen3-Next)."""
    share_embeddings_and_output_weights: bool = False
    """Whether the output layer uses the word embedding's weight (tied)."""
    hidden_dropout: float = 0.0
    """Dropout of each block's output before joining the residual stream."""
    embedding_dropout: float | None = None
    """Dropout of the embedding's output. None: hidden_dropout (Megatron). Seed-OSS and Phi-3 have
    0."""
    attention_dropout: float = 0.0
    """Dropout of the attention probabilities."""
    window_size: tuple[int, int] | None = None
    """Sliding window of attention: visible positions before a query's position, and visible
    positions after (must be 0). None: all positions before."""
    window_attn_skip_freq: int | Sequence[int] | None = None
    """Layers that see all positions in spite of window_size: every n-th layer, or a list with 1
    (window) or 0 (all positions) for each layer. None: every layer has the window."""
    fp32_residual_connection: bool = False
    """Keep the residual stream, from the embedding to the last norm, in fp32 with weights in bf16
    or fp16."""
    attention_softmax_in_fp32: bool = False
    """Compute attention scores, softmax and context in fp32. torch's fused kernels already sum the
    softmax in fp32."""
    attention_backend: AttentionBackend = "auto"
    """Kernels of attention: flash, cudnn, efficient and math by torch's names, chunked (plain
    products in chunks, a reference) or flex (torch's FlexAttention, which trains on GPUs only).
    auto is the first that supports the inputs. Any other kernel is used or refused."""
    softmax_scale: float | None = None
    """Factor of attention scores before the softmax. None: kv_channels^-1/2."""
    softmax_type: SoftmaxType = "vanilla"
    """learnable: every head has a learned score of a key without a value, softmax_offset, visible
    to all queries (an attention sink, gpt-oss)."""
    attn_logit_softcapping: float | None = None
    """Attention scores x become cap tanh(x / cap) before the softmax (Gemma 2). torch's fused
    kernels have no such scores. None: unchanged."""
    final_logit_softcapping: float | None = None
    """Logits x become cap tanh(x / cap) (Gemma 2). None: unchanged."""
    embedding_multiplier: float = 1.0
    """Factor of the word embeddings (Granite)."""
    residual_multiplier: float = 1.0
    """Factor of each block's output before joining the residual stream (Granite)."""
    logits_scaling: float = 1.0
    """Divisor of the logits (Granite)."""
    logits_in_fp32: bool = False
    """Return logits in fp32. The losses are computed in fp32 in any case."""
    label_smoothing: float = 0.0
    """Share of the target's probability spread over all entries of the vocabulary in the losses, as
    in torch's cross entropy."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits, added to the losses to keep logits small
    (PaLM: 1e-4)."""
    mla: LatentAttentionConfig | None = None
    """Latent attention in every layer (DeepSeek-V2). None: attention with heads of kv_channels."""
    moe: MoEConfig | None = None
    """Experts in place of feed-forward layers, in all layers or a subset. None: no experts."""
    mamba: MambaConfig | None = None
    """Mixers of Mamba-2 in the layers of the kind mamba. None: no such layers."""
    delta_net: DeltaNetConfig | None = None
    """Mixers of gated delta net, in the layers named by linear_attention_freq and in layers of the
    kind delta_net. None: no such layers."""
    linear_attention_freq: int | Sequence[int] | None = None
    """Layers with gated delta net in place of attention (Qwen3-Next): all but every n-th layer, or
    a list with 1 (gated delta net) or 0 (attention) for each layer. None: every layer attends."""
    layer_pattern: str | Sequence[str] | None = None
    """Layers with a single mixer each, as a string of letters (Megatron's hybrid_layer_pattern): M
    Mamba-2, G gated delta net, * attention, + latent attention, - feed-forward, E experts. | ends a
    pipeline stage, and / begins the letters of a depth of multi-token prediction
    (``config/hybrid_pattern.py``). Without |, stages are divided by cost. Or the kind of every
    layer in a list: dense, expert, attention, mlp, moe, mamba, or the class path of a user's kind
    (``config/layer_kinds.py``). None: as moe.layer_freq says."""
    hybrid_attention_ratio: InitVar[float | None] = None
    """Megatron's deprecated share of attention layers. Refused with the pattern that it means."""
    hybrid_mlp_ratio: InitVar[float | None] = None
    """Megatron's deprecated share of feed-forward layers. Refused with the pattern that it
    means."""
    mtp_num_layers: int | None = None
    """Layers of multi-token prediction behind the last layer, of the last layer's kind, or of the
    kinds in layer_pattern. In training, depth k predicts a token k positions beyond the next token
    (DeepSeek-V3). None: no such layers."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the losses of multi-token prediction, averaged over the predicting layers, in the
    training loss."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights. linear_proj, linear_fc2 and out_proj divide the
    value by the square root of the number of blocks in the residual stream: two in a layer with
    attention and feed-forward, one in a layer with a single mixer."""
    init_seed: int = 1234
    """Seed of the initial weights. Initial weights depend only on the seed and on the parameter's
    name, not on the layout."""

    def __post_init__(
        self, hybrid_attention_ratio: float | None, hybrid_mlp_ratio: float | None
    ) -> None:
        refuse_ratios(self, hybrid_attention_ratio, hybrid_mlp_ratio)
        self._resolve_pattern()
        check_counts(self, *_COUNTS)
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_numbers(self)
        check_residual_stream(self)
        restore_group(self, "mla", LatentAttentionConfig)
        check_latent_attention(self)
        check_heads(self)
        check_head_norms(self)
        restore_group(self, "rope_scaling", RopeScaling)
        for name in _BY_LAYER:
            if isinstance(getattr(self, name), list):  # of YAML or a checkpoint
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_activation(self)
        check_windows(self)
        check_scores(self)
        check_rotary(self)
        restore_group(self, "moe", MoEConfig)
        restore_group(self, "mamba", MambaConfig)
        restore_group(self, "delta_net", DeltaNetConfig)
        check_layer_kinds(self)
        check_delta_net(self)

    def _resolve_pattern(self) -> None:
        """Fill in what follows from a pattern of letters."""
        pattern = self.layer_pattern
        positions = "rope"
        if isinstance(pattern, str):
            resolved = hybrid_pattern(self, pattern)
            positions = "rope" if "+" in pattern else "none"
            object.__setattr__(self, "num_layers", len(resolved.letters))
            object.__setattr__(self, "mtp_num_layers", resolved.depths or None)
        elif pattern is not None:
            object.__setattr__(self, "layer_pattern", tuple(pattern))
        if self.position_embedding_type is None:
            object.__setattr__(self, "position_embedding_type", positions)

    @property
    def embedding_dropout_p(self) -> float:
        """Probability of a zero in the embedding's output."""
        if self.embedding_dropout is None:
            return self.hidden_dropout
        return self.embedding_dropout

    @property
    def num_residual_blocks(self) -> int:
        """Blocks added to the residual stream: attention, feed-forward, and single mixers."""
        return sum(1 if kind in SINGLE_MIXER_KINDS else 2 for kind in self.layer_kinds)

    @property
    def query_groups(self) -> int:
        """Key/value heads of the model (g)."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of a query or key head (d)."""
        if self.mla is not None:
            return self.mla.q_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def heads_per_group(self) -> int:
        """Query heads per key/value head."""
        return self.num_attention_heads // self.query_groups

    @property
    def num_sinks(self) -> int:
        """Heads with a learned sink."""
        return self.num_attention_heads if self.softmax_type == "learnable" else 0

    @property
    def norms_inputs(self) -> bool:
        """Whether attention and feed-forward read normed hidden states."""
        return self.norm_placement != "post"

    @property
    def norms_outputs(self) -> bool:
        """Whether outputs of attention and feed-forward are normed."""
        return self.norm_placement in ("post", "sandwich")

    @property
    def norms_middle(self) -> bool:
        """Whether the feed-forward has a norm of its own before."""
        return self.norm_placement in ("pre", "sandwich")

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Widths of the norms of queries and of keys. 0: no norms."""
        heads = (self.num_attention_heads, self.query_groups)
        q, k = (1, 1) if self.qk_layernorm_per_head else heads
        return (q * self.head_dim, k * self.head_dim) if self.qk_layernorm else (0, 0)

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer (f)."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def hybrid(self) -> HybridPattern | None:
        """The parsed pattern of letters, or None."""
        pattern = self.layer_pattern
        return parse_hybrid_pattern(pattern) if isinstance(pattern, str) else None

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of every layer."""
        if isinstance(self.layer_pattern, str):
            return parse_hybrid_pattern(self.layer_pattern).kinds
        if self.layer_pattern is not None:
            return tuple(self.layer_pattern)
        if self.moe is not None:
            return self.moe.layer_kinds(self.num_layers)
        return ("dense",) * self.num_layers

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts, without layers of multi-token prediction."""
        return sum(kind in GROUPS["moe"] for kind in self.layer_kinds)

    def of_layer(self, index: int) -> TransformerConfig:
        """Return the configuration of a layer, with the layer's window and rotary positions.

        Layers of multi-token prediction count as the last layer.
        """
        return layer_config(self, min(index, self.num_layers - 1))

    @property
    def has_linear_attention(self) -> bool:
        """Whether a layer with this configuration, from :meth:`of_layer`, has gated delta net in
        place of attention.
        """
        return all(linear_layers(self.linear_attention_freq, self.num_layers))

    @property
    def attends(self) -> bool:
        """Whether a layer has attention, as far as the kinds of layers tell."""
        return not set(self.layer_kinds + self.depth_kinds) <= WITHOUT_ATTENTION

    @property
    def has_feed_forward(self) -> bool:
        """Whether a layer has a feed-forward or experts, as far as the kinds of layers tell."""
        return not set(self.layer_kinds + self.depth_kinds) <= WITHOUT_FEED_FORWARD

    @property
    def num_predicting_layers(self) -> int:
        """Layers of multi-token prediction (D). 0: no such layers."""
        return self.mtp_num_layers or 0

    @property
    def depth_kinds(self) -> tuple[str, ...]:
        """Kinds of the layers in each depth of multi-token prediction: the last layer's, or the
        letters behind / in the pattern.
        """
        hybrid = self.hybrid
        return self.layer_kinds[-1:] if hybrid is None else hybrid.depth_kinds

    @property
    def expert_hidden_size(self) -> int:
        """Size of a token in the experts: the latent's, or hidden_size."""
        latent = None if self.moe is None else self.moe.latent_size
        return latent or self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Width of an expert."""
        width = None if self.moe is None else self.moe.ffn_hidden_size
        return width or self.ffn_size

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head."""
        if self.mla is not None:
            return self.mla.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def longest_short_document(self) -> int | None:
        """Most tokens of a document before all its rotary frequencies are others (LongRoPE). None:
        frequencies do not depend on the document.
        """
        scaling = self.rope_scaling
        is_long = scaling is not None and scaling.rope_type == "longrope"
        return scaling.original_length if scaling is not None and is_long else None

    @property
    def gated(self) -> bool:
        """Whether linear_fc1 holds a gate and an up projection."""
        return self.activation in ("swiglu", "geglu", "geglu_tanh", "quick_geglu")

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused linear_qkv weight. Each query group has the query heads, as many gates
        with attention_output_gate, a key head and a value head.
        """
        per_group = self.heads_per_group * (1 + self.attention_output_gate) + 2
        return self.query_groups * per_group * self.head_dim

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain values, for checkpoints and logs."""
        return asdict(self)
