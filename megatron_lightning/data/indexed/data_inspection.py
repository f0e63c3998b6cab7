"""``megatron-lightning data inspect``: sizes, ids and lengths of indexed data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_lightning.data.indexed.index_check import check_index
from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.indexed.remote import written_path
from megatron_lightning.data.rows.lengths import Lengths
from megatron_lightning.data.rows.row_view import NOTE, histogram_text, new_console
from megatron_lightning.errors import DataError
from megatron_lightning.optional import require

_BLOCK = 1 << 24  # tokens


def inspect(prefixes: list[str], *, vocab_size: int | None = None) -> None:
    """Check indexed data sets and print documents, tokens, ids and lengths.

    All tokens are read: ids outside of the vocabulary and damaged indices are named.

    Args:
        prefixes: Prefixes of data sets (PREFIX.bin and PREFIX.idx).
        vocab_size: Number of ids of the tokenizer. Default: ids are not checked.

    Raises:
        DataError: If a data set is missing or damaged, or an id is outside of the vocabulary.
    """
    console = new_console()
    for prefix in prefixes:
        indexed = IndexedDataset(written_path(prefix, "prefixes"))
        check_index(indexed)
        console.rule(Path(prefix).name, align="left")
        console.print(prefix)
        smallest, largest = id_range(indexed)
        if vocab_size is not None and not 0 <= smallest <= largest < vocab_size:
            raise DataError(
                f"{prefix}.bin: has ids {smallest} to {largest}, and vocab_size={vocab_size}: the "
                "data were made with another tokenizer. Set vocab_size to that one's."
            )
        console.print(_summary(indexed, smallest, largest))
        console.print(length_picture(indexed))


def length_picture(indexed: IndexedDataset) -> Any:
    """Return the number of documents of each length, as bars. The longest hundredth is counted."""
    return histogram_text(Lengths.of(indexed).histogram())


def _summary(indexed: IndexedDataset, smallest: int, largest: int) -> Any:
    require("rich", "a picture of data")
    from rich.text import Text

    mebibytes = indexed.num_tokens * indexed.dtype.itemsize / 2**20
    kinds = "" if indexed.modes is None else ", with modes (multimodal data)"
    return Text(
        f"{indexed.num_documents:,} documents of {len(indexed):,} sequences{kinds}\n"
        f"{indexed.num_tokens:,} tokens of {indexed.dtype.name} ({mebibytes:,.1f} MiB), ids "
        f"{smallest:,} to {largest:,}",
        style=NOTE,
    )


def id_range(indexed: IndexedDataset) -> tuple[int, int]:
    """Return the smallest and the largest token id, 0 and 0 without tokens."""
    tokens, smallest, largest = indexed.all_tokens(), None, None
    for begin in range(0, len(tokens), _BLOCK):
        block = tokens[begin : begin + _BLOCK]
        low, high = int(block.min()), int(block.max())
        smallest = low if smallest is None else min(smallest, low)
        largest = high if largest is None else max(largest, high)
    return smallest or 0, largest or 0
