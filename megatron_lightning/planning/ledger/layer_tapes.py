"""The tape of one micro-batch through the parts of a :class:`GPTModel`: saved and allocated bytes
of each operation. No torch here.

The tape follows the code of ``layers`` and torch's kernels. Norms keep their input. Attention keeps
queries, keys, values, output and one number a query. On the CPU attention with dropout keeps the
probabilities, and a column-parallel layer keeps the gathered input. GPUs gather the input again.

Notation: ``T`` tokens of the micro-batch on this rank, ``t`` tokens between tensor-parallel regions
(T / tp under sequence parallelism), ``h`` hidden, ``e`` bytes of an element in GEMMs, ``r`` bytes
of an element in the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.models.blueprint import EMBEDDING, OUTPUT, matrix_at
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning.ledger.precision_bytes import Precision
from megatron_lightning.planning.ledger.quantized_weights import operand_bytes, recipe_of
from megatron_lightning.planning.ledger.rank_parameters import local_matrices
from megatron_lightning.planning.ledger.tape import Operation
from megatron_lightning.precision.recipes import FP8Recipe

DeviceKind = Literal["cuda", "cpu"]
_WORDS = f"{EMBEDDING}.word_embeddings"
MAIN_BYTES = 4
"""Bytes of an element in fp32."""
MOST_KEPT_LOGITS = 8
"""Most logits of a token saved for backward, in units of the hidden size.

Logits of larger vocabularies are recomputed.
"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes behind the bytes of one micro-batch on one rank."""

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
    compiled: bool = False
    """Whether the blocks are compiled by inductor."""
    fp8_recipe: FP8Recipe | None = None
    """Recipe of quantized layers."""

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
        """Bytes of an element in GEMMs (e)."""
        return self.precision.compute_bytes

    @property
    def residual(self) -> int:
        """Bytes of an element of the residual stream (r)."""
        return MAIN_BYTES if self.config.fp32_residual_connection else self.precision.residual_bytes

    @property
    def stream_bytes(self) -> float:
        """Bytes of the residual stream (t h r), equal to a message between stages."""
        return float(self.sharded_tokens * self.config.hidden_size * self.residual)

    @property
    def is_fused(self) -> bool:
        """Whether norms make no intermediate tensors, and dropout keeps one byte an element."""
        return self.compiled or self.device == "cuda"

    @property
    def keeps_gathered(self) -> bool:
        """Whether a column-parallel layer keeps the gathered input instead of the shard."""
        return self.layout.tp > 1 and self.device == "cpu" and not self.split_backward


# ------------------------------------------------------------------------------------ small parts


def norm(sizes: Sizes, path: str, x: str, output: str) -> Operation:
    """Return a norm of the residual stream ``x`` [t, h]."""
    channels = sizes.sharded_tokens * sizes.config.hidden_size
    return norm_of(sizes, path, x, output, channels=channels, element=sizes.residual)


def norm_of(
    sizes: Sizes,
    path: str,
    x: str,
    output: str,
    *,
    channels: float,
    element: int,
    rows: int | None = None,
) -> Operation:
    """Return a norm of ``x`` with ``channels`` elements of ``element`` bytes in ``rows`` normalized
    rows. None: one row for each token.
    """
    rows = sizes.sharded_tokens if rows is None else rows
    out = channels * element
    is_rms = sizes.config.normalization == "RMSNorm"
    # On a CPU half precision is computed in fp32, tensor by tensor.
    copies = channels * MAIN_BYTES if is_rms and element < MAIN_BYTES and not sizes.is_fused else 0
    return Operation(
        path=path,
        keeps={x: float(out), f"{path} scale": 4.0 * rows * (1 if is_rms else 2)},
        inputs={x: float(out)},
        makes=(output,),
        forward_bytes=out + 2 * copies,
        backward_bytes=2 * out + 3 * copies,
    )


