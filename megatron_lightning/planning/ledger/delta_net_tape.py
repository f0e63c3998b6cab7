"""The tape of gated delta net. No torch here.

Notation: ``T`` tokens of the micro-batch on this rank, ``h`` value heads and ``g`` key heads of a
rank, ``d`` channels of a key, ``e`` channels of a value, ``c`` tokens of a chunk.
"""

from __future__ import annotations

from megatron_lightning.config import DeltaNetConfig
from megatron_lightning.planning.ledger import layer_tapes
from megatron_lightning.planning.ledger.layer_tapes import MAIN_BYTES, Sizes
from megatron_lightning.planning.ledger.single_mixer import mixer_layer, normed
from megatron_lightning.planning.ledger.tape import Kept, Operation


def delta_net_layer(sizes: Sizes, path: str, stream: str) -> list[Operation]:
    """Return the tape of a layer with a single mixer of gated delta net."""
    inner = delta_net(sizes, f"{path}.self_attention", normed(path))
    return mixer_layer(sizes, path, "input_layernorm", stream, inner)


def delta_net(sizes: Sizes, path: str, x: str) -> list[Operation]:
    """Return the tape of the mixer, from the normed stream ``x`` to the output."""
    net = sizes.config.delta_net
    if net is None:
        return []
    projected, mixed, gated = f"{path} projected", f"{path} mixed", f"{path} gated"
    return [
        layer_tapes.linear(sizes, f"{path}.in_proj", x, projected),
        *_exchange(sizes, net, path, projected),
        _mix(sizes, net, path, (projected, mixed)),
        _gated_norm(sizes, net, path, (projected, mixed, gated)),
        layer_tapes.linear(sizes, f"{path}.out_proj", gated, f"{path} out"),
    ]


def _widths(sizes: Sizes, net: DeltaNetConfig) -> tuple[float, float]:
    """Return the elements of a token on this rank: of the delta rule's inputs, and of its output.

    Context-parallel ranks beyond the key heads repeat queries and keys.
    """
    tp, cp = sizes.layout.tp, sizes.layout.cp
    copies = max(1.0, cp * tp / net.num_key_heads) if cp > 1 else 1.0
    inputs = 2 * copies * net.key_width + net.value_width + 2 * net.num_value_heads
    return inputs / tp, net.value_width / tp


def _exchange(sizes: Sizes, net: DeltaNetConfig, path: str, projected: str) -> list[Operation]:
    """Return the exchange of tokens for heads: the message, and the received inputs."""
    if sizes.layout.cp == 1:
        return []
    size = sizes.tokens * _widths(sizes, net)[0] * sizes.element
    return [
        Operation(
            path=path, inputs={projected: size}, makes=(f"{path} received",),
            forward_bytes=2 * size, backward_bytes=2 * size,
        )
    ]  # fmt: skip


def _mix(sizes: Sizes, net: DeltaNetConfig, path: str, names: tuple[str, str]) -> Operation:
    """Return convolution and delta rule."""
    inputs, outputs = _widths(sizes, net)
    tokens, e = float(sizes.tokens), sizes.element
    inputs_received = names[0] if sizes.layout.cp == 1 else f"{path} received"
    # A view of the projection keeps all of the projection.
    width = sum(net.in_parts) / sizes.layout.tp if sizes.layout.cp == 1 else inputs
    bytes_inside = tokens * MAIN_BYTES * _kept_per_token(sizes, net)
    saved_inputs: Kept = {inputs_received: tokens * width * e}
    return Operation(
        path=path,
        keeps=saved_inputs
        if net.recompute_scan
        else {**saved_inputs, f"{path} scan": bytes_inside},
        inputs=saved_inputs,
        makes=(names[1],),
        forward_bytes=tokens * outputs * e + (bytes_inside / 2 if net.recompute_scan else 0.0),
        backward_bytes=(bytes_inside if net.recompute_scan else 0.0) + bytes_inside / 2,
    )


def _kept_per_token(sizes: Sizes, net: DeltaNetConfig) -> float:
    """Return the elements of a token between ``in_proj`` and the gated norm kept by autograd.

    In fp32: the convolved channels before and after padding, convolution and activation; queries
    and keys in chunks and their products; and, by value head, the decays, the system and the scores
    of a chunk, scaled queries and keys, the solution, written values, and states of the chunks.
    """
    inputs, values = _widths(sizes, net)
    chunk = min(net.chunk_size, sizes.sequence_length)
    d, e, heads = net.key_head_dim, net.value_head_dim, values / net.value_head_dim
    keys = (inputs - values - 2 * heads) / (2 * d)
    channels = inputs - 2 * heads
    by_key = keys * (2 + 2 * d + 2 * chunk)
    return 4 * channels + by_key + heads * (7 + 4 * chunk + 3 * d + 4 * e + 2 * d * e / chunk)


def _gated_norm(
    sizes: Sizes, net: DeltaNetConfig, path: str, names: tuple[str, str, str]
) -> Operation:
    """Return the gated norm of the outputs, computed in fp32."""
    tokens, e = float(sizes.tokens), sizes.element
    width = net.value_width / sizes.layout.tp
    projected = tokens * sum(net.in_parts) / sizes.layout.tp * e
    saved_inputs: Kept = {names[0]: projected, names[1]: tokens * width * e}
    heads = width / net.value_head_dim
    bytes_inside = tokens * (3 * width + heads) * MAIN_BYTES
    return Operation(
        path=f"{path}.out_norm",
        keeps=saved_inputs
        if net.recompute_scan
        else {**saved_inputs, f"{path} norm": bytes_inside},
        inputs=saved_inputs,
        makes=(names[2],),
        forward_bytes=tokens * width * e + bytes_inside,
        backward_bytes=2 * bytes_inside,
    )
