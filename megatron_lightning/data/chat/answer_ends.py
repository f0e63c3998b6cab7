"""Tokens at the end of trained answers, found in tokenized documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from megatron_lightning.data.chat.chat_encoding import SupervisedOptions
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.documents import Document, Documents

_MOST = 1000
"""Largest number of documents looked at."""
_SHARE = 0.01
"""Smallest share of documents with an end."""


def answer_ends(
    sources: Sequence[Documents], tokenizer: ChatTokenizer, options: SupervisedOptions
) -> tuple[int, ...]:
    """Return the added tokens that end trained answers, the most frequent first.

    A token counts if a hundredth of the documents, evenly spread, ends an answer with the token: a
    model trained on these documents writes the token behind an answer.

    Args:
        sources: Documents of each source.
        tokenizer: Tokenizer of the documents.
        options: How rows became the documents.
    """
    counts: Counter[int] = Counter()
    num_documents = 0
    for document in _spread(sources):
        if options.truncation == "right" and len(document.ids) == options.sequence_length:
            continue  # the end may be cut off
        num_documents += 1
        stops = _stops(document)
        # A mask of reasoning cuts answers into pieces.
        places = stops[-1:] if options.chat.reasoning == "mask" else stops
        counts.update({end for stop in places for end in _end(document, stop, tokenizer)})
    return tuple(end for end, count in counts.most_common() if count >= _SHARE * num_documents)


def _spread(sources: Sequence[Documents]) -> Iterable[Document]:
    """Return documents evenly spread over the sources."""
    most = max(1, _MOST // max(1, len(sources)))
    return chain.from_iterable(
        (
            source[int(index)]
            for index in np.unique(np.linspace(0, len(source) - 1, most, dtype=int))
        )
        for source in sources
        if len(source)
    )


def _stops(document: Document) -> list[int]:
    """Return the positions behind the runs of trained tokens."""
    marks = np.append(document.trained, False).astype(np.int8)
    stops: list[int] = (np.flatnonzero(np.diff(marks) < 0) + 1).tolist()
    return stops


def _end(document: Document, stop: int, tokenizer: ChatTokenizer) -> list[int]:
    """Return the added token at the end of a run. White space may follow the token. Empty: there is
    no such token.
    """
    for position in (stop - 1, stop - 2):
        if position < 0 or not document.trained[position]:
            return []
        token = int(document.ids[position])
        if tokenizer.is_added(token):
            return [token]
        if tokenizer.decode([token]).strip():
            return []
    return []
