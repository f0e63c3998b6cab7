"""Operations of a document and of an image in a training step, by their tokens. No torch here."""

from __future__ import annotations

from dataclasses import replace

from megatron_lightning.config import TransformerConfig
from megatron_lightning.planning.flops import OPERATIONS_PER_WEIGHT, flops
from megatron_lightning.planning.ledger.tower_memory import TowerSizes

_POINTS = 64
Table = tuple[list[int], list[float]]
"""Rising numbers of tokens, and the operations of each."""


def text_operations(config: TransformerConfig, longest: int) -> Table:
    """Return the operations of documents of up to ``longest`` tokens."""
    tokens = _points(longest)
    return tokens, [0.0, *(flops(config, batch_size=1, sequence_length=n) for n in tokens[1:])]


def image_operations(tower: TowerSizes, longest: int) -> Table:
    """Return the operations of images of up to ``longest`` tokens in tower and projector."""
    tokens = _points(longest)
    images = (replace(tower, image_tokens=n) for n in tokens)
    return tokens, [OPERATIONS_PER_WEIGHT * (x.multiply_adds() + x.mixing()) for x in images]


def _points(longest: int) -> list[int]:
    return sorted({longest * n // _POINTS for n in range(_POINTS + 1)})
