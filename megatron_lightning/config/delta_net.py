"""Sizes of gated delta net layers (https://arxiv.org/abs/2412.06464), and the layers with linear
attention. No torch here.

Names follow Megatron-Core without the prefix ``linear_``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError

DeltaKernel = Literal["auto", "torch"]

_COUNTS = (
    "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim",
    "chunk_size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig:
    """Sizes of the mixer of gated delta net layers."""

    num_key_heads: int = 16
    """Heads of queries and keys (g)."""
    num_value_heads: int = 32
    """Heads of values (h), each with a state. Consecutive value heads share a key head."""
    key_head_dim: int = 128
    """Channels of a query and of a key (d)."""
    value_head_dim: int = 128
    """Channels of a value (e)."""
    conv_kernel_dim: int = 4
    """Tokens that the convolution before the delta rule reads: a token and the tokens before."""
    chunk_size: int = 64
    """Tokens of a chunk of the delta rule in torch. The result does not depend on the number."""
    kernel: DeltaKernel = "auto"
    """auto: the kernel of flash-linear-attention, if the package is installed, for activations in
    16 bits on GPUs. torch: the delta rule in torch in any case."""
    recompute_scan: bool = True
    """Keep only the outputs of in_proj and of the delta rule for backward, and compute convolution,
    delta rule and gated norm again. False: keep all intermediate tensors."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if not is_count(getattr(self, name)):
                raise ConfigError(
                    f"delta_net.{name} is {getattr(self, name)!r}; it must be a positive integer."
                )
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"delta_net.num_value_heads is {self.num_value_heads}, and "
                f"delta_net.num_key_heads is {self.num_key_heads}; each key head serves equally "
                "many value heads. Set num_value_heads to a multiple of num_key_heads."
            )
        if self.kernel not in get_args(DeltaKernel):
            raise ConfigError(
                f"delta_net.kernel is {self.kernel!r}, which is unknown. Set it to one of "
                f"{', '.join(get_args(DeltaKernel))}."
            )

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head (r)."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_width(self) -> int:
        """Channels of all queries, and of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Channels of all values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def in_parts(self) -> tuple[int, int, int, int, int, int]:
        """Rows of ``in_proj``: queries, keys, values, gates, beta, alpha."""
        keys, values, heads = self.key_width, self.value_width, self.num_value_heads
        return keys, keys, values, values, heads, heads

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Channels of the convolution: queries, keys, values."""
        return self.key_width, self.key_width, self.value_width


def linear_layers(frequency: int | Sequence[int] | None, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has linear attention, by
    ``TransformerConfig.linear_attention_freq``.
    """
    if frequency is None:
        return (False,) * num_layers
    if isinstance(frequency, int):  # every n-th layer has softmax attention
        return tuple(number % frequency != 0 for number in range(1, num_layers + 1))
    return tuple(bool(entry) for entry in frequency)
