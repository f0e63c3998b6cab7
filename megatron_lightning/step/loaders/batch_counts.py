"""Numbers of batches on the ranks of a job. Steps with collectives need equal numbers.

Loaders with a length are compared when a loop begins, at no cost in a step. Loaders without a
length are compared batch by batch (``agreed_loader.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import RunningStage

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.step.options import StrategyOptions

Count = int | float
"""Batches of a loader. Infinite for loaders without a length."""

_SHOWN = 8  # ranks in a message


def by_rank(values: Sequence[object]) -> str:
    """Return values of the ranks for a message, in a large job only of the first ranks."""
    texts = [f"rank {rank}: {value}" for rank, value in enumerate(values[:_SHOWN])]
    return ", ".join(texts) + (", …" if len(values) > _SHOWN else "")


def check_loader(loader: object, stage: RunningStage, world: AxisGroup) -> None:
    """Compare a loader with the loaders of the other ranks, before the loop begins. A collective.

    Args:
        loader: Read by this rank.
        stage: Use of the loader.
        world: All ranks.

    Raises:
        ConfigError: If only some ranks have a length, or a batch.
    """
    lengths = world.all_gather_object(sized_len(loader))
    is_known = [length is not None for length in lengths]
    if any(is_known) and not all(is_known):
        texts = by_rank(["no length" if length is None else length for length in lengths])
        raise ConfigError(
            f"the {stage.value} DataLoader has a length on some ranks only ({texts}), and they "
            "cannot agree on the end of an epoch. Give it __len__ on all of them, or on none."
        )
    if 0 in lengths and any(lengths):
        raise ConfigError(
            f"the {stage.value} DataLoader has no batch on some ranks ({by_rank(lengths)}), and "
            "Lightning leaves out the loop on these, where the others wait for them forever. Use a "
            "smaller batch_size or fewer data-parallel ranks, or give every rank a batch."
        )


def check_training(count: Count, world: AxisGroup) -> None:
    """Compare the number of training batches of an epoch. A collective.

    Raises:
        ConfigError: If the number differs.
    """
    counts = world.all_gather_object(count)
    if len(set(counts)) > 1:
        raise ConfigError(
            f"the ranks have different numbers of training batches ({by_rank(counts)}), and every "
            "step reduces gradients over them, so that some would wait for the others forever. "
            f"Set Trainer(limit_train_batches={min(counts)}), or let each rank read as many: by a "
            "DistributedSampler(drop_last=True) of your own, or by the strategy "
            "(use_distributed_sampler=True, and a dataset with __len__)."
        )


def forwards_together(options: StrategyOptions, context: ParallelContext) -> bool:
    """Return whether forwards are collectives of data-parallel ranks: forwards gather units, or
    send tokens to experts.
    """
    return context.dp.size > 1 and (options.data_parallel == "fsdp" or context.ep.size > 1)


class EvaluationCounts:
    """Numbers of batches in a validation, test or prediction.

    If a forward is a collective of the data-parallel ranks (``fsdp``, experts), a rank with fewer
    batches than other ranks repeats the last batch. Otherwise ranks may have different numbers.
    """

    def __init__(self, world: AxisGroup, *, together: bool) -> None:
        self._world = world
        self._together = together
        self._ends: list[tuple[int, int]] = []
        self._num_run = 0
        self.difference = ""
        """Describes the numbers, if different."""

    def begin(
        self, trainer: pl.Trainer, own_counts: Sequence[Count], *, repeats: bool = True
    ) -> None:
        """Compare the numbers before the first batch. A collective.

        Args:
            trainer: The Trainer at the beginning of a loop.
            own_counts: Numbers of batches of this rank's loaders.
            repeats: Whether a batch can be repeated.

        Raises:
            ConfigError: If the numbers differ, and ranks cannot repeat the last batch.
        """
        ranks = self._world.all_gather_object(own_counts)
        self._ends, self._num_run, self.difference = [], 0, ""
        if all(counts == own_counts for counts in ranks):
            return
        self.difference = by_rank([", ".join(map(str, counts)) for counts in ranks])
        if not self._together:
            return
        # Ranks that run out repeat their last batch, without effect, so that collectives in the
        # steps pair up.
        most = [max(counts) for counts in zip(*ranks, strict=True)]
        cannot = any(not all(counts) for counts in ranks) or float("inf") in most
        if cannot or not repeats:
            prefix = "val" if trainer.validating or trainer.sanity_checking else "test"
            prefix = "predict" if trainer.predicting else prefix
            raise ConfigError(
                f"the ranks have different numbers of batches ({self.difference}), all ranks have "
                "to run them together, and a rank that has fewer cannot repeat its last one. Set "
                f"Trainer(limit_{prefix}_batches={min(map(min, ranks))}), or give each rank as "
                "many."
            )
        ends = accumulate(int(count) for count in own_counts)
        num_missing = [int(needed - count) for needed, count in zip(most, own_counts, strict=True)]
        self._ends = list(zip(ends, num_missing, strict=True))

    def next(self) -> int:
        """Count the current batch. Return the number of repetitions for other ranks."""
        self._num_run += 1
        return sum(num_missing for end, num_missing in self._ends if end == self._num_run)

    def refuse(self, what: str) -> None:
        """Refuse a collective of the data-parallel ranks in a step, if the ranks have different
        numbers of steps.

        Raises:
            ConfigError: If the numbers differ.
        """
        if self.difference:
            raise ConfigError(
                f"{what} in a step is a collective of the data-parallel ranks, which have "
                f"different numbers of batches ({self.difference}), so that some would wait for "
                "the others forever, or reduce values of other batches. Log with on_epoch=True and "
                "on_step=False, gather at the end of the epoch, or give each rank as many batches."
            )
