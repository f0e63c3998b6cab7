"""Losses of untouched ``transformers`` models in chunks, without the logits of all tokens.

Hooks around the call of a causal language model with ``labels`` let its output layer await the loss
(:mod:`megatron_lightning.layers.losses.lazy_logits`). Under tensor parallelism the ranks exchange a
few numbers a token, not logits. The forward stays the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.layers.adapters.adaptable import restore
from megatron_lightning.layers.losses.lazy_logits import AwaitedLoss, PendingLogits
from megatron_lightning.models.awaited_losses import begin_awaiting, habits_of
from megatron_lightning.models.plans.hf_plans import transformers_models

_CALL = "_call_with_labels"
"""Attribute of a model during a call with labels."""
_IGNORED = -100


def fuse_losses(module: nn.Module, undo: ExitStack) -> None:
    """Compute losses of calls with labels in chunks until ``undo`` is closed.

    Args:
        module: The LightningModule, assembled.
        undo: Removes the hooks.
    """
    for model in transformers_models(module).values():
        if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            for handle in (
                model.register_forward_pre_hook(_before, with_kwargs=True),
                model.register_forward_hook(_after, always_call=True),
            ):
                undo.callback(handle.remove)
            undo.callback(_after, model, (), None)  # of a call that a pipeline has left


# ------------------------------------------------------------------------------------------- hooks


@dataclass(frozen=True)
class _Call:
    layer: nn.Module
    awaited: AwaitedLoss
    previous: Any
    """Loss function set by the user. None: the family's."""


@dataclass(frozen=True)
class CausalLoss:
    """The loss function of ``transformers`` for pending logits of a call."""

    original: Callable[..., Tensor]
    awaited: AwaitedLoss
    labels: Tensor

    def __call__(  # noqa: PLR0917 (called by transformers)
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the mean loss of the counted tokens, or the sum by ``num_items_in_batch``."""
        targets = labels if shift_labels is None else shift_labels
        is_known = targets is self.labels and ignore_index == _IGNORED
        if not isinstance(logits, PendingLogits) or not is_known:
            more = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return self.original(
                logits, labels, vocab_size, shift_labels=shift_labels, **more, **options
            )
        total = logits.pending.losses().sum()
        count = num_items_in_batch
        if count is None:
            count = (self.awaited.targets != _IGNORED).sum()
        mean: Tensor = total / (count.to(total.device) if isinstance(count, Tensor) else count)
        return mean


def _before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Await the loss of a call with labels. Compiled calls compute logits."""
    if torch.compiler.is_compiling():
        return
    _after(model, (), None)  # a pipeline leaves calls without the hook behind them
    arguments = kwargs
    if args:
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
    if labels is None or not _has_stock_loss(model):
        return
    own_labels = labels if shifted is None else shifted
    # The next token's label, as ForCausalLMLoss shifts.
    targets = F.pad(labels, (0, 1), value=_IGNORED)[..., 1:] if shifted is None else shifted
    awaited = AwaitedLoss(targets, habits_of(model))
    layer = begin_awaiting(model, awaited)
    if layer is not None:
        vars(model)[_CALL] = _Call(layer, awaited, vars(model).get("_loss_function"))
        model.loss_function = CausalLoss(model.loss_function, awaited, own_labels)


def _after(model: Any, args: tuple[Any, ...], output: Any) -> None:
    """End the call."""
    if torch.compiler.is_compiling():
        return
    call: _Call | None = vars(model).pop(_CALL, None)
    if call is not None:
        call.awaited.is_over = True
        restore(call.layer, "awaited")
        vars(model).pop("_loss_function", None)
        if call.previous is not None:
            model.loss_function = call.previous


def _has_stock_loss(model: Any) -> bool:
    """Return whether a model has the loss function of causal language models."""
    function = getattr(model, "loss_function", None)
    name = (getattr(function, "__module__", ""), getattr(function, "__name__", ""))
    return name == ("transformers.loss.loss_utils", "ForCausalLMLoss")
