"""Options and pages common to benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import machine

SizeT = TypeVar("SizeT")


def parser_of(
    description: str | None, *, quick: str = "a tiny model and two rounds"
) -> argparse.ArgumentParser:
    """Return the parser of a benchmark with rounds: ``--quick``, ``--rounds`` and ``--results``.

    Args:
        description: Docstring of the benchmark.
        quick: Help of ``--quick``.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--rounds", type=int, default=15, help="pairs to measure; fewer than 15 prove nothing"
    )
    parser.add_argument(
        "--results", type=Path, default=machine.RESULTS, help="folder of the result files"
    )
    return parser


def measured_page(
    title: str,
    name: str,
    measure: Callable[[], tuple[str, Mapping[str, Any]]],
    folder: Path | None,
) -> str:
    """Measure, and return the page; with a folder, keep it there.

    Args:
        title: Of the page.
        name: Of its file, before the date.
        measure: Returns the text of the page and the numbers beside it.
        folder: None: nothing is written.
    """
    facts: dict[str, Any] = machine.describe()
    text, numbers = measure()
    facts["load_average_at_end"] = machine.describe()["load_average"]
    page = f"# {title}\n\n{machine.headline(facts)}.\n\n{text}"
    if folder is not None:
        machine.keep(folder, name, facts, page, numbers)
    return page


def print_page(
    description: str | None, run: Callable[[SizeT, Path | None], str], size: SizeT, quick: SizeT
) -> None:
    """Read the command line, measure with one thread, and print the page.

    Args:
        description: Docstring of the benchmark.
        run: Takes a size and the folder of results, and returns the page.
        size: Of a measurement that is kept.
        quick: That of ``--quick``, which writes nothing.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny; nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(run(quick, None) if options.quick else run(size, machine.RESULTS))
