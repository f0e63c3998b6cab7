"""Plan the blocks of queries and keys that a kernel computes.

Queries and keys are *spans*: runs of consecutive positions, in order, anywhere in the sequence. A
pair of spans is visible, invisible, or cut by the diagonal or the edge of a window. The plan walks
a window in pieces of the window's length, so that no mask is larger than a piece and the visible
keys of the piece. Documents that share a row have separate blocks, so the work is the sum of the
squared lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from megatron_lightning.layers.attention.sequence_info import SequenceInfo

_LEAST_PIECE = 128


@dataclass(frozen=True)
class Block:
    """Local queries and keys for one kernel call."""

    queries: slice
    keys: slice
    mask: Literal["none", "causal", "band"] = "none"
    """``band``: query i sees key j where ``0 <= i + shift - j``, and ``<= window`` if a window is
    set.
    """
    shift: int = 0
    window: int | None = None
    row: int | None = None
    """Row of the batch. None: all rows."""

    @property
    def rows(self) -> slice:
        """Rows of the batch."""
        return slice(None) if self.row is None else slice(self.row, self.row + 1)


def visible_blocks(
    queries: Sequence[range], keys: Sequence[range], sequence: SequenceInfo
) -> list[Block]:
    """Return blocks that cover every visible pair of a query and a key exactly once.

    Args:
        queries: Spans of the local queries.
        keys: Spans of the keys.
        sequence: Visibility of keys.
    """
    causal, window, documents = sequence.causal, sequence.window, sequence.documents
    if documents is None:
        return blocks(queries, keys, causal=causal, window=window)
    visible: list[Block] = []
    is_every_row = len(documents.boundaries) == 1
    for row, document in documents.spans():
        its_queries, first_query = _inside(queries, document)
        its_keys, first_key = _inside(keys, document)
        # Inside a document the spans are counted from the document's first token. Blocks name local
        # rows and columns again.
        if its_queries and its_keys:
            visible += (
                replace(
                    block,
                    row=None if is_every_row else row,
                    queries=_moved(block.queries, first_query),
                    keys=_moved(block.keys, first_key),
                )
                for block in blocks(its_queries, its_keys, causal=causal, window=window)
            )
    return visible


def _inside(spans: Sequence[range], document: range) -> tuple[list[range], int]:
    """Return the parts of ``spans`` in a document, and the local index of the first.

    The parts are adjacent. A document that reaches from one span to the next covers the end of the
    first span and the beginning of the second.
    """
    found: list[range] = []
    start, first = 0, 0
    for span in spans:
        part = range(max(span.start, document.start), min(span.stop, document.stop))
        if part:
            first = first if found else start + part.start - span.start
            found.append(part)
        start += len(span)
    return found, first


def _moved(local: slice, by: int) -> slice:
    return slice(local.start + by, local.stop + by)


def blocks(
    queries: Sequence[range], keys: Sequence[range], *, causal: bool, window: int | None
) -> list[Block]:
    """Return the blocks of rows with one document.

    Args:
        queries: Spans of the local queries.
        keys: Spans of the keys.
        causal: Whether a query sees no later key.
        window: Number of earlier positions visible to a causal query. None: all.
    """
    full_block = Block(slice(0, sum(map(len, queries))), slice(0, sum(map(len, keys))))
    if not causal:
        return [full_block]
    if window is None and list(queries) == list(keys):
        return [Block(full_block.queries, full_block.keys, "causal")]
    visible: list[Block] = []
    key_starts = [0, *accumulate(map(len, keys))]
    for piece, start in _pieces(queries, window):
        for span, key_start in zip(keys, key_starts, strict=False):
            block = _block(piece, start, span, key_start, window)
            if block is not None:
                visible.append(block)
    return _merged(visible)


def _pieces(queries: Sequence[range], window: int | None) -> Iterator[tuple[range, int]]:
    """Yield runs of positions, and the local index of the first query of each."""
    start = 0
    for span in queries:
        size = len(span) if window is None else max(window, _LEAST_PIECE)
        for offset in range(0, len(span), size):
            yield span[offset : offset + size], start + offset
        start += len(span)


def _block(
    piece: range, start: int, span: range, key_start: int, window: int | None
) -> Block | None:
    """Return the visible part of a pair, without keys invisible to all queries, or None if nothing
    is visible.
    """
    first = span.start if window is None else max(span.start, piece.start - window)
    stop = min(span.stop, piece.stop)
    if stop <= first:
        return None
    rows = slice(start, start + len(piece))
    columns = slice(key_start + first - span.start, key_start + stop - span.start)
    if stop - 1 <= piece.start and (window is None or first >= piece.stop - 1 - window):
        return Block(rows, columns)
    if window is None and first == piece.start and stop == piece.stop:
        return Block(rows, columns, "causal")
    return Block(rows, columns, "band", piece.start - first, window)


def _merged(found: Sequence[Block]) -> list[Block]:
    """Join fully visible neighbors: keys of equal queries first, then queries of equal keys."""
    result = list(found)
    for by in ("keys", "queries"):
        source, result = result, []
        for block in source:
            if result and _adjoin(result[-1], block, by):
                last = result.pop()
                queries = slice(last.queries.start, block.queries.stop)
                result.append(Block(queries, slice(last.keys.start, block.keys.stop)))
            else:
                result.append(block)
    return result


def _adjoin(last: Block, block: Block, by: str) -> bool:
    if last.mask != "none" or block.mask != "none":
        return False
    if by == "keys":
        return last.queries == block.queries and last.keys.stop == block.keys.start
    return last.keys == block.keys and last.queries.stop == block.queries.start
