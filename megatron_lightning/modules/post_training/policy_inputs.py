"""Inputs of a policy's loss: checks of batches and models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.loss import CrossEntropy
from megatron_lightning.layers.losses.policy_loss import PolicyLoss, Terms
from megatron_lightning.modules.post_training.policy_options import PolicyOptions
from megatron_lightning.pipeline.batch.sequence_split import IGNORED_LABEL

Batch = dict[str, Tensor]


def quantile(values: Tensor, rank: float) -> Tensor:
    """Return a quantile of ``values`` [n], also of more than ``torch.quantile`` takes."""
    ordered = values.sort().values
    place = rank * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return torch.lerp(ordered[low], ordered[high], place - low)


def checked_rows(batch: Batch, policy: PolicyOptions) -> Batch:
    """Return a copy of a batch, with labels of masked rows ignored.

    Raises:
        ConfigError: If an entry is missing.
    """
    reasons = {"tokens": "", "labels": "", "advantages": ""}
    if policy.needs_sampler:
        reasons["logprobs"] = " of the sampler, which importance_sampling_correction and "
        reasons["logprobs"] += "off_policy_mask_threshold compare with"
    if policy.mask_truncated_completions:
        reasons["truncated"] = ", which mask_truncated_completions reads"
    if policy.reference == "scores":
        reasons["ref_logprobs"] = ' of the reference "scores"'
    for name, reason in reasons.items():
        if name not in batch:
            raise ConfigError(
                f"the batch has no {name}{reason}, but {', '.join(batch)}. Set RolloutDataModule "
                "as the data of a PolicyModule, or return the entry from your own data."
            )
    rows = dict(batch)
    if policy.mask_truncated_completions:
        is_cut = rows.pop("truncated").bool()[:, None]
        rows["labels"] = rows["labels"].masked_fill(is_cut, IGNORED_LABEL)
    return rows


def check_plain_loss(model: Any) -> None:
    """Check that the loss of a model's tokens is a log-probability."""
    loss = getattr(model, "loss", None)
    if not isinstance(loss, CrossEntropy):
        return
    for name in ("label_smoothing", "z_loss"):
        value = getattr(loss, name)
        if value:
            raise ConfigError(
                f"the model's loss has {name}={value}, so that it is no log-probability of a "
                "token, which a policy is trained by. Set it to 0."
            )


def weighed_sum(policy: PolicyLoss, values: Tensor, terms: Terms) -> Tensor:
    """Return the sum [] of ``values`` [b, s] over tokens, or over the rows' means."""
    weighed = values.to(terms.mask.dtype) * terms.mask
    return (weighed if policy.by_tokens else weighed / terms.counts).sum()