def linear(
    sizes: Sizes,
    path: str,
    x: str,
    output: str,
    *,
    rows: float | None = None,
    features_out: float | None = None,
) -> Operation:
    """Return the linear layer at ``path`` of ``x``. The blueprint has the layer's sizes and split.

    Args:
        sizes: Sizes.
        path: Path of the layer in the model.
        x: Name of the input.
        output: Name of the output.
        rows: Rows of the input, if rows are not tokens. None: tokens.
        features_out: Features of the output on a rank. None: an even share of the matrix's.
    """
    matrices = local_matrices(matrix_at(sizes.config, path), sizes.layout)
    e, style, wide_in = sizes.element, matrices.style, matrices.features_in
    wide_out = matrices.features_out if features_out is None else features_out
    elements = matrices.num * wide_in * wide_out
    tensor_parallel = style != "replicated" and rows is None
    full_rows = float(sizes.tokens if tensor_parallel else (rows or sizes.sharded_tokens))
    shard = float(sizes.sharded_tokens) if tensor_parallel else full_rows
    # Under sequence parallelism column layers gather their input, and row layers scatter their
    # output.
    gathers = style == "column" and shard != full_rows
    scatters = style == "row" and shard != full_rows
    kept_rows = shard if gathers and not sizes.keeps_gathered else full_rows
    saved_input = x if kept_rows == shard or not gathers else f"{x} gathered"
    saved_input, operand = _operand(
        sizes, path, saved_input, is_shard=gathers and not sizes.keeps_gathered
    )
    keeps = {saved_input: kept_rows * wide_in * operand}
    if sizes.precision.autocast and saved_input != f"{path} operand":
        keeps[f"{path} weight"] = elements * e
    grad_in = full_rows * wide_in * e + (shard * wide_in * e if gathers else 0)
    # A gathered gradient stays alive together with the received shard.
    grad_out = full_rows * wide_out * e + (shard * wide_out * e if scatters else 0)
    gathered_again = full_rows * wide_in * e if gathers and not sizes.keeps_gathered else 0.0
    return Operation(
        path=path,
        keeps=keeps,
        inputs={x: shard * wide_in * e},
        makes=(output,),
        forward_bytes=full_rows * wide_out * e + (full_rows * wide_in * e if gathers else 0),
        backward_bytes=grad_in + grad_out + (0 if sizes.split_backward else gathered_again),
        weight_gradient_bytes=elements * sizes.precision.weight_bytes,
        deferred={
            saved_input: kept_rows * wide_in * operand,
            f"{path} gradient": full_rows * wide_out * operand,
        },
    )


def _operand(sizes: Sizes, path: str, x: str, *, is_shard: bool) -> tuple[str, float]:
    """Return name and bytes per value of the saved input of a linear layer: quantized data if a
    recipe quantizes the layer, except for shards gathered in bf16.
    """
    recipe = None if sizes.compiled else recipe_of(sizes.config, sizes.fp8_recipe, path)
    if recipe is None or (is_shard and not recipe.is_per_tensor):
        return x, sizes.element
    return f"{path} operand", operand_bytes(recipe)


def dropout(sizes: Sizes, path: str, p: float, name: str) -> list[Operation]:
    """Return a dropout of the stream, or nothing with probability 0."""
    if not p:
        return []
    elements = float(sizes.sharded_tokens * sizes.config.hidden_size)
    mask = elements * (1 if sizes.is_fused else sizes.element)
    size = elements * sizes.element
    return [
        Operation(path=path, keeps={name: mask}, forward_bytes=2 * size, backward_bytes=2 * size)
    ]


# ----------------------------------------------------------------------------------- feed-forward


def mlp(sizes: Sizes, path: str, normed: str, ffn_size: int) -> list[Operation]:
    """Return a feed-forward layer, from the normed stream to the output."""
    width = ffn_size / sizes.layout.tp
    return _feed_forward(sizes, path, normed, width=width, rows=float(sizes.tokens))


def _feed_forward(
    sizes: Sizes,
    path: str,
    x: str,
    *,
    width: float,
    rows: float,
    linear_rows: float | None = None,
) -> list[Operation]:
    """Return two linear layers around an activation of ``rows`` rows and ``width`` features.

    ``linear_rows``: see :func:`linear`.
    """
    size, inner, inner_name = rows * width * sizes.element, f"{path} fc1", f"{path} inner"
    operations = [linear(sizes, f"{path}.linear_fc1", x, inner, rows=linear_rows)]
    if sizes.config.gated:
        operations.append(
            # Backward recomputes the activated gate, beside the gradients of gate and up. Compiled
            # code needs no extra tensor.
            Operation(
                path=f"{path}.activation", keeps={inner: 2 * size}, inputs={inner: 2 * size},
                makes=(inner_name,), forward_bytes=size,
                backward_bytes=(3 if sizes.compiled else 4) * size,
            )
        )  # fmt: skip
    else:
        operations.append(
            Operation(
                path=f"{path}.activation", keeps={inner: size}, inputs={inner: size},
                makes=(inner_name,),
                forward_bytes=size, backward_bytes=2 * size,
            )
        )  # fmt: skip
    output = f"{path} out"
    return [*operations, linear(sizes, f"{path}.linear_fc2", inner_name, output, rows=linear_rows)]


