"""Random samples in the form of a pre-training run's, to time a layout before there is data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

_SEEDS = 2**62


class MockGPTDataset(Dataset[dict[str, Tensor]]):
    """Uniformly random tokens. A sample depends only on the seed and the index.

    Args:
        num_samples: Samples.
        sequence_length: Tokens of a sample.
        vocab_size: Upper bound of the tokens, exclusive.
        seed: Of this part of the data.
    """

    def __init__(self, num_samples: int, sequence_length: int, vocab_size: int, seed: int) -> None:
        self._num_samples = num_samples
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._seed = seed

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return sample ``index``: tokens, labels and loss_mask, all [sequence_length].

        Raises:
            IndexError: If there is no such sample.
        """
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + index) % _SEEDS)
        text = torch.randint(
            self._vocab_size, (self._sequence_length + 1,), generator=generator, device="cpu"
        )
        return {
            "tokens": text[:-1].clone(),
            "labels": text[1:].clone(),
            "loss_mask": torch.ones(self._sequence_length),
        }
