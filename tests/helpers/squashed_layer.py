"""A user's kind of layer: a norm and a feed-forward, whose output passes tanh."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig
from megatron_lightning.layers.attention.rotary import RotaryEmbedding
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.norm import build_norm
from megatron_lightning.models.blueprint import Weight, mlp, norm
from megatron_lightning.planning.ledger import layer_tapes
from megatron_lightning.planning.ledger.layer_tapes import Sizes
from megatron_lightning.planning.ledger.tape import Operation


class SquashedLayer(nn.Module):
    """The layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layernorm = build_norm(config, config.hidden_size)
        self.feed_forward = MLP(config)

    def forward(self, hidden: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h]."""
        out: Tensor = hidden + torch.tanh(self.feed_forward(self.layernorm(hidden)))
        return out


class Squashed:
    """The kind."""

    @staticmethod
    def build(config: TransformerConfig, rotary: RotaryEmbedding | None) -> nn.Module:
        """Return the layer."""
        return SquashedLayer(config)

    @staticmethod
    def weights(config: TransformerConfig) -> tuple[Weight, ...]:
        """Return the weights of the layer."""
        inner = mlp(config, config.ffn_size)
        return (
            *norm(config, "layernorm", config.hidden_size),
            *(weight.inside("feed_forward") for weight in inner),
        )

    @staticmethod
    def ledger(sizes: Sizes, path: str, stream: str) -> list[Operation]:
        """Return the operations of the layer."""
        normed, size = f"{path} normed", sizes.stream_bytes
        output = f"{path} output"
        return [
            layer_tapes.norm(sizes, f"{path}.layernorm", stream, normed),
            *layer_tapes.mlp(sizes, f"{path}.feed_forward", normed, sizes.config.ffn_size),
            Operation(path=path, keeps={f"{path} tanh": size}, makes=(output,), forward_bytes=size),
        ]
