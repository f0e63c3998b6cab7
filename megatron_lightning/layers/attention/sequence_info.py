"""Positions and visible keys of a batch of sequences, as a single argument of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.moe.routes import Routes
from megatron_lightning.layers.state.key_cache import CacheStep
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.documents import Documents, row_lengths

__all__ = ["Documents", "SequenceInfo", "document_lengths", "rotary_places"]


@dataclass(frozen=True)
class SequenceInfo:
    """Positions and visible keys of a batch of sequences."""

    position_ids: Tensor | None = None
    """[b or 1, s] positions of the queries. None: 0 to s-1."""
    lengths: Tensor | None = None
    """[b or 1, s or 1] length of each token's document, without padding, for rotary frequencies
    that depend on it. None: s."""
    causal: bool = True
    """Whether a query sees the keys of no later position."""
    window: int | None = None
    """Number of earlier positions visible to a causal query. None: all."""
    documents: Documents | None = None
    """Documents of the full rows, invisible to each other. None: each row is a document."""
    cache: CacheStep | None = None
    """Requests with new tokens in the row, and the cache of earlier keys.

    None: the batch holds full sequences.
    """
    routes: Routes | None = None
    """Experts of the tokens, to replay or to record. None: routers choose."""
    padding: Tensor | None = None
    """[b, s] whether a token is padding. Whatever counts tokens leaves padding out.

    None: no token is padding.
    """

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise ConfigError(
                f"a window of {self.window} positions is only for causal attention. Set causal to "
                "True, or window to None."
            )

    def with_window(self, window: int) -> SequenceInfo:
        """Return the sequences with a window."""
        return replace(self, window=window)

    def without_routes(self) -> SequenceInfo:
        """Return the sequences for layers whose routes are neither replayed nor recorded."""
        return self if self.routes is None else replace(self, routes=None)

    def with_padding(self, padding: Tensor | None) -> SequenceInfo:
        """Return the sequences with other padding [b, s]."""
        return self if self.padding is padding else replace(self, padding=padding)

    @property
    def deal(self) -> Deal | None:
        """Chunks of the ranks that share the sequences. None: zigzag."""
        return None if self.documents is None else self.documents.deal

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention supports the visibility: all positions, or only earlier
        positions.
        """
        return self.window is None and self.documents is None


def rotary_places(sequence: SequenceInfo | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the positions, and the lengths of the documents, as a rotary embedding takes them."""
    return (None, None) if sequence is None else (sequence.position_ids, sequence.lengths)


def document_lengths(
    tokens: Tensor,
    position_ids: Tensor | None,
    documents: Documents | None,
    padding: Tensor | None,
    cache: CacheStep | None,
) -> Tensor | None:
    """Return :attr:`SequenceInfo.lengths` of full rows of tokens [b, s], or of a step's tokens."""
    if cache is not None:
        return cache.lengths(tokens.shape[1], tokens.device)
    if documents is not None:
        return documents.lengths(device=tokens.device)
    if position_ids is None and padding is None:
        return None
    if position_ids is None:
        position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return row_lengths(position_ids, padding)
