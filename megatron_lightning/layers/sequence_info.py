"""Positions and visible keys of a batch of sequences, as one argument of attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.key_cache import CacheStep
from megatron_lightning.parallel.documents import Documents

__all__ = ["Documents", "SequenceInfo"]


@dataclass(frozen=True)
class SequenceInfo:
    """Positions and visible keys of a batch of sequences."""

    position_ids: Tensor | None = None
    """[b or 1, s] positions of the queries; None: 0 to s-1."""
    causal: bool = True
    """Whether a query sees the keys of no later position."""
    window: int | None = None
    """How many positions back a causal query sees beside its own; None: all."""
    documents: Documents | None = None
    """Documents of the full rows, which do not see each other; None: a row is one."""
    cache: CacheStep | None = None
    """Requests whose new tokens the row holds, and where their earlier keys are kept; None: the
    batch is whole sequences."""

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise ConfigError(
                f"a window of {self.window} positions is only for causal attention. Set causal to "
                "True, or window to None."
            )

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention can do it: all positions, or those before."""
        return self.window is None and self.documents is None
