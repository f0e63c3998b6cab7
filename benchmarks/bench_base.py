"""Memory of a frozen base in bf16, 8 and 4 bits: peaks of a process, beside the plan's.

    python -m benchmarks.bench_base          # some minutes; writes results/
    python -m benchmarks.bench_base --quick  # a tiny model: does it run?

A Llama folder in bf16 is trained with LoRA for three steps of one row, each base in a process of
its own. Memory is what the process has allocated (``RssAnon``) above that before the module is
made: the highest while the folder is read, and the highest in the steps.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import machine
from benchmarks.command_line import parser_of
from megatron_lightning.bridge import AutoBridge
from megatron_lightning.modules import HuggingFaceModule
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.peft import LoRA
from megatron_lightning.planning import memory
from megatron_lightning.planning.ledger.adapter_memory import AdapterSizes
from megatron_lightning.strategies import MegatronStrategy

BASES = (None, "blockwise", "mxfp8", "nvfp4")
_SEQUENCE, _STEPS, _RANK = 128, 3, 8


class Peaks(NamedTuple):
    """Bytes of a process above those before the module was made, and the median step."""

    read: int
    steps: int
    step_s: float


class _Watch(pl.Callback):
    """Samples the memory of the process from the beginning of the fit."""

    def __init__(self) -> None:
        self.before = machine.status_bytes("RssAnon")
        self.highest = self.read = 0
        self.times: list[float] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ends.wait(0.002):
            self.highest = max(self.highest, machine.status_bytes("RssAnon"))

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.read, self.highest = self.highest, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def peaks(self) -> Peaks:
        """End sampling."""
        self._ends.set()
        self._thread.join()
        took = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return Peaks(
            self.read - self.before, self.highest - self.before, sorted(took)[len(took) // 2]
        )


def _train(folder: str, base: str | None, pipe: Any) -> None:
    torch.set_num_threads(1)
    rows: Any = [
        {"tokens": row[:-1], "labels": row[1:]}
        for row in torch.randint(0, 512, (_STEPS, _SEQUENCE + 1))
    ]
    watch = _Watch()
    module = HuggingFaceModule(folder, peft=LoRA(r=_RANK, base=base))  # type: ignore[arg-type]
    trainer = pl.Trainer(
        strategy=MegatronStrategy(), accelerator="cpu", devices=1, precision="bf16-true",
        max_steps=_STEPS, callbacks=[watch], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=1))
    pipe.send(watch.peaks())


def measure(folder: str, base: str | None) -> Peaks:
    """Train in a new process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(folder, base, sender))
    process.start()
    peaks: Peaks = receiver.recv()
    process.join()
    return peaks


def planned_bytes(folder: str, base: str | None) -> int:
    """Return weights, gradients and optimizer of the plan."""
    found = memory(
        AutoBridge.from_hf_pretrained(folder).to_config(),
        ParallelLayout(),
        precision="bf16-true",
        adapters=AdapterSizes(r=_RANK, base=base),
    )
    return found.weights_bytes + found.gradients_bytes + found.optimizer_bytes


def run(sizes: dict[str, int], folder: Path) -> str:
    """Measure, write a page into ``folder``, and return the page."""
    facts = machine.describe()
    with tempfile.TemporaryDirectory() as model:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(model)
        size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        found = {base: (measure(model, base), planned_bytes(model, base)) for base in BASES}
    facts["load_average_at_end"] = machine.describe()["load_average"]
    mib = 2**20
    lines = [
        f"# A frozen base in few bits, {facts['date'][:10]}",
        "",
        f"{machine.headline(facts)}.",
        "",
        f"Llama of {sizes['num_hidden_layers']} layers x {sizes['hidden_size']}, a folder of "
        f"{size / mib:.0f} MiB in bf16; LoRA of rank {_RANK}, one row of {_SEQUENCE} tokens, "
        "bf16-true, one process.",
        "",
        "| base | planned: weights, gradients, optimizer | highest while reading | highest in the "
        "steps | median step |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {base or 'bf16'} | {planned / mib:.0f} MiB | {peaks.read / mib:.0f} MiB | "
        f"{peaks.steps / mib:.0f} MiB | {peaks.step_s:.2f} s |"
        for base, (peaks, planned) in found.items()
    ]
    page = "\n".join(lines) + "\n"
    numbers = {base or "bf16": peaks._asdict() for base, (peaks, _) in found.items()}
    machine.keep(folder, "base_cpu", facts, page, numbers)
    return page


def main() -> None:
    """Read the command line and run."""
    options = parser_of(__doc__).parse_args()
    sizes = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072}
    sizes |= {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4}
    if options.quick:
        sizes |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    print(run(sizes, options.results))


if __name__ == "__main__":
    main()
