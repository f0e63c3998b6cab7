"""Injection of faults at chosen steps, once in the life of a run's folder."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from megatron_lightning.callbacks.rehearsal.faults import LASTING, Fault, disk_fault, strike
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import INJECTED_FAULTS
from megatron_lightning.resilience.failure import print_message


class FaultInjector(pl.Callback):
    """Make ranks fail on purpose, to rehearse run, launcher and file system.

    Each fault happens once: a line in ``injected_faults.jsonl`` of the folder, written before the
    fault, keeps a restarted run from the fault. Delete the file to rehearse again. Every rank draws
    the same steps and ranks from the seed.

    Args:
        faults: The faults. ``nan`` makes the gradient of the first trained parameter of the rank
            NaN. Faults of the disk hold for the writes of this process by Python.
        seed: Seed of drawn steps and ranks.
        folder: Folder of the notes, shared by all ranks. None: the Trainer's ``default_root_dir``.

    Raises:
        ConfigError: If there are no faults, or at the start, if a rank does not exist, or at a
            ``nan`` on a rank without a trained parameter.
    """

    def __init__(
        self, faults: Sequence[Fault], seed: int = 0, folder: str | Path | None = None
    ) -> None:
        if not faults:
            raise ConfigError("faults is empty: nothing would fail. Give at least one Fault.")
        self.faults = tuple(faults)
        self.seed = seed
        self.folder = folder
        self._due: dict[int, Fault] = {}  # by position in ``faults``
        self._lasting: dict[int, tuple[Fault, ExitStack]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lasting": {}}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw this rank's faults, without the faults noted already."""
        drawn = [
            fault.drawn(random.Random(f"{self.seed}/{index}"), trainer.world_size)
            for index, fault in enumerate(self.faults)
        ]
        happened = self._happened(trainer)
        self._due = {
            index: fault
            for index, fault in enumerate(drawn)
            if fault.hits(trainer.global_rank) and index not in happened
        }

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End faults at the end of their steps, and begin this step's."""
        step = trainer.global_step
        for index, (fault, undo) in list(self._lasting.items()):
            if step >= fault.first_step + fault.num_steps:
                undo.close()
                del self._lasting[index]
        for index, fault in list(self._due.items()):
            if step == fault.first_step:
                del self._due[index]
                self._begin(index, fault, trainer, pl_module)
        for fault, _ in self._lasting.values():
            if fault.kind == "slow":
                time.sleep(fault.seconds)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End all faults."""
        self._end_all()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """End all faults: the next run of this process begins sound."""
        self._end_all()

    def _begin(
        self, index: int, fault: Fault, trainer: pl.Trainer, module: pl.LightningModule
    ) -> None:
        poisoned = _first_trained(module, trainer) if fault.kind == "nan" else None
        self._note(index, fault, trainer)
        print_message(
            f"FaultInjector: {fault.kind} on rank {trainer.global_rank} after step "
            f"{trainer.global_step}"
        )
        if fault.kind not in LASTING:
            strike(fault.kind)
            return
        undo = ExitStack()
        if poisoned is not None:
            handle = poisoned.register_hook(_not_a_number)  # type: ignore[no-untyped-call]
            undo.callback(handle.remove)
        elif fault.kind != "slow":
            undo.enter_context(disk_fault(fault.kind))
        self._lasting[index] = (fault, undo)

    def _end_all(self) -> None:
        for _, undo in self._lasting.values():
            undo.close()
        self._lasting.clear()

    def _path(self, trainer: pl.Trainer) -> Path:
        return Path(self.folder or trainer.default_root_dir) / INJECTED_FAULTS

    def _happened(self, trainer: pl.Trainer) -> set[int]:
        """Return the positions of the faults noted by this rank."""
        path = self._path(trainer)
        lines = path.read_text().splitlines() if path.exists() else []
        notes = map(json.loads, lines)
        return {note["fault"] for note in notes if note["rank"] == trainer.global_rank}

    def _note(self, index: int, fault: Fault, trainer: pl.Trainer) -> None:
        """Append a line, in one write and to the disk, since the process may die next."""
        path, note = self._path(trainer), {
            "fault": index, "kind": fault.kind, "rank": trainer.global_rank,
            "step": trainer.global_step, "time": time.time(),
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, f"{json.dumps(note)}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _first_trained(module: pl.LightningModule, trainer: pl.Trainer) -> Tensor:
    for parameter in module.parameters():
        if parameter.requires_grad:
            return parameter
    raise ConfigError(
        f"the fault nan is due on rank {trainer.global_rank}, and none of its parameters is "
        'trained: no gradient can be NaN. Set another rank, or "all" if every rank trains some.'
    )


def _not_a_number(gradient: Tensor) -> Tensor:
    return torch.full_like(gradient, torch.nan)
