"""Options common to the benchmarks with rounds."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import machine


def parser_of(
    description: str | None, *, quick: str = "a tiny model and two rounds"
) -> argparse.ArgumentParser:
    """Return a parser with ``--quick``, ``--rounds`` and ``--results``.

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
