"""The generation that a policy is trained on: advantages, and scores before its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.data.rollouts.generation import Batch, Generation
from megatron_lightning.data.rollouts.rollout_data import RolloutData
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.advantages import (
    advantages,
    check_advantage,
    deviation,
    without_signal,
)
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.modules.post_training.policy_options import PolicyOptions

ENTRY = "policy_generation"
"""Entry of a checkpoint within a generation."""


@dataclass(kw_only=True)
class TrainedGeneration:
    """A generation in training.

    Args:
        number: Number of the generation.
        rows: Its rows, of all replicas.
        rewards: Of the rows [n]. NaN: not scored.
        advantages: Of the rows [n].
        ends: Ids of tokens that end a text. Empty: not known.
        step: Optimizer steps before the first update.
        old_logprobs: Log-probabilities [length - 1] of the texts before the first update, for later
            ones. None: there is one update.
    """

    number: int
    rows: Generation
    rewards: Tensor
    advantages: Tensor
    ends: Sequence[int]
    step: int
    old_logprobs: list[Tensor] | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Counts and times of the sampler, for the log."""

    @classmethod
    def begin(
        cls, data: RolloutData, number: int, rows: Generation, policy: PolicyOptions, step: int
    ) -> TrainedGeneration:
        """Return a generation before its first update."""
        rewards = rows.rewards(data.reward_weights)
        kind, scale = check_advantage(policy.advantage, policy.scale_rewards)
        return cls(
            number=number,
            rows=rows,
            rewards=rewards,
            advantages=advantages(rewards, rows.groups, kind=kind, scale=scale),
            ends=data.end_ids,
            step=step,
        )

    def batch(self, places: Sequence[int], *, step: int, multiple: int, longest: int) -> Batch:
        """Return the rows of ``places`` as a batch of :class:`PolicyModule`.

        Args:
            places: Numbers of the rows.
            step: Optimizer steps until now.
            multiple: Rows are padded to a multiple of this.
            longest: Most positions of a row.

        Raises:
            ConfigError: If a row is longer than that.
        """
        for place in places:
            length = len(self.rows.rows[place])
            if length - 1 > longest:
                raise ConfigError(
                    f"row {place} of generation {self.number} has {length} ids, and the model "
                    f"has {longest} positions. Leave the row out, or lower "
                    "max_completion_length where it was sampled."
                )
        batch = self.rows.batch(places, padding=0, multiple=multiple, longest=longest)
        batch["advantages"] = self.advantages[list(places)]
        if self.ends:
            batch["truncated"] = self.rows.truncated(self.ends)[list(places)]
        if self.old_logprobs is not None and step != self.step:
            old = torch.zeros_like(batch["logprobs"])
            for number, place in enumerate(places):
                scores = self.old_logprobs[place]
                old[number, : len(scores)] = scores
            batch["old_logprobs"] = old
        return batch

    def statistics(self) -> dict[str, Tensor]:
        """Return means over the rows by name, for the log."""
        rows = self.rows
        lengths = torch.tensor([float(sum(row.mask)) for row in rows.rows])
        values = {
            "reward": self.rewards.nanmean(),
            "reward_std": deviation(self.rewards),
            "groups_without_signal": without_signal(self.rewards, rows.groups),
            "unscored_rows": self.rewards.isnan().float().sum(),
            "completion_length": lengths.mean(),
        }
        values |= {f"reward/{name}": rows.reward(name).nanmean() for name in rows.reward_names}
        if self.ends:
            values["truncated_rows"] = rows.truncated(self.ends).float().mean()
        values |= {name: torch.tensor(value) for name, value in self.sampling.items()}
        return {name: value.nan_to_num(0.0) for name, value in values.items()}

    def state(self) -> dict[str, Any]:
        """Return what a resume within the generation needs, as plain values and tensors."""
        old, digest = self.old_logprobs, self.rows.digest
        return {"number": self.number, "step": self.step, "old_logprobs": old, "digest": digest}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on after the updates before a checkpoint.

        Args:
            state: Of :meth:`state`.

        Raises:
            ConfigError: If the rows on disk are not those of the checkpoint.
        """
        if state["digest"] != self.rows.digest:
            raise ConfigError(
                f"generation {self.number} on disk has other rows than when the checkpoint was "
                "written: another run has written to the folder. Put its file back, or resume from "
                "a checkpoint between generations."
            )
        self.step = state["step"]
        old = state["old_logprobs"]
        self.old_logprobs = None if old is None else list(old)


def most_positions(model: Any) -> int:
    """Return the positions of the longest row of a language model."""
    if isinstance(model, GPTModel):
        return model.config.max_sequence_length
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "max_position_embeddings", 0) or 1 << 30)
