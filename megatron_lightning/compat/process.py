"""Memory of the C library and of GPUs, and messages beyond the user's control."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def silence_treespec_warning() -> None:
    """Hide a warning of torch 2.13 about Lightning's loops, printed by every rank and beyond the
    user's control.
    """
    warnings.filterwarnings(
        "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning
    )


def keep_freed_memory() -> None:
    """Make glibc keep the memory freed by a step, up to 2 GiB at the heap's end, for the next step.

    Otherwise glibc may return the memory to the kernel, and the kernel maps every page again.
    ``MALLOC_TRIM_THRESHOLD_`` in the environment takes precedence. Other C libraries are not
    changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        # The limit of glibc's own. The limit stops growing once either threshold is set.
        mallopt(_M_MMAP_THRESHOLD, 2**25)


@contextmanager
def unlogged_fake_tensors() -> Iterator[None]:
    """Enclose a run on fake tensors with handled errors: torch prints each error with a traceback
    before raising.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled_before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled_before


def record_allocations(max_entries: int | None) -> None:
    """Keep the history of the GPU's allocations from now on. None: stop."""
    record: Any = torch.cuda.memory._record_memory_history
    record(enabled=None) if max_entries is None else record(max_entries=max_entries)


def write_allocations(path: str) -> None:
    """Write the history of allocations to a file for ``memory_viz``."""
    write: Any = torch.cuda.memory._dump_snapshot
    write(path)
