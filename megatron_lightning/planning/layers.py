"""The tape of one micro-batch through the parts of a :class:`GPTModel`: what each operation keeps and
allocates. No torch here.

It follows the code of ``layers`` and torch's kernels. On a GPU norms and attention are fused: norms
keep their input, attention keeps queries, keys, values, output and one number a query. On the CPU
RMSNorm is several operations in fp32, attention with dropout keeps the probabilities, and a
column-parallel layer keeps its gathered input, which GPUs gather again.

Notation: ``T`` tokens of the micro-batch on this rank, ``t`` its tokens between tensor-parallel
regions (T / tp under sequence parallelism), ``h`` hidden, ``e`` bytes of an element in products,
``r`` of one in the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_lightning.config import LatentAttentionConfig, MoEConfig, TransformerConfig
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.planning.precision import Precision
from megatron_lightning.planning.tape import Kept, Operation

DeviceKind = Literal["cuda", "cpu"]
_MAIN = 4  # bytes of fp32


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the bytes of one micro-batch on one rank depend on."""

    config: TransformerConfig
    layout: ParallelLayout
    precision: Precision
    device: DeviceKind
    sequence_length: int
    """Tokens of a sample."""
    micro_batch_size: int
    """Samples of a micro-batch."""
    split_backward: bool
    """Whether weight gradients are deferred."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank (T)."""
        return self.micro_batch_size * self.sequence_length // self.layout.cp

    @property
    def sharded_tokens(self) -> int:
        """Tokens between tensor-parallel regions (t)."""
        return self.tokens // (self.layout.tp if self.layout.sp else 1)

    @property
    def element(self) -> int:
        """Bytes of an element in products (e)."""
        return self.precision.compute_bytes

    @property
    def residual(self) -> int:
        """Bytes of an element of the residual stream (r)."""
        return _MAIN if self.config.fp32_residual_connection else self.precision.residual_bytes

    @property
    def stream_bytes(self) -> float:
        """Bytes of the residual stream (t h r), which is also what stages send."""
        return float(self.sharded_tokens * self.config.hidden_size * self.residual)

    @property
    def keeps_gathered(self) -> bool:
        """Whether a column-parallel layer keeps its gathered input rather than its shard."""
        return self.layout.tp > 1 and self.device == "cpu" and not self.split_backward


# ------------------------------------------------------------------------------------ small parts


def norm(sizes: Sizes, path: str, x: str, output: str) -> Operation:
    """Return a norm of the residual stream ``x`` [t, h]."""
    channels = sizes.sharded_tokens * sizes.config.hidden_size
    return _norm(sizes, path, x, output, channels, sizes.residual)


def _norm(
    sizes: Sizes, path: str, x: str, output: str, channels: float, bytes_in: int
) -> Operation:
    rows = sizes.sharded_tokens
    out = channels * bytes_in
    if sizes.config.normalization == "RMSNorm" and sizes.device == "cpu":
        copy = x if bytes_in == _MAIN else f"{x} in fp32"
        wide = float(channels * _MAIN)
        keeps: Kept = {copy: wide, f"{path} scaled": wide, f"{path} scale": 4.0 * rows}
        return Operation(
            path=path, keeps=keeps, inputs={x: float(out)}, makes=(output,),
            forward_bytes=wide + out, backward_bytes=4 * wide,
        )  # fmt: skip
    statistics = 4.0 * rows * (1 if sizes.config.normalization == "RMSNorm" else 2)
    return Operation(
        path=path, keeps={x: float(out), f"{path} scale": statistics}, inputs={x: float(out)}, makes=(output,),
        forward_bytes=out, backward_bytes=2 * out,
    )  # fmt: skip


def linear(
    sizes: Sizes,
    path: str,
    x: str,
    output: str,
    *,
    features: tuple[float, float],
    style: Literal["column", "row", "replicated"],
    rows: float | None = None,
    num_matrices: float = 1,
) -> Operation:
    """Return a linear layer of ``x``; ``features`` are the rank's own, in and out.

    Args:
        sizes: Sizes.
        path: Its path.
        x: Name of its input.
        output: Name of its output.
        features: The rank's features of input and output.
        style: How its weight is split.
        rows: Rows of its input, where they are no tokens; None: its tokens.
        num_matrices: Weights of that shape.
    """
    e, (wide_in, wide_out) = sizes.element, features
    tensor_parallel = style != "replicated" and rows is None
    full = float(sizes.tokens if tensor_parallel else (rows or sizes.sharded_tokens))
    shard = float(sizes.sharded_tokens) if tensor_parallel else full
    gathers = style == "column" and shard != full
    scatters = style == "row" and shard != full
    kept_rows = shard if gathers and not sizes.keeps_gathered else full
    kept = x if kept_rows == shard or not gathers else f"{x} gathered"
    keeps = {kept: kept_rows * wide_in * e}
    if sizes.precision.autocast:
        keeps[f"{path} weight"] = num_matrices * wide_in * wide_out * e
    grad_in = full * wide_in * e + (shard * wide_in * e if gathers else 0)
    # A gathered gradient stays with the shard that arrived.
    grad_out = full * wide_out * e + (shard * wide_out * e if scatters else 0)
    gathered_again = full * wide_in * e if gathers and not sizes.keeps_gathered else 0.0
    return Operation(
        path=path,
        keeps=keeps,
        inputs={x: shard * wide_in * e},
        makes=(output,),
        forward_bytes=full * wide_out * e + (full * wide_in * e if gathers else 0),
        backward_bytes=grad_in + grad_out + (0 if sizes.split_backward else gathered_again),
        weight_gradient_bytes=num_matrices * wide_in * wide_out * sizes.precision.weight_bytes,
        deferred={kept: kept_rows * wide_in * e, f"{path} gradient": full * wide_out * e},
    )


