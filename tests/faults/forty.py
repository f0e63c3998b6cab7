"""Forty faults: each kind once on every launcher and layout. ``python -m tests.faults.forty FOLDER
[LAUNCHER …]`` runs all and prints a table.

Started again as its launcher does it (torchrun by itself, the others by their exit code), a job
must end finished, with the losses and samples of an undisturbed run, bit by bit, and no rank may
hang.

``plain`` is ``python train.py``, ``slurm`` four tasks as srun starts them, with a program in the
place of scontrol, and ``in-process`` four such tasks that start again in their processes. All
processes are forked from one that has imported everything (``forked.py``). ``--exec`` in the place
of a launcher starts ``plain`` and ``torchrun`` as programs, whose imports take most of the time.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.faults.faulty_job import HANG_S, LAYOUTS, STEPS
from tests.faults.forked import agent, starter, task
from tests.faults.processes import ROOT
from tests.helpers.slurm import free_port

LAUNCHERS = ("plain", "torchrun", "slurm", "in-process")
KINDS = ("kill", "exception", "hang", "disk", "signal")
STARTS = 3
LIMIT_S = 10.0
"""From the fault, or from its detection, to the end of the last rank or to the restart."""
START_LIMIT_S = 240.0
SCONTROL = '#!/bin/sh\necho "$@" >> "$CALLS"\n'


class Case(NamedTuple):
    """One fault."""

    launcher: str
    layout: str
    kind: str
    rank: int

    @property
    def signal_or_kind(self) -> str:
        """The kind as the job knows it: Slurm sends SIGUSR1 before a limit, others SIGTERM."""
        if self.kind != "signal":
            return self.kind
        return "sigusr1" if self.launcher == "slurm" else "sigterm"


class Outcome(NamedTuple):
    """Outcome of a job."""

    codes: list[int]
    """Exit code of each start."""
    fault_s: float
    """Seconds from the fault until no rank ran any more or all had met again, without detection."""
    resumed_at: int
    """First step that was trained after the fault."""
    output: str


def cases() -> Iterator[Case]:
    """Yield all forty. Every rank is killed, and has each fault, on some launcher or layout."""
    for i, launcher in enumerate(LAUNCHERS):
        for j, layout in enumerate(LAYOUTS):
            for k, kind in enumerate(KINDS):
                yield Case(launcher, layout, kind, (i + 2 * j + k) % 4)


# ---------------------------------------------------------------------------------------- one start


class _Task:
    """A process of a start, with a session of its own and output in a file."""

    def __init__(self, process: subprocess.Popen[bytes] | BaseProcess) -> None:
        self._process = process
        self.pid = int(process.pid or 0)

    @property
    def code(self) -> int | None:
        """The exit code. None: the process runs."""
        process = self._process
        return process.exitcode if isinstance(process, BaseProcess) else process.poll()


class _Start:
    """One start of a job, and when the ranks of its fault had ended.

    Args:
        case: The fault.
        folder: Folder of the job.
        number: Number of the start.
        runs_programs: Whether ``plain`` and ``torchrun`` are programs.
    """

    def __init__(self, case: Case, folder: Path, number: int, runs_programs: bool) -> None:
        self.ended_s: float | None = None
        self._file = folder / f"output-{number}"
        self._file.touch()
        job = [str(folder), case.layout, case.launcher, case.signal_or_kind, str(case.rank)]
        if case.launcher in ("slurm", "in-process"):
            self._tasks = [self._fork(task, job, env) for env in _tasks(folder)]
            return
        if not runs_programs:
            main = agent if case.launcher == "torchrun" else starter
            self._tasks = [self._fork(main, job, {})]
            return
        command = [sys.executable, "-m", "tests.faults.faulty_job", *job]
        if case.launcher == "torchrun":
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=4"]
            command[2:3] = [*torchrun, "--max-restarts=2", "-m", command[2]]
        with self._file.open("ab") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )
        self._tasks = [_Task(process)]

    def _fork(
        self, main: Callable[..., None], job: list[str], environment: dict[str, str]
    ) -> _Task:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.faults.forked"])
        merged = {**os.environ, **environment}
        process = context.Process(target=main, args=(job, merged, str(self._file)))
        process.start()
        return _Task(process)

    @property
    def output(self) -> str:
        """Output of all processes."""
        return self._file.read_text(errors="replace")

    def wait(self) -> int:
        """Wait for the end. Return an exit code other than 0, if any; kill what hangs, and return
        -1.
        """
        deadline, code = time.monotonic() + START_LIMIT_S, 0
        while any(task.code is None for task in self._tasks) or self._is_ending():
            time.sleep(0.05)
            self._look()
            if time.monotonic() > deadline:
                code = -1
                break
        self._look()
        if not code:
            code = max((task.code or 0 for task in self._tasks), key=lambda one: (one != 0, one))
        self._kill()
        return code

    def _is_ending(self) -> bool:
        """Whether ranks of the fault still run, though the first process has ended."""
        self._look()
        return self.ended_s is None and "FAULT " in self.output

    def _look(self) -> None:
        """Note when the ranks of the fault have ended, or have met to start again."""
        output = self.output
        fault = re.search(r"FAULT (\S+)", output)
        if fault is None or self.ended_s is not None:
            return
        first = re.findall(r"RANK \d (\d+)", output)[:4]
        if "all ranks met" in output or not any(_runs(int(pid)) for pid in first):
            self.ended_s = time.time() - float(fault[1])

    def _kill(self) -> None:
        sessions = {task.pid for task in self._tasks}
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                if process.pid and os.getsid(process.pid) in sessions:
                    process.kill()


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _tasks(folder: Path) -> list[dict[str, str]]:
    """Return the environments of four tasks of Slurm, with a scontrol that records calls."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "scontrol").write_text(SCONTROL)
    (tools / "scontrol").chmod(0o755)
    common = {
        "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
        "PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(folder / "calls"),
    }  # fmt: skip
    return [{**common, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(4)]


# ----------------------------------------------------------------------------------------- one case


def run_case(case: Case, folder: Path, *, runs_programs: bool = False) -> Outcome:
    """Run a job with its fault to the end, as a scheduler starts it again.

    Args:
        case: The fault.
        folder: Folder of the job.
        runs_programs: Whether ``plain`` and ``torchrun`` are programs.

    Raises:
        AssertionError: If it does not end finished, hangs, or has other losses or samples.
    """
    codes, output, fault_s = list[int](), "", 0.0
    for number in range(STARTS):
        start = _Start(case, folder, number, runs_programs)
        codes.append(start.wait())
        output += start.output
        fault_s = start.ended_s or fault_s
        if start.output.count("DONE") == 4:
            break
    told = f"{case}: exit codes {codes}, {fault_s:.1f} s\n{output}"
    assert codes[-1] == 0 and output.count("DONE") >= 4, told
    assert case.kind == "none" or re.search(r"FAULT \S+", output), told
    _assert_stop(case, codes, folder, told)
    limit_s = HANG_S + LIMIT_S if case.kind == "hang" else LIMIT_S
    assert fault_s * _share(output) < limit_s, told
    if case.kind != "none":
        _assert_equal(output, _reference(case.layout), told)
    last = start.output if len(codes) > 1 else output.partition("FAULT ")[2]
    again = re.search(r"LOSS 0 (\d+)", last)
    return Outcome(codes, fault_s, int(again[1]) if again else 0, output)


def _assert_stop(case: Case, codes: list[int], folder: Path, told: str) -> None:
    """A signal ends a job in order: saved, with its code, and queued again under Slurm."""
    if case.kind != "signal":
        return
    first = 0 if case.launcher == "torchrun" else 75
    assert codes == [first, 0], told
    if case.launcher == "slurm":
        assert (folder / "calls").read_text() == "requeue 1\n", told
        assert (folder / "hpc_ckpt_1.ckpt").exists(), told
    else:
        assert (folder / "rescue.ckpt").exists(), told


def _share(output: str) -> float:
    """Return the share of a processor that processes had while they imported."""
    shares = re.findall(r"STARTED ([\d.]+) ([\d.]+)", output)
    return min([1.0, *(float(computed) / float(passed) for passed, computed in shares)])


def values(output: str) -> dict[tuple[str, int, int], set[str]]:
    """Return losses and samples of a job's output, by kind, rank and step."""
    found: dict[tuple[str, int, int], set[str]] = {}
    for name, rank, step, value in re.findall(r"(LOSS|SAMPLES) (\d) (\d+) (\S+)", output):
        found.setdefault((name, int(rank), int(step)), set()).add(value)
    return found


def _assert_equal(output: str, expected: str, told: str) -> None:
    """Every rank had all steps and samples of an undisturbed run, once or again with equal bits."""
    found, wanted = values(output), values(expected)
    assert len(wanted) == 2 * 4 * STEPS, expected
    different = {
        key: (found.get(key), value) for key, value in wanted.items() if found.get(key) != value
    }
    assert not different, f"{different}\n{told}"


@lru_cache
def _reference(layout: str) -> str:
    """Return the output of an undisturbed run."""
    with tempfile.TemporaryDirectory() as folder:
        return run_case(Case("slurm", layout, "none", 0), Path(folder)).output


# ---------------------------------------------------------------------------------------------- all


def table(folder: Path, launchers: tuple[str, ...], report: Callable[[str], None]) -> int:
    """Run all cases of launchers. Return the number of cases that went wrong."""
    report(
        "| launcher | layout | fault | rank | exit codes of the starts | s to end | resumed at |"
    )
    report("|---|---|---|---|---|---|---|")
    wrong = 0
    runs_programs = "--exec" in launchers
    for case in cases():
        if case.launcher not in launchers:
            continue
        place = folder / "-".join(map(str, case))
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        first = f"| {case.launcher} | {case.layout} | {case.signal_or_kind} | {case.rank} |"
        try:
            outcome = run_case(case, place, runs_programs=runs_programs)
        except AssertionError as error:
            wrong += 1
            (place / "failed.txt").write_text(str(error))
            report(f"{first} **wrong**: {str(error).splitlines()[0][:120]} | | |")
            continue
        codes = ", ".join(map(str, outcome.codes))
        report(f"{first} {codes} | {outcome.fault_s:.1f} | {outcome.resumed_at} |")
        shutil.rmtree(place)
    return wrong


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, launchers = Path(sys.argv[1]), tuple(sys.argv[2:])
    if not set(launchers) & set(LAUNCHERS):
        launchers += LAUNCHERS
    raise SystemExit(min(1, table(folder, launchers, lambda line: print(line, flush=True))))


if __name__ == "__main__":
    main()
