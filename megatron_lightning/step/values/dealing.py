"""Deal the chunks of packed rows to the ranks that share sequences, for each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_lightning.assembly.checks.dealt_rows import check_chunks, why_two_chunks
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.deal import Deal, chunk_numbers
from megatron_lightning.parallel.documents import Documents
from megatron_lightning.step.run_context import RunContext

_IDS, _POSITIONS = "document_ids", "position_ids"


@dataclass(frozen=True)
class Dealing:
    """Makes the deals of a run."""

    num_ranks: int
    """Ranks that share sequences."""
    chunks: int | None
    """Chunks of a packed row on each rank. None: as its documents need, and the length has room."""
    by_positions: bool = False
    """Whether positions that do not go on by 1 begin documents."""
    why_two: str | None = None
    """Why rows keep two chunks, unless the user asks for two."""

    @classmethod
    def of(cls, scope: RunContext) -> Dealing:
        """Return the dealing of a run. A collective.

        Raises:
            ConfigError: If the user asks for more than two chunks, and a model takes two.
        """
        context = scope.context
        options, num_ranks = context.context_options, context.cp.size
        asked = options.chunks_per_rank
        if asked == 2:
            return cls(num_ranks, 2)
        if "a2a+p2p" in options.cp_comm_types:
            return cls(num_ranks, 2, why_two='cp_comm_type "a2a+p2p" needs adjacent chunks')
        if scope.options.compile is not None:
            return cls(num_ranks, 2, why_two="compiled blocks would be compiled anew for others")
        plans = scope.part.plans.applied
        # A pipeline stage has some of the modules, and all stages deal alike.
        of_stages = context.pp.all_gather_object(why_two_chunks(scope.module, plans))
        if why := next(filter(None, of_stages), None):
            check_chunks(why, asked)
            return cls(num_ranks, 2, why_two=why)
        by_positions = any(plan.packed_positions for plan in plans.values())
        return cls(num_ranks, None if asked == "auto" else asked, by_positions)

    def described(self, batch: Any, length: int) -> str | None:
        """Return how packed rows of ``length`` tokens are divided. None: the batch has none, or the
        user has asked for two chunks.
        """
        is_packed = isinstance(batch, Mapping) and (_IDS in batch or _POSITIONS in batch)
        if not is_packed or (self.chunks == 2 and self.why_two is None):
            return None
        numbers = [self.chunks] if self.chunks else chunk_numbers(length, self.num_ranks)
        chunks = " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
        begin = f"each rank holds {chunks} chunks of a packed row of {length} tokens"
        if numbers[-1] > 2:
            return f"{begin}, dealt by the work of attention"
        why = self.why_two or f"{length} tokens do not divide into more, of 64 tokens at least"
        return f"{begin}, not dealt by the work of attention: {why}"

    def of_rows(self, microbatch: Any, length: int) -> Deal | None:
        """Return the deal of a micro-batch of full rows of ``length`` tokens. None: zigzag, for
        rows of one document.

        Raises:
            ConfigError: If the length does not divide into the chunks that the user asks for.
        """
        numbers = [self.chunks] if self.chunks else chunk_numbers(length, self.num_ranks)
        documents = None if numbers == [2] else self._documents(microbatch, length)
        if documents is None or documents.are_full_rows:
            return None
        multiple = numbers[0] * self.num_ranks
        if length % multiple:
            raise ConfigError(
                f"chunks_per_rank is {numbers[0]}, and packed rows of {length} tokens do not "
                f"divide into {numbers[0]} chunks for each of {self.num_ranks} ranks. Pad or cut "
                f'rows to a multiple of {multiple}, or set chunks_per_rank to "auto".'
            )
        return documents.dealt(self.num_ranks, numbers)

    def _documents(self, microbatch: Any, length: int) -> Documents | None:
        """Return the documents that a batch with names declares. None: it declares none."""
        name = _POSITIONS if self.by_positions else _IDS
        rows = microbatch.get(name) if isinstance(microbatch, Mapping) else None
        if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != length:
            return None
        return Documents.of_positions(rows) if self.by_positions else Documents.of_ids(rows)
