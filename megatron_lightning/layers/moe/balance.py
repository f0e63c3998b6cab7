"""Balance the experts from one optimizer step to the next.

The bias of an expert (``router_enable_expert_bias``) follows the number of tokens routed to the
expert in all forwards of a step, on all ranks and in all micro-batches and accumulated batches.
Recomputation does not count. The counts of ``global_aux_loss`` restart with each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.moe.layer import TOKENS_PER_EXPERT, MoELayer
from megatron_lightning.layers.step_report import is_bound
from megatron_lightning.parallel.shards.other_stages import present_modules


class ExpertBalance:
    """End of an optimizer step for all expert layers on this rank.

    Args:
        module: The model.
        sum_counts: Returns the sum of a tensor over the ranks with the same layers and other
            tokens, equal on each rank.
    """

    def __init__(self, module: nn.Module, sum_counts: Callable[[Tensor], Tensor]) -> None:
        self._layers = [m for _, m in present_modules(module) if isinstance(m, MoELayer)]
        self._sum_counts = sum_counts
        for layer in self._layers:
            layer.global_counts.reset()

    @property
    def needs_all_ranks(self) -> bool:
        """Whether losses of this rank depend on the tokens of other ranks."""
        return any("global_aux_loss" in m.router.moe.auxiliary_losses for m in self._layers)

    @torch.no_grad()
    def end_step(self, *, stepped: bool) -> None:
        """Update the biases from the tokens since the last call, and reset the counts.

        A collective if layers have biases.

        Args:
            stepped: Whether the optimizer has changed the parameters. If not, biases stay.
        """
        biased = []
        for layer in self._layers:
            layer.global_counts.reset()
            counts = layer.report.counts.pop(TOKENS_PER_EXPERT, None)
            bias = layer.router.expert_bias
            # Biases of frozen routers belong to the frozen weights.
            if bias is not None and layer.router.weight.requires_grad:
                none = torch.zeros_like(bias, dtype=torch.int64)
                biased.append((bias, none if counts is None else counts, layer.router.moe))
        if not (biased and stepped):
            return
        summed = self._sum_counts(torch.cat([counts for _, counts, _ in biased]))
        of_layers = torch.split(summed, [len(bias) for bias, _, _ in biased])
        for (bias, _, moe), of_layer in zip(biased, of_layers, strict=True):
            bias.copy_(updated_expert_bias(bias, of_layer, moe))


@contextmanager
def balance_experts(module: Any, optimizer: Any) -> Iterator[None]:
    """Wrap an optimizer's step and update the experts' biases afterwards, under any of Lightning's
    strategies. A step skipped by a gradient scaler changes no bias. Under MegatronStrategy the
    context does nothing, because the strategy updates the biases.

    Args:
        module: A LightningModule with layers of experts.
        optimizer: The stepping optimizer.

    Raises:
        ConfigError: If a loss needs the tokens of other ranks.
    """
    if is_bound(module):
        yield
        return
    steps: list[bool] = []
    inner = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper
    # A gradient scaler leaves out the inner step: only a hook inside knows.
    hook = inner.register_step_post_hook(lambda *_: steps.append(True))
    try:
        yield
    finally:
        hook.remove()
    trainer = module.trainer
    balance = ExpertBalance(module, partial(trainer.strategy.reduce, reduce_op="sum"))
    if trainer.world_size > 1 and balance.needs_all_ranks:
        raise ConfigError(
            f"moe.router_load_balancing_type=global_aux_loss with {trainer.world_size} ranks under "
            f"{type(trainer.strategy).__name__}: the layers do not see the tokens of other ranks. "
            "Use MegatronStrategy, or set the type to aux_loss."
        )
    balance.end_step(stepped=bool(steps))


@torch.no_grad()
def updated_expert_bias(expert_bias: Tensor, tokens_per_expert: Tensor, moe: MoEConfig) -> Tensor:
    """Return ``expert_bias`` [..., E] raised for experts with less than the mean number of tokens
    and lowered for experts with more (https://arxiv.org/abs/2408.15664).

    Args:
        expert_bias: Biases of the last step. Not changed.
        tokens_per_expert: [..., E] tokens of the whole optimizer step, over all ranks.
        moe: The layer's configuration.
    """
    # Integers: the sign near the mean is exact for any number of tokens.
    excess = tokens_per_expert * tokens_per_expert.shape[-1] - tokens_per_expert.sum(-1, True)
    return expert_bias - moe.router_bias_update_rate * excess.sign().to(expert_bias.dtype)