def dropout(sizes: Sizes, path: str, p: float, name: str) -> list[Operation]:
    """Return a dropout of the stream; none with probability 0."""
    if not p:
        return []
    elements = float(sizes.sharded_tokens * sizes.config.hidden_size)
    mask = elements * (sizes.element if sizes.device == "cpu" else 1)
    size = elements * sizes.element
    return [
        Operation(path=path, keeps={name: mask}, forward_bytes=2 * size, backward_bytes=2 * size)
    ]


# -------------------------------------------------------------------------------------- attention


def attention(sizes: Sizes, path: str, normed: str) -> list[Operation]:
    """Return the attention of a layer, from the normed stream to its output."""
    config, mla = sizes.config, sizes.config.mla
    heads = config.num_attention_heads // sizes.layout.tp
    if mla is not None:
        projections, kept, value = _latent(sizes, mla, path, normed, heads)
        head = mla.q_head_dim
    else:
        projections, kept, value = _grouped(sizes, path, normed, heads)
        head = config.head_dim
    context = f"{path} context"
    proj = linear(
        sizes, f"{path}.linear_proj", context, f"{path} out",
        features=(heads * value, config.hidden_size), style="row",
    )  # fmt: skip
    return [*projections, _core(sizes, path, context, kept, heads, (head, value)), proj]


def _core(
    sizes: Sizes, path: str, context: str, kept: Kept, heads: int, head: tuple[int, int]
) -> Operation:
    """Return the attention itself; ``head``: sizes of a key and a value."""
    config, tokens, e = sizes.config, sizes.tokens, sizes.element
    padded = max(head) * heads * tokens * e  # kernels take heads of one size
    output = context if head[1] == max(head) else f"{path} padded context"
    keeps = dict(kept) | {output: float(padded), f"{path} log sum": 4.0 * tokens * heads}
    probabilities = 0.0
    if config.attention_dropout and sizes.device == "cpu":
        length = sizes.sequence_length // sizes.layout.cp
        probabilities = float(tokens) * length * heads * e
        keeps |= {f"{path} probabilities": 3 * probabilities, f"{path} scaled": 2.0 * padded}
    wide = _MAIN / e if config.attention_softmax_in_fp32 else 1
    return Operation(
        path=f"{path}.core_attention",
        keeps=keeps,
        inputs=kept,
        makes=(context,),
        forward_bytes=padded * wide + probabilities,
        # The output's gradient; those of queries, keys and values.
        backward_bytes=padded * wide + sum(kept.values()) + 2 * probabilities,
    )


