"""Files of results, with the header of every kept record, and sizes of this process.

A page begins with its header. :func:`megatron_lightning.cards.header.read_record` reads pages,
numbers, cards and records of GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lightning.cards.header import commit, describe, headline, with_header

__all__ = ["RESULTS", "ROOT", "commit", "describe", "headline", "keep", "status_bytes"]
ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def keep(
    folder: Path, name: str, facts: Mapping[str, Any], page: str, numbers: Mapping[str, Any]
) -> Path:
    """Write a page of results and its numbers into ``folder``, both with the header ``facts``;
    return the page's file, named by ``name`` and the date.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{name}_{facts['date'].replace(':', '').replace('+0000', '')}"
    record = {**numbers, "header": facts}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    stem.with_suffix(".md").write_text(with_header(page, facts))
    return stem.with_suffix(".md")


def status_bytes(field: str) -> int:
    """Return a size of this process as Linux counts it, such as ``VmHWM``; 0 on other systems."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
