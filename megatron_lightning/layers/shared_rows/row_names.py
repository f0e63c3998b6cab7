"""Names of a call's arguments with the tokens of rows, of which a rank has a part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class RowNames:
    """Arguments with a row's tokens in dim 1, and those of an encoder's rows, which stay full."""

    tokens: str = "input_ids"
    embeddings: str = "inputs_embeds"
    mask: str = "attention_mask"
    positions: str = "position_ids"
    types: str = "token_type_ids"
    media_types: str = "mm_token_type_ids"
    """Which tokens are those of images."""
    source: tuple[str, ...] = ()
    """Arguments of an encoder."""
    of_logits: tuple[str, ...] = ("labels", "shift_labels", "num_items_in_batch")
    """Arguments compared with a rank's logits."""

    @classmethod
    def of(cls, model: nn.Module) -> RowNames:
        """Return the names of a model's call: ranks share the rows of a decoder."""
        return _OF_DECODER if reads_source(model) else _OF_TEXT

    @property
    def rows(self) -> tuple[str, ...]:
        """Arguments with the tokens of rows that ranks share."""
        own = (self.tokens, self.embeddings, self.mask, self.positions)
        return (*own, self.types, self.media_types)


_OF_TEXT = RowNames()
_OF_DECODER = RowNames(
    tokens="decoder_input_ids",
    embeddings="decoder_inputs_embeds",
    mask="decoder_attention_mask",
    positions="decoder_position_ids",
    types="decoder_token_type_ids",
    source=("input_ids", "inputs_embeds", "attention_mask", "encoder_outputs"),
)


def reads_source(model: nn.Module) -> bool:
    """Return whether a model of ``transformers`` has an encoder that reads rows of its own."""
    config: Any = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False))