def _grouped(
    sizes: Sizes, path: str, normed: str, heads: int
) -> tuple[list[Operation], Kept, int]:
    """Return projection and rotation of grouped heads, what attention keeps of them, and the size of
    a value head.
    """
    config, e = sizes.config, sizes.element
    groups = max(1, config.query_groups // sizes.layout.tp)
    d, tokens = config.head_dim, sizes.tokens
    q, k = float(tokens * heads * d * e), float(tokens * groups * d * e)
    fused = f"{path} qkv"
    operations = [
        linear(
            sizes, f"{path}.linear_qkv", normed, fused,
            features=(config.hidden_size, (heads + 2 * groups) * d), style="column",
        )
    ]  # fmt: skip
    if config.qk_layernorm:
        channels = tokens * (heads + groups) * d
        one = _norm(sizes, f"{path}.q_layernorm", fused, f"{path} heads", channels, e)
        keeps = dict(one.keeps) | ({fused: q + 2 * k} if fused in one.keeps else {})
        operations.append(
            Operation(
                path=one.path, keeps=keeps, inputs=one.inputs, makes=one.makes,
                forward_bytes=one.forward_bytes, backward_bytes=one.backward_bytes,
            )
        )  # fmt: skip
    rotated = config.position_embedding_type == "rope"
    if rotated:
        operations.append(
            Operation(
                path=f"{path}.rotary",
                makes=(f"{path} q", f"{path} k"),
                forward_bytes=2 * q + k,
                backward_bytes=2 * q + 3 * k,
            )
        )
    kept = {fused: q + 2 * k}  # the values are a view of it
    if rotated or config.qk_layernorm:
        kept |= {f"{path} q": q, f"{path} k": k}
    elif heads > groups:
        kept |= {f"{path} q": q}
    return operations, kept, d


def _latent(
    sizes: Sizes, mla: LatentAttentionConfig, path: str, normed: str, heads: int
) -> tuple[list[Operation], Kept, int]:
    """Return the same for latent attention."""
    config, tokens, e = sizes.config, sizes.tokens, sizes.element
    h, q_rank, q_size = config.hidden_size, mla.q_lora_rank, heads * mla.q_head_dim
    operations = []

    def step(name: str, x: str, width_in: int, width_out: int, *, column: bool) -> str:
        output = f"{path} {name} out"
        operations.append(
            linear(
                sizes, f"{path}.{name}", x, output, features=(width_in, width_out),
                style="column" if column else "replicated",
            )
        )  # fmt: skip
        return output

    def normed_latent(name: str, x: str, width: int) -> str:
        if not config.qk_layernorm:
            return x
        channels = sizes.sharded_tokens * width
        operations.append(
            _norm(sizes, f"{path}.{name}", x, f"{path} {name} out", channels, sizes.element)
        )
        return f"{path} {name} out"

    if q_rank is None:
        step("linear_q_proj", normed, h, q_size, column=True)
    else:
        latent = step("linear_q_down_proj", normed, h, q_rank, column=False)
        latent = normed_latent("q_layernorm", latent, q_rank)
        step("linear_q_up_proj", latent, q_rank, q_size, column=True)
    shared, rank = mla.qk_pos_emb_head_dim, mla.kv_lora_rank
    latent = step("linear_kv_down_proj", normed, h, rank + shared, column=False)
    latent = normed_latent("kv_layernorm", latent, rank)
    expanded = heads * (mla.qk_head_dim + mla.v_head_dim)
    heads_out = step("linear_kv_up_proj", latent, rank, expanded, column=True)
    q, kv = float(tokens * q_size * e), float(tokens * expanded * e)
    operations.append(
        Operation(
            path=f"{path}.rotary",
            makes=(f"{path} q", f"{path} k", f"{path} v"),
            forward_bytes=2 * q,
            backward_bytes=2 * q + kv,
        )
    )
    padded = float(tokens * heads * max(mla.q_head_dim, mla.v_head_dim) * e)
    kept = {f"{path} q": padded, f"{path} k": padded}
    # Values are padded copies, or a view of the heads.
    kept |= (
        {f"{path} v": padded} if mla.v_head_dim < mla.q_head_dim else {heads_out: kv}
    )
    return operations, kept, mla.v_head_dim


# ----------------------------------------------------------------------------------- feed-forward


def mlp(sizes: Sizes, path: str, normed: str, ffn_size: int) -> list[Operation]:
    """Return a feed-forward layer, from the normed stream to its output."""
    h, f = sizes.config.hidden_size, ffn_size / sizes.layout.tp
    up = 2 * f if sizes.config.gated else f

    def layer(name: str, x: str, output: str, wide: tuple[float, float], column: bool) -> Operation:
        return linear(
            sizes, f"{path}.{name}", x, output, features=wide, style="column" if column else "row"
        )

    return _feed_forward(sizes, path, normed, (h, up, f), layer, float(sizes.tokens))


def _feed_forward(
    sizes: Sizes,
    path: str,
    x: str,
    widths: tuple[float, float, float],
    layer: Callable[[str, str, str, tuple[float, float], bool], Operation],
    rows: float,
) -> list[Operation]:
    """Return two linear layers around an activation, of ``rows`` rows."""
    (h, up, f), e = widths, sizes.element
    size, inner, made = rows * f * e, f"{path} fc1", f"{path} inner"
    operations = [layer("linear_fc1", x, inner, (h, up), True)]
    if sizes.config.gated:
        operations += [
            # The gradients of gate and up, joined.
            Operation(path=path, forward_bytes=0.0, backward_bytes=4 * size),
            Operation(
                path=f"{path}.activation", keeps={inner: 2 * size}, inputs={inner: 2 * size},
                makes=(f"{path} gate",), backward_bytes=3 * size,
            ),
            Operation(
                path=path, keeps={inner: 2 * size, f"{path} gate": size}, makes=(made,),
                forward_bytes=size, backward_bytes=3 * size,
            ),
        ]  # fmt: skip
    else:
        operations.append(
            Operation(
                path=f"{path}.activation", keeps={inner: size}, inputs={inner: size}, makes=(made,),
                forward_bytes=size, backward_bytes=2 * size,
            )
        )  # fmt: skip
    return [*operations, layer("linear_fc2", made, f"{path} out", (f, h), False)]


def experts(sizes: Sizes, moe: MoEConfig, path: str, normed: str) -> list[Operation]:
    """Return a layer of experts with equally many tokens each."""
    config, layout, e = sizes.config, sizes.layout, sizes.element
    h, tokens = config.hidden_size, float(sizes.sharded_tokens)
    k = float(moe.router_topk)
    sent = tokens * k  # rows of this rank's tokens
    rows = sent * layout.etp  # of this rank's experts
    if layout.ep * layout.etp > 1 and moe.token_dispatcher_type == "allgather":
        rows = sent * layout.etp
    row_bytes, wide = rows * h * e, sent * h * _MAIN
    router_input = {normed: tokens * h * e}
    if e < _MAIN:
        router_input = {f"{path} router input": tokens * h * _MAIN}
    small = tokens * (moe.num_experts * _MAIN + k * 40)
    operations = [
        Operation(
            path=f"{path}.router",
            keeps=router_input | {f"{path} routing": small},
            inputs={normed: tokens * h * e},
            forward_bytes=4 * tokens * moe.num_experts * _MAIN,
            backward_bytes=tokens * h * _MAIN + 4 * tokens * moe.num_experts * _MAIN,
        )
    ]
    if moe.shared_expert_intermediate_size:
        operations += mlp(
            sizes, f"{path}.shared_experts", normed, moe.shared_expert_intermediate_size
        )
    dispatched = f"{path} rows"
    exchanged = row_bytes if layout.ep * layout.etp > 1 else 0.0
    operations.append(
        Operation(
            path=path, makes=(dispatched,),
            forward_bytes=row_bytes + 2 * exchanged, backward_bytes=row_bytes + 2 * exchanged,
        )
    )  # fmt: skip
    f = config.expert_ffn_size / layout.etp
    num_experts = moe.num_experts / layout.ep

    def layer(name: str, x: str, output: str, wide: tuple[float, float], column: bool) -> Operation:
        return linear(
            sizes, f"{path}.experts.{name}", x, output, features=wide, style="column", rows=rows,
            num_matrices=num_experts,
        )  # fmt: skip

    up = 2 * f if config.gated else f
    inner = _feed_forward(sizes, f"{path}.experts", dispatched, (h, up, f), layer, rows)
    operations += inner
    # In fp32: rows, multiplied with the probabilities, and these in the slots of their tokens.
    outputs = {f"{path} outputs": 2 * wide}
    return [
        *operations,
        Operation(
            path=path,
            keeps=outputs,
            forward_bytes=2 * exchanged + 2 * wide,
            backward_bytes=2 * exchanged + 2 * wide,
        ),
    ]


# ------------------------------------------------------------------------------------------- ends


def embedding(sizes: Sizes, output: str) -> list[Operation]:
    """Return the embedding of a micro-batch."""
    size, tokens = sizes.stream_bytes, float(sizes.tokens)
    full = tokens * sizes.config.hidden_size * sizes.residual
    rows = -(-sizes.config.vocab_size // sizes.layout.tp)
    lookup = Operation(
        path="embedding.word_embeddings",
        keeps={"tokens": 16 * tokens},
        makes=(output,),
        forward_bytes=2 * full + size,
        backward_bytes=2 * full + size,
        weight_gradient_bytes=rows * sizes.config.hidden_size * sizes.precision.weight_bytes,
    )
    drop = dropout(sizes, "embedding.dropout", sizes.config.hidden_dropout, "embedding dropout")
    return [lookup, *drop]


def output_and_loss(sizes: Sizes, normed: str) -> list[Operation]:
    """Return the output layer and the loss of every token.

    One rank keeps log probabilities in fp32, several keep their part of the logits.
    """
    config, e, tokens = sizes.config, sizes.element, float(sizes.tokens)
    rows = -(-config.vocab_size // sizes.layout.tp)
    logits, wide = tokens * rows * e, tokens * rows * _MAIN
    layer = linear(
        sizes, "output_layer", normed, "logits", features=(config.hidden_size, rows), style="column"
    )
    copy = wide if e < _MAIN else 0.0
    if sizes.layout.tp > 1:
        loss = Operation(
            path="loss",
            keeps={"logits": logits, "loss": 32 * tokens},
            forward_bytes=wide + copy,
            backward_bytes=wide + copy,
        )
    else:
        loss = Operation(
            path="loss",
            keeps={"log probabilities": wide, "loss": 32 * tokens},
            forward_bytes=logits + copy,
            backward_bytes=2 * wide,
        )
    return [layer, loss]
