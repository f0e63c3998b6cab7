"""Samples as text on a terminal: trained tokens in color, ends of documents, lengths as bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.rows.lengths import Histogram, Lengths
from megatron_lightning.data.rows.packed_rows import IGNORED, ImagePlace
from megatron_lightning.data.rows.packing import Numbers
from megatron_lightning.optional import require

if TYPE_CHECKING:
    from rich.text import Text

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""
TRAINED, PROMPT, NOTE = "bold green", "dim", "cyan"
_SPACES = str.maketrans({"\n": "⏎\n", "\t": "⇥"})


def new_console() -> Any:
    """Return a console of ``rich``.

    Raises:
        ConfigError: If ``rich`` is not installed.
    """
    require("rich", "a picture of data")
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def sample_text(
    sample: Mapping[str, npt.NDArray[np.int64]],
    decode: Decode,
    images: Sequence[ImagePlace] = (),
) -> Text:
    """Return a sample as text: each token in the style of its kind, a line between two documents.

    Args:
        sample: ``tokens`` and ``labels`` [s], and ``document_ids`` [s] if documents share a row.
        decode: Ids -> text.
        images: Places of images, shown by their size.
    """
    require("rich", "a picture of data")
    from rich.text import Text

    notes = {one.begin: _image_note(one) for one in images}
    bounds = {bound for one in images for bound in (one.begin, one.end)}
    tokens, labels = sample["tokens"], sample["labels"]
    documents = sample.get("document_ids", np.zeros(len(tokens), np.int64))
    trained = np.zeros(len(tokens), bool)
    trained[1:] = labels[:-1] != IGNORED  # the label of a token is the next token
    end = _end(trained, documents, packed="document_ids" in sample)
    text, begin = Text(), 0
    for stop in range(1, end + 1):
        continues = (
            stop not in bounds
            and stop < end
            and trained[stop] == trained[begin]
            and documents[stop] == documents[begin]
        )
        if continues:
            continue
        if begin in notes:
            decoded = notes[begin]
            text.append(decoded, style=NOTE)
        else:
            decoded = decode(tokens[begin:stop].tolist()).translate(_SPACES)
            text.append(decoded, style=TRAINED if trained[begin] else PROMPT)
        if stop < end and documents[stop] != documents[begin]:
            text.append("\n" if not decoded.endswith("\n") else "")
            text.append(f"{'─' * 12} document {documents[stop] + 1}\n", style=NOTE)
        begin = stop
    if end < len(tokens):
        text.append(f"\n{len(tokens) - end} tokens of padding", style=NOTE)
    return text


def _image_note(image: ImagePlace) -> str:
    height, width = image.size
    if image.kind == "audio":
        return f"[sound {height / width:.2f} s, {image.end - image.begin} tokens]"
    return f"[image {height} \u00d7 {width}, {image.end - image.begin} tokens]"


def _end(trained: npt.NDArray[np.bool_], documents: Numbers, *, packed: bool) -> int:
    """Return the start of padding: behind the last trained token, or at a document of padding."""
    last = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else len(trained)
    if not packed:
        return last
    return last if documents[-1] == documents[last - 1] + 1 else len(documents)


def sample_note(sample: Mapping[str, npt.NDArray[np.int64]]) -> str:
    """Return a line about a sample."""
    trained = int((sample["labels"] != IGNORED).sum())
    return f"{len(sample['tokens'])} positions, {trained} trained tokens"


def histogram(lengths: Numbers, longest: int) -> Text:
    """Return the number of documents of each length up to ``longest`` tokens, as bars."""
    found = Lengths()
    found.add(lengths)
    return histogram_text(found.histogram(longest))


def histogram_text(found: Histogram) -> Text:
    """Return bars in colors."""
    require("rich", "a picture of data")
    from rich.text import Text

    text = Text()
    for one in found.bars:
        text.append(f"{one.label} ", style=PROMPT)
        text.append(one.bar, style=TRAINED)
        text.append(f" {one.num_documents}\n" if one.num_documents else "\n", style=PROMPT)
    text.append(found.note, style=NOTE)
    return text


def stream_text(tokens: Sequence[int], end: int | None, decode: Decode) -> Text:
    """Return a sample of pre-training as text, with a line at each end of a document.

    Args:
        tokens: Token ids.
        end: Id at the end of a document. None: unknown.
        decode: Ids -> text.
    """
    require("rich", "a picture of data")
    from rich.text import Text

    text, begin = Text(), 0
    ends = [place + 1 for place, token in enumerate(tokens) if token == end]
    for stop in dict.fromkeys([*ends, len(tokens)]):
        is_end = stop in ends
        decoded = decode(tokens[begin : stop - is_end]).translate(_SPACES)
        text.append(decoded, style=TRAINED)
        if is_end:
            text.append("\n" if decoded and not decoded.endswith("\n") else "")
            text.append(f"{'─' * 12} end of document\n", style=NOTE)
        begin = stop
    return text


def as_numbers(ids: Sequence[int]) -> str:
    """Return ids without a tokenizer."""
    return " ".join(map(str, ids))
