"""The feed-forward layer: gated (https://arxiv.org/abs/2002.05202) or not."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig
from megatron_lightning.layers.activation import build_activation
from megatron_lightning.layers.engine import Engine


class MLP(nn.Module):
    """Two linear layers around an activation.

    With a gate, ``linear_fc1`` is one [2f, h] weight, with the gate's rows first.

    Args:
        config: Sizes.
        ffn_size: Width (f). None: the config's width.
    """

    engine: Engine | None = None
    """Computes the layer and the preceding norm. The norm module then returns its input."""

    def __init__(self, config: TransformerConfig, ffn_size: int | None = None) -> None:
        super().__init__()
        f, bias = ffn_size or config.ffn_size, config.add_bias_linear
        self.activation = build_activation(config)
        self.linear_fc1 = nn.Linear(config.hidden_size, 2 * f if config.gated else f, bias=bias)
        if config.gated:
            self.linear_fc1.fused_rows = (f, f)  # type: ignore[assignment]
        self.linear_fc2 = nn.Linear(f, config.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]."""
        if self.engine is not None and self.engine.takes(hidden):
            return self.engine(hidden)
        out: Tensor = self.linear_fc2(self.activation(self.linear_fc1(hidden)))
        return out
