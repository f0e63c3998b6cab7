"""Reading and writing a Hugging Face folder, beside stock ``transformers`` and ``dd``.

    python -m benchmarks.bench_bridge            # 2 GB, 7 rounds; writes benchmarks/results
    python -m benchmarks.bench_bridge --quick    # seconds: 30 MB, to see that everything runs

*Load*: processor seconds until every parameter is written once, in a process of its own, with the
files in the page cache. Stock parameters are views of mapped files, and are written by a copy.
*Memory*: the largest anonymous memory of a rank of tensor parallel 2 above what it had before the
model, beside its part of the parameters. *Disk*: bytes that eight ranks of tensor parallel 8 read
from the disk, with the files out of the page cache, beside the bytes of the folder. *Export*: wall
time of a folder beside ``dd`` of the same bytes, both flushed to the disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import machine, ranks
from benchmarks.statistics import Ratio, ratio_of_medians, verdict
from megatron_lightning.bridge import AutoBridge
from megatron_lightning.bridge.folders.export import write_folder
from megatron_lightning.bridge.hf_models.transformers_model import fill_weights
from megatron_lightning.modules import HuggingFaceModule
from megatron_lightning.strategies import MegatronStrategy

MIB = 1 << 20
LOAD_GOAL = 0.9
MEMORY_GOAL_BYTES = 100 * MIB
"""Beside the rank's part and its largest parameter."""
DISK_GOAL = 1.2
DISK_RANKS = 8


