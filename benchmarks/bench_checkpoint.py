"""Time of saving and loading a checkpoint, compared with plain ``torch.distributed.checkpoint`` and
``dd`` on the same disk.

    python -m benchmarks.bench_checkpoint            # 1 GiB, 18 rounds; writes benchmarks/results
    python -m benchmarks.bench_checkpoint --quick    # seconds: 16 MiB, to see that everything runs

Every round does everything once, in alternating order and after a pause, so that other load on the
disk affects all alike. Files are flushed to the disk when they are written (``conv=fsync``) and
dropped from the page cache before they are read. Checksums are on, as always. Memory that an
operation needs, page cache included, is claimed before it: see ``claim_memory``. The stall of an
asynchronous save is the time until training continues, compared with a plain copy of the same
bytes. Memory is the peak of this process above its size before the operation, as Linux counts it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks import machine
from benchmarks.large_manifest import ManifestCost, measure_manifest
from benchmarks.statistics import Ratio, ratio_of_medians, verdict
from megatron_lightning.checkpoint import TensorShards, load_sharded, open_checkpoint, save_sharded
from megatron_lightning.checkpoint.writing.background import BackgroundJob, HostBuffer
from megatron_lightning.checkpoint.writing.saving import take_snapshot, write_snapshot

COLUMNS = 4096
NUM_TENSORS = 16
PAUSE_S = 0.5  # virtual disks grant a burst after a pause: every operation gets one
MIB = 1 << 20


@dataclass(frozen=True)
class Comparison:
    """A ratio and its goal."""

    what: str
    ratio: Ratio
    goal: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether the interval meets the goal, within the tolerance of all goals."""
        return self.ratio.meets(self.goal) if self.at_least else self.ratio.keeps(self.goal)


def make_state(num_bytes: int) -> dict[str, Tensor]:
    """Return random fp32 matrices of about ``num_bytes`` in total."""
    rows = max(1, num_bytes // (4 * COLUMNS * NUM_TENSORS))
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{i}.weight": torch.randn(rows, COLUMNS, generator=generator)
        for i in range(NUM_TENSORS)
    }


