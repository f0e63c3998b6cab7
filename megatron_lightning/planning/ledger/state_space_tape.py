"""The tape of Mamba-2 layers. No torch here.

Notation: ``T`` tokens of the micro-batch on this rank, ``d`` channels, ``h`` heads and ``g`` groups
of a rank, ``n`` channels of B and C of a group, ``K`` = d + 2 g n channels of the convolution,
``l`` tokens of a chunk, ``k`` chunks of a sequence.
"""

from __future__ import annotations

from megatron_lightning.config import MambaConfig
from megatron_lightning.planning.ledger import layer_tapes
from megatron_lightning.planning.ledger.layer_tapes import MAIN_BYTES, Sizes
from megatron_lightning.planning.ledger.single_mixer import mixer_layer, normed
from megatron_lightning.planning.ledger.tape import Operation


def mamba_layer(sizes: Sizes, name: str, stream: str) -> list[Operation]:
    """Return the tape of a layer of Mamba-2."""
    mamba, path = sizes.config.mamba, f"{name}.mixer"
    if mamba is None:
        return []
    inner = [
        layer_tapes.linear(sizes, f"{path}.in_proj", normed(name), f"{path} projected"),
        _mix(sizes, mamba, path),
        layer_tapes.linear(sizes, f"{path}.out_proj", f"{path} mixed", f"{name} mixed"),
    ]
    return mixer_layer(sizes, name, "norm", stream, inner)


def _mix(sizes: Sizes, mamba: MambaConfig, path: str) -> Operation:
    """Return convolution, scan and gated norm, computed in fp32."""
    mixer, tp, e = mamba.sizes(sizes.config.hidden_size), sizes.layout.tp, sizes.element
    tokens = float(sizes.tokens)
    projected = {f"{path} projected": tokens * sum(mixer.in_parts) / tp * e}
    bytes_inside = MAIN_BYTES * _kept_numbers(sizes, mamba) + _mask_bytes(sizes, mamba)
    chunk = _chunk(sizes, mamba)
    gradients = MAIN_BYTES * tokens * (2 * mixer.heads * chunk + 4 * mixer.inner) / tp
    saved_tensors = (
        projected if mamba.recompute_scan else projected | {f"{path} scan": bytes_inside}
    )
    return Operation(
        path=path,
        keeps=saved_tensors,
        inputs=projected,
        makes=(f"{path} mixed",),
        forward_bytes=tokens * mixer.inner / tp * e
        + (bytes_inside if mamba.recompute_scan else 0.0),
        backward_bytes=gradients + sum(projected.values())
        + (bytes_inside if mamba.recompute_scan else 0.0),
    )  # fmt: skip


def _kept_numbers(sizes: Sizes, mamba: MambaConfig) -> float:
    """Return the numbers that autograd keeps between ``in_proj`` and ``out_proj``, beside both
    linear layers' inputs.
    """
    mixer, tp, tokens = mamba.sizes(sizes.config.hidden_size), sizes.layout.tp, float(sizes.tokens)
    batch, chunk = sizes.micro_batch_size, _chunk(sizes, mamba)
    heads, inner = mixer.heads / tp, mixer.inner / tp
    groups = max(mixer.groups / tp, 1.0)
    channels, num_chunks = sum(mixer.conv_parts) / tp, tokens / batch / chunk
    segments = 2 if sizes.layout.cp > 1 else 1
    tokens_before = segments * (mamba.conv_kernel - 1) * batch * channels
    convolved = 3 * tokens * channels + tokens_before  # padded, its sum, activated
    if sizes.element < MAIN_BYTES:  # copies of channels and gate
        convolved += tokens * (channels + inner)
    steps = 4 * tokens * heads + 2 * heads  # before and behind softplus, decays to ends and starts
    scores = tokens * chunk * (2 * heads + groups)  # decays, scores times decays, scores
    shared_numbers = 4 * tokens * groups * mixer.state  # B and C in the order of each product
    states = batch * num_chunks * inner * mixer.state * 2 + batch * heads * num_chunks**2
    # Scaled inputs in three forms, the state's outputs, y, the gate, before and behind the norm.
    outputs = 8 * tokens * inner + tokens * groups
    return convolved + steps + scores + shared_numbers + states + outputs


def _mask_bytes(sizes: Sizes, mamba: MambaConfig) -> float:
    """Return the bytes of the causal masks of chunks and of chunks of chunks."""
    chunk = _chunk(sizes, mamba)
    return float(chunk**2) + (sizes.tokens / sizes.micro_batch_size / chunk) ** 2


def _chunk(sizes: Sizes, mamba: MambaConfig) -> int:
    """Return the tokens of a chunk."""
    cp = sizes.layout.cp
    return min(mamba.chunk_size, sizes.sequence_length // (1 if cp == 1 else 2 * cp))
