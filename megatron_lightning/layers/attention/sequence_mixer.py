"""Base of modules that mix the tokens of sequences: attention and layers with a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.parallel.deal import Deal


class SequenceMixer(nn.Module, ABC):
    """A module that mixes the tokens of sequences, of which context-parallel ranks may hold parts.

    A mixer bound to the ranks takes sequence parts. A full sequence would be mixed as a part, and
    the outputs would be wrong. So :attr:`takes_parts` is true only in steps, and outside of steps a
    mixer that shares sequences refuses inputs.
    """

    kind: ClassVar[str] = "mixer of tokens"
    """Name of the kind of mixer, for messages."""
    takes_parts = True
    """Whether inputs are currently this rank's sequence shards, if ranks share sequences."""
    deal: Deal | None = None
    """Chunks of the micro-batch at hand, if ranks share sequences. None: zigzag."""

    @property
    @abstractmethod
    def shares_sequences(self) -> bool:
        """Whether ranks share the sequences."""

    def check_parts(self) -> None:
        """Check that inputs are sequence shards, if ranks share sequences.

        Raises:
            ConfigError: If the ranks share sequences, and inputs are full sequences.
        """
        if self.shares_sequences and not self.takes_parts:
            raise ConfigError(
                f"a model whose {self.kind} is bound to the ranks of context_parallel_size was "
                "called outside of a training, validation, test or predict step, on a sequence "
                "that is not split. Call it in a step, or load a checkpoint into a model of its "
                "own."
            )

    def check_deal(self, sequence: SequenceInfo | None) -> None:
        """Check that a module that is told the chunks of packed rows was told the right ones.

        Raises:
            ConfigError: If it was not.
        """
        is_cached = sequence is not None and sequence.cache is not None
        if self.deal is not None and not is_cached and (sequence is None or sequence.deal is None):
            raise ConfigError(
                f"the chunks of packed rows are dealt by work, and a {type(self).__name__} was "
                "called without the documents of the rows, which tell it the rank's chunks. Pass "
                "SequenceInfo(documents=...) with the documents that your model receives, or set "
                "ContextOptions(chunks_per_rank=2)."
            )
