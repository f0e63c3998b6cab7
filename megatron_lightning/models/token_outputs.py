"""Losses and logits of tokens, from a ``GPTModel`` and from an untouched causal language model of
``transformers`` alike, without gathered logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron_lightning.layers.local_logits import local_logits, output_layer
from megatron_lightning.layers.loss import Vocabulary, losses_of
from megatron_lightning.models.transformer import GPTModel


def vocabulary_size(model: nn.Module) -> int:
    """Return the number of logits of a token in the full model. 0: not known."""
    return int(getattr(output_layer(model), "out_features", 0))


def token_losses_of(model: nn.Module, tokens: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
    """Return the losses of the tokens [b, s] in fp32.

    Args:
        model: A language model, called once.
        tokens: [b, s].
        labels: [b, s], already shifted. -100 has no loss.
        inputs: Further inputs, such as ``position_ids``.
    """
    if isinstance(model, GPTModel):
        losses: Tensor = model(tokens, labels, **inputs)
        return losses
    logits, vocabulary = token_logits(model, tokens, **inputs)
    return losses_of(logits, labels, vocabulary)


def token_logits(model: nn.Module, tokens: Tensor, **inputs: Any) -> tuple[Tensor, Vocabulary]:
    """Return this rank's logits [b, s, v / ranks], and how the vocabulary is split.

    Args:
        model: A language model, called once.
        tokens: [b, s].
        inputs: Further inputs, such as ``position_ids``.
    """
    with local_logits(model) as vocabulary:
        if isinstance(model, GPTModel):
            logits: Tensor = model(tokens, **inputs)
        else:
            # Models of transformers separate documents by positions alone, and count no padding.
            for name in ("document_ids", "padding"):
                inputs.pop(name, None)
            logits = model(input_ids=tokens, use_cache=False, **inputs).logits
    return logits, vocabulary