class Bench:
    """Timed operations on one folder and one state.

    Args:
        folder: A folder on the disk to measure.
        state: The tensors to save.
    """

    def __init__(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        self.folder, self.state = folder, dict(state)
        self.num_bytes = sum(tensor.nbytes for tensor in state.values())
        self._copy = {name: tensor.clone() for name, tensor in state.items()}
        self._buffer = HostBuffer()
        self._written = 0.0
        with open(self._raw, "wb") as file:
            for tensor in state.values():
                file.write(tensor.numpy().data)

    @property
    def _raw(self) -> Path:
        return self.folder / "raw"

    def _shards(self, tensors: Mapping[str, Tensor]) -> list[TensorShards]:
        return [TensorShards.full(name, tensor) for name, tensor in tensors.items()]

    def dd_write(self) -> None:
        """Write the same bytes with dd."""
        _dd(f"if={self._raw}", f"of={self.folder / 'dd'}", "conv=fsync")

    def dd_read(self) -> None:
        """Read them with dd."""
        _dd(f"if={self.folder / 'dd'}", "of=/dev/null")

    def save(self) -> None:
        """Save a checkpoint."""
        save_sharded(self.folder / "ours", self._shards(self.state), {})

    def load(self) -> None:
        """Load it into existing tensors."""
        load_sharded(open_checkpoint(self.folder / "ours"), self._shards(self._copy))

    def dcp_save(self) -> None:
        """Save with torch.distributed.checkpoint."""
        dcp.save(self.state, checkpoint_id=str(self.folder / "dcp"), no_dist=True)

    def dcp_load(self) -> None:
        """Load it into existing tensors."""
        dcp.load(self._copy, checkpoint_id=str(self.folder / "dcp"), no_dist=True)

    def copy(self) -> None:
        """Copy the state in memory."""
        for name, tensor in self.state.items():
            self._copy[name].copy_(tensor)

    def async_stall(self) -> BackgroundJob:
        """Start an asynchronous save; return when training may continue."""
        snapshot = self._buffer.copy_of(
            take_snapshot(self.folder / "async", self._shards(self.state), {})
        )
        return BackgroundJob(lambda: write_snapshot(snapshot))

    def check(self) -> None:
        """Compare the tensors loaded last with the state.

        Raises:
            RuntimeError: If they differ.
        """
        if any(not torch.equal(self.state[name], self._copy[name]) for name in self.state):
            raise RuntimeError(
                "the loaded tensors differ from the saved ones; the times mean nothing."
            )
        for tensor in self._copy.values():
            tensor.zero_()

    def forget(self, name: str) -> None:
        """Drop a file or folder from the page cache, after one read that claims the cache's
        memory.
        """
        path = self.folder / name
        buffer = bytearray(8 * MIB)
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file():
                with open(file, "rb", buffering=0) as content:
                    while content.readinto(buffer):
                        pass
                    os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def remove(self, name: str) -> None:
        """Delete a file or folder."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _dd(*arguments: str) -> None:
    subprocess.run(["dd", *arguments, "bs=8M", "status=none"], check=True)


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def claim_memory(num_bytes: int) -> None:
    """Touch memory and free it: a virtual machine returns free memory to its host and waits when it
    needs it again.
    """
    pages = np.empty(num_bytes, np.uint8)
    pages[:: os.sysconf("SC_PAGE_SIZE")] = 1


def measure_round(bench: Bench, number: int) -> dict[str, float]:
    """Do everything once; return seconds by name."""
    pairs = [
        ("dd", bench.dd_write, bench.dd_read),
        ("ours", bench.save, bench.load),
        ("dcp", bench.dcp_save, bench.dcp_load),
    ]
    orders = list(permutations(pairs))
    turned = orders[number % len(orders)]
    seconds: dict[str, float] = {}
    for name, write, _ in turned:
        bench.remove(name)
        claim_memory(bench.num_bytes)
        time.sleep(PAUSE_S)
        seconds[f"{name}_write"] = timed(write)
    for name, _, read in turned:
        bench.forget(name)
        time.sleep(PAUSE_S)
        seconds[f"{name}_read"] = timed(read)
        if name != "dd":
            bench.check()
    seconds["copy"] = timed(bench.copy)
    claim_memory(bench.num_bytes)
    start = time.perf_counter()
    job = bench.async_stall()
    seconds["async_stall"] = time.perf_counter() - start
    job.wait()
    seconds["async_written"] = time.perf_counter() - start
    bench.remove("async")
    return seconds


@contextmanager
def peak_of(result: dict[str, float], name: str) -> Iterator[None]:
    """Record under ``name`` the peak memory of this process in bytes, above its size before the
    block.
    """
    before = machine.status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (man 5 proc)
    try:
        yield
    finally:
        result[name] = machine.status_bytes("VmHWM") - before


def measure_memory(bench: Bench) -> dict[str, float]:
    """Return the peak memory of each operation in bytes, above the state itself."""
    peaks: dict[str, float] = {}
    with peak_of(peaks, "async"):  # first, before there is freed memory to reuse
        bench.async_stall().wait()
    bench.remove("async")
    with peak_of(peaks, "save"):
        bench.save()
    with peak_of(peaks, "load"):
        bench.load()
    bench.remove("dcp")
    with peak_of(peaks, "dcp_save"):
        bench.dcp_save()
    with peak_of(peaks, "dcp_load"):
        bench.dcp_load()
    return peaks


def compare(rounds: list[dict[str, float]]) -> list[Comparison]:
    """Return the ratios that have goals."""

    def series(name: str) -> list[float]:
        return [seconds[name] for seconds in rounds]

    return [
        Comparison(
            "save, of the disk's sequential rate",
            ratio_of_medians(series("dd_write"), series("ours_write")),
            0.9,
        ),
        Comparison(
            "save, speed relative to DCP",
            ratio_of_medians(series("dcp_write"), series("ours_write")),
            1.0,
        ),
        Comparison(
            "load, of the disk's sequential rate",
            ratio_of_medians(series("dd_read"), series("ours_read")),
            0.9,
        ),
        Comparison(
            "load, speed relative to DCP",
            ratio_of_medians(series("dcp_read"), series("ours_read")),
            1.0,
        ),
        Comparison(
            "stall of an asynchronous save, of a plain copy's time",
            ratio_of_medians(series("async_stall"), series("copy")),
            1.5,
            at_least=False,
        ),
    ]


def markdown(
    facts: Mapping[str, Any],
    rounds: list[dict[str, float]],
    comparisons: list[Comparison],
    peaks: Mapping[str, float],
    manifest: ManifestCost,
) -> str:
    """Return the result as a page."""
    size = facts["state_bytes"]
    lines = [
        f"# Checkpoints, {facts['date'][:10]}",
        "",
        f"{machine.headline(facts)}.",
        "",
        f"{size / MIB:.0f} MiB in {NUM_TENSORS} fp32 matrices, one process, {len(rounds)} rounds "
        "in turns; checksums on, files flushed, page cache emptied before reading.",
        "",
        "| operation | median s | MiB/s |",
        "| --- | --- | --- |",
    ]
    for name in rounds[0]:
        median = sorted(seconds[name] for seconds in rounds)[len(rounds) // 2]
        lines.append(f"| {name} | {median:.3f} | {size / MIB / median:.0f} |")
    lines += [
        "",
        "| goal | wanted | measured, with a 95 % bootstrap interval | |",
        "| --- | --- | --- | --- |",
    ]
    for entry in comparisons:
        sign = "≥" if entry.at_least else "≤"
        lines.append(
            f"| {entry.what} | {sign} {entry.goal} | {entry.ratio} | {verdict(entry.met)} |"
        )
    largest = facts["largest_tensor_bytes"]
    lines += [
        f"| memory of a save, of the largest tensor's | ≤ 1 | {peaks['save'] / largest:.2f} "
        f"({peaks['save'] / MIB:.0f} MiB) | {verdict(peaks['save'] <= largest)} |",
        f"| memory of an asynchronous save, of the state's | ≤ 1.05 | {peaks['async'] / size:.2f} "
        f"| {verdict(peaks['async'] <= 1.05 * size)} |",
        f"| manifest of {manifest.num_ranks:,} ranks, MB | ≤ 200 | {manifest.num_bytes / 1e6:.0f} "
        f"({manifest.num_shards:,} boxes) | {verdict(manifest.num_bytes <= 200e6)} |",
        f"| making and writing it, s | ≤ 30 | {manifest.dump_s:.1f}, and {manifest.load_s:.1f} to "
        f"read and check it | {verdict(manifest.dump_s <= 30)} |",
        "",
        f"For information, memory beyond the state: load {peaks['load'] / MIB:.0f} MiB; DCP's save "
        f"{peaks['dcp_save'] / MIB:.0f} MiB, its load {peaks['dcp_load'] / MIB:.0f} MiB.",
        "",
    ]
    return "\n".join(lines)


def run(
    num_bytes: int, num_rounds: int, folder: Path, results: Path, *, num_ranks: int = 16384
) -> str:
    """Measure, write a JSON and a Markdown file into ``results``, and return the page.

    Args:
        num_bytes: Size of the state.
        num_rounds: Number of rounds.
        folder: A folder on the disk to measure; a temporary folder inside it is used and removed.
        results: Folder of the result files.
        num_ranks: Ranks of the simulated save.
    """
    facts = machine.describe()
    manifest = measure_manifest(num_ranks)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        bench = Bench(Path(place), make_state(num_bytes))
        facts |= {
            "state_bytes": bench.num_bytes,
            "largest_tensor_bytes": max(t.nbytes for t in bench.state.values()),
        }
        peaks = measure_memory(bench)  # also warms everything up
        rounds = [measure_round(bench, number) for number in range(num_rounds)]
    facts["load_average_at_end"] = machine.describe()["load_average"]
    comparisons = compare(rounds)
    page = markdown(facts, rounds, comparisons, peaks, manifest)
    kept = {"rounds": rounds, "peaks": peaks, "manifest": asdict(manifest)}
    kept["comparisons"] = [{**asdict(entry), "met": entry.met} for entry in comparisons]
    machine.keep(results, "checkpoint_cpu", facts, page, kept)
    return page


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="16 MiB, two rounds, a manifest of few ranks"
    )
    parser.add_argument(
        "--mib",
        type=int,
        default=1024,
        help="size of the state; more than a disk's own cache holds",
    )
    parser.add_argument(
        "--rounds", type=int, default=18, help="fewer than 15 prove nothing; six are every order"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="a folder on the disk to measure",
    )
    parser.add_argument(
        "--results", type=Path, default=machine.RESULTS, help="folder of the result files"
    )
    options = parser.parse_args()
    mib, rounds, ranks = (16, 2, 256) if options.quick else (options.mib, options.rounds, 16384)
    print(run(mib * MIB, rounds, options.folder, options.results, num_ranks=ranks))


if __name__ == "__main__":
    main()
