"""Progress of texts and scores on stderr: a bar on a terminal, and a line at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm  # type: ignore[import-untyped]

from megatron_lightning.inference.engine.request_batch import DraftCounts, Request


class Progress:
    """Counts tokens while a block runs.

    Args:
        title: Name of the work.
        most: Tokens at most.
        shows: Whether to write anything. True on a single rank.
        drafts: Counts of drafts, shown at the end if there are any. None: no drafts.
    """

    def __init__(
        self, title: str, most: int, *, shows: bool, drafts: DraftCounts | None = None
    ) -> None:
        self._title = title
        self._drafts = drafts
        self._shows = shows
        self._num_tokens = 0
        self._start = time.perf_counter()
        hides = not (shows and sys.stderr.isatty())
        self._bar = tqdm(desc=title, total=most, unit=" tokens", leave=False, disable=hides)

    def show(self, requests: Sequence[Request]) -> None:
        """Show how far requests are."""
        total = sum(len(request.logprobs) for request in requests)
        self._bar.update(total - self._num_tokens)
        self._num_tokens = total

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
        seconds = time.perf_counter() - self._start
        if self._shows and kind is None:
            drafts = f", {self._drafts}" if self._drafts and self._drafts.proposed else ""
            print(
                f"{self._title}: {self._num_tokens:,} tokens in {seconds:.1f} s, "
                f"{self._num_tokens / max(seconds, 1e-9):,.0f} tokens/s{drafts}",
                file=sys.stderr,
                flush=True,
            )
