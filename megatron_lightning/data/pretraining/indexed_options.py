"""Options common to the data of indexed files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from megatron_lightning.data.order.batch_size import BatchSizeSchedule
from megatron_lightning.data.order.resume_order import OnChangedData
from megatron_lightning.data.pretraining.run_options import RunSizes
from megatron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class IndexedOptions:
    """Options common to the data of indexed files.

    Args:
        global_batch_size: Samples of an optimizer step over all data-parallel ranks, for any number
            of ranks. Replaces ``batch_size``.
        batch_size_schedule: Growing global batch sizes of training. Replaces ``batch_size``.
        split: Weights of train, validation and test, splitting the documents in file order. A part
            of weight 0 has no loader in a fit, and is an error elsewhere. ``predict`` reads the
            test part. None: 969, 30 and 1.
        num_train_samples: Training samples of the full run, over as many epochs as needed. Default:
            one epoch, repeated by Lightning in the same order.
        num_val_samples: Validation samples. Default: all validation samples once.
        num_test_samples: Test samples. Default: all test samples once.
        num_workers: Worker processes of each loader on each rank. 0 reads in the training process.
        reading_thread: Whether a thread of the training process reads the next two batches while
            a step waits for its device. Replaces ``num_workers``, and is faster for small samples.
        cache_dir: Folder of the index cache. Default: ``{data_prefix}/cache``. Without a shared
            file system each node builds a local cache. Data at a URL need the folder: blocks that
            are read are kept there.
        cache_bytes: Size of the blocks kept of data at a URL. Default: no limit.
        skip_samples: Ranges [first, end] of ``consumed_samples`` skipped by training, such as the
            samples of a loss spike. Skipped samples count as consumed. A checkpoint keeps the
            ranges.
        on_changed_data: Reaction of a resumed run if the order of training samples has changed
            since the checkpoint. ``refuse`` raises an error. ``continue``: every data set resumes
            in its own order at its last sample, new data sets begin at 0, and a table lists the
            samples read twice. ``restart``: all data sets begin again. ``reorder`` reads on at the
            same position of the new order with a warning.

    Raises:
        ConfigError: If a value cannot work.
    """

    global_batch_size: int | None = None
    batch_size_schedule: BatchSizeSchedule | None = None
    split: str | None = None
    seed: int = 1234
    num_train_samples: int | None = None
    num_val_samples: int | None = None
    num_test_samples: int | None = None
    vocab_size: int | None = None
    num_workers: int = 0
    reading_thread: bool = False
    cache_dir: str | None = None
    cache_bytes: int | None = None
    skip_samples: list[list[int]] | None = None
    on_changed_data: OnChangedData = "refuse"

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(
                f"num_workers={self.num_workers}: set it to 0 to read in the training process, or "
                "to 1 or more"
            )
        if self.on_changed_data not in get_args(OnChangedData):
            raise ConfigError(
                f"on_changed_data={self.on_changed_data!r}; must be one of "
                f"{', '.join(get_args(OnChangedData))}."
            )

    def sizes(self, batch_size: int | None) -> RunSizes:
        """Return batch sizes and numbers of samples.

        Raises:
            ConfigError: If they contradict each other.
        """
        return RunSizes(
            batch_size=batch_size,
            global_batch_size=self.global_batch_size,
            batch_size_schedule=self.batch_size_schedule,
            num_train_samples=self.num_train_samples,
            num_val_samples=self.num_val_samples,
            num_test_samples=self.num_test_samples,
        )
