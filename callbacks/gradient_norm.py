"""Log the global gradient norm: a single number for the full model on every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.strategies.megatron import MegatronStrategy


class GradientNormMonitor(pl.Callback):
    """Log the 2-norm of all gradients before clipping, once an optimizer step.

    Under :class:`MegatronStrategy` the norm spans all axes, without double counting. Under another
    strategy the norm is of this rank's gradients. If steps may be skipped (``16-mixed``,
    ``non_finite="skip"``), ``skipped_steps`` counts skipped steps.

    Args:
        name: Key of the norm in the logs.
        groups: Log the norm of every parameter group too, as ``name/group``, if there are several.
        zeros: Log the number of zero elements in the gradients, as ``name_zeros``. Reads all
            gradients once more.
    """

    def __init__(
        self, name: str = "grad_norm", *, groups: bool = False, zeros: bool = False
    ) -> None:
        self.name = name
        self.groups = groups
        self.zeros = zeros

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Compute and log the norms. A collective under MegatronStrategy."""
        strategy = trainer.strategy
        values: dict[str, Any] = {}
        # p.grad may be a shard or None there. The strategy sums over shards.
        if isinstance(strategy, MegatronStrategy):
            values[self.name] = strategy.gradient_norm()
            norms: Mapping[str, Tensor] = (
                strategy.gradient_group_norms(optimizer) if self.groups else {}
            )
            zeros = strategy.num_zero_gradients() if self.zeros else None
        else:
            gradients = [
                parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None
            ]
            values[self.name] = torch.nn.utils.get_total_norm(gradients)
            norms = _norms_of_groups(optimizer) if self.groups else {}
            zeros = (
                torch.stack([(gradient == 0).sum() for gradient in gradients]).sum()
                if self.zeros and gradients
                else None
            )
        if len(norms) > 1:
            values.update({f"{self.name}/{group}": norm for group, norm in norms.items()})
        if zeros is not None:
            values[f"{self.name}_zeros"] = zeros.float()
        pl_module.log_dict(values, on_step=True, on_epoch=False)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Log the number of skipped steps. No optimizer hook runs for a skipped step."""
        if isinstance(trainer.strategy, MegatronStrategy) and trainer.strategy.may_skip_steps:
            pl_module.log(
                "skipped_steps", float(trainer.strategy.skipped_steps), on_step=True, on_epoch=False
            )


def _norms_of_groups(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        str(group.get("name", index)): torch.nn.utils.get_total_norm(
            [p.grad for p in group["params"] if p.grad is not None]
        )
        for index, group in enumerate(optimizer.param_groups)
    }
