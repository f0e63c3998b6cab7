"""DataLoaders like the user's for a data-parallel rank's part of the samples, resuming after a
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from megatron_lightning.data.order.batch_size import BatchSizeSchedule, ScheduledBatchSampler
from megatron_lightning.data.order.sampler import ResumableSampler, ShardedSampler
from megatron_lightning.data.order.skipped import SkippedSamples
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.stopping import requeue_signal
from megatron_lightning.lightning_internals.loaders import (
    training_loaders,
    unwrapped_batch_sampler,
    with_sampler,
)
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.resilience.loader_workers import EndWithRank


def resumable(
    loader: DataLoader[Any],
    group: AxisGroup,
    *,
    consumed: int = 0,
    micro_batch_size: int | None = None,
    skipped: SkippedSamples | None = None,
) -> DataLoader[Any]:
    """Return a training DataLoader like ``loader`` with a :class:`ResumableSampler`.

    A loader over an iterable dataset or with a DistributedSampler of the user's own is returned
    unchanged, since such a loader shards and resumes itself. A loader with the user's own class of
    batch sampler is split, and does not resume. With a single data-parallel rank such a loader is
    returned unchanged, too, and so is a loader with a sampler without length. Batches may be a
    :class:`ScheduledBatchSampler`.

    Args:
        loader: The user's.
        group: The data-parallel ranks.
        consumed: Samples consumed by training so far, over all ranks.
        micro_batch_size: Samples of a micro-batch.
        skipped: Samples passed over by training.

    Raises:
        ConfigError: If the samples cannot be split among several data-parallel ranks.
    """
    if type(loader.batch_sampler) is ScheduledBatchSampler:
        return _scheduled(
            loader, loader.batch_sampler, group, consumed, micro_batch_size or 1, skipped=skipped
        )
    custom_batches = (
        loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    )
    # The order is the user's sampler. Our sampler takes this rank's share of it, and can begin
    # anywhere.
    order = (
        getattr(loader.batch_sampler, "sampler", loader.sampler)
        if custom_batches
        else _order(loader)
    )
    if isinstance(loader.dataset, IterableDataset) or isinstance(
        order, ResumableSampler | DistributedSampler
    ):
        return loader
    if group.size > 1:
        _check_length(order, group, RunningStage.TRAINING)
    # Batches of unknown sizes: samples are shared, and the position is not known.
    if custom_batches and group.size > 1:
        return _with_sampler(loader, ShardedSampler(order, group, repeat=True))
    if custom_batches or not hasattr(order, "__len__"):
        return loader
    batches = _given_batches(loader)
    batch_size, drop_last = (
        (batches.batch_size, batches.drop_last)
        if batches
        else (loader.batch_size or 1, bool(loader.drop_last))
    )
    # A constant size is a schedule with one entry: one sampler serves both.
    constant = BatchSizeSchedule(global_batch_size=batch_size * group.size)
    running = partial(constant.running_batch_size, unit=1)
    sampler = ResumableSampler(
        _order(loader),
        group,
        batch_size=running,
        drop_last=drop_last,
        consumed=consumed,
        skipped=skipped,
    )
    return _with_sampler(loader, sampler)


def _scheduled(
    loader: DataLoader[Any],
    batches: ScheduledBatchSampler,
    group: AxisGroup,
    consumed: int,
    micro_batch_size: int,
    *,
    skipped: SkippedSamples | None,
) -> DataLoader[Any]:
    schedule, unit = batches.schedule, micro_batch_size * group.size
    sampler = ResumableSampler(
        batches.sampler,
        group,
        batch_size=partial(schedule.running_batch_size, unit=unit),
        drop_last=batches.drop_last,
        consumed=consumed,
        skipped=skipped,
    )
    shared = ScheduledBatchSampler(
        sampler,
        schedule,
        drop_last=batches.drop_last,
        num_replicas=group.size,
        micro_batch_size=micro_batch_size,
    )
    return with_sampler(loader, sampler, batch_sampler=shared)


def sampler_of(loader: object) -> ResumableSampler | None:
    """Return the sampler put into a DataLoader by :func:`resumable`, if any."""
    candidates = (
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    )
    return next((sampler for sampler in candidates if isinstance(sampler, ResumableSampler)), None)


def _given_batches(loader: DataLoader[Any]) -> BatchSampler | None:
    """Return the plain BatchSampler passed to the DataLoader by the user. The loader then has no
    batch size of its own.
    """
    batches = loader.batch_sampler
    return batches if type(batches) is BatchSampler and loader.batch_size is None else None


def _order(loader: DataLoader[Any]) -> Iterable[int]:
    """Return the user's sampler. Beside a given BatchSampler, torch puts an unused sequential
    sampler.
    """
    batches = _given_batches(loader)
    return batches.sampler if batches else loader.sampler


def _with_sampler(
    loader: DataLoader[Any], sampler: Sampler[int], mode: RunningStage | None = None
) -> DataLoader[Any]:
    """Return a DataLoader like ``loader`` with another reading order."""
    batches = _given_batches(loader)
    if batches is None:
        return with_sampler(loader, sampler, mode)
    return with_sampler(
        loader, sampler, mode, batch_size=batches.batch_size, drop_last=batches.drop_last
    )


def sharded_for_evaluation(
    loader: DataLoader[Any], group: AxisGroup, stage: RunningStage
) -> DataLoader[Any]:
    """Return a validation, test or predict DataLoader of this data-parallel rank's share.

    No sample is repeated, so that means do not depend on the number of ranks: Lightning's DDP makes
    the shares of validation and test equal by the first samples. Where a rank would have no batch,
    it is done here as well, with a warning.
    """
    if (
        isinstance(loader.dataset, IterableDataset)
        or isinstance(_order(loader), DistributedSampler)
        or group.size == 1
    ):
        return loader
    share: dict[str, Any] = {"num_replicas": group.size, "rank": group.rank, "shuffle": False}
    _check_length(_order(loader), group, stage)
    if stage == RunningStage.PREDICTING:
        return _sharded_for_prediction(loader, group, share)
    order = _order(loader)
    repeats = not _has_batches(loader, group)
    if not isinstance(order, SequentialSampler):
        return _with_sampler(loader, ShardedSampler(order, group, repeat=repeats), stage)
    kind = DistributedSampler if repeats else UnrepeatedDistributedSampler
    return _with_sampler(loader, kind(loader.dataset, **share), stage)


def _has_batches(loader: DataLoader[Any], group: AxisGroup) -> bool:
    """Return whether every rank has a batch without repeated samples. Warn if only repetitions
    give it one.
    """
    order = _order(loader)
    num_samples = len(order)  # type: ignore[arg-type]
    batches = _given_batches(loader) or loader
    least = (batches.batch_size or 1) if batches.drop_last else 1
    if num_samples // group.size >= least:
        return True
    if num_samples % group.size and -(-num_samples // group.size) >= least:
        rank_zero_warn(
            f"{num_samples} samples of validation or test are shared by {group.size} data-parallel "
            "ranks, and each needs a batch: the first samples are repeated, and count twice in "
            "means. Give more samples, or use fewer ranks."
        )
    return False


def _check_length(order: Iterable[int], group: AxisGroup, stage: RunningStage) -> None:
    if not hasattr(order, "__len__"):
        raise ConfigError(
            f"the {stage.value} DataLoader has a {type(order).__name__} without __len__, which "
            f"cannot be split among {group.size} data-parallel ranks. Give it a length, or split "
            "the samples yourself and set Trainer(use_distributed_sampler=False)."
        )


def _sharded_for_prediction(
    loader: DataLoader[Any], group: AxisGroup, share: dict[str, Any]
) -> DataLoader[Any]:
    """Put the share inside the batch sampler, since Lightning has already wrapped the batch sampler
    to record the indices of every batch.
    """

    def shared(order: Iterable[int]) -> Sampler[int]:
        if isinstance(order, SequentialSampler):
            return UnrepeatedDistributedSamplerWrapper(order, **share)
        return ShardedSampler(order, group, repeat=False)

    batches = unwrapped_batch_sampler(loader)
    if batches is None:
        return with_sampler(loader, shared(loader.sampler))
    if isinstance(getattr(batches, "sampler", None), Sampler) and not isinstance(
        batches.sampler, DistributedSampler
    ):
        batches.sampler = shared(batches.sampler)
    return loader


def training_samplers(trainer: pl.Trainer) -> list[ResumableSampler]:
    """Return the samplers of the training data made by :func:`resumable`."""
    samplers = [sampler_of(loader) for loader in training_loaders(trainer)]
    return [sampler for sampler in samplers if sampler is not None]


def training_generators(trainer: pl.Trainer) -> list[torch.Generator]:
    """Return the generators that the user has given to training loaders and samplers. Random states
    of the process do not hold their states.
    """
    loaders = training_loaders(trainer)
    orders = [sampler.order for sampler in training_samplers(trainer)]
    found = [getattr(owner, "generator", None) for owner in (*loaders, *orders)]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def prepared_loader(
    loader: object,
    trainer: pl.Trainer,
    replicas: AxisGroup,
    *,
    injects_samplers: bool,
    consumed: int,
    micro_batch_size: int | None,
    skipped: SkippedSamples | None = None,
) -> object:
    """Return a loader of this data-parallel rank's share of the data, for the Trainer's current
    work.

    Args:
        loader: The loader returned by the user's module or data module.
        trainer: Reader of the loader.
        replicas: The data-parallel ranks.
        injects_samplers: Whether the Trainer may replace samplers (``use_distributed_sampler``).
        consumed: Samples consumed by training so far, over all ranks.
        micro_batch_size: Samples of a micro-batch.
        skipped: Samples passed over by training.

    Raises:
        ConfigError: If samples are to be passed over in a loader with its own sharding.
    """
    if not isinstance(loader, DataLoader):
        _check_skipped(skipped, trainer, loader)
        return loader
    if injects_samplers and trainer.training:
        loader = resumable(
            loader,
            replicas,
            consumed=consumed,
            micro_batch_size=micro_batch_size,
            skipped=skipped,
        )
        _check_skipped(skipped, trainer, loader)
    elif injects_samplers and trainer.state.stage is not None:
        loader = sharded_for_evaluation(loader, replicas, trainer.state.stage)
    if loader.num_workers:
        init = loader.worker_init_fn
        if not isinstance(init, EndWithRank):
            init = EndWithRank(init, requeue_signal(trainer))
        if init.init is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
            # Lightning would seed workers by global rank. Ranks of one replica must see the same
            # random transforms.
            init.init = partial(pl_worker_init_function, rank=replicas.rank)
        loader.worker_init_fn = init
    return loader


def skipped_samples(trainer: pl.Trainer) -> SkippedSamples:
    """Return the samples to pass over, as requested by the data module and callbacks."""
    owners = [getattr(trainer, "datamodule", None), *getattr(trainer, "callbacks", [])]
    skipped = SkippedSamples()
    for owner in owners:
        skipped |= SkippedSamples(getattr(owner, "skip_samples", None) or ())
    return skipped


def announce_skipped(skipped: SkippedSamples, consumed: int) -> None:
    """Print the samples ahead that training will pass over.

    Args:
        skipped: Samples passed over by training.
        consumed: Samples consumed by training so far, over all ranks.
    """
    ahead = [f"{first} to {end}" for first, end in skipped.ranges if end > consumed]
    if ahead:
        rank_zero_info(
            f"MegatronStrategy: training passes over the samples {', '.join(ahead)} "
            "(skip_samples). An epoch with them ends that much earlier, without a validation that "
            "is due at its last batch."
        )


def _check_skipped(skipped: SkippedSamples | None, trainer: pl.Trainer, loader: object) -> None:
    if skipped and trainer.training and sampler_of(loader) is None:
        raise ConfigError(
            f"skip_samples is {list(map(list, skipped.ranges))}, and the training loader decides "
            "by itself which samples come: only the order of a map-style dataset can be passed "
            "over. Leave skip_samples out and skip them in the dataset."
        )
