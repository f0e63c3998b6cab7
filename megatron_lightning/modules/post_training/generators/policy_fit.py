"""Parts of a fit that the sampling of its texts needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.modules.post_training.policy_options import PolicyOptions
from megatron_lightning.modules.post_training.rollout_data import RolloutDataModule


@dataclass(frozen=True, kw_only=True)
class PolicyFit:
    """The fit of a policy."""

    trainer: pl.Trainer
    data: RolloutDataModule
    """Prompts, rewards and environment."""
    policy: PolicyOptions
    """Temperature and length of the answers."""
    model: Any
    """The trained model, or this rank's part."""
    longest: int
    """Most positions of a row."""
    run: str
    """Name of the fit, the same on all ranks."""
