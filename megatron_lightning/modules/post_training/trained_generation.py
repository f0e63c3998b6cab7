"""The generation that a policy is trained on: advantages, and scores before its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.data.rollouts.generation import Batch, Generation
from megatron_lightning.data.rollouts.rollout_data import RolloutData
from megatron_lightning.data.rows.packed_rows import IGNORED
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
    """Of all texts."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Counts and times of the sampler, for the log."""

    @classmethod
    def begin(
        cls, data: RolloutData, number: int, rows: Generation, policy: PolicyOptions, step: int
    ) -> TrainedGeneration:
        """Return a generation before its first update.

        Raises:
            ConfigError: If a row has several texts, and the loss is a mean over rows.
        """
        if len(rows.texts) > len(rows.rows):
            check_split(policy)
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

    def texts_of(self, places: Sequence[int]) -> list[int]:
        """Return the numbers of the texts of rows."""
        firsts = {owner: number for number, owner in reversed(list(enumerate(self.rows.owners)))}
        return [
            firsts[place] + number
            for place in places
            for number in range(len(self.rows.rows[place].texts))
        ]

    def batch(self, numbers: Sequence[int], *, step: int, multiple: int, longest: int) -> Batch:
        """Return texts as a batch of :class:`PolicyModule`.

        Args:
            numbers: Numbers of the texts.
            step: Optimizer steps until now.
            multiple: Rows are padded to a multiple of this.
            longest: Most positions of a row.

        Raises:
            ConfigError: If a row is longer than that.
        """
        owners = [self.rows.owners[number] for number in numbers]
        for number, owner in zip(numbers, owners, strict=True):
            length = len(self.rows.texts[number])
            if length - 1 > longest:
                raise ConfigError(
                    f"row {owner} of generation {self.number} has {length} ids, and the model "
                    f"has {longest} positions. Leave the row out, or lower "
                    "max_completion_length where it was sampled."
                )
        batch = self.rows.batch(numbers, padding=0, multiple=multiple, longest=longest)
        batch["advantages"] = self.advantages[owners]
        if self.ends:
            batch["truncated"] = self.rows.truncated(self.ends)[owners]
        if self.old_logprobs is not None and step != self.step:
            old = torch.zeros_like(batch["logprobs"])
            for row, number in enumerate(numbers):
                scores = self.old_logprobs[number]
                old[row, : len(scores)] = scores
            batch["old_logprobs"] = old
        return batch

    def statistics(self) -> dict[str, Tensor]:
        """Return means over the rows by name, for the log."""
        rows = self.rows
        lengths = torch.tensor([float(row.num_sampled) for row in rows.rows])
        values = {
            "reward": self.rewards.nanmean(),
            "reward_std": deviation(self.rewards),
            "groups_without_signal": without_signal(self.rewards, rows.groups),
            "unscored_rows": self.rewards.isnan().float().sum(),
            "completion_length": lengths.mean(),
            "texts_of_row": torch.tensor(len(rows.texts) / len(rows.rows)),
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


def check_split(policy: PolicyOptions) -> None:
    """Check that conversations may have several texts.

    Raises:
        ConfigError: If the loss is a mean over rows.
    """
    if not policy.by_tokens:
        raise ConfigError(
            f'history is "split", and loss_type={policy.loss_type} is a mean over rows, in which a '
            "conversation of several texts would count several times. Set loss_type to one over "
            'tokens (dapo, cispo, vespo), or history to "keep".'
        )


def filled(batch: Batch, count: int) -> Batch:
    """Return a batch of ``count`` rows: with empty ones, which train nothing, behind its own.

    Forwards of replicas that gather weights need equally many rows on each.
    """
    missing = count - len(batch["tokens"])
    if missing <= 0:
        return batch
    empty = {
        name: torch.zeros_like(x[:1]).expand(missing, *x.shape[1:]) for name, x in batch.items()
    }
    empty["labels"] = torch.full_like(empty["labels"], IGNORED)
    empty["padding"] = torch.ones_like(empty["padding"])
    empty["padding"][:, :1] = False  # attention reads one token at least
    return {name: torch.cat([x, empty[name]]) for name, x in batch.items()}


def most_positions(model: Any) -> int:
    """Return the positions of the longest row of a language model."""
    if isinstance(model, GPTModel):
        return model.config.max_sequence_length
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "max_position_embeddings", 0) or 1 << 30)
