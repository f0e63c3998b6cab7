"""Growing global batch sizes, as functions of the samples consumed: a ramp of equal increments, or
steps at given positions (Megatron-Core's ``num_microbatches_calculator``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch.utils.data import BatchSampler, Sampler

from megatron_lightning.errors import ConfigError

_UNITS: Mapping[str, int] = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class BatchSizeSchedule:
    """Global batch size (samples of a batch over all data-parallel ranks) as a function of the
    samples consumed.

    Raises:
        ConfigError: If the values contradict each other.
    """

    global_batch_size: int
    """Samples of a batch at the end of the schedule."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """(size of the first batches, increment, samples of the ramp). All sizes last for the same
    number of samples of the ramp."""
    step_batch_size_schedule: str | None = None
    """Positions and sizes, such as "0:16 1000:32 5000:64". Positions may end in K, M, B or T."""
    sequence_length: int | None = None
    """Tokens of a sample, if the positions of step_batch_size_schedule are in tokens."""
    decrease_batch_size_if_needed: bool = False
    """Round a size down to full micro-batches on all data-parallel ranks, instead of refusing the
    size."""

    def __post_init__(self) -> None:
        ways = {
            "rampup_batch_size": self.rampup_batch_size,
            "step_batch_size_schedule": self.step_batch_size_schedule,
        }
        if all(ways.values()):
            raise ConfigError(
                "rampup_batch_size and step_batch_size_schedule are both set. Leave one out."
            )
        if self.rampup_batch_size is not None:
            self._check_ramp(*self.rampup_batch_size)
        sizes = self.sizes
        if min(sizes) < 1 or any(following < previous for previous, following in pairwise(sizes)):
            raise ConfigError(
                f"the global batch sizes are {sizes}; they must be positive and must not decrease. "
                "Order them."
            )
        if sizes[-1] != self.global_batch_size:
            raise ConfigError(
                f"step_batch_size_schedule ends with {sizes[-1]}, and global_batch_size is "
                f"{self.global_batch_size}. Set both to the final size."
            )

    def _check_ramp(self, start: int, increment: int, samples: int) -> None:
        if increment < 1 or samples < 0 or start > self.global_batch_size:
            raise ConfigError(
                f"rampup_batch_size={[start, increment, samples]} does not lead up to "
                f"global_batch_size={self.global_batch_size}. Set a start below it, a positive "
                "increment, and the samples of the ramp."
            )
        if (self.global_batch_size - start) % increment:
            raise ConfigError(
                f"rampup_batch_size={[start, increment, samples]}: the difference from {start} to "
                f"global_batch_size={self.global_batch_size} is not a multiple of the increment. "
                f"Set an increment that divides {self.global_batch_size - start}."
            )

    @cached_property
    def _steps(self) -> list[tuple[int, int]]:
        """(first position in samples, size), in order."""
        text = self.step_batch_size_schedule
        if text is None:
            return [(0, self.global_batch_size)]
        steps = []
        for entry in text.split():
            position, colon, size = entry.partition(":")
            factor = _UNITS.get(position[-1:].upper(), 1)
            digits = position[:-1] if factor > 1 else position
            if not (colon and digits.isdecimal() and size.isdecimal()):
                raise ConfigError(
                    f"step_batch_size_schedule={text!r}: {entry!r} is not position:size, such as "
                    "1M:32."
                )
            # Positions may be in tokens: whole samples are counted from here on.
            steps.append((int(digits) * factor // (self.sequence_length or 1), int(size)))
        if (
            not steps
            or steps[0][0] != 0
            or any(following[0] <= previous[0] for previous, following in pairwise(steps))
        ):
            raise ConfigError(
                f"step_batch_size_schedule={text!r} does not begin at 0, or is not ordered. Order "
                "it by position."
            )
        return steps

    @property
    def sizes(self) -> list[int]:
        """All global batch sizes, in order."""
        if self.rampup_batch_size is None:
            return [size for _, size in self._steps]
        start, increment, samples = self.rampup_batch_size
        return (
            [*range(start, self.global_batch_size, increment), self.global_batch_size]
            if samples
            else [self.global_batch_size]
        )

    def batch_size(self, consumed_samples: int) -> int:
        """Return the global batch size after ``consumed_samples``."""
        if self.rampup_batch_size is None:
            return next(
                size for position, size in reversed(self._steps) if consumed_samples >= position
            )
        start, increment, samples = self.rampup_batch_size
        if consumed_samples > samples or samples == 0 or start == self.global_batch_size:
            return self.global_batch_size
        return (
            start
            + int(consumed_samples / (samples / ((self.global_batch_size - start) // increment)))
            * increment
        )

    def running_batch_size(self, consumed_samples: int, unit: int) -> int:
        """Return the global batch size, rounded down to ``unit`` (micro-batch size x data-parallel
        size) if configured.
        """
        size = self.batch_size(consumed_samples)
        return size // unit * unit if self.decrease_batch_size_if_needed else size

    def num_microbatches(self, micro_batch_size: int, data_parallel_size: int) -> list[int]:
        """Return the different numbers of micro-batches per step.

        Raises:
            ConfigError: For a size not divisible into full micro-batches on all ranks.
        """
        unit = micro_batch_size * data_parallel_size
        for size in self.sizes:
            if size < unit or (size % unit and not self.decrease_batch_size_if_needed):
                raise ConfigError(
                    f"global batch size ({size}) is not divisible by micro batch size "
                    f"({micro_batch_size}) times data parallel size ({data_parallel_size}). Set "
                    f"the sizes of the batch size schedule to multiples of {unit}"
                    + (", or decrease_batch_size_if_needed." if size > unit else ".")
                )
        return list(dict.fromkeys(size // unit for size in self.sizes))


class ScheduledBatchSampler(BatchSampler):
    """Batches sized by a :class:`BatchSizeSchedule`: ``DataLoader(dataset, batch_sampler=…)``.

    MegatronStrategy splits each batch over the data-parallel ranks, and resumes at the checkpoint's
    position in the data. The number of batches differs from pass to pass, so there is no length.

    Args:
        sampler: The order of the samples.
        schedule: Global batch sizes.
        drop_last: Drop an incomplete last batch of a pass.
        num_replicas: Data-parallel ranks. ``sampler`` yields the samples of a single rank.
        micro_batch_size: Samples of a micro-batch, to round sizes down.
    """

    def __init__(
        self,
        sampler: Sampler[int] | Iterable[int],
        schedule: BatchSizeSchedule,
        *,
        drop_last: bool = True,
        num_replicas: int = 1,
        micro_batch_size: int = 1,
    ) -> None:
        super().__init__(sampler, 1, drop_last)
        self.schedule = schedule
        self.num_replicas = num_replicas
        self.unit = micro_batch_size * num_replicas
        schedule.num_microbatches(micro_batch_size, num_replicas)
        self.consumed_samples = 0
        """Samples of all batches yielded, over all ranks. The ``consumed_samples`` of the sampler
        take precedence."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        start = True
        for index in self.sampler:
            if start:  # the sampler begins a pass only now
                self.consumed_samples = getattr(
                    self.sampler, "consumed_samples", self.consumed_samples
                )
                start = False
            batch.append(index)
            size = self.schedule.running_batch_size(self.consumed_samples, self.unit)
            if len(batch) * self.num_replicas >= size:
                self.consumed_samples += size
                yield batch
                batch = []
        if batch and not self.drop_last:
            self.consumed_samples += len(batch) * self.num_replicas
            yield batch

    def __len__(self) -> int:
        raise TypeError("the number of batches depends on how many samples have been consumed")