def make_folder(path: Path, num_bytes: int) -> int:
    """Save a random Llama in bf16 of about ``num_bytes``, and return the bytes of its weights."""
    import transformers

    hidden = 1024 if num_bytes > 10**9 else 256
    sizes: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, vocab_size=32 * hidden, **sizes
    )
    layer = 2 * (4 * 3 + 3) * hidden * hidden
    config.num_hidden_layers = max(1, (num_bytes - 2 * 2 * 32 * hidden * hidden) // layer)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(path, max_shard_size=num_bytes // 4)
    return sum(p.nbytes for p in model.parameters())


# -------------------------------------------------------------------------------------------- load


def load_ours(path: Path) -> None:
    """Read every parameter into memory of its own."""
    fill_weights(AutoBridge.from_hf_pretrained(path).lazy_model(dtype="auto"))


def load_stock(path: Path) -> None:
    """Load as ``transformers`` does, and write every parameter once."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def apart(body: Callable[..., Any], *args: Any) -> Any:
    """Run ``body`` in a process of its own, since memory that it frees would be used again here."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=lambda: results.put(body(*args)))
    process.start()
    process.join()
    return results.get()


def processor_seconds(body: Callable[[Path], None], path: Path) -> float:
    """Return the processor time of ``body``."""
    began = time.process_time()
    body(path)
    return time.process_time() - began


# ------------------------------------------------------------------------------------------ memory


class PeakMemory(pl.Callback):
    """Samples anonymous memory until the first prediction."""

    def __init__(self) -> None:
        self.peak = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ends.wait(0.002):
            self.peak = max(self.peak, machine.status_bytes("RssAnon"))

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop sampling."""
        self._ends.set()
        self._thread.join()


def read_part(path: str, num_ranks: int, **options: Any) -> HuggingFaceModule:
    """Read this rank's part of the model under tensor parallelism."""
    module = HuggingFaceModule(path)
    trainer = pl.Trainer(
        strategy=MegatronStrategy(tensor_model_parallel_size=num_ranks),
        accelerator="cpu", devices=num_ranks, logger=False, enable_progress_bar=False,
        precision="bf16-true", enable_checkpointing=False, enable_model_summary=False,
        limit_predict_batches=0, **options,
    )  # fmt: skip
    trainer.predict(module, DataLoader(torch.zeros(2, 4, dtype=torch.long)))  # type: ignore[arg-type]
    return module


def memory_of_a_rank(path: str) -> tuple[int, int, int]:
    """Return peak above the memory before, bytes of the part, and of its largest parameter."""
    warnings.filterwarnings("ignore")
    AutoBridge.from_hf_pretrained(path).lazy_model(dtype="auto")  # imports
    before, peak = machine.status_bytes("RssAnon"), PeakMemory()
    module = read_part(path, 2, callbacks=[peak])
    sizes = [p.nbytes for p in module.parameters()]
    return peak.peak - before, sum(sizes), max(sizes)


# -------------------------------------------------------------------------------------------- disk


def leave_page_cache(path: Path) -> None:
    """Drop the pages of a folder's files, so that the next read is from the disk."""
    for file in path.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes_of_a_rank(path: str) -> tuple[int, int]:
    """Return the bytes that this process read from the disk, and the bytes of its part."""
    warnings.filterwarnings("ignore")
    before = disk_bytes()
    module = read_part(path, DISK_RANKS)
    return disk_bytes() - before, sum(p.nbytes for p in module.parameters())


def disk_bytes() -> int:
    """Return the bytes that this process has read from the disk, by Linux' count. 0: unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


# ------------------------------------------------------------------------------------------ export


def export_seconds(path: Path, target: Path) -> float:
    """Write the folder's model as a new folder."""
    bridge = AutoBridge.from_hf_pretrained(path)
    plan = bridge.plan()
    fills = {name: lazy.fill for name, lazy in plan.parameters.items()}
    began = time.monotonic()
    write_folder(target, plan.folder, plan.tensors(fills))
    seconds = time.monotonic() - began
    shutil.rmtree(target)
    return seconds


def dd_seconds(path: Path, target: Path) -> float:
    """Copy the same files with ``dd``."""
    target.mkdir()
    began = time.monotonic()
    for file in path.glob("*.safetensors"):
        command = ["dd", f"if={file}", f"of={target / file.name}", "bs=4M", "conv=fsync"]
        subprocess.run(command, check=True, capture_output=True)
    seconds = time.monotonic() - began
    shutil.rmtree(target)
    return seconds


def page(facts: dict[str, Any], rows: dict[str, Any]) -> str:
    """Return the page of results."""
    load: Ratio = rows["load"]
    export: Ratio = rows["export"]
    peak, part, largest = rows["memory"]
    limit = part + largest + MEMORY_GOAL_BYTES
    read, owned = (sum(column) for column in zip(*rows["disk"], strict=True))
    disk_verdict = verdict(read <= DISK_GOAL * rows["bytes"])
    return "\n".join(
        [
            "# Reading and writing a Hugging Face folder",
            "",
            f"{machine.headline(facts)}.",
            "",
            f"`python -m benchmarks.bench_bridge`, {rows['bytes'] / 1e9:.2f} GB in bf16, "
            f"{rows['rounds']} rounds in turns.",
            "",
            "| | | goal | |",
            "|---|---|---|---|",
            f"| load, processor seconds, ours ÷ stock | {load} | at most {LOAD_GOAL} | "
            f"{verdict(load.keeps(LOAD_GOAL))} |",
            f"| peak memory of a rank of TP 2 | {peak / MIB:,.0f} MiB of a part of "
            f"{part / MIB:,.0f} MiB | at most part + one parameter + 100 MiB = "
            f"{limit / MIB:,.0f} MiB | {verdict(peak <= limit)} |",
            f"| read from the disk by {DISK_RANKS} ranks of TP {DISK_RANKS}, cold | "
            + (
                f"{read / rows['bytes']:.3f} of the folder (parts together "
                f"{owned / rows['bytes']:.3f}) | at most {DISK_GOAL} | {disk_verdict} |"
                if read
                else "no counter here | | |"
            ),
            f"| export, wall time, ours ÷ dd with fsync | {export} | reported | |",
            "",
        ]
    )


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--results", type=Path, default=machine.RESULTS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rounds = options.rounds or (2 if options.quick else 7)
    facts = machine.describe()
    series: dict[str, list[float]] = {name: [] for name in ("ours", "stock", "export", "dd")}
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "folder"
        num_bytes = apart(make_folder, path, 30 * 10**6 if options.quick else 2 * 10**9)
        apart(load_ours, path)  # warms the cache
        for index in range(rounds):
            bodies = [("ours", load_ours), ("stock", load_stock)]
            for name, body in bodies if index % 2 else reversed(bodies):
                series[name].append(apart(processor_seconds, body, path))
            writes = [("export", export_seconds), ("dd", dd_seconds)]
            for name, write in writes if index % 2 else reversed(writes):
                series[name].append(apart(write, path, Path(parent) / "target"))
        memory = max(ranks.run(2, memory_of_a_rank, str(path), limit_s=300.0))
        leave_page_cache(path)
        disk = ranks.run(DISK_RANKS, disk_bytes_of_a_rank, str(path), limit_s=600.0)
    facts["load_average_at_end"] = machine.describe()["load_average"]
    rows = {
        "bytes": num_bytes,
        "rounds": rounds,
        "load": ratio_of_medians(series["ours"], series["stock"]),
        "export": ratio_of_medians(series["export"], series["dd"]),
        "memory": memory,
        "disk": disk,
    }
    text = page(facts, rows)
    print(text)
    numbers = {**rows, "load": asdict(rows["load"]), "export": asdict(rows["export"])}
    machine.keep(options.results, "bridge_cpu", facts, text, {"series": series, **numbers})


if __name__ == "__main__":
    main()
