"""Configuration objects: sizes of the transformer models, and the strategy's groups of options. No
torch here.

Names are Megatron-Core's where it has them. Notation of the package's model files: ``s`` sequence,
``b`` batch, ``h`` hidden, ``n`` attention heads, ``g`` query groups, ``d`` head dim
(``kv_channels``), ``f`` feed-forward size, ``v`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

from megatron_lightning.errors import ConfigError

Normalization = Literal["RMSNorm", "LayerNorm"]
PositionEmbedding = Literal["rope", "learned_absolute", "none"]
RopeType = Literal["llama3", "yarn"]
DataParallel = Literal["ddp", "zero1", "fsdp"]
NonFinite = Literal["ignore", "raise", "skip"]
StartMethod = Literal["popen", "spawn", "fork"]
MomentsDtype = Literal["fp32", "bf16"]
SaveErrorAction = Literal["raise", "warn"]
ContextExchange = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
Activation = Literal["swiglu", "gelu", "gelu_tanh"]

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "normalization": get_args(Normalization),
    "position_embedding_type": get_args(PositionEmbedding),
    "activation": get_args(Activation),
}
_COUNTS = (
    "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_sequence_length",
    "num_query_groups", "kv_channels", "ffn_hidden_size",
)  # fmt: skip
# The two bounds, lower first, and what else only this type has.
_ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": (
        "beta_slow", "beta_fast", "mscale", "mscale_all_dim", "correction_range_round_to_int",
    ),
}  # fmt: skip


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_counts(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not _is_count(value):
            raise ConfigError(f"{name} is {value!r}; it must be a positive integer.")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name} is {value!r}, which is unknown. Set it to one of {', '.join(choices)}."
        )


@dataclass(frozen=True, kw_only=True)
class LossScaleOptions:
    """Dynamic loss scaling of ``16-mixed``, with Megatron's rule and defaults."""

    initial_scale: float = 2.0**32
    """Scale of the first step; it falls in the first steps, by their overflows, to one that
    fits."""
    growth_interval: int = 1000
    """Steps without overflow after which the scale is raised."""
    growth_factor: float = 2.0
    """Factor by which it is raised."""
    backoff_factor: float = 0.5
    """Factor by which it is lowered after an overflow."""
    hysteresis: int = 2
    """Overflows that are skipped before the scale is lowered; the count restarts when the scale is
    raised."""
    min_scale: float = 1.0
    """The scale is never lowered below this."""

    def __post_init__(self) -> None:
        if not 0.0 < self.min_scale <= self.initial_scale:
            raise ConfigError(
                f"loss scale: initial_scale is {self.initial_scale} and min_scale "
                f"{self.min_scale}; the scale starts at the first and never falls below the "
                "second. Set 0 < min_scale <= initial_scale."
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ConfigError(
                f"loss scale: growth_interval is {self.growth_interval} and hysteresis "
                f"{self.hysteresis}; both must be positive integers."
            )
        if self.growth_factor <= 1.0 or not 0.0 < self.backoff_factor < 1.0:
            raise ConfigError(
                f"loss scale: growth_factor is {self.growth_factor} and backoff_factor "
                f"{self.backoff_factor}; the first raises the scale, the second lowers it. Set "
                "growth_factor above 1, and backoff_factor between 0 and 1."
            )


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies for longer sequences than those of the pretraining, by Llama 3's rule
    (https://arxiv.org/abs/2407.21783) or YaRN (https://arxiv.org/abs/2309.00071).

    Both look at the turns that a channel makes over the original length: below a lower bound its
    frequency is divided by ``factor``, above an upper bound kept, and in between interpolated.
    """

    rope_type: RopeType
    """Rule: llama3 interpolates over the turns, yarn over the channels."""
    factor: float
    """Divisor of the low frequencies, 1 or more; Megatron's default for llama3 is 8."""
    original_max_position_embeddings: int
    """Longest sequence of the pretraining in tokens; Megatron's default is 8192 for llama3 and 4096
    for yarn."""
    low_freq_factor: float = 1.0
    """llama3: lower bound, in turns."""
    high_freq_factor: float = 4.0
    """llama3: upper bound, in turns."""
    beta_fast: float = 32.0
    """yarn: upper bound, in turns."""
    beta_slow: float = 1.0
    """yarn: lower bound, in turns."""
    mscale: float = 1.0
    """yarn: cosines and sines are multiplied by (0.1 x mscale x ln(factor) + 1) / (0.1 x
    mscale_all_dim x ln(factor) + 1)."""
    mscale_all_dim: float = 0.0
    """yarn: see mscale."""
    correction_range_round_to_int: bool = True
    """yarn: widen the interpolated range to whole channels."""

    def __post_init__(self) -> None:
        _check_choice("rope_scaling.rope_type", self.rope_type, get_args(RopeType))
        _check_counts(self, "original_max_position_embeddings")
        if not 1.0 <= self.factor < float("inf"):
            raise ConfigError(
                f"rope_scaling.factor is {self.factor}; low frequencies are divided by it, so that "
                "longer sequences fit. Set it to 1 or more."
            )
        defaults = {field.name: field.default for field in fields(self)}
        for other in _ROPE_FIELDS.keys() - {self.rope_type}:
            for name in _ROPE_FIELDS[other]:
                if getattr(self, name) != defaults[name]:
                    raise ConfigError(
                        f"rope_scaling.{name}={getattr(self, name)} is an option of {other}, and "
                        f"rope_type is {self.rope_type}. Leave it out, or set rope_type to {other}."
                    )
        lower, upper = _ROPE_FIELDS[self.rope_type][:2]
        if not 0.0 < getattr(self, lower) < getattr(self, upper) < float("inf"):
            raise ConfigError(
                f"rope_scaling: {lower} is {getattr(self, lower)} and {upper} "
                f"{getattr(self, upper)}; frequencies between the two are interpolated. Set 0 < "
                f"{lower} < {upper}."
            )
        for name in ("mscale", "mscale_all_dim"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"rope_scaling.{name} is {getattr(self, name)}; attention would become flatter "
                    "with longer sequences. Set it to 0 or more."
                )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of a decoder-only transformer."""

    num_layers: int
    """Transformer layers of the model."""
    hidden_size: int
    """Width of the residual stream (h)."""
    num_attention_heads: int
    """Query heads (n)."""
    vocab_size: int
    """Entries of the vocabulary (v); any size."""
    max_sequence_length: int = 2048
    """Longest sequence in tokens; the number of learned positions."""
    num_query_groups: int | None = None
    """Key and value heads (g); None: one for each query head; 1: multi-query attention."""
    kv_channels: int | None = None
    """Size of one head (d); None: hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer (f); None: 4 x hidden_size."""
    normalization: Normalization = "RMSNorm"
    """Kind of the norms."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance in the norms."""
    position_embedding_type: PositionEmbedding = "rope"
    """Rotary positions in attention, learned positions added to the word embeddings, or none."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = 1.0
    """Part of each head that is rotated."""
    rope_scaling: RopeScaling | None = None
    """Rotary frequencies for longer sequences (Llama 3.1, YaRN); None: as rotary_base gives
    them."""
    activation: Activation = "swiglu"
    """Feed-forward activation; swiglu is gated: linear_fc1 holds gate and up, gate first; gelu_tanh
    is GPT-2's."""
    add_bias_linear: bool = False
    """Whether the linear layers (but not the output layer) have a bias."""
    add_qkv_bias: bool = False
    """Whether linear_qkv has a bias even where the other linear layers have none (Qwen2)."""
    qk_layernorm: bool = False
    """Normalize every query and key head before the rotation (Qwen3)."""
    share_embeddings_and_output_weights: bool = False
    """Whether the output layer uses the word embedding's weight (tied)."""
    hidden_dropout: float = 0.0
    """Dropout of the embedding's and of each block's output before it joins the residual stream."""
    attention_dropout: float = 0.0
    """Dropout of the attention probabilities."""
    window_size: tuple[int, int] | None = None
    """Sliding window of attention: positions before a query's own that it sees, and positions after
    it, which have to be 0; None: all positions before."""
    fp32_residual_connection: bool = False
    """Keep the residual stream, from the embedding to the last norm, in fp32 where the weights are
    bf16 or fp16."""
    attention_softmax_in_fp32: bool = False
    """Compute attention scores, softmax and context in fp32; torch's fused kernels already sum the
    softmax in fp32."""
    logits_in_fp32: bool = False
    """Return logits in fp32; the losses are computed in fp32 in any case."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; linear_proj and linear_fc2 use it divided by
    sqrt(2 x num_layers)."""
    init_seed: int = 1234
    """Seed of the initial weights, which depend on it and on the parameter's name only, not on the
    layout."""

    def __post_init__(self) -> None:
        _check_counts(self, *_COUNTS)
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name in ("layernorm_epsilon", "init_method_std"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it cannot be below 0. Set it to 0 or more."
                )
        if not self.rotary_base > 0.0:
            raise ConfigError(
                f"rotary_base is {self.rotary_base}; rotary frequencies are its powers. Set it "
                "above 0."
            )
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it is a probability. Set it to 0 or more "
                    "and below 1."
                )
        self._check_heads()
        self._check_window()
        self._check_rope_scaling()

    def _check_rope_scaling(self) -> None:
        given: object = self.rope_scaling
        if isinstance(given, Mapping):
            # From `to_dict`: a checkpoint holds plain values only.
            object.__setattr__(self, "rope_scaling", RopeScaling(**given))
        elif given is not None and not isinstance(given, RopeScaling):
            raise ConfigError(
                f"rope_scaling is {given!r}, which describes no scaling. Set it to a RopeScaling."
            )
        if self.rope_scaling is None:
            return
        if self.position_embedding_type != "rope":
            raise ConfigError(
                f"rope_scaling is set, and position_embedding_type={self.position_embedding_type} "
                "has no rotary frequencies. Leave it out, or set position_embedding_type to rope."
            )
        if self.rope_scaling.rope_type == "yarn" and self.rotary_base <= 1.0:
            raise ConfigError(
                f"rotary_base={self.rotary_base} with rope_scaling.rope_type=yarn: yarn looks for "
                "the channel of a frequency, and frequencies do not fall from channel to channel. "
                "Set rotary_base above 1."
            )

    def _check_window(self) -> None:
        window = self.window_size
        if window is None:
            return
        if len(window) != 2 or window[0] < 0 or window[1] != 0:
            raise ConfigError(
                f"window_size is {window}; a position sees itself and some before it. Set it to "
                "(positions before, 0), or leave it unset."
            )
        if self.attention_dropout:
            raise ConfigError(
                f"window_size={window} and attention_dropout={self.attention_dropout} cannot be "
                "combined. Set attention_dropout to 0."
            )

    def _check_heads(self) -> None:
        heads, groups = self.num_attention_heads, self.query_groups
        if self.kv_channels is None and self.hidden_size % heads:
            raise ConfigError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={heads}, "
                "so a head has no size. Set kv_channels, or a hidden_size that is a multiple of "
                "the heads."
            )
        if heads % groups:
            raise ConfigError(
                f"num_attention_heads={heads} is not divisible by num_query_groups={groups}; each "
                "key/value head serves equally many query heads. Set num_query_groups to a "
                "divisor of the heads."
            )
        if self.position_embedding_type == "rope" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ConfigError(
                f"rotary_percent={self.rotary_percent} of kv_channels={self.head_dim} rotates "
                f"{self.rotary_dim} channels; rotation works on pairs within a head. Set both so "
                "that the product is even, and at most kv_channels."
            )
        if self.rotary_percent > 1.0:
            raise ConfigError(
                f"rotary_percent is {self.rotary_percent}; a head has no more to rotate. Set it to "
                "at most 1."
            )

    @property
    def query_groups(self) -> int:
        """Key/value heads of the model (g)."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of one head (d)."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.query_groups

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer (f)."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def gated(self) -> bool:
        """Whether linear_fc1 holds a gate and an up projection."""
        return self.activation == "swiglu"

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused linear_qkv weight: per query group its query heads, one key and one
        value head.
        """
        return self.query_groups * (self.heads_per_group + 2) * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        h, f, norms = self.hidden_size, self.ffn_size, 2 if self.normalization == "LayerNorm" else 1
        fc1 = (2 if self.gated else 1) * f
        layer = (
            h * (self.qkv_rows + self.num_attention_heads * self.head_dim + fc1 + f) + 2 * h * norms
        )
        layer += (
            self.qkv_rows * (self.add_bias_linear or self.add_qkv_bias)
            + (2 * h + fc1) * self.add_bias_linear
        )
        layer += 2 * self.head_dim * norms * self.qk_layernorm
        embeddings = self.vocab_size * h * (1 if self.share_embeddings_and_output_weights else 2)
        positions = (
            self.max_sequence_length * h * (self.position_embedding_type == "learned_absolute")
        )
        return self.num_layers * layer + embeddings + positions + h * norms

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain values, for checkpoints and logs."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options of saving and loading checkpoints."""

    async_save: bool = False
    """Copy the state to host memory and write it in the background during training. The copy takes
    as much memory as the rank writes. The next save, and the end of training, wait until it is
    committed."""
    on_save_error: SaveErrorAction = "raise"
    """"raise" ends training when a checkpoint cannot be saved; "warn" continues, and older ones are
    kept until one can."""
    resize_vocabulary: bool = False
    """Load checkpoints whose vocabulary is padded to another size than the model's: of embedding
    and output layer (what the sharding plan calls ``VocabParallel``) and of their optimizer states,
    rows beyond the model's are left out, and missing ones are zeros, with a warning. False: another
    size is an error."""

    def __post_init__(self) -> None:
        _check_choice("on_save_error", self.on_save_error, get_args(SaveErrorAction))


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """Sharding and communication of gradients and optimizer state over the data-parallel ranks."""

    bucket_size: int | None = None
    """Elements at which a gradient bucket closes and its reduction may start; None: Megatron's
    max(40e6, 1e6 per data-parallel rank), and no more than an eighth of the parameters, so that
    small models overlap as well."""
    grad_reduce_in_bf16: bool = False
    """Send gradients as bf16, half the bytes; they are accumulated over micro-batches in fp32 all
    the same."""
    num_distributed_optimizer_instances: int = 1
    """Groups of neighboring ranks into which the data-parallel ranks are split: zero1 and fsdp
    shard inside a group (a node) and keep a replica in each of the others (hybrid sharding)."""
    overlap_param_gather: bool = False
    """Gather the parameters that zero1 has stepped beside the next forward instead of inside the
    step. Code that reads weights between the two (a callback, the module's own hooks, a step before
    it calls the layer) sees old ones."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer's state and master weights in host memory, and step there."""
    moments_dtype: MomentsDtype = "fp32"
    """Dtype of the optimizer's moments between the steps; the step itself computes in fp32."""
    reshard_after_forward: bool | None = None
    """fsdp: release a unit's full parameters between forward and backward (ZeRO-3) and gather them
    again; None: where a step is one micro-batch. With micro-batches they are otherwise gathered
    once a step (ZeRO-2)."""
    reduce_every_microbatch: bool = False
    """fsdp: reduce-scatter gradients after every micro-batch, so that full gradients are never
    kept, instead of once a step."""

    def __post_init__(self) -> None:
        _check_counts(self, "bucket_size", "num_distributed_optimizer_instances")
        _check_choice("moments_dtype", self.moments_dtype, get_args(MomentsDtype))


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Attention over sequences that are divided over ranks, with Megatron-Core's names."""

    cp_comm_type: ContextExchange | list[ContextExchange] = "p2p"
    """How queries meet the keys of other ranks: "p2p" passes keys and values around the ranks (ring
    attention), "all_gather" gathers them, "a2a" exchanges parts of the sequence for heads
    (Ulysses), "a2a+p2p" does so among neighbors and passes keys and values around their groups. A
    list has one entry for each attention module of the full model, in order."""
    hierarchical_context_parallel_sizes: list[int] | None = None
    """Ranks of the two levels of "a2a+p2p": neighbors that exchange heads, and groups of them in a
    ring; their product is context_parallel_size. None: there are no levels."""

    def __post_init__(self) -> None:
        for name in self.exchanges:
            _check_choice("cp_comm_type", name, get_args(ContextExchange))
        sizes, needed = self.hierarchical_context_parallel_sizes, "a2a+p2p" in self.exchanges
        if sizes is None and needed:
            raise ConfigError(
                'cp_comm_type "a2a+p2p" has two levels of ranks, and '
                "hierarchical_context_parallel_sizes is not set. Set it to the ranks that exchange "
                "heads and the number of their groups, such as [2, 2] for context_parallel_size=4."
            )
        if sizes is None:
            return
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(map(_is_count, sizes)):
            raise ConfigError(
                f"hierarchical_context_parallel_sizes is {sizes!r}. Set it to two positive "
                "integers: the ranks that exchange heads and the number of their groups, such as "
                "[2, 2] for context_parallel_size=4."
            )
        if not needed:
            raise ConfigError(
                f"hierarchical_context_parallel_sizes={sizes} are the levels of cp_comm_type "
                f'"a2a+p2p", and cp_comm_type is {self.cp_comm_type!r}. Set the sizes to None, or '
                'cp_comm_type to "a2a+p2p".'
            )

    @property
    def exchanges(self) -> tuple[ContextExchange, ...]:
        """The types in use, each once."""
        given = self.cp_comm_type
        return tuple(dict.fromkeys(given if isinstance(given, list) else [given]))

    def num_exchanging(self, exchange: ContextExchange, num_ranks: int) -> int:
        """Return how many of ``num_ranks`` context-parallel ranks divide the heads among them."""
        if exchange == "a2a+p2p" and self.hierarchical_context_parallel_sizes is not None:
            return self.hierarchical_context_parallel_sizes[0]
        return num_ranks if exchange == "a2a" else 1


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Partition of the model into pipeline stages and order of the micro-batches, with
    Megatron-Core's names.
    """

    units: list[str] | None = None
    """Path patterns of the units between which the model may be divided, in the order in which one
    forward calls them; None: the model's own, or else they are found."""
    pipeline_model_parallel_layout: str | list[list[str]] | None = None
    """Layers of every stage in Megatron's notation, such as "Et*3|(tt|)*29,mL", or as lists of
    "embedding", "decoder", "mtp" and "loss"; None: layers are spread evenly."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first pipeline rank, all of its chunks together; None: like the others."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last pipeline rank, all of its chunks together; None: like the others."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when layers are spread."""
    account_for_loss_in_pipeline_split: bool = False
    """Count output layer and loss as a layer when layers are spread."""
    microbatch_group_size_per_vp_stage: int | None = None
    """Micro-batches that visit a model chunk in one go, for the interleaved schedule; None: as few
    as possible."""
    variable_seq_lengths: bool = False
    """Whether micro-batches of equal shapes may still differ in the shapes between stages, or in
    whether these take a gradient: steps that trim a batch by its values, layers frozen within an
    epoch. Every message then carries its shapes."""
    explicit_steps: bool = False
    """Whether steps get full batches and call ``run_pipeline(self, fn, batch)`` to run ``fn`` on
    each micro-batch, instead of being run once for each."""

    def __post_init__(self) -> None:
        _check_counts(
            self,
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "microbatch_group_size_per_vp_stage",
        )
        ways = {
            "pipeline_model_parallel_layout": self.pipeline_model_parallel_layout is not None,
            "num_layers_in_first_pipeline_stage": self.num_layers_in_first_pipeline_stage
            is not None,
            "num_layers_in_last_pipeline_stage": self.num_layers_in_last_pipeline_stage is not None,
            "account_for_embedding_in_pipeline_split": self.account_for_embedding_in_pipeline_split,
            "account_for_loss_in_pipeline_split": self.account_for_loss_in_pipeline_split,
        }
        found = [name for name, is_set in ways.items() if is_set]
        kinds = {name.split("_")[0] for name in found}  # pipeline, num or account
        if len(kinds) > 1:
            raise ConfigError(
                f"{' and '.join(found)} are set; each is a way of its own to partition the model. "
                "Set a layout, or the layers of the first and last stage, or count embedding and "
                "loss."
            )


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Activations that are recomputed in the backward pass or offloaded to the host, with
    Megatron's names.
    """

    recompute_granularity: Literal["selective", "full"] | None = None
    """Recompute parts of each layer (selective), full layers (full), or nothing."""
    recompute_modules: Sequence[str] = ("core_attn",)
    """Selective: names of modules inside a layer (core_attn, mlp, layernorm, …), or dotted patterns
    of module paths. Of norms and activation functions the output is dropped, of other modules all
    saved tensors but their inputs."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Full: keep the input of every n layers (uniform), or recompute n layers of each stage one by
    one (block)."""
    recompute_num_layers: int | None = None
    """Full: the number n of layers."""
    recompute_layers: Sequence[str] = ("**.layers.*", "layers.*")
    """Patterns of the paths of the layers."""
    offload_modules: Sequence[str] = ()
    """Names or patterns, as above, of modules whose saved tensors are kept in host memory."""
    offload_min_bytes: int = 1 << 20
    """Smaller tensors stay on the device."""

    def __post_init__(self) -> None:
        granularity, method, count = (
            self.recompute_granularity,
            self.recompute_method,
            self.recompute_num_layers,
        )
        if granularity not in (None, "selective", "full"):
            raise ConfigError(
                f"recompute_granularity is {granularity!r}, which is unknown. Set selective, full, "
                "or nothing."
            )
        if method not in (None, "uniform", "block"):
            raise ConfigError(
                f"recompute_method is {method!r}, which is unknown. Set uniform or block."
            )
        if granularity == "full" and (method is None or count is None):
            raise ConfigError(
                f"recompute_granularity=full with recompute_method={method} and "
                f"recompute_num_layers={count}: which layers? Set both, such as uniform and 1."
            )
        if granularity != "full" and (method is not None or count is not None):
            raise ConfigError(
                f"recompute_method={method} and recompute_num_layers={count} choose full layers, "
                f"and recompute_granularity is {granularity}. Set it to full, or leave both out."
            )
        _check_counts(self, "recompute_num_layers")
        if granularity == "selective" and not self.recompute_modules:
            raise ConfigError(
                "recompute_modules is empty, and recompute_granularity is selective. Name a module."
            )
        for name in ("recompute_modules", "recompute_layers", "offload_modules"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is no list. Put it into brackets."
                )
