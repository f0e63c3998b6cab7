"""Context parallelism of states: each rank scans its segments of every sequence, the chunks that
it was dealt: two, or more of packed rows.

A segment needs two things of the segments before: the state at the segment's start, and a few
tokens for the convolution. So every rank gathers one state and a few tokens of each segment. The
messages do not grow with the sequence, and any number of heads, groups and ranks will do.

    state at the start of segment z = sum over y < z of (decay over y+1 .. z-1) x (state added by y)

A rank's n segments lie side by side in the batch, in the order of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.state_space.row_documents import TokenDocuments, token_documents
from megatron_lightning.layers.state_space.scan import carried_states
from megatron_lightning.parallel.collectives import gather_sequence
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.documents import Documents
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart, join


@dataclass(frozen=True)
class Segments:
    """Segments of this rank in sequences that context-parallel ranks share."""

    group: AxisGroup
    """The context-parallel ranks."""
    deal: Deal | None = None
    """Segments of all ranks. None: zigzag."""

    @property
    def part(self) -> SequencePart:
        """The rank's part of the sequences."""
        return SequencePart(self.group.rank, self.group.size, self.deal)

    def fold(self, x: Tensor) -> Tensor:
        """Map the segments [n w, b, ...] to [w, n b, ...]."""
        return torch.unflatten(x, 0, (len(self.part.chunks), -1)).transpose(0, 1).flatten(1, 2)

    def unfold(self, x: Tensor) -> Tensor:
        """Undo :meth:`fold`."""
        return torch.unflatten(x, 1, (len(self.part.chunks), -1)).transpose(0, 1).flatten(0, 1)

    def tokens_before(self, x: Tensor, number: int) -> Tensor:
        """Return the last ``number`` tokens [number, n b, c] before each of this rank's segments
        x [w, n b, c], zeros before the first segment. A collective.

        Raises:
            ConfigError: If a segment has fewer tokens.
        """
        if len(x) < number:
            size, chunks = self.group.size, len(self.part.chunks)
            segments = chunks * size
            advice = "lower context_parallel_size" if chunks == 2 else "set chunks_per_rank to 2"
            raise ConfigError(
                f"{size} context-parallel ranks cut a sequence of {segments * len(x)} tokens into "
                f"{segments} segments of {len(x)}, and the convolution reads {number} tokens "
                f"before a token. Pad sequences to at least {segments * number} tokens, or "
                f"{advice}."
            )
        tails = torch.unflatten(x[len(x) - number :], 1, (len(self.part.chunks), -1))
        tails = tails.movedim(1, 0)
        tails = self._of_all(tails)
        return self._before_mine(tails).movedim(0, 1).flatten(1, 2)

    def start_states(
        self, log_decay: Tensor, added: Tensor, documents: SegmentDocuments | None
    ) -> Tensor:
        """Return the states [n b, h, p, d] at the start of this rank's segments. A collective.

        Args:
            log_decay: [n b, h] log of the decay over each segment.
            added: [n b, h, p, d] state that each segment alone leaves behind.
            documents: Documents of the segments. None: a row is one document.
        """
        message = torch.cat([added.flatten(2), log_decay.unsqueeze(-1)], -1)
        message = self._of_all(torch.unflatten(message, 0, (len(self.part.chunks), -1)))
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
        part, num_ranks = self.part, self.group.size
        width = length // len(part.chunks)
        tokens = token_documents(documents, part.positions(num_ranks * length, device))
        ends = torch.arange(1, len(part.chunks) * num_ranks + 1, device=device)
        last = ends * width - 1
        lasts = token_documents(documents, last)
        if tokens is None or lasts is None:
            return None
        folded = TokenDocuments(*(self.fold(t.expand(-1, size)) for t in tokens))
        last_numbers = lasts.numbers.expand(-1, size)
        return SegmentDocuments(folded, last_numbers, self._before_mine(last_numbers).flatten())

    def _of_all(self, mine: Tensor) -> Tensor:
        """Map tensors of this rank's segments [n, ...] to all segments' [n c, ...], in order of
        the sequence. A collective.
        """
        gathered = gather_sequence(mine.contiguous(), self.group)
        return join(gathered.chunk(self.group.size), 0, self.deal)

    def _before_mine(self, of_all: Tensor) -> Tensor:
        """Map values of all segments [n c, ...] to the values of the segments before this rank's
        segments [n, ...], zero before the first.
        """
        nothing = torch.zeros_like(of_all[0])
        return torch.stack([of_all[z - 1] if z else nothing for z in self.part.chunks])


@dataclass(frozen=True)
class SegmentDocuments:
    """Documents of this rank's segments."""

    tokens: TokenDocuments
    """Documents of the tokens [w, n b]."""
    last_numbers: Tensor
    """[n c, b] number of the document of the last token of every segment."""
    before: Tensor
    """[n b] number of the document of the last token before each segment of this rank."""
