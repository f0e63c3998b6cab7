"""Log the global gradient norm: a single number for the full model on every layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
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
        layers: Log the norm of every numbered layer too, and of every other module with trained
            parameters, as ``name/model.decoder.layers.3``.
    """

    def __init__(
        self,
        name: str = "grad_norm",
        *,
        groups: bool = False,
        zeros: bool = False,
        layers: bool = False,
    ) -> None:
        self.name = name
        self.groups = groups
        self.zeros = zeros
        self.layers = layers

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Compute and log the norms. A collective under MegatronStrategy."""
        strategy = trainer.strategy
        values: dict[str, Any] = {}
        groups: Mapping[str, Tensor] = {}
        layers: Mapping[str, Tensor] = {}
        zeros: Tensor | None = None
        # p.grad may be a shard or None there. The strategy sums over shards.
        if isinstance(strategy, MegatronStrategy):
            values[self.name] = strategy.gradient_norm()
            if self.groups:
                groups = strategy.gradient_group_norms(optimizer)
            if self.layers:
                layers = strategy.gradient_norms(layer_of)
            if self.zeros:
                zeros = strategy.num_zero_gradients()
        else:
            gradients = [
                parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None
            ]
            values[self.name] = torch.nn.utils.get_total_norm(gradients)
            if self.groups:
                groups = _norms_of_groups(optimizer)
            if self.layers:
                layers = _norms_of_layers(pl_module)
            if self.zeros and gradients:
                zeros = torch.stack([(gradient == 0).sum() for gradient in gradients]).sum()
        by_key = {**(groups if len(groups) > 1 else {}), **layers}
        values.update({f"{self.name}/{key}": norm for key, norm in by_key.items()})
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


def layer_of(name: str) -> str:
    """Return the numbered layer of a parameter, or the parameter's module without such a layer."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1]) or name


def _norms_of_groups(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        str(group.get("name", index)): _norm(group["params"])
        for index, group in enumerate(optimizer.param_groups)
    }


def _norms_of_layers(module: nn.Module) -> dict[str, Tensor]:
    layers: dict[str, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(layer_of(name), []).append(parameter)
    return {layer: _norm(parameters) for layer, parameters in layers.items()}


def _norm(parameters: Iterable[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
