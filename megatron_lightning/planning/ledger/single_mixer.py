"""Tapes of layers with a single mixer. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lightning.planning.ledger import layer_tapes
from megatron_lightning.planning.ledger.attention_memory import attention
from megatron_lightning.planning.ledger.layer_tapes import Sizes
from megatron_lightning.planning.ledger.tape import Operation, compiled


def mixer_layer(
    sizes: Sizes, name: str, norm: str, stream: str, mixer: Sequence[Operation]
) -> list[Operation]:
    """Return the tape of a norm, a mixer and the addition to the residual stream.

    Args:
        sizes: Sizes.
        name: Path of the layer.
        norm: Name of the norm in the layer.
        stream: Name of the entering stream.
        mixer: Operations of the mixer, whose input is :func:`normed`.
    """
    dropped = layer_tapes.dropout(
        sizes, f"{name}.dropout", sizes.config.hidden_dropout, f"{name} dropout"
    )
    operations = [
        layer_tapes.norm(sizes, f"{name}.{norm}", stream, normed(name)),
        *mixer,
        *dropped,
        Operation(path=name, makes=(f"{name} output",), forward_bytes=sizes.stream_bytes),
    ]
    return compiled(operations) if sizes.compiled else operations


def normed(name: str) -> str:
    """Return the name of the mixer's input in the layer at ``name``."""
    return f"{name} normed"


def attention_layer(sizes: Sizes, name: str, stream: str) -> list[Operation]:
    """Return the tape of a layer of attention."""
    inner = attention(sizes, f"{name}.self_attention", normed(name))
    return mixer_layer(sizes, name, "input_layernorm", stream, inner)


def mlp_layer(sizes: Sizes, name: str, stream: str) -> list[Operation]:
    """Return the tape of a feed-forward layer."""
    inner = layer_tapes.mlp(sizes, f"{name}.mlp", normed(name), sizes.config.ffn_size)
    return mixer_layer(sizes, name, "pre_mlp_layernorm", stream, inner)


def moe_layer(sizes: Sizes, name: str, stream: str) -> list[Operation]:
    """Return the tape of a layer of experts."""
    moe = sizes.config.moe
    if moe is None:
        return mlp_layer(sizes, name, stream)
    inner = layer_tapes.experts(sizes, moe, f"{name}.mlp", normed(name))
    return mixer_layer(sizes, name, "pre_mlp_layernorm", stream, inner)
