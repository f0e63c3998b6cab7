"""Several trainings that take turns step by step, so that noise of the machine affects all alike.

A *team* is the processes of one variant. After setup they wait before every training step until the
coordinator gives them their turn; waiting uses no processor. A step is one iteration of Lightning's
loop, from the start of one batch to the start of the next, without the wait.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import machine
from benchmarks.variants import Shape, Variant

TIMEOUT_S = 120.0
_PRELOAD = ["benchmarks.teams"]


class StepTime(NamedTuple):
    """One step of one rank."""

    wall_s: float
    cpu_s: float
    """Processor seconds of all threads of the process."""
    loss: float
    peak_bytes: int
    """Peak memory so far: of the GPU if there is one, else of the process above the imports; 0:
    unknown."""
    host_s: float = 0.0
    """Processor seconds of the training thread alone, without the communication threads."""


class TeamError(RuntimeError):
    """Failure of a process of a team; the message holds its traceback."""


class _Turns(pl.Callback):
    """Callback that waits for its turn at the start of every batch and reports the time of the
    previous step.
    """

    def __init__(self, pipe: Connection, imported_bytes: int) -> None:
        self._pipe, self._imported = pipe, imported_bytes
        self._start: tuple[float, float, float] | None = None
        self._loss: Tensor | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        self._report()
        self._pipe.recv()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._start = time.perf_counter(), time.process_time(), time.thread_time()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self._loss = outputs["loss"]

    def on_train_end(self, *_: Any) -> None:
        self._report()

    def _report(self) -> None:
        if self._start is None or self._loss is None:
            self._pipe.send(None)  # ready
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter(), time.process_time(), time.thread_time()
        wall, cpu, host = (end - start for end, start in zip(now, self._start, strict=True))
        loss = self._loss.full_tensor() if hasattr(self._loss, "full_tensor") else self._loss
        self._pipe.send(StepTime(wall, cpu, float(loss), self._peak_bytes(), host))

    def _peak_bytes(self) -> int:
        if torch.cuda.is_initialized():
            return torch.cuda.max_memory_allocated()
        return max(0, machine.status_bytes("VmHWM") - self._imported)


def batches(shape: Shape, variant: Variant, rank: int, num_steps: int) -> DataLoader[Any]:
    """Return the training data of one rank; the global batch of a step is the same in every
    variant.
    """
    generator = torch.Generator().manual_seed(0)
    count = num_steps * shape.batch
    samples = torch.randint(0, shape.vocab_size, (count, shape.sequence + 1), generator=generator)
    rows = [{"tokens": row[:-1], "labels": row[1:]} for row in samples]
    share: Any = (
        None if variant.ours or variant.data_size == 1 else range(rank, count, variant.data_size)
    )
    return DataLoader(rows, batch_size=shape.batch // variant.data_size, sampler=share)


def train(pipe: Connection, variant: Variant, shape: Shape, rank: int, num_steps: int) -> None:
    """Train for ``num_steps`` steps, each in its turn."""
    imported = machine.status_bytes("VmRSS")
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator=shape.accelerator,
        devices=variant.size,
        precision=shape.precision,  # type: ignore[arg-type]
        strategy=variant.strategy(shape),
        max_steps=num_steps,
        gradient_clip_val=1.0,
        use_distributed_sampler=variant.ours,  # Lightning's sampler would shuffle
        callbacks=[_Turns(pipe, imported)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(variant.module(shape.config), batches(shape, variant, rank, num_steps))


def _rank_main(
    variant: Variant, shape: Shape, rank: int, store: str, pipe: Connection, num_steps: int
) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sizes = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": variant.size,
        "LOCAL_WORLD_SIZE": variant.size,
    }
    os.environ.update({key: str(value) for key, value in sizes.items()})
    try:
        if variant.size > 1:  # as under torchrun: the processes exist
            os.environ.update(
                TORCHELASTIC_RUN_ID="benchmark",
                GROUP_RANK="0",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT="29500",
            )
            file_store, timeout = dist.FileStore(store, variant.size), timedelta(hours=1)
            dist.init_process_group(
                "gloo", store=file_store, rank=rank, world_size=variant.size, timeout=timeout
            )
        train(pipe, variant, shape, rank, num_steps)
    except BaseException:
        pipe.send(TeamError(f"rank {rank} of {variant.name}:\n{traceback.format_exc()}"))
        raise
    os._exit(0)  # closing the groups of a finished team in step would need another turn


class Team:
    """The processes of one variant."""

    def __init__(self, variant: Variant, shape: Shape, num_steps: int, folder: str) -> None:
        self.variant = variant
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        context = _fork_server()
        for rank in range(variant.size):
            pipe, theirs = context.Pipe()
            args = (variant, shape, rank, f"{folder}/{variant.name}", theirs, num_steps)
            process = context.Process(target=_rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def wait_until_ready(self) -> None:
        """Return when every rank waits for its first turn."""
        self._receive()

    def step(self) -> list[StepTime]:
        """Run one training step on all ranks; return its times by rank."""
        for pipe in self._pipes:
            pipe.send(None)
        return self._receive()

    def _receive(self) -> list[Any]:
        received = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                raise TeamError(
                    f"rank {rank} of {self.variant.name} gave no answer for {TIMEOUT_S} s."
                )
            try:
                answer = pipe.recv()
            except EOFError:
                raise TeamError(f"rank {rank} of {self.variant.name} died.") from None
            if isinstance(answer, TeamError):
                raise answer
            received.append(answer)
        return received

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _fork_server() -> Any:
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


@contextmanager
def assembled(variants: Sequence[Variant], shape: Shape, num_steps: int) -> Iterator[list[Team]]:
    """Start a team for every variant, one after another; end them all at the end of the block."""
    teams: list[Team] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for variant in variants:
                teams.append(Team(variant, shape, num_steps, folder))
                teams[-1].wait_until_ready()
            yield teams
        finally:
            for team in teams:
                team.end()


def measure(
    variants: Sequence[Variant], shape: Shape, num_rounds: int, num_dropped: int = 1
) -> Mapping[str, list[list[StepTime]]]:
    """Run the variants in turn; return the steps by name, round and rank, without the dropped first
    rounds.

    Every other round runs in the opposite order, so that no variant always follows the same one.
    """
    steps: dict[str, list[list[StepTime]]] = {variant.name: [] for variant in variants}
    with assembled(variants, shape, num_dropped + num_rounds) as teams:
        for index in range(num_dropped + num_rounds):
            for team in teams if index % 2 == 0 else reversed(teams):
                times = team.step()
                if index >= num_dropped:
                    steps[team.variant.name].append(times)
    return steps
