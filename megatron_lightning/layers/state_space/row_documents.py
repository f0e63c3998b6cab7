"""Documents in the rows of a batch, as numbers and positions of tokens on the device.

The numbers follow from the table of boundaries by tensor operations, so a compiled graph is the
same for all documents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lightning.parallel.documents import Documents


class TokenDocuments(NamedTuple):
    """Documents of tokens [s, rows]. A single row represents all rows of the batch."""

    numbers: Tensor
    """Number of the token's document in the row, rising from 0."""
    positions: Tensor
    """Position of the token in the document."""


def token_documents(documents: Documents | None, positions: Tensor) -> TokenDocuments | None:
    """Return the documents of the tokens at ``positions`` [s] of the full rows. None: every row is
    one document.
    """
    if documents is None:
        return None
    if not torch.compiler.is_compiling() and documents.are_full_rows:
        return None
    table = documents.table.to(positions.device, non_blocking=True)
    places = positions.expand(len(table), -1).contiguous()
    numbers = torch.searchsorted(table, places, right=True) - 1
    starts = table.gather(1, numbers)
    return TokenDocuments(numbers.mT.contiguous(), (places - starts).mT.contiguous())
