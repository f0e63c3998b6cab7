"""The tape of Mamba-2 layers, and the multiply-adds of the scan. No torch here.

Notation: ``T`` tokens of the micro-batch on this rank, ``d`` channels and ``h`` heads of a rank,
``g n`` channels of B and of C of a rank, ``c`` tokens of a chunk.
"""

from __future__ import annotations

from megatron_lightning.config import MambaConfig, TransformerConfig
from megatron_lightning.config.mamba import MambaSizes
from megatron_lightning.planning import layers
from megatron_lightning.planning.layers import MAIN_BYTES, Sizes
from megatron_lightning.planning.tape import Operation


def mamba_layer(sizes: Sizes, path: str, stream: str) -> list[Operation]:
    """Return the tape of a layer with a single mixer of Mamba-2."""
    config, mamba = sizes.config, sizes.config.mamba
    if mamba is None:
        return []
    normed, projected = f"{path} normed", f"{path} projected"
    mixed, dropped = f"{path} mixed", f"{path} dropout"
    return [
        layers.norm(sizes, f"{path}.norm", stream, normed),
        layers.linear(sizes, f"{path}.mixer.in_proj", normed, projected),
        _mix(sizes, mamba, f"{path}.mixer", (projected, mixed)),
        layers.linear(sizes, f"{path}.mixer.out_proj", mixed, f"{path} out"),
        *layers.dropout(sizes, f"{path}.dropout", config.hidden_dropout, dropped),
        Operation(path=path, makes=(f"{path} output",), forward_bytes=sizes.stream_bytes),
    ]


def _mix(sizes: Sizes, mamba: MambaConfig, path: str, names: tuple[str, str]) -> Operation:
    """Return convolution, scan and gated norm.

    In fp32, for each token: the padded and the convolved channels, their activation, decays and
    scores of a chunk, states of the chunks, the output before and after the gate.
    """
    own, tp = mamba.sizes(sizes.config.hidden_size), sizes.layout.tp
    tokens, e = float(sizes.tokens), sizes.element
    projected = tokens * sum(own.in_parts) / tp * e
    mixed = tokens * own.inner / tp * e
    inside = tokens * MAIN_BYTES * _kept_per_token(own, mamba, tp, sizes)
    keeps = {names[0]: projected} if mamba.recompute_scan else {f"{path} scan": inside}
    return Operation(
        path=path,
        keeps=keeps,
        inputs={names[0]: projected},
        makes=(names[1],),
        forward_bytes=mixed + (inside / 2 if mamba.recompute_scan else 0.0),
        backward_bytes=(inside if mamba.recompute_scan else 0.0) + inside / 2,
    )


def _kept_per_token(own: MambaSizes, mamba: MambaConfig, tp: int, sizes: Sizes) -> float:
    """Return the elements of a token between ``in_proj`` and ``out_proj`` kept by autograd."""
    tokens = sizes.sequence_length // sizes.layout.cp
    chunk = min(mamba.chunk_size, tokens)
    heads, inner = own.heads / tp, own.inner / tp
    width = max(own.groups / tp, 1.0) * own.state
    convolved = sum(own.conv_parts) / tp
    scores = 2 * heads * chunk  # decays, and scores times decays
    states = 2 * inner * own.state / chunk
    return 3 * convolved + 6 * inner + 4 * width + scores + states


def scan_multiply_adds(config: TransformerConfig, tokens: int) -> float:
    """Return the multiply-adds of convolution and scan of a Mamba-2 layer for ``tokens`` tokens.

    Of a token: scores with half of the chunk's tokens and the product with their inputs, the
    contribution to the chunk's state, and the output of the state.
    """
    mamba = config.mamba
    if mamba is None:
        return 0.0
    own = mamba.sizes(config.hidden_size)
    pairs = mamba.chunk_size / 2 * (own.groups * own.state + own.inner)
    states = 2 * own.inner * own.state
    return tokens * (pairs + states + sum(own.conv_parts) * mamba.conv_kernel)
