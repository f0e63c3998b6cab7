"""Learning-rate and weight-decay schedules as a torch ``LRScheduler``: Megatron-Core's
``OptimizerParamScheduler``.

With n optimizer steps (or samples) consumed, a group with peak rate ``max`` trains at

    n <= warm-up          init + (max - init) n / warm-up
    n > decay             min
    inverse-square-root   max(min, max sqrt(warm-up / n))
    otherwise             min + c (max - min), with r = (n - warm-up) / (decay - warm-up)

with c = 1 (constant), 1 - r (linear) or (cos(pi r) + 1) / 2 (cosine,
https://arxiv.org/abs/1608.03983). WSD (warm-up, stable, decay: https://arxiv.org/abs/2404.06395)
keeps c = 1 until the last ``wsd_decay_steps``. After a fraction q of ``wsd_decay_steps``, c is 1 -
q, (cos(pi q) + 1) / 2, 2 * 0.5^q - 1 or 1 - sqrt(q). The first step of a run is taken at n = 0, so
with a warm-up at ``init``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megatron_lightning.errors import CheckpointError, ConfigError

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
TailStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]
OnResume = Literal["require_equal", "configured", "checkpoint"]


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """A schedule, with the names of Megatron-Core. All ``_steps`` are counted in ``unit`` from the
    start of training.

    The peak is the learning rate given to the optimizer or to a parameter group.
    """

    lr_decay_style: DecayStyle = "cosine"
    """Shape of the decay."""
    lr_decay_steps: int | None = None
    """End of the decay and start of ``min_lr``. Required by every style but constant."""
    lr_warmup_steps: int = 0
    """Length of the linear warm-up."""
    init_lr: float = 0.0
    """Learning rate at the start of the warm-up."""
    min_lr: float = 0.0
    """Learning rate after the decay. A parameter group may have a separate ``min_lr``."""
    lr_wsd_decay_style: TailStyle = "exponential"
    """Shape of the tail of WSD."""
    wsd_decay_steps: int | None = None
    """Length of the tail of WSD, ending at ``lr_decay_steps``."""
    start_wd: float | None = None
    """Weight decay at the start. Leave out ``start_wd`` and ``end_wd`` for the optimizer's weight
    decay."""
    end_wd: float | None = None
    """Weight decay after ``wd_incr_steps``."""
    wd_incr_steps: int | None = None
    """Length of the change of the weight decay. Leave out for ``lr_decay_steps``."""
    wd_incr_style: WeightDecayStyle = "constant"
    """Shape of the change of the weight decay. Constant requires equal ends."""
    unit: Literal["steps", "samples"] = "steps"
    """Whether optimizer steps or training samples are counted."""
    samples_per_step: int | None = None
    """Samples of an optimizer step over all ranks, for strategies without a sample count.
    MegatronStrategy counts samples."""
    on_resume: OnResume = "require_equal"
    """Whether to refuse a checkpoint of another schedule, to follow this schedule, or to follow the
    checkpoint's."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("lr_decay_style", DecayStyle), ("lr_wsd_decay_style", TailStyle),
            ("wd_incr_style", WeightDecayStyle),
            ("unit", Literal["steps", "samples"]), ("on_resume", OnResume),
        ):  # fmt: skip
            if getattr(self, name) not in get_args(choices):
                allowed = ", ".join(get_args(choices))
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, which is unknown. Set it to one of "
                    f"{allowed}."
                )
        if not self.init_lr >= 0.0 or not self.min_lr >= 0.0:
            raise ConfigError(
                f"init_lr={self.init_lr} and min_lr={self.min_lr} are rates. Set them to 0 or more."
            )
        self._check_lengths()
        self._check_weight_decay()

    def _check_lengths(self) -> None:
        decay, warmup = self.lr_decay_steps, self.lr_warmup_steps
        if warmup < 0:
            raise ConfigError(f"lr_warmup_steps={warmup} is a length. Set it to 0 or more.")
        if decay is None and self.lr_decay_style != "constant":
            raise ConfigError(
                f"lr_decay_style={self.lr_decay_style} ends somewhere. Set lr_decay_steps."
            )
        if decay is not None and decay <= warmup:
            raise ConfigError(
                f"lr_decay_steps={decay} ends before lr_warmup_steps={warmup}; it counts from the "
                "start of training. Set it above lr_warmup_steps."
            )
        if self.lr_decay_style == "WSD" and (
            self.wsd_decay_steps is None or not 0 < self.wsd_decay_steps <= (decay or 0)
        ):
            raise ConfigError(
                f"wsd_decay_steps is {self.wsd_decay_steps}; the tail of WSD lies within "
                f"lr_decay_steps={decay}. Set it to 1 to {decay}."
            )

    def _check_weight_decay(self) -> None:
        start, end = self.start_wd, self.end_wd
        if (start is None) != (end is None):
            raise ConfigError(
                f"start_wd={start} and end_wd={end}; a change has two ends. Set both, or neither."
            )
        if start is None or end is None:
            return
        if not 0.0 <= start <= end:
            raise ConfigError(
                f"start_wd={start} and end_wd={end}; weight decay grows from 0 or more. Lower "
                "start_wd."
            )
        if self.wd_incr_style == "constant" and start != end:
            raise ConfigError(
                f"start_wd={start} and end_wd={end} differ under wd_incr_style=constant. Set "
                "linear or cosine."
            )
        if self.wd_incr_style != "constant" and not (self.wd_incr_steps or self.lr_decay_steps):
            raise ConfigError(
                f"wd_incr_style={self.wd_incr_style} ends somewhere. Set wd_incr_steps."
            )

    def lr(self, consumed: int, peak: float, init: float, floor: float) -> float:
        """Return the learning rate after ``consumed`` steps or samples, from ``init`` over ``peak``
        to ``floor``.
        """
        warmup, decay = self.lr_warmup_steps, self.lr_decay_steps
        if warmup > 0 and consumed <= warmup:
            return init + (peak - init) * float(consumed) / float(warmup)
        if self.lr_decay_style == "constant" or decay is None:
            return peak
        if consumed > decay:
            return floor
        if self.lr_decay_style == "inverse-square-root":
            rate: float = peak * max(warmup, 1) ** 0.5 / (max(consumed, 1) ** 0.5)
            return max(floor, rate)
        return floor + self._coefficient(consumed, warmup, decay) * (peak - floor)

    def _coefficient(self, consumed: int, warmup: int, decay: int) -> float:
        if self.lr_decay_style == "WSD":
            tail = self.wsd_decay_steps or 1
            start = decay - tail
            return (
                1.0
                if consumed <= start
                else _TAILS[self.lr_wsd_decay_style](float(consumed - start) / float(tail))
            )
        return _TAILS[self.lr_decay_style](float(consumed - warmup) / float(decay - warmup))

    def weight_decay(self, consumed: int) -> float | None:
        """Return the weight decay after ``consumed`` steps or samples. None: not scheduled."""
        start, end, length = self.start_wd, self.end_wd, self.wd_incr_steps or self.lr_decay_steps
        if (
            start is None
            or end is None
            or self.wd_incr_style == "constant"
            or length is None
            or consumed > length
        ):
            return end
        ratio = float(consumed) / float(length)
        return start + (ratio if self.wd_incr_style == "linear" else _cosine(1.0 - ratio)) * (
            end - start
        )


