"""Samples as text on a terminal: trained tokens in color, ends of documents, lengths as bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.packing import Numbers
from megatron_lightning.data.supervised import IGNORED
from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""
_BARS = 16
_WIDTH = 48
_EIGHTHS = " ▏▎▍▌▋▊▉"
TRAINED, PROMPT, NOTE = "bold green", "dim", "cyan"
_SPACES = str.maketrans({"\n": "⏎\n", "\t": "⇥"})


def new_console() -> Any:
    """Return a console of ``rich``.

    Raises:
        ConfigError: If ``rich`` is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ConfigError(
            "`data show` needs the package rich, which is not installed; `pip install rich`"
        ) from error
    return Console(highlight=False, soft_wrap=True)


def sample_text(sample: Mapping[str, npt.NDArray[np.int64]], decode: Decode) -> Text:
    """Return a sample as text: each token in the style of its kind, a line between two documents.

    Args:
        sample: ``tokens`` and ``labels`` [s], and ``document_ids`` [s] if documents share a row.
        decode: Ids -> text.
    """
    from rich.text import Text

    tokens, labels = sample["tokens"], sample["labels"]
    documents = sample.get("document_ids", np.zeros(len(tokens), np.int64))
    trained = np.zeros(len(tokens), bool)
    trained[1:] = labels[:-1] != IGNORED  # the label of a token is the next token
    end = _end(trained, documents, packed="document_ids" in sample)
    text, begin = Text(), 0
    for stop in range(1, end + 1):
        continues = (
            stop < end and trained[stop] == trained[begin] and documents[stop] == documents[begin]
        )
        if continues:
            continue
        decoded = decode(tokens[begin:stop].tolist()).translate(_SPACES)
        text.append(decoded, style=TRAINED if trained[begin] else PROMPT)
        if stop < end and documents[stop] != documents[begin]:
            text.append("\n" if not decoded.endswith("\n") else "")
            text.append(f"{'─' * 12} document {documents[stop] + 1}\n", style=NOTE)
        begin = stop
    if end < len(tokens):
        text.append(f"\n{len(tokens) - end} tokens of padding", style=NOTE)
    return text


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
    from rich.text import Text

    edges = np.unique(np.linspace(0, longest, _BARS + 1).astype(int))
    counts, _ = np.histogram(lengths - 1, edges)
    num_longer = int((lengths > longest).sum())
    most, text = max(1, int(counts.max())), Text()
    digits = len(str(longest))
    for number, count in enumerate(counts.tolist()):
        cells, eighths = divmod(round(8 * _WIDTH * count / most), 8)
        bar = "█" * cells + (_EIGHTHS[eighths] if eighths else "")
        bar = bar or ("▏" if count else "")
        label = f"{edges[number] + 1:>{digits}} to {edges[number + 1]:>{digits}} "
        text.append(label, style=PROMPT)
        text.append(bar, style=TRAINED)
        text.append(f" {count}\n" if count else "\n", style=PROMPT)
    median = int(np.median(lengths)) if len(lengths) else 0
    longer = f", {num_longer} longer than {longest}" if num_longer else ""
    text.append(
        f"{len(lengths)} documents, {int(lengths.sum())} tokens, median {median}{longer}",
        style=NOTE,
    )
    return text


def stream_text(tokens: Sequence[int], end: int | None, decode: Decode) -> Text:
    """Return a sample of pre-training as text, with a line at each end of a document.

    Args:
        tokens: Token ids.
        end: Id at the end of a document. None: unknown.
        decode: Ids -> text.
    """
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
