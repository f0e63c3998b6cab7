"""Generations as the data of a policy: loaders of places, and rows behind them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_lightning.config.value_checks import check_counts
from megatron_lightning.data.flat_options import takes
from megatron_lightning.data.rollouts.generation import Generation
from megatron_lightning.data.rows.sources import source_files
from megatron_lightning.data.run_data import Batch, RunData
from megatron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Options of ``RolloutDataModule``.

    Args:
        replay: Recorded generations: a file, a folder or a pattern. A file of JSON lines is a
            generation, in the order of the names.
        batch_size: Rows of a batch on a replica. An update has ``accumulate_grad_batches`` of them
            on each replica.
        reward_weights: Factor of each reward. Default: 1.
        end_ids: Ids of tokens that end a text. Default: those of the model's folder.
        pad_to: Rows of a batch are padded to a multiple of this.

    Raises:
        ConfigError: If a value cannot work.
    """

    replay: str
    batch_size: int
    reward_weights: dict[str, float] | None = None
    end_ids: list[int] | None = None
    pad_to: int = 64

    def __post_init__(self) -> None:
        check_counts(self, "batch_size", "pad_to")


class Places(Dataset[Tensor]):
    """Number of the generation and of the row [2] of every row in training, in order.

    Args:
        sizes: Rows of each generation.
        repeats: Times that the rows of a generation are trained.
    """

    def __init__(self, sizes: Sequence[int], repeats: int) -> None:
        self._sizes = sizes
        self._ends = list(accumulate(size * repeats for size in sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Tensor:
        number = bisect_right(self._ends, index)
        start = self._ends[number - 1] if number else 0
        return torch.tensor([number, (index - start) % self._sizes[number]])


class RolloutData(RunData):
    """Generations of ``RolloutDataModule``, read without a Trainer."""

    @takes(RolloutOptions)
    def __init__(self, options: RolloutOptions) -> None:
        super().__init__(0)
        self.replay = options.replay
        self.batch_size = options.batch_size
        self.reward_weights: Mapping[str, float] | None = options.reward_weights
        self.pad_to = options.pad_to
        self._end_ids = options.end_ids
        self._read = lru_cache(maxsize=1)(Generation.read)

    @property
    def files(self) -> list[str]:
        """Files of the generations.

        Raises:
            DataError: If there is none.
        """
        return source_files(self.replay)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end a text. Empty: not known."""
        return tuple(self._end_ids or ()) or tuple(self._model().generation_ends())

    def generation(self, number: int) -> Generation:
        """Return the rows of a generation."""
        return self._read(self.files[number])

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of places ``{"places": [b, 2]}``. A step asks for their rows.

        Raises:
            ConfigError: If a batch would have rows of several generations.
        """
        sizes = [len(Generation.read(file).rows) for file in self.files]
        replicas, runs = self._num_replicas(), self._num_accumulated()
        update = self.batch_size * replicas * runs
        for file, size in zip(self.files, sizes, strict=True):
            if size % update:
                raise ConfigError(
                    f"{file} has {size} rows, and an update has batch_size={self.batch_size} x "
                    f"{replicas} replicas x accumulate_grad_batches={runs} = {update}, which does "
                    "not divide them: an update would have rows of two generations. Set "
                    "batch_size to a divisor, or write files of as many rows."
                )
        places = Places(sizes, self._num_iterations())
        return DataLoader(places, batch_size=self.batch_size, shuffle=False, collate_fn=_collate)

    def _num_iterations(self) -> int:
        """Return the times that the rows of a generation are trained."""
        return 1


def _collate(places: Sequence[Tensor]) -> Batch:
    return {"places": torch.stack(list(places))}
