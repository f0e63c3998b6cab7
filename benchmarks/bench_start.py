"""From the start of a script to the end of its first training step, beside plain Lightning.

    python -m benchmarks.bench_start          # some minutes; writes results/
    python -m benchmarks.bench_start --quick  # one round: does it run?

Both programs are started in turn, so that other load affects both alike. On a busy machine the
processor seconds of rank 0 are the number to trust. A first round, which compiles modules and reads
files into memory, does not count.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks import machine
from benchmarks.command_line import parser_of
from benchmarks.statistics import Ratio, ratio_of_medians, verdict

LIMIT = 1.1
"""Goal: start to first step, ours divided by plain Lightning's."""
IMPORT_S = 0.3
"""Goal: seconds of the package's import beyond Lightning's."""
_SCRIPT = Path(__file__).parent / "start_run.py"
_IMPORT = """
import time
import lightning.pytorch
before = time.process_time(), time.perf_counter()
import megatron_lightning.strategies
print(time.process_time() - before[0], time.perf_counter() - before[1])
"""

Times = dict[str, list[float]]


def _environment() -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(machine.ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users do not compile at every start
    return environment


def start(kind: str, ranks: int) -> tuple[float, float]:
    """Start a script, and return wall and processor seconds until its first step has ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "first_step.json")
        # Beside the benchmarks it would import their modules for the standard library's.
        script = shutil.copy(_SCRIPT, folder)
        command = [sys.executable, script, kind, str(ranks), str(file)]
        began_s = time.time()
        subprocess.run(command, env=_environment(), check=True, capture_output=True, cwd=folder)
        found = json.loads(file.read_text())
    return found["time_s"] - began_s, found["cpu_s"]


def import_times() -> tuple[float, float]:
    """Return processor and wall seconds of the package's import after Lightning's."""
    found = subprocess.run(
        [sys.executable, "-c", _IMPORT], env=_environment(), check=True, capture_output=True
    )
    cpu_s, wall_s = map(float, found.stdout.split())
    return cpu_s, wall_s


def measure(rounds: int, ranks: int) -> tuple[Times, Times]:
    """Return wall and processor seconds of every round, for each kind."""
    wall: Times = {"plain": [], "ours": []}
    cpu: Times = {"plain": [], "ours": []}
    for index in range(rounds + 1):
        for kind in wall if index % 2 else reversed(wall):
            wall_s, cpu_s = start(kind, ranks)
            if index:
                wall[kind].append(wall_s)
                cpu[kind].append(cpu_s)
    return wall, cpu


def _row(name: str, times: Times, ratio: Ratio) -> str:
    plain, ours = median(times["plain"]), median(times["ours"])
    kept = verdict(ratio.value <= LIMIT)
    return f"| {name} | {plain:.2f} s | {ours:.2f} s | {ratio} | {kept} |"


def run(rounds: int, folder: Path) -> str:
    """Measure, write a page into ``folder``, and return the page."""
    facts = machine.describe()
    imports = [import_times() for _ in range(rounds + 1)][1:]
    cpu_s, wall_s = (median(values) for values in zip(*imports, strict=True))
    rows, numbers = [], {"import_cpu_s": [cpu for cpu, _ in imports]}
    for ranks in (1, 2):
        name = "one process" if ranks == 1 else "two processes"
        for what, times in zip(("wall", "processor"), measure(rounds, ranks), strict=True):
            ratio = ratio_of_medians(times["ours"], times["plain"])
            rows.append(_row(f"{name}, {what}", times, ratio))
            numbers |= {f"{ranks} {what} {kind}": values for kind, values in times.items()}
    facts["load_average_at_end"] = machine.describe()["load_average"]
    lines = [
        f"# Start to first step, {facts['date'][:10]}",
        "",
        f"{machine.headline(facts)}.",
        "",
        f"{rounds} rounds; medians. A module of four blocks, one step. Goal: at most {LIMIT} of "
        "plain Lightning (one process) and of its `ddp` (two).",
        "",
        "| from the start of the script | Lightning | this library | ratio | goal |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"Importing `megatron_lightning.strategies` after `lightning.pytorch`: {cpu_s:.2f} "
        f"processor seconds, {wall_s:.2f} s of wall time. Goal: at most {IMPORT_S} s, "
        f"{verdict(cpu_s <= IMPORT_S)}.",
    ]
    page = "\n".join(lines) + "\n"
    machine.keep(folder, "start_cpu", facts, page, numbers)
    return page


def main() -> None:
    """Read the command line and run."""
    options = parser_of(__doc__, quick="one round").parse_args()
    print(run(1 if options.quick else options.rounds, options.results))


if __name__ == "__main__":
    main()
