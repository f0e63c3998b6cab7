"""All measurements that need a GPU, by case and item, and a page for each case."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import bench_gpu, gpu_cases, gpu_inference, gpu_moe, gpu_precision
from benchmarks.gpu.record import Record, plain, summary
from benchmarks.gpu_cases import Item, Numbers

CASES: Mapping[str, Mapping[str, Item]] = {
    **bench_gpu.CASES,
    "headline": {**gpu_cases.HEADLINE, **bench_gpu.HEADLINE, **gpu_inference.HEADLINE},
    **gpu_cases.CASES,
    **gpu_precision.CASES,
    **gpu_moe.CASES,
    **gpu_inference.CASES,
}
"""Case -> item -> measurement; a budgeted run begins with the first."""
ITEMS: Mapping[str, Item] = {
    f"{case}/{name}": item for case, items in CASES.items() for name, item in items.items()
}
COMPARED: Mapping[str, Callable[[Mapping[str, Numbers]], Mapping[str, Numbers]]] = {
    "training": bench_gpu.beside_rivals,
}
"""Case -> numbers that several of its items give together."""


def record_of(case: str, folder: Path) -> Record:
    """Return the kept record of a case.

    Raises:
        FileNotFoundError: If there is a page without its numbers, which the next page would lose.
    """
    path = folder / f"gpu_case_{case}.json"
    page = path.with_suffix(".md")
    if page.exists() and not path.exists():
        raise FileNotFoundError(
            f"{page} has no {path.name} beside it, so that a new page would lose its numbers. "
            "Restore the file, or remove the page."
        )
    return Record(path, resume=True)


def write(case: str, record: Record, header: Mapping[str, Any]) -> None:
    """Add what items give together, and write the page."""
    measured = {name: entry["numbers"] for name, entry in record.entries.items()}
    if case in COMPARED:
        for name, numbers in COMPARED[case](measured).items():
            record.add(name, numbers, header)
    record.write_page(header)


def run_items(items: Mapping[str, Item], record: Record, deadline: float) -> int:
    """Measure the items that are not in the record and fit into the time; return how many are
    missing or failed.
    """
    missing = 0
    for name, item in items.items():
        if record.has(name):
            print(f"{name}: measured before", flush=True)
            continue
        if time.monotonic() + item.seconds > deadline:
            print(
                f"{name}: left for the next run, {deadline - time.monotonic():.0f} s are not "
                "enough",
                flush=True,
            )
            missing += 1
            continue
        try:
            numbers = plain(item.measure())
        except Exception as error:  # one failing measurement must not cost the others
            traceback.print_exc()
            numbers = {"failed": f"{type(error).__name__}: {error}"}
            missing += 1
        record.add(name, numbers)
        print(f"{name}: {json.dumps(summary(numbers))}", flush=True)
    return missing
