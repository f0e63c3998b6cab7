"""The balancing loss of an untouched mixture of experts of ``transformers``.

A model with ``output_router_logits: true`` in its configuration adds ``router_aux_loss_coef`` times
its own balancing loss to every training loss. The loss is a product of means over the tokens of all
layers of a micro-batch (``load_balancing_loss_func`` of the model's file), top_k if all experts are
used equally. ``router_aux_loss_coef`` alone changes nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from megatron_lightning.errors import ConfigError

LOGITS = "output_router_logits"
"""Entry of a configuration: whether a model returns the logits of its routers, and their loss."""


def coefficient_of(config: Any) -> float:
    """Return the factor of the balancing loss in the training loss of a configuration of
    ``transformers``. 0: there is none.
    """
    text = config.get_text_config()
    wants = getattr(text, LOGITS, False)
    return float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0) if wants else 0.0


def router_loss(model: Any, output: Any, tokens: Tensor, padding: Tensor | None) -> Tensor | None:
    """Return the balancing loss times its coefficient. None: the model computes none, or is in
    evaluation.

    Args:
        model: A causal language model of ``transformers``.
        output: Returned by the model.
        tokens: [b, s].
        padding: [b, s] whether a token is padding, which does not count. None: no token is.

    Raises:
        ConfigError: If the routers have seen a part of the tokens.
    """
    loss = getattr(output, "aux_loss", None)
    coefficient = coefficient_of(model.config) if model.training else 0.0
    if not coefficient or not isinstance(loss, Tensor):
        return None
    logits = getattr(output, "router_logits", None) or ()
    for layer in logits:
        if layer.shape[:-1].numel() != tokens.numel():
            raise ConfigError(
                f"{type(model).__name__} has output_router_logits=True, and a rank's routers see "
                f"{layer.shape[:-1].numel()} of {tokens.numel()} tokens. Set sequence_parallel to "
                "False, or config_overrides={output_router_logits: false}."
            )
    if padding is not None:
        loss = _masked(model, logits, ~padding, loss)
    return coefficient * loss


def _masked(model: Any, logits: Any, is_text: Tensor, loss: Tensor) -> Tensor:
    """Return the model's loss without padding. ``loss``: with padding."""
    # A mask for the model's call would also reach attention, which packed rows must not have.
    files = (sys.modules[kind.__module__] for kind in type(model).__mro__)
    functions = (vars(file).get("load_balancing_loss_func") for file in files)
    function = next((found for found in functions if found is not None), None)
    config = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    counts = (getattr(owner, name, None) for name in names for owner in (model, config))
    num_experts = next((count for count in counts if count), None)
    topk = getattr(model, "num_experts_per_tok", None) or config.num_experts_per_tok
    if function is None or num_experts is None:
        return loss
    masked: Tensor = function(tuple(logits), num_experts, topk, is_text)
    return masked
