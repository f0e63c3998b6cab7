"""The tape of one micro-batch through attention: saved and allocated bytes of each operation.

No torch here.

Notation as in ``layers.py``. ``n`` heads of the rank, ``g`` query groups of the rank, ``d`` head
dim.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lightning.config import LatentAttentionConfig
from megatron_lightning.config.attention_kernels import (
    KERNELS,
    StoredScores,
    choose_kernel,
    kernel_form,
)
from megatron_lightning.planning.ledger.layer_tapes import MAIN_BYTES, Sizes, linear, norm_of
from megatron_lightning.planning.ledger.tape import Kept, Operation

_LEAST_PIECE = 128  # queries of a block of a window, as in layers/context/blocks.py


def attention(sizes: Sizes, path: str, normed: str) -> list[Operation]:
    """Return the attention of a layer, from the normed stream to the output."""
    config, mla = sizes.config, sizes.config.mla
    heads = config.num_attention_heads // sizes.layout.tp
    if mla is not None:
        projections, saved, value = _latent(sizes, mla, path, normed, heads)
        head = mla.q_head_dim
    else:
        projections, saved, value = _grouped(sizes, path, normed, heads)
        head = config.head_dim
    context = f"{path} context"
    proj = linear(sizes, f"{path}.linear_proj", context, f"{path} out")
    core = _core(sizes, path, context, kept=saved, heads=heads, head=(head, value))
    if config.attention_output_gate:
        return [*projections, core, *_gated(sizes, path, context, proj, heads=heads)]
    return [*projections, core, proj]


def _gated(
    sizes: Sizes, path: str, context: str, proj: Operation, *, heads: int
) -> list[Operation]:
    """Return the product of context and gate, and the projection of the product."""
    size = float(sizes.tokens * heads * sizes.config.head_dim * sizes.element)
    gated, gate = f"{path} gated", f"{path} gate"
    product = Operation(
        path=path,
        keeps={context: size, gate: size},
        inputs={context: size},
        makes=(gated,),
        forward_bytes=2 * size,
        backward_bytes=3 * size,
    )
    renamed = {gated if key == context else key: kept for key, kept in proj.keeps.items()}
    return [product, replace(proj, keeps=renamed, inputs={gated: size})]


def _core(
    sizes: Sizes, path: str, context: str, *, kept: Kept, heads: int, head: tuple[int, int]
) -> Operation:
    """Return the core attention. ``head``: sizes of a key and a value."""
    config, tokens, e = sizes.config, sizes.tokens, sizes.element
    padded = float(max(head) * heads * tokens * e)  # kernels take heads of one size
    is_padded = head[1] < max(head)
    core = f"{path}.core_attention"
    form = kernel_form(config, sizes.layout.cp, device=sizes.device)
    backend = config.attention_backend
    stored = KERNELS[choose_kernel(backend, form) if backend == "auto" else backend].scores(form)
    if stored is not None and stored.kept:
        output = f"{path} padded context" if is_padded else context
        return _unfused(sizes, core, context, output, inputs=kept, heads=heads, padded=padded)
    is_copied = is_padded or _is_output_copied(sizes)
    output = f"{path} kernel output" if is_copied else context
    keeps = dict(kept) | {output: padded, f"{path} log sum": 4.0 * tokens * heads}
    scores = 0.0 if stored is None else _block_scores(sizes, heads, stored)
    is_capped = config.attn_logit_softcapping is not None
    width = MAIN_BYTES / e if config.attention_softmax_in_fp32 else 1
    return Operation(
        path=core,
        keeps=keeps,
        inputs=kept,
        makes=(context,),
        forward_bytes=padded * width + 3 * scores,
        # The output's gradient, and the gradients of queries, keys and values.
        backward_bytes=padded * width + sum(kept.values()) + (5 + is_capped) * scores,
    )


def _is_output_copied(sizes: Sizes) -> bool:
    """Return whether the projection reads and keeps a copy of the kernel's output, by position.

    Kernels of GPUs return samples one after the other. Kernels of CPUs return the layout of the
    queries. Rotated queries lie head by head, other queries by position.
    """
    if sizes.compiled:
        return False
    if sizes.device == "cuda":
        return sizes.micro_batch_size > 1
    return sizes.config.mla is not None or sizes.config.position_embedding_type == "rope"


def _unfused(
    sizes: Sizes, core: str, context: str, output: str, *, inputs: Kept, heads: int, padded: float
) -> Operation:
    """Return attention by torch's math kernels.

    The kernels compute in fp32 and keep the probabilities, scaled copies of queries and keys, and
    copies of values.
    """
    config, e = sizes.config, sizes.element
    w = max(MAIN_BYTES, e)
    probabilities = float(sizes.tokens * sizes.sequence_length * heads * w)
    # Dropout keeps its mask as bytes on a GPU, and as numbers on a CPU.
    copies = 1.0
    if config.attention_dropout:  # probabilities after dropout, and the mask
        copies += 1 + (1 if sizes.device == "cpu" else 1 / w)
    return Operation(
        path=core,
        keeps={
            f"{core} probabilities": copies * probabilities,
            f"{core} copies": 3 * padded * w / e,
            output: padded,
        },
        inputs=inputs,
        makes=(context,),
        forward_bytes=probabilities + padded * w / e,
        backward_bytes=2 * probabilities + padded * w / e,
    )


def _block_scores(sizes: Sizes, heads: int, stored: StoredScores) -> float:
    """Return the bytes of the largest block's scores. Scores are not kept."""
    length, window = sizes.sequence_length // sizes.layout.cp, sizes.config.window_size
    queries, keys = length, length
    if window is not None:
        queries = min(length, max(window[0], _LEAST_PIECE))
        keys = min(length, queries + window[0])
    rows = sizes.tokens // length
    queries, keys = min(queries, stored.queries or queries), min(keys, stored.keys or keys)
    return float(rows * heads * queries * keys * MAIN_BYTES)


