"""Progress of long tools: a callback of bytes, and a progress bar as callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm  # type: ignore[import-untyped]

Advance = Callable[[int], object]
"""Called with the number of bytes processed since the last call, from any thread."""


def silent(num_bytes: int) -> None:
    """Report nothing."""


@contextmanager
def progress_bar(title: str, total_bytes: int) -> Iterator[Advance]:
    """Show a bar of ``total_bytes`` on stderr while the block runs."""
    with tqdm(
        desc=title, total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, leave=False
    ) as bar:
        yield bar.update
