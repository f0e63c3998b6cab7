"""Advantages of sampled answers: rewards compared with those of the same prompt.

With R the reward of a row, k scorable rows in its group, means and deviations over scorable rows,
deviations by k - 1:

    grpo           (R - mean of the group) / (deviation + 1e-4)      arXiv 2402.03300
    rloo           R - mean of the group's other rows                arXiv 2402.14740
    reinforce_pp   C / (deviation of C over the batch + 1e-4), where C = R - mean of the group
                   ("REINFORCE++-baseline", arXiv 2501.03262, by rows)

The deviation of grpo is that of the group, of the rewards of the batch, or none.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError

AdvantageName = Literal["grpo", "rloo", "reinforce_pp"]
Scale = Literal["group", "batch", "none"]
_SMALLEST = 1e-4


def check_advantage(kind: str, scale: str | bool) -> tuple[AdvantageName, Scale]:
    """Return the names of an advantage and of its deviation.

    Args:
        kind: See the module.
        scale: Whose deviation divides, for grpo. True: "group". False: "none".

    Raises:
        ConfigError: If a name is unknown, or the deviation does not belong to the kind.
    """
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    for name, value, names in (
        ("advantage", kind, get_args(AdvantageName)),
        ("scale_rewards", scale, get_args(Scale)),
    ):
        if value not in names:
            raise ConfigError(f"{name} is {value!r}; must be one of {', '.join(names)}.")
    if kind != "grpo" and scale == "batch":
        raise ConfigError(
            f'scale_rewards is "batch", and is for the advantage grpo alone: {kind} has a '
            "deviation of its own, or none. Leave it out."
        )
    return kind, scale  # type: ignore[return-value]


def advantages(
    rewards: Tensor, groups: Tensor, *, kind: AdvantageName = "grpo", scale: Scale = "group"
) -> Tensor:
    """Return the advantages [n] in fp32. 0 where there is no reward, or nothing to compare with.

    Args:
        rewards: [n] of all rows of a batch, over all ranks. NaN: the row could not be scored.
        groups: Group of every row [n], any integers.
        kind: See the module.
        scale: Whose deviation divides, for grpo.
    """
    rewards = rewards.double()  # the mean of equal rewards equals them, to 1e-13
    numbers = _numbered(groups)[1]
    known = (~rewards.isnan()).double()

    def group_sum(values: Tensor) -> Tensor:
        sums = values.new_zeros(len(values)).index_add_(0, numbers, values.nan_to_num(0.0))
        return sums[numbers]

    count, total = group_sum(known), group_sum(rewards)
    if kind == "rloo":
        return (rewards - (total - rewards) / (count - 1)).nan_to_num(0.0, 0.0, 0.0).float()
    result = rewards - total / count
    if kind == "reinforce_pp":
        result = result / (deviation(result) + _SMALLEST)
    elif scale == "group":
        result = result / ((group_sum(result.square()) / (count - 1)).sqrt() + _SMALLEST)
    elif scale == "batch":
        result = result / (deviation(rewards) + _SMALLEST)
    return result.nan_to_num(0.0, 0.0, 0.0).float()


def deviation(values: Tensor) -> Tensor:
    """Return the deviation [] of ``values`` [n], by n - 1, over those that are not NaN."""
    known = values[~values.isnan()]
    return known.std() if len(known) > 1 else torch.zeros((), device=values.device)


def without_signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return the share [] of the groups in which all rewards are equal, or none is known."""
    kinds, numbers = _numbered(groups)
    ranges = [
        torch.full((len(kinds),), start).scatter_reduce(0, numbers, rewards.nan_to_num(start), how)
        for start, how in ((float("inf"), "amin"), (float("-inf"), "amax"))
    ]
    return (ranges[0] >= ranges[1]).float().mean()


def _numbered(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different groups, and the number of every row's group [n] among them."""
    found: tuple[Tensor, Tensor] = groups.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    return found
