"""Sizes of Mamba-2 layers (https://arxiv.org/abs/2405.21060). No torch here.

Names follow Megatron-Core without the prefix ``mamba_``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from megatron_lightning.config.value_checks import check_choice, is_count
from megatron_lightning.errors import ConfigError

ScanEngine = Literal["auto", "torch", "mamba_ssm"]
_COUNTS = ("state_dim", "head_dim", "num_groups", "expand", "conv_kernel", "chunk_size")


class MambaSizes(NamedTuple):
    """Sizes of a mixer of a model, over all ranks."""

    heads: int
    """Heads."""
    head_dim: int
    """Channels of a head."""
    groups: int
    """Groups of heads with common B and C."""
    state: int
    """Channels of B and of C."""

    @property
    def inner(self) -> int:
        """Channels of the gate z and of x."""
        return self.heads * self.head_dim

    @property
    def in_parts(self) -> tuple[int, int, int, int, int]:
        """Rows of ``in_proj``: z, x, B, C, dt."""
        width = self.groups * self.state
        return self.inner, self.inner, width, width, self.heads

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Channels of the convolution: x, B, C."""
        width = self.groups * self.state
        return self.inner, width, width


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Sizes of the mixer of Mamba-2 layers."""

    state_dim: int = 128
    """Channels of the state of a head's channel (n)."""
    head_dim: int = 64
    """Channels of a head (p)."""
    num_groups: int = 8
    """Groups of heads with common B and C (g)."""
    num_heads: int | None = None
    """Heads. None: expand x hidden_size / head_dim."""
    expand: int = 2
    """Channels of all heads in units of the hidden size, if num_heads is not set."""
    conv_kernel: int = 4
    """Tokens that the convolution before the scan reads: a token and the tokens before."""
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Smallest and largest step size. transformers' Nemotron-H has steps of 0.001 and more."""
    chunk_size: int = 128
    """Tokens mixed by one GEMM in the scan. The result does not depend on the number."""
    recompute_scan: bool = True
    """Keep only the output of in_proj for backward, and compute convolution, scan and gated norm
    again. False: keep all intermediate tensors."""
    scan_engine: ScanEngine = "auto"
    """Code of the scan of full rows: torch, or the fused kernel of the package mamba_ssm on CUDA.
    auto: the kernel where the package loads. Sequences that ranks share are scanned by torch."""

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *(() if self.num_heads is None else ("num_heads",))):
            value = getattr(self, name)
            if not is_count(value):
                raise ConfigError(f"mamba.{name} is {value!r}; it must be a positive integer.")
        check_choice("mamba.scan_engine", self.scan_engine, get_args(ScanEngine))
        object.__setattr__(self, "dt_limit", tuple(map(float, self.dt_limit)))
        if len(self.dt_limit) != 2 or not 0.0 <= self.dt_limit[0] < self.dt_limit[1]:
            raise ConfigError(
                f"mamba.dt_limit is {self.dt_limit}; a step size is at least the first number, "
                "which is 0 or more, and at most the second. Set it to (0, inf) for no limit."
            )

    def sizes(self, hidden_size: int) -> MambaSizes:
        """Return the sizes of the mixer of a model with ``hidden_size``.

        Raises:
            ConfigError: If heads and groups do not divide the channels.
        """
        heads, remainder = divmod(self.expand * hidden_size, self.head_dim)
        if self.num_heads is not None:
            heads, remainder = self.num_heads, 0
        if remainder:
            raise ConfigError(
                f"mamba.head_dim is {self.head_dim}, which does not divide mamba.expand x "
                f"hidden_size = {self.expand} x {hidden_size}. Set head_dim to a divisor, or "
                "num_heads."
            )
        if heads % self.num_groups:
            raise ConfigError(
                f"mamba.num_groups is {self.num_groups}, and {heads} heads cannot form equal "
                f"groups. Set num_groups to a divisor of {heads}."
            )
        return MambaSizes(heads, self.head_dim, self.num_groups, self.state_dim)
