"""Resume of callbacks that unfreeze layers during fit."""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


def announces_unfreezing(trainer: pl.Trainer) -> bool:
    """Return whether a ``BaseFinetuning`` callback will unfreeze parameters later."""
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # set from another class
    return any(isinstance(callback, BaseFinetuning) for callback in callbacks)


def unfreeze_again(module: pl.LightningModule, added: Iterable[Tensor]) -> None:
    """Unfreeze parameters again after a resume, if a ``BaseFinetuning`` callback had unfrozen the
    parameters before the save.

    The callback restores the added parameter groups, but leaves the parameters of the groups
    frozen, as its ``setup`` has made the parameters.

    Args:
        module: The LightningModule.
        added: Tensors added to the optimizers' groups since the optimizers were made.
    """
    trainer: pl.Trainer = module.trainer
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # set from another class
    finetuning = next(
        (callback for callback in callbacks if isinstance(callback, BaseFinetuning)), None
    )
    frozen = {id(tensor) for tensor in added if not tensor.requires_grad}
    if finetuning is None or not frozen:
        return
    names = [name for name, parameter in module.named_parameters() if id(parameter) in frozen]
    for child in module.modules():
        parameters = [p for p in child.parameters(recurse=False) if id(p) in frozen]
        for parameter in parameters:
            parameter.requires_grad_(True)
        if parameters and isinstance(child, _BatchNorm):
            child.track_running_stats = True
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    rank_zero_warn(
        f"{type(finetuning).__name__} had unfrozen {', '.join(names[:3])}{more} when the "
        "checkpoint was saved. They are trained again; Lightning's own strategies would leave them "
        "frozen after the resume."
    )
