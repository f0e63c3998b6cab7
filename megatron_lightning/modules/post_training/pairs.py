"""Steps on pairs of answers: their rows, their number, and the logged rewards."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from megatron_lightning.errors import ConfigError

Batch = dict[str, Tensor]


def rows_of(batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    """Return tokens and labels [2 b, s] of the chosen answers, followed by the rejected answers.

    Args:
        batch: The batch.
        name: Name of the module, for the error.

    Raises:
        ConfigError: If the batch has no pairs.
    """
    if "chosen" not in batch:
        raise ConfigError(
            f"the batch has no pairs of answers, but {', '.join(batch)}. Set PreferenceDataModule "
            f"as the data of a {name}, or train the inner model itself."
        )
    tokens = torch.cat([batch["chosen"], batch["rejected"]])
    return tokens, torch.cat([batch["chosen_labels"], batch["rejected_labels"]])


def num_pairs(batch: Batch) -> Tensor:
    """Return the number of pairs []."""
    return torch.tensor(len(batch["chosen"]), device=batch["chosen"].device)


def padding_of(batch: Batch) -> Tensor | None:
    """Return the padding [2 b, s] of the rows. None: the data do not state it."""
    names = ("chosen_padding", "rejected_padding")
    return torch.cat([batch[name] for name in names]) if names[0] in batch else None


def log_rewards(module: LightningModule, rewards: Tensor) -> None:
    """Log the rewards [b, 2] of chosen and rejected answers, without gradients."""
    prefix = "" if module.trainer.training else "test_" if module.trainer.testing else "val_"
    difference = rewards[:, 0] - rewards[:, 1]
    values = {
        "rewards_chosen": rewards[:, 0].mean(),
        "rewards_rejected": rewards[:, 1].mean(),
        "rewards_margin": difference.mean(),
        "rewards_accuracy": (difference > 0).float().mean(),
    }
    for name, value in values.items():
        module.log(f"{prefix}{name}", value, sync_dist=True, batch_size=len(rewards))
