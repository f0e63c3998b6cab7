"""Learning rate schedules by name, with lengths in steps or in parts of the fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.lr_schedules import DecayStyle, LRSchedule

ScheduleName = Literal["linear", "cosine", "wsd"]
_STYLES: Mapping[str, DecayStyle] = {"linear": "linear", "cosine": "cosine", "wsd": "WSD"}
_TAIL = 10  # the tail of WSD is a tenth (https://arxiv.org/abs/2404.06395, section 4)


def check_schedule_name(name: str) -> None:
    """Check the name of a schedule.

    Raises:
        ConfigError: If there is no such schedule.
    """
    if name not in get_args(ScheduleName):
        raise ConfigError(
            f"lr_schedule is {name!r}; must be one of {', '.join(get_args(ScheduleName))}, or "
            "lr_decay_style and further options of LRSchedule."
        )


@dataclass(frozen=True)
class Lengths:
    """The schedule of a module. See the options of :class:`LanguageModule`."""

    name: str | None
    min_lr: float
    warmup: int | float
    decay: int | Literal["max"] | None

    @property
    def follow_the_fit(self) -> bool:
        """Whether a length is a part of the fit."""
        return self.decay == "max" or 0 < self.warmup < 1

    def check(self, given: LRSchedule | None) -> None:
        """Check the options against each other.

        Args:
            given: The schedule that replaces the options.

        Raises:
            ConfigError: If they contradict each other.
        """
        min_lr, warmup, decay = self.min_lr, self.warmup, self.decay
        if given is not None and (min_lr or warmup or decay is not None):
            raise ConfigError(
                f"lr_schedule is given beside min_learning_rate={min_lr}, warmup_steps={warmup}, "
                f"decay_steps={decay}, which it replaces. Put them into lr_schedule."
            )
        if given is None and min_lr and decay is None:
            raise ConfigError(
                f"min_learning_rate={min_lr} is where the decay ends, and decay_steps is not set. "
                "Set decay_steps=max, which ends the decay with the run, or a number of steps, or "
                "leave out min_learning_rate."
            )
        if warmup < 0 or (warmup > 1 and warmup != int(warmup)):
            raise ConfigError(
                f"warmup_steps is {warmup}; it is a number of steps, or a fraction below 1. Set "
                "one of them."
            )

    def schedule(self) -> LRSchedule | None:
        """Return the schedule if no length is a part of the fit. None: a constant rate from the
        first step on, or the schedule follows the fit.
        """
        if self.follow_the_fit or self.decay == "max":
            return None
        return self._schedule(int(self.warmup), self.decay)

    def of_fit(self, num_steps: int | float) -> LRSchedule | None:
        """Return the schedule of a fit.

        Args:
            num_steps: Optimizer steps of the fit.

        Raises:
            ConfigError: If the number of steps is unknown.
        """
        if not 0 < num_steps < float("inf"):
            raise ConfigError(
                f"decay_steps={self.decay} and warmup_steps={self.warmup} follow the steps of the "
                f"fit, and the Trainer's are {num_steps}. Set max_steps or max_epochs of the "
                "Trainer, or numbers of steps."
            )
        length = int(num_steps) if self.decay in ("max", None) else int(self.decay)
        warmup = int(self.warmup * length) if self.warmup < 1 else int(self.warmup)
        return self._schedule(warmup, None if self.decay is None else length)

    def _schedule(self, warmup: int, decay: int | None) -> LRSchedule | None:
        if not warmup and decay is None:
            return None
        style: DecayStyle = "constant" if decay is None else _STYLES[self.name or "cosine"]
        return LRSchedule(
            lr_decay_style=style,
            lr_decay_steps=decay,
            lr_warmup_steps=warmup,
            min_lr=self.min_lr,
            wsd_decay_steps=max(1, (decay or 0) // _TAIL) if style == "WSD" else None,
        )
