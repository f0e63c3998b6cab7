"""The tape of gated delta net. No torch here.

Notation: ``T`` tokens of the micro-batch on this rank, ``h`` value heads and ``g`` key heads of a
rank, ``d`` channels of a key, ``e`` channels of a value, ``c`` tokens of a chunk.
"""

from __future__ import annotations

from megatron_lightning.config import DeltaNetConfig
from megatron_lightning.planning import layers
from megatron_lightning.planning.layers import MAIN_BYTES, Sizes
from megatron_lightning.planning.single_mixer import mixer_layer, normed
from megatron_lightning.planning.tape import Kept, Operation


def delta_net_layer(sizes: Sizes, path: str, stream: str) -> list[Operation]:
    """Return the tape of a layer with a single mixer of gated delta net."""
    inner = delta_net(sizes, f"{path}.self_attention", normed(path))
    return mixer_layer(sizes, path, "input_layernorm", stream, inner)


def delta_net(sizes: Sizes, path: str, x: str) -> list[Operation]:
    """Return the tape of the mixer, from the normed stream ``x`` to the output."""
    own = sizes.config.delta_net
    if own is None:
        return []
    projected, mixed, gated = f"{path} projected", f"{path} mixed", f"{path} gated"
    return [
        layers.linear(sizes, f"{path}.in_proj", x, projected),
        *_exchange(sizes, own, path, projected),
        _mix(sizes, own, path, (projected, mixed)),
        _gated_norm(sizes, own, path, (projected, mixed, gated)),
        layers.linear(sizes, f"{path}.out_proj", gated, f"{path} out"),
    ]


def _widths(sizes: Sizes, own: DeltaNetConfig) -> tuple[float, float]:
    """Return the elements of a token on this rank: of the delta rule's inputs, and of its output.

    Context-parallel ranks beyond the key heads repeat queries and keys.
    """
    tp, cp = sizes.layout.tp, sizes.layout.cp
    copies = max(1.0, cp * tp / own.num_key_heads) if cp > 1 else 1.0
    inputs = 2 * copies * own.key_width + own.value_width + 2 * own.num_value_heads
    return inputs / tp, own.value_width / tp


def _exchange(sizes: Sizes, own: DeltaNetConfig, path: str, projected: str) -> list[Operation]:
    """Return the exchange of tokens for heads: the message, and the received inputs."""
    if sizes.layout.cp == 1:
        return []
    size = sizes.tokens * _widths(sizes, own)[0] * sizes.element
    return [
        Operation(
            path=path, inputs={projected: size}, makes=(f"{path} received",),
            forward_bytes=2 * size, backward_bytes=2 * size,
        )
    ]  # fmt: skip


def _mix(sizes: Sizes, own: DeltaNetConfig, path: str, names: tuple[str, str]) -> Operation:
    """Return convolution and delta rule."""
    inputs, outputs = _widths(sizes, own)
    tokens, e = float(sizes.tokens), sizes.element
    received = names[0] if sizes.layout.cp == 1 else f"{path} received"
    # A view of the projection keeps all of the projection.
    width = sum(own.in_parts) / sizes.layout.tp if sizes.layout.cp == 1 else inputs
    inside = tokens * MAIN_BYTES * _kept_per_token(sizes, own)
    kept: Kept = {received: tokens * width * e}
    return Operation(
        path=path,
        keeps=kept if own.recompute_scan else {**kept, f"{path} scan": inside},
        inputs=kept,
        makes=(names[1],),
        forward_bytes=tokens * outputs * e + (inside / 2 if own.recompute_scan else 0.0),
        backward_bytes=(inside if own.recompute_scan else 0.0) + inside / 2,
    )


def _kept_per_token(sizes: Sizes, own: DeltaNetConfig) -> float:
    """Return the elements of a token between ``in_proj`` and the gated norm kept by autograd.

    In fp32: the convolved channels before and after padding, convolution and activation; queries
    and keys in chunks and their products; and, by value head, the decays, the system and the scores
    of a chunk, scaled queries and keys, the solution, written values, and states of the chunks.
    """
    inputs, values = _widths(sizes, own)
    chunk = min(own.chunk_size, sizes.sequence_length)
    d, e, heads = own.key_head_dim, own.value_head_dim, values / own.value_head_dim
    keys = (inputs - values - 2 * heads) / (2 * d)
    channels = inputs - 2 * heads
    by_key = keys * (2 + 2 * d + 2 * chunk)
    return 4 * channels + by_key + heads * (7 + 4 * chunk + 3 * d + 4 * e + 2 * d * e / chunk)


def _gated_norm(
    sizes: Sizes, own: DeltaNetConfig, path: str, names: tuple[str, str, str]
) -> Operation:
    """Return the gated norm of the outputs, computed in fp32."""
    tokens, e = float(sizes.tokens), sizes.element
    width = own.value_width / sizes.layout.tp
    projected = tokens * sum(own.in_parts) / sizes.layout.tp * e
    kept: Kept = {names[0]: projected, names[1]: tokens * width * e}
    heads = width / own.value_head_dim
    inside = tokens * (3 * width + heads) * MAIN_BYTES
    return Operation(
        path=f"{path}.out_norm",
        keeps=kept if own.recompute_scan else {**kept, f"{path} norm": inside},
        inputs=kept,
        makes=(names[2],),
        forward_bytes=tokens * width * e + inside,
        backward_bytes=2 * inside,
    )