def _grouped(sizes: Sizes, path: str, normed: str, heads: int) -> tuple[list[Operation], Kept, int]:
    """Return projection and rotation of grouped heads, the tensors saved by attention, and the size
    of a value head.
    """
    config, e = sizes.config, sizes.element
    groups = max(1, config.query_groups // sizes.layout.tp)
    d, tokens = config.head_dim, sizes.tokens
    q, k = float(tokens * heads * d * e), float(tokens * groups * d * e)
    fused = f"{path} qkv"
    fused_size = q * (1 + config.attention_output_gate) + 2 * k
    # Ranks beyond the query groups share heads, so their outputs add up to more than the matrix.
    features = float((heads * (1 + config.attention_output_gate) + 2 * groups) * d)
    operations = [linear(sizes, f"{path}.linear_qkv", normed, fused, features_out=features)]
    if config.qk_layernorm:
        channels = tokens * (heads + groups) * d
        one = norm_of(
            sizes, f"{path}.q_layernorm", fused, f"{path} heads", channels=channels, element=e,
            rows=tokens * (heads + groups if config.qk_layernorm_per_head else 2),
        )  # fmt: skip
        keeps = dict(one.keeps) | {fused: fused_size}
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
                makes=(f"{path} q", f"{path} k", f"{path} v"),
                forward_bytes=2 * q + 4 * k,
                backward_bytes=2 * q + 3 * k,
            )
        )
    if rotated and not config.qk_layernorm and not sizes.compiled:  # the values are copied
        return operations, {f"{path} q": q, f"{path} k": k, f"{path} v": k}, d
    saved = {fused: fused_size}  # the values are a view of the fused output
    if rotated or config.qk_layernorm:
        saved |= {f"{path} q": q, f"{path} k": k}
    elif heads > groups:
        saved |= {f"{path} q": q}
    return operations, saved, d


def _latent(
    sizes: Sizes, mla: LatentAttentionConfig, path: str, normed: str, heads: int
) -> tuple[list[Operation], Kept, int]:
    """Return the operations, saved tensors and value size of latent attention."""
    config, tokens, e = sizes.config, sizes.tokens, sizes.element
    q_rank, q_size = mla.q_lora_rank, heads * mla.q_head_dim
    operations = []

    def step(name: str, x: str) -> str:
        output = f"{path} {name} out"
        operations.append(linear(sizes, f"{path}.{name}", x, output))
        return output

    def normed_latent(name: str, x: str, width: int) -> str:
        if not config.qk_layernorm:
            return x
        channels = sizes.sharded_tokens * width
        operations.append(
            norm_of(sizes, f"{path}.{name}", x, f"{path} {name} out", channels=channels, element=e)
        )
        return f"{path} {name} out"

    # The order of the layer's forward. Norms make copies only where queries and keys have one.
    if q_rank is None:
        step("linear_q_proj", normed)
    else:
        latent = step("linear_q_down_proj", normed)
        latent = normed_latent("q_layernorm", latent, q_rank)
        step("linear_q_up_proj", latent)
    latent = step("linear_kv_down_proj", normed)
    latent = normed_latent("kv_layernorm", latent, mla.kv_lora_rank)
    expanded = heads * (mla.qk_head_dim + mla.v_head_dim)
    heads_out = step("linear_kv_up_proj", latent)
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
    saved = {f"{path} q": padded, f"{path} k": padded}
    # Values are padded copies, or a view of the heads.
    saved |= {f"{path} v": padded} if mla.v_head_dim < mla.q_head_dim else {heads_out: kv}
    return operations, saved, mla.v_head_dim