def _cosine(ratio: float) -> float:
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


# Remaining fraction of the way from peak to minimum after a fraction of the decay.
_TAILS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": _cosine,
    "exponential": lambda ratio: 2.0 * math.pow(0.5, ratio) - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}


class _Group(NamedTuple):
    """The configured values of a parameter group."""

    peak: float
    floor: float
    init: float
    wd_mult: float


class ScheduledLR(LRScheduler):
    """Set the learning rate and, if configured, the weight decay of every parameter group by an
    :class:`LRSchedule`.

    A group's peak is the group's ``lr`` at construction. Further keys of a group are read if
    present: ``min_lr``, ``lr_mult`` (already included in ``lr``, and the factor of ``init_lr`` and
    ``min_lr``), and ``wd_mult`` (the factor of the scheduled weight decay, by default 0 for groups
    without weight decay and 1 for all other groups). Step the scheduler after every optimizer step
    (Lightning: ``"interval": "step"``).

    Raises:
        ConfigError: If a group's minimum is above the group's peak. In :meth:`step`, if samples are
            not counted.
    """

    def __init__(self, optimizer: Optimizer, schedule: LRSchedule) -> None:
        self.schedule = schedule
        self.num_steps = 0
        """Steps or samples consumed."""
        self._samples: int | None = None  # counted since the last step
        self._groups = [_own(group, schedule) for group in optimizer.param_groups]
        for index, group in enumerate(self._groups):
            if not group.floor <= group.peak:
                raise ConfigError(
                    f"parameter group {index} has min_lr={group.floor} above its learning rate "
                    f"{group.peak}. Lower min_lr."
                )
        self._counting = False
        super().__init__(optimizer)
        self._counting = True

    def count_samples(self, num_samples: int) -> None:
        """Count samples, over all ranks, of the next optimizer step."""
        self._samples = (self._samples or 0) + num_samples

    def forget_samples(self) -> None:
        """Discard the samples counted since the last step, after a skipped step."""
        self._samples = 0

    def step(self, epoch: int | None = None) -> None:
        """Advance by an optimizer step, or by the samples of a step."""
        if self._counting:
            self.num_steps += self._increment()
        super().step()
        self._set_weight_decay()

    def _increment(self) -> int:
        if self.schedule.unit == "steps":
            return 1
        samples, self._samples = self._samples, None if self._samples is None else 0
        if samples is None:
            samples = self.schedule.samples_per_step
        if samples is None:
            raise ConfigError(
                'the schedule has unit="samples", and this strategy does not count them. Set '
                "samples_per_step, or use "
                "MegatronStrategy."
            )
        return samples

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of every group."""
        return [
            self.schedule.lr(self.num_steps, group.peak, group.init, group.floor)
            for group in self._groups
        ]

    def _set_weight_decay(self) -> None:
        value = self.schedule.weight_decay(self.num_steps)
        if value is not None:
            for group, own_group in zip(self.optimizer.param_groups, self._groups, strict=True):
                group["weight_decay"] = value * own_group.wd_mult

    def state_dict(self) -> dict[str, Any]:
        """Return progress and schedule as plain values."""
        return {
            "num_steps": self.num_steps,
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "schedule": asdict(self.schedule),
            "groups": [group._asdict() for group in self._groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`, under the schedule selected by ``on_resume``."""
        how = self.schedule.on_resume
        if how == "require_equal":
            self._require_equal(state_dict)
        elif how == "checkpoint":
            saved_state = {"on_resume": how, "samples_per_step": self.schedule.samples_per_step}
            self.schedule = replace(LRSchedule(**state_dict["schedule"]), **saved_state)  # type: ignore[arg-type]
            self._groups = [_Group(**group) for group in state_dict["groups"]]
        self.num_steps = state_dict["num_steps"]
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["step_count"]
        self.base_lrs = [group.peak for group in self._groups]
        for group, own_group, rate in zip(
            self.optimizer.param_groups, self._groups, self.get_lr(), strict=True
        ):
            group["initial_lr"] = own_group.peak
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._set_weight_decay()
        self._last_lr = self.get_lr()

    def _require_equal(self, state: Mapping[str, Any]) -> None:
        saved = state["schedule"]
        settings = {
            key: value
            for key, value in asdict(self.schedule).items()
            if key not in ("on_resume", "samples_per_step")
        }
        differing = [
            f"{key}: {value} here, {saved.get(key)} there"
            for key, value in settings.items()
            if saved.get(key) != value
        ]
        mine = [group._asdict() for group in self._groups]
        if not differing and mine != state["groups"]:
            differing = [f"parameter groups: {mine} here, {state['groups']} there"]
        if differing:
            raise CheckpointError(
                "the checkpoint was written under another learning-rate schedule "
                f"({'; '.join(differing)}). Set on_resume to "
                '"configured" to follow this schedule from here on, or to "checkpoint" to follow '
                "the one in the checkpoint."
            )


def _own(group: Mapping[str, Any], schedule: LRSchedule) -> _Group:
    factor = float(group.get("lr_mult", 1.0))
    floor = group.get("min_lr")
    return _Group(
        peak=float(group["lr"]),
        floor=schedule.min_lr * factor if floor is None else float(floor),
        init=schedule.init_lr * factor,
        wd_mult=float(group.get("wd_mult", 1.0 if group.get("weight_decay") else 0.0)),
    )
