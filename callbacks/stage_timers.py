"""Times of forwards and backwards on every rank: per stage, and for ranks that fall behind."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median_low
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from megatron_lightning import compat
from megatron_lightning.callbacks.clock import Clock, Mark, OwnTime
from megatron_lightning.callbacks.counting import log_values, values_of_ranks
from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError
from megatron_lightning.lightning_internals.loops import is_accumulating, is_logging_step
from megatron_lightning.pipeline.schedules.actions import Kind
from megatron_lightning.pipeline.timeline import Timeline
from megatron_lightning.strategies.megatron import MegatronStrategy

_PHASES = ("forward", "backward", "other")


class StageTimers(pl.Callback):
    """Log the seconds of computation in a step, the minimum and maximum over all ranks.

    | key after ``stage/`` | value |
    |---|---|
    | ``forward_min``, ``forward_max`` | forwards of all micro-batches of a step |
    | ``backward_min``, ``backward_max`` | backwards, including backwards of weights alone |
    | ``other_min``, ``other_max`` | the rest: waits for other ranks, reductions, the optimizer |

    An action of a pipeline counts from the arrival of its message. On a GPU times are the device's.
    Only batches of logging steps (``log_every_n_steps``) are measured, and only a measurement waits
    for a GPU.
    """

    _prefix = "stage/"

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        """Records the current batch. None: no measurement."""
        self._own = OwnTime()
        self._batch: dict[str, Mark] = {}  # marks of the batch at hand
        self._seconds = [0.0] * len(_PHASES)  # of the batches of the step at hand

    @property
    def overhead(self) -> float:
        """Share of the training time spent in the hooks."""
        return self._own.share

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse other strategies than MegatronStrategy."""
        if not isinstance(trainer.strategy, MegatronStrategy):
            name = type(self).__name__
            raise ConfigError(
                f"{name} times the actions of MegatronStrategy, and the Trainer has a "
                f"{type(trainer.strategy).__name__}. Set strategy to megatron, or remove the "
                "callback."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count."""
        self._clock = Clock(trainer.strategy.root_device)
        self._seconds = [0.0] * len(_PHASES)
        self._own.start()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to measure if the step is logged."""
        strategy = trainer.strategy
        if not is_logging_step(trainer) or not isinstance(strategy, MegatronStrategy):
            return
        with self._own.counted():
            self.timeline = Timeline(strategy.root_device)
            strategy.executor.observers.append(self.timeline)
            self._batch = {"start": self._clock.mark()}

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Mark the backward of Lightning's own step, without the collectives behind the
        backward.
        """
        if self.timeline is None or not loss.requires_grad:
            return
        marks = self._batch

        def begin(_: Tensor) -> None:
            marks["forward"] = self._clock.mark()
            compat.at_end_of_backward(lambda: marks.update(backward=self._clock.mark()))

        loss.register_hook(begin)  # type: ignore[no-untyped-call]

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Add the batch's times. Log at the end of the step."""
        strategy = trainer.strategy
        if self.timeline is None or not isinstance(strategy, MegatronStrategy):
            return
        with self._own.counted():
            timeline, self.timeline = self.timeline, None
            strategy.executor.observers.remove(timeline)
            end = self._clock.mark()
            with self._own.waiting():
                self._clock.wait(end)
            self._add(timeline, end)
            if not is_accumulating(trainer):
                rows = values_of_ranks(trainer, self._seconds)
                self._seconds = [0.0] * len(_PHASES)
                self._follow(trainer, strategy, rows)

    def _add(self, timeline: Timeline, end: Mark) -> None:
        marks, busy = self._batch, dict.fromkeys(_PHASES, 0.0)
        for action, begin_s, end_s in timeline.intervals():
            phase = "forward" if action.kind is Kind.FORWARD else "backward"
            busy[phase] += end_s - begin_s
        if busy["backward"] == 0.0 and "backward" in marks:
            busy["backward"] = self._clock.seconds(marks["forward"], marks["backward"])
        passed = self._clock.seconds(marks["start"], end)
        busy["other"] = max(0.0, passed - busy["forward"] - busy["backward"])
        self._seconds = [a + busy[name] for a, name in zip(self._seconds, _PHASES, strict=True)]

    def _follow(
        self, trainer: pl.Trainer, strategy: MegatronStrategy, rows: Sequence[Sequence[float]]
    ) -> None:
        """Log the times of all ranks, by phase."""
        values: dict[str, float] = {}
        for name, column in zip(_PHASES, zip(*rows, strict=True), strict=True):
            values |= {f"{name}_min": min(column), f"{name}_max": max(column)}
        log_values(trainer, values, self._prefix)


class StragglerMonitor(StageTimers):
    """Log the slowest rank among ranks of equal work, and warn of a rank that stays slow.

    | key after ``straggler/`` | value |
    |---|---|
    | ``rank`` | the rank with the longest forwards and backwards, relative to its peers |
    | ``slowdown`` | time of the rank, divided by the median of its peers |

    Peers are all ranks with the same pipeline rank, and so with equal stages. Times are means over
    the last ``window`` logging steps, measured as by :class:`StageTimers`: without waits for
    messages, reductions and hooks. Collectives inside of a step, of tensor-parallel layers or of
    ``self.log(on_step=True, sync_dist=True)``, slow all participating ranks.

    Args:
        window: Logging steps to average over.
        slowdown: Slowdown above which a warning is issued, once for each rank.

    Raises:
        ConfigError: If a value cannot be used.
    """

    _prefix = "straggler/"

    def __init__(self, window: int = 5, slowdown: float = 1.3) -> None:
        super().__init__()
        if not is_count(window) or slowdown <= 1:
            raise ConfigError(
                f"window is {window} and slowdown is {slowdown}. Set window to 1 or more and "
                "slowdown above 1."
            )
        self.window = window
        self.slowdown = slowdown
        self._last: deque[list[float]] = deque(maxlen=window)
        self._warned: set[int] = set()

    def _follow(
        self, trainer: pl.Trainer, strategy: MegatronStrategy, rows: Sequence[Sequence[float]]
    ) -> None:
        self._last.append([row[0] + row[1] for row in rows])
        means = [sum(seconds) / len(self._last) for seconds in zip(*self._last, strict=True)]
        peers: dict[int, list[int]] = defaultdict(list)
        per_stage = max(1, len(means) // strategy.layout.pp)  # pp is the outermost axis
        for rank in range(len(means)):
            peers[rank // per_stage].append(rank)
        slowdowns = {}
        for ranks in peers.values():
            usual = median_low(means[rank] for rank in ranks)
            slowdowns.update({rank: means[rank] / usual if usual > 0 else 1.0 for rank in ranks})
        slowest = max(slowdowns, key=lambda rank: slowdowns[rank])
        log_values(trainer, {"rank": slowest, "slowdown": slowdowns[slowest]}, self._prefix)
        is_slow = slowdowns[slowest] >= self.slowdown and len(self._last) == self.window
        if is_slow and slowest not in self._warned:
            self._warned.add(slowest)
            rank_zero_warn(
                f"StragglerMonitor: rank {slowest} computes {slowdowns[slowest]:.2f} times as long "
                f"as its peers, over {self.window} logging steps. Look at its device's clock, "
                "temperature and neighbors, or leave its node out."
            )
