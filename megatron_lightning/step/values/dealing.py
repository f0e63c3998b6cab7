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
    is_declared: bool = True
    """Whether ``sequence_dims`` declare the entry with the documents. A step that divides the entry
    itself counts on two chunks."""
    why_two: str | None = None
    """Why rows keep two chunks, unless the user asks for two."""

    @classmethod
    def of(cls, scope: RunContext, dims: Mapping[Any, int]) -> Dealing:
        """Return the dealing of a run. A collective.

        Args:
            scope: The run context.
            dims: The ``sequence_dims``.

        Raises:
            ConfigError: If the user asks for more than two chunks, and a model takes two.
        """
        asked, plans = scope.context.context_options.chunks_per_rank, scope.part.plans.applied
        why = None if asked == 2 else _why_two(scope)
        by_positions = any(plan.packed_positions for plan in plans.values())
        return cls(
            scope.context.cp.size,
            2 if why else None if asked == "auto" else asked,
            by_positions,
            is_declared=dims.get(_POSITIONS if by_positions else _IDS) in (1, -1),
            why_two=why,
        )

    def described(self, batch: Any, length: int, *, trains: bool) -> str | None:
        """Return how packed rows of ``length`` tokens are divided. None: no row of the batch is
        packed, or the user has asked for two chunks.

        Raises:
            ConfigError: As :meth:`of_rows` does.
        """
        if self.chunks == 2 and self.why_two is None:
            return None
        rows = self._rows(batch, length)
        why = None if rows is None else self._why_not(length, trains=trains)
        if rows is None or self._documents(rows).are_full_rows:
            return None
        numbers = [2] if why else self._numbers(length)
        chunks = " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
        begin = f"each rank holds {chunks} chunks of a packed row of {length} tokens"
        end = "dealt by the work of attention"
        return f"{begin}, not {end}: {why}" if why else f"{begin}, {end}"

    def of_rows(self, microbatch: Any, length: int, *, trains: bool) -> Deal | None:
        """Return the deal of a micro-batch of full rows of ``length`` tokens. None: zigzag, for
        rows of one document, and for rows that keep two chunks.

        Raises:
            ConfigError: In training, if the length does not divide into the chunks that the user
                asks for.
        """
        rows = self._rows(microbatch, length)
        # The length is looked at first: it is the same on all ranks, and documents are not.
        if rows is None or self._why_not(length, trains=trains):
            return None
        documents = self._documents(rows)
        if documents.are_full_rows:
            return None
        return documents.dealt(self.num_ranks, self._numbers(length))

    def _numbers(self, length: int) -> list[int]:
        return [self.chunks] if self.chunks else chunk_numbers(length, self.num_ranks)

    def _why_not(self, length: int, *, trains: bool) -> str | None:
        """Return why packed rows of ``length`` tokens keep two chunks. None: they are dealt."""
        if self.why_two:
            return self.why_two
        if not self.is_declared:
            return f"sequence_dims does not declare dim 1 of {self._name!r}"
        numbers = self._numbers(length)
        multiple = numbers[0] * self.num_ranks
        if numbers == [2]:
            return f"{length} tokens do not divide into more, of 64 tokens at least"
        if length % multiple == 0:
            return None
        why = f"into {numbers[0]} chunks for each of {self.num_ranks} ranks"
        if not trains:
            return f"{length} tokens do not divide {why}"
        raise ConfigError(
            f"chunks_per_rank is {numbers[0]}, and packed rows of {length} tokens do not divide "
            f"{why}. Pad or cut rows to a multiple of {multiple}, or set chunks_per_rank to "
            '"auto".'
        )

    @property
    def _name(self) -> str:
        """Entry of a batch with the documents."""
        return _POSITIONS if self.by_positions else _IDS

    def _rows(self, batch: Any, length: int) -> Tensor | None:
        """Return the full rows [b, s] that tell the documents of a batch. None: it has none."""
        rows = batch.get(self._name) if isinstance(batch, Mapping) else None
        is_rows = isinstance(rows, Tensor) and rows.ndim == 2 and rows.shape[1] == length
        return rows if is_rows else None

    def _documents(self, rows: Tensor) -> Documents:
        return Documents.of_positions(rows) if self.by_positions else Documents.of_ids(rows)


def _why_two(scope: RunContext) -> str | None:
    """Return why all packed rows of a run keep two chunks a rank. A collective."""
    options = scope.context.context_options
    if "a2a+p2p" in options.cp_comm_types:
        return 'cp_comm_type "a2a+p2p" needs adjacent chunks'
    if scope.options.compile is not None:
        return "compiled blocks would be compiled anew for others"
    # A pipeline stage has some of the modules, and all stages deal alike.
    here = why_two_chunks(scope.module, scope.part.plans.applied)
    why = next(filter(None, scope.context.pp.all_gather_object(here)), None)
    check_chunks(why, options.chunks_per_rank)
    return why