def experts(sizes: Sizes, moe: MoEConfig, path: str, normed: str) -> list[Operation]:
    """Return a layer of experts with equally many tokens each."""
    config, layout, e = sizes.config, sizes.layout, sizes.element
    h, tokens = config.hidden_size, float(sizes.sharded_tokens)
    latent, k = config.expert_hidden_size, float(moe.router_topk)
    sent_rows = tokens * k  # rows of this rank's tokens
    rows = sent_rows * layout.etp  # of this rank's experts
    row_bytes, sum_bytes = rows * latent * e, sent_rows * latent * MAIN_BYTES
    router_input = {normed: tokens * h * e}
    if e < MAIN_BYTES:
        router_input = {f"{path} router input": tokens * h * MAIN_BYTES}
    small = tokens * (moe.num_experts * MAIN_BYTES + k * 40)
    operations = [
        Operation(
            path=f"{path}.router",
            keeps=router_input | {f"{path} routing": small},
            inputs={normed: tokens * h * e},
            forward_bytes=4 * tokens * moe.num_experts * MAIN_BYTES,
            backward_bytes=tokens * h * MAIN_BYTES + 4 * tokens * moe.num_experts * MAIN_BYTES,
        )
    ]
    if moe.shared_expert_intermediate_size:
        operations += mlp(
            sizes, f"{path}.shared_experts", normed, moe.shared_expert_intermediate_size
        )
    if moe.latent_size:
        operations.append(linear(sizes, f"{path}.fc1_latent_proj", normed, f"{path} latents"))
    dispatched = f"{path} rows"
    exchanged = row_bytes if layout.ep * layout.etp > 1 else 0.0
    operations.append(
        Operation(
            path=path, makes=(dispatched,),
            forward_bytes=row_bytes + 2 * exchanged, backward_bytes=row_bytes + 2 * exchanged,
        )
    )  # fmt: skip
    width = config.expert_ffn_size / layout.etp
    inner = f"{path}.experts"
    operations += _feed_forward(sizes, inner, dispatched, width=width, rows=rows, linear_rows=rows)
    # In fp32: the outputs are kept, because the gradients of the probabilities multiply the
    # outputs.
    outputs = {f"{path} outputs": sum_bytes}
    operations.append(
        Operation(
            path=path, keeps=outputs, makes=(f"{path} sums",),
            forward_bytes=2 * exchanged + sum_bytes,
            backward_bytes=2 * exchanged + 2 * sum_bytes,
        )
    )  # fmt: skip
    if moe.latent_size:
        up = f"{path}.fc2_latent_proj"
        operations.append(linear(sizes, up, f"{path} sums", f"{path} out"))
    return operations


# ------------------------------------------------------------------------------------------- ends


def embedding(sizes: Sizes, output: str) -> list[Operation]:
    """Return the embedding of a micro-batch."""
    size, tokens = sizes.stream_bytes, float(sizes.tokens)
    full_bytes = tokens * sizes.config.hidden_size * sizes.residual
    table = local_matrices(matrix_at(sizes.config, _WORDS), sizes.layout)
    lookup = Operation(
        path=_WORDS,
        keeps={"tokens": 16 * tokens},
        makes=(output,),
        forward_bytes=2 * full_bytes + size,
        backward_bytes=2 * full_bytes + size,
        weight_gradient_bytes=table.features_in * table.features_out * sizes.precision.weight_bytes,
    )
    p = sizes.config.embedding_dropout_p
    drop = dropout(sizes, "embedding.dropout", p, "embedding dropout")
    return [lookup, *drop]


def output_and_loss(sizes: Sizes, normed: str) -> Operation:
    """Return the fused output layer and loss of every token (``linear_loss.py``).

    Only a chunk of tokens has logits at a time. Logits of a small vocabulary are kept. The weight
    gradient is summed over the chunks in fp32, and not deferred.
    """
    config, e, tokens = sizes.config, sizes.element, float(sizes.tokens)
    rows = local_matrices(matrix_at(config, OUTPUT), sizes.layout).features_out
    layer = linear(sizes, OUTPUT, normed, "losses")
    keeps = dict(layer.keeps) | {"targets": 18 * tokens}
    chunk = chunk_tokens(sizes.tokens, config.hidden_size) * rows
    # As linear_loss.py decides: small vocabularies keep their logits, others compute a chunk at a
    # time.
    logits = float(chunk * e)
    if config.vocab_size <= MOST_KEPT_LOGITS * config.hidden_size:
        keeps["logits"], logits = tokens * rows * e, 0.0
    softmax = chunk * (MAIN_BYTES + (e if e < MAIN_BYTES else 0))
    caps = 2.0 * chunk * MAIN_BYTES if config.final_logit_softcapping is not None else 0.0
    full_grad = tokens * config.hidden_size * e
    # Below fp32: the sum, the GEMM result of a chunk, and the returned gradient.
    sums = MAIN_BYTES + (e + sizes.precision.weight_bytes if e < MAIN_BYTES else 0)
    weight_gradient = float(rows * config.hidden_size * sums)
    return replace(
        layer,
        keeps=keeps,
        forward_bytes=logits + chunk * MAIN_BYTES + caps,
        backward_bytes=full_grad + logits + softmax + caps + weight_gradient,
        weight_gradient_bytes=0.0,
        deferred={},
    )


def chunk_tokens(num_tokens: int, hidden_size: int) -> int:
    """Return the tokens with logits at a time, like ``layers.linear_loss.chunk_tokens``."""
    longest = min(max(128, hidden_size // 2), max(16, ceil(num_tokens / 4)))
    return ceil(num_tokens / ceil(num_tokens / longest))
