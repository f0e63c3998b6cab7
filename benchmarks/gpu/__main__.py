"""Tests and benchmarks on one GPU; needs nothing but the checkout on the path and never downloads.

    python -m benchmarks.gpu --budget 8m --record FILE                  # what is worth most first
    python -m benchmarks.gpu --budget 8m --record NEW --continue FILE   # the rest
    python -m benchmarks.gpu_tests --merge FILE                         # into results/
    python -m benchmarks.gpu --case step  # one longer case; run it again to continue it

A budgeted run orders tests and cases by never ran, failed when last run, and oldest. Cases have the
GPU for themselves, in the first half of the budget; tests share the GPU afterwards, and cases get
what time they leave. FILE is written after each of them. ``--bundles`` brings what the machine
lacks (:mod:`benchmarks.gpu.bundles`). Without a GPU the commands print so and exit with code 0, so
that one command works on every machine.
"""

from __future__ import annotations

import argparse
import lzma
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import gpu_tests, machine
from benchmarks.gpu import bundles, jobs, probe
from benchmarks.gpu.budget import Kept, Workers, spend
from benchmarks.gpu.cases import CASES, record_of, run_items, write
from benchmarks.gpu.record import RunRecord
from megatron_lightning.errors import DataError

BUDGET = "450s"
"""Less than 8 minutes, since the last measurement may take longer than expected."""


def budgeted(options: argparse.Namespace) -> int:
    """Run for a budget; return how many tests and cases failed or are missing."""
    deadline = time.monotonic() + jobs.seconds(options.budget)
    header = machine.describe()
    stamp = header["date"][:19].replace(":", "")
    path = options.record or machine.RESULTS / f"gpu_{stamp}.json"
    record = RunRecord(path, header, *options.earlier)
    record.write()
    with tempfile.TemporaryDirectory() as folder:
        env = _unpacked(options.bundles, Path(folder), record) if options.bundles else {}
        found = probe.two_ranks_a_device(env)
        record.probe = found.said
        record.write()
        print(f"two ranks on a GPU: {found.said}", flush=True)
        kept = Kept(gpu_tests.read_record(), gpu_tests.read_record(gpu_tests.CASES_RECORD))
        cases_env = {name: value for name, value in env.items() if name != bundles.PRELOAD}
        workers = Workers(tests_env={**env, **found.env}, cases_env=cases_env)
        return spend(record, kept, deadline, workers)


def _unpacked(packed: Path, folder: Path, record: RunRecord) -> Mapping[str, str]:
    """Unpack the bundles and note them; return the environment that uses them. Without them the
    run goes on, for its time on the GPU is short.
    """
    try:
        env = bundles.unpack(packed, folder)
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        record.bundles, env = f"none: {type(error).__name__}: {error}", {}
    else:
        record.bundles = ", ".join(sorted(path.name for path in folder.iterdir()))
    print(f"bundles: {record.bundles}", flush=True)
    return env


def one_case(case: str, folder: Path, deadline: float) -> int:
    """Run or continue a case; return how many items failed or are missing."""
    record = record_of(case, folder)
    missing = run_items(CASES[case], record, deadline)
    write(case, record, machine.describe())
    pages = f"{record.path} and {record.path.with_suffix('.md').name}"
    print(f"written: {pages}; {missing or 'nothing'} failed or missing")
    return missing


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default=BUDGET, help="time of the run, such as 8m or 450s")
    parser.add_argument(
        "--record", type=Path,
        help="file of the run, written after each test and case; its log stands beside it. "
        "Default: results/gpu_DATE.json",
    )  # fmt: skip
    parser.add_argument(
        "--continue", dest="earlier", action="append", type=Path, default=[], metavar="FILE",
        help="record of an earlier run: what passed there, on this commit and GPU, is done",
    )  # fmt: skip
    parser.add_argument("--bundles", type=Path, help="folder of benchmarks.gpu.bundles")
    parser.add_argument("--case", help=f"one longer case of {', '.join(CASES)}")
    parser.add_argument(
        "--results", type=Path, default=machine.RESULTS, help="folder of the files of --case"
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    try:
        jobs.seconds(options.budget)
    except ValueError as error:
        parser.error(f"--budget: {error}")
    if options.record is not None and not options.record.absolute().parent.is_dir():
        parser.error(f"--record: there is no folder {options.record.absolute().parent}")
    for each in options.earlier:
        if not each.is_file():
            parser.error(f"--continue: there is no file {each}")
        try:
            RunRecord(each, {}, each)
        except (DataError, KeyError, TypeError) as error:
            parser.error(f"--continue: {each} is no record of a run: {error!s}")
    if options.case is not None and options.case not in CASES:
        parser.error(f"there is no case {options.case!r}; set --case to one of {', '.join(CASES)}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run. Return 1 if something failed or is missing."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    if not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds no CUDA device here, so there is nothing to "
            "test or measure."
        )
        return 0
    # The workers end with this process, whoever ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.case is not None:
        deadline = time.monotonic() + jobs.seconds(options.budget)
        return int(one_case(options.case, options.results, deadline) > 0)
    return int(budgeted(options) > 0)


if __name__ == "__main__":
    sys.exit(main())
