"""Losses and logits of tokens, from a ``GPTModel`` and from an untouched causal language model of
``transformers`` alike, without gathered logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.local_logits import local_logits, output_layer
from megatron_lightning.layers.losses.loss import CrossEntropy, Vocabulary, losses_of
from megatron_lightning.models.awaited_losses import awaited_losses
from megatron_lightning.models.router_loss import router_loss
from megatron_lightning.models.transformer import GPTModel

_TEMPERATURE, _ENTROPIES = "_loss_temperature", "_loss_entropies"
"""Attributes of a model of ``transformers``."""


def set_temperature(model: nn.Module, temperature: float) -> None:
    """Divide the logits by ``temperature``, as a sampler does, in later losses of
    :func:`token_losses_of` and :func:`losses_and_router_loss`, also in validation. A ``GPTModel``
    does so in its own losses, too. Logits stay as they are. A
    :class:`~megatron_lightning.modules.HuggingFaceModule` computes its losses by its ``loss``,
    which has a ``temperature`` of its own.

    Raises:
        ConfigError: If the temperature is no positive number, or a ``GPTModel`` has another loss
            than ours.
    """
    if not 0.0 < temperature < math.inf:
        raise ConfigError(
            f"temperature is {temperature}, and logits are divided by it. Set a number above 0: "
            "texts sampled without a temperature (0: the likeliest token) have no log-probability "
            "to train."
        )
    if not isinstance(model, GPTModel):
        vars(model)[_TEMPERATURE] = temperature
    elif isinstance(model.loss, CrossEntropy):
        model.loss.temperature = temperature
    elif temperature != 1.0:
        raise ConfigError(
            f"temperature is {temperature}, and the loss of the model is a "
            f"{type(model.loss).__name__}, which divides no logits. Set temperature to 1."
        )


def temperature_of(model: nn.Module) -> float:
    """Return the temperature of a model of ``transformers``. See :func:`set_temperature`."""
    temperature: float = vars(model).get(_TEMPERATURE, 1.0)
    return temperature


class Entropies:
    """Entropies of the tokens of the last call of a model, for the logits of its losses.

    Args:
        by_position: Whether positions come first in the order of the tokens, then rows.
    """

    def __init__(self, *, by_position: bool) -> None:
        self.calls: list[Tensor] = []
        """Entropies [n] of the tokens of each call."""
        self._by_position = by_position

    def of(self, labels: Tensor) -> Tensor:
        """Return the entropies [b, s] of the tokens with ``labels`` [b, s]."""
        last = self.calls[-1]
        return last.view(labels.t().shape).t() if self._by_position else last.view(labels.shape)


@contextmanager
def entropies_of(model: nn.Module) -> Iterator[Entropies]:
    """Compute entropies in the losses of a model inside the block, without gradients: losses of
    :func:`token_losses_of` and of a ``GPTModel``.

    Raises:
        ConfigError: If a ``GPTModel`` has another loss than ours.
    """
    is_own = isinstance(model, GPTModel)
    found = Entropies(by_position=is_own)
    if not is_own:
        vars(model)[_ENTROPIES] = found.calls
        try:
            yield found
        finally:
            del vars(model)[_ENTROPIES]
        return
    if not isinstance(model.loss, CrossEntropy):
        raise ConfigError(
            f"entropies were asked for, and the loss of the model is a {type(model.loss).__name__},"
            " which computes none. Leave the model's loss as it is."
        )
    model.loss.entropies = found.calls
    try:
        yield found
    finally:
        model.loss.entropies = None


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
    return losses_and_router_loss(model, tokens, labels, **inputs)[0]


def losses_and_router_loss(
    model: nn.Module, tokens: Tensor, labels: Tensor, **inputs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of the tokens [b, s] in fp32, and the balancing loss of a model of
    ``transformers`` times its coefficient, if the model has one in its training loss.

    The arguments are those of :func:`token_losses_of`.
    """
    if isinstance(model, GPTModel):
        return model(tokens, labels, **inputs), None
    loss = CrossEntropy(temperature=temperature_of(model))
    loss.entropies = vars(model).get(_ENTROPIES)
    with awaited_losses(model, labels, loss) as awaited:
        if awaited.is_awaited:
            output = _call(model, tokens, inputs)
            losses = awaited.of(output.logits)
            return losses, router_loss(model, output, tokens, inputs.get("padding"))
    with local_logits(model) as vocabulary:
        output = _call(model, tokens, inputs)
    vocabulary = replace(
        vocabulary, temperature=temperature_of(model), entropies=vars(model).get(_ENTROPIES)
    )
    losses = losses_of(output.logits, labels, vocabulary)
    return losses, router_loss(model, output, tokens, inputs.get("padding"))


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
            logits = _call(model, tokens, inputs).logits
    return logits, vocabulary


def _call(model: nn.Module, tokens: Tensor, inputs: dict[str, Tensor]) -> Any:
    """Return the output of a model of ``transformers``, which separates documents by positions
    alone, and counts no padding.
    """
    known = {name: x for name, x in inputs.items() if name not in ("document_ids", "padding")}
    return model(input_ids=tokens, use_cache=False, **known)
