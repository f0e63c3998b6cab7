"""Context parallelism of states: each rank scans its two segments of every sequence.

A segment needs two things of the segments before: the state at the segment's start, and a few
tokens for the convolution. So every rank gathers one state and a few tokens of each segment. The
messages do not grow with the sequence, and any number of heads, groups and ranks will do.

    state at the start of segment z = sum over y < z of (decay over y+1 .. z-1) x (state added by y)

A rank's two segments lie side by side in the batch, the early segment first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.state_space.row_documents import TokenDocuments, token_documents
from megatron_lightning.layers.state_space.scan import carried_states
from megatron_lightning.parallel.collectives import gather_sequence
from megatron_lightning.parallel.documents import Documents
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart, join


@dataclass(frozen=True)
class Segments:
    """Segments of this rank in sequences that context-parallel ranks share."""

    group: AxisGroup
    """The context-parallel ranks."""

    @property
    def mine(self) -> list[int]:
        """Numbers of this rank's two segments."""
        return [self.group.rank, 2 * self.group.size - 1 - self.group.rank]

    def fold(self, x: Tensor) -> Tensor:
        """Map both segments [2w, b, ...] to [w, 2b, ...]."""
        return torch.unflatten(x, 0, (2, -1)).transpose(0, 1).flatten(1, 2)

    def unfold(self, x: Tensor) -> Tensor:
        """Undo :meth:`fold`."""
        return torch.unflatten(x, 1, (2, -1)).transpose(0, 1).flatten(0, 1)

    def tokens_before(self, x: Tensor, number: int) -> Tensor:
        """Return the last ``number`` tokens [number, 2b, c] before each of this rank's segments
        x [w, 2b, c], zeros before the first segment. A collective.

        Raises:
            ConfigError: If a segment has fewer tokens.
        """
        if len(x) < number:
            size = self.group.size
            raise ConfigError(
                f"{size} context-parallel ranks cut a sequence of {2 * size * len(x)} tokens into "
                f"{2 * size} segments of {len(x)}, and the convolution reads {number} tokens "
                f"before a token. Pad sequences to at least {2 * size * number} tokens, or lower "
                "context_parallel_size."
            )
        tails = torch.unflatten(x[len(x) - number :], 1, (2, -1)).movedim(1, 0)
        tails = self._of_all(tails)
        return self._before_mine(tails).movedim(0, 1).flatten(1, 2)

    def start_states(
        self, log_decay: Tensor, added: Tensor, documents: SegmentDocuments | None
    ) -> Tensor:
        """Return the states [2b, h, p, n] at the start of this rank's segments. A collective.

        Args:
            log_decay: [2b, h] log of the decay over each segment.
            added: [2b, h, p, n] state that each segment alone leaves behind.
            documents: Documents of the segments. None: a row is one document.
        """
        message = torch.cat([added.flatten(2), log_decay.unsqueeze(-1)], -1)
        message = self._of_all(torch.unflatten(message, 0, (2, -1)))
        states = torch.unflatten(message[..., :-1], -1, added.shape[2:])
        ends = carried_states(
            message[..., -1], states, None if documents is None else documents.last_numbers
        )
        return self._before_mine(ends).flatten(0, 1)

    def documents(
        self, documents: Documents | None, length: int, size: int, device: torch.device
    ) -> SegmentDocuments | None:
        """Return the documents of this rank's tokens. None: every row is one document.

        Args:
            documents: Documents of the full rows.
            length: Tokens of this rank.
            size: Rows of the batch.
            device: Device of the tokens.
        """
        num_ranks, width = self.group.size, length // 2
        part = SequencePart(self.group.rank, num_ranks)
        tokens = token_documents(documents, part.positions(num_ranks * length, device))
        last = torch.arange(1, 2 * num_ranks + 1, device=device) * width - 1
        lasts = token_documents(documents, last)
        if tokens is None or lasts is None:
            return None
        folded = TokenDocuments(*(self.fold(t.expand(-1, size)) for t in tokens))
        last_numbers = lasts.numbers.expand(-1, size)
        return SegmentDocuments(folded, last_numbers, self._before_mine(last_numbers).flatten())

    def _of_all(self, mine: Tensor) -> Tensor:
        """Map tensors of this rank's segments [2, ...] to all segments' [2c, ...], in order of the
        sequence. A collective.
        """
        gathered = gather_sequence(mine.contiguous(), self.group)
        return join(gathered.chunk(self.group.size), 0)

    def _before_mine(self, of_all: Tensor) -> Tensor:
        """Map values of all segments [2c, ...] to the values of the segments before this rank's
        segments [2, ...], zero before the first.
        """
        return torch.stack([of_all[z - 1] if z else torch.zeros_like(of_all[0]) for z in self.mine])


@dataclass(frozen=True)
class SegmentDocuments:
    """Documents of this rank's segments."""

    tokens: TokenDocuments
    """Documents of the tokens [w, 2b]."""
    last_numbers: Tensor
    """[2c, b] number of the document of the last token of every segment."""
    before: Tensor
    """[2b] number of the document of the last token before each segment of this rank."""
