"""A job that ends while gloo's threads are still busy: ``python -m tests.faults.ending START_METHOD
DATA_PARALLEL``.

All that it made stays referred to, and the interpreter takes its time to shut down.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer

KEPT: list[object] = []


class Slow:
    """An object whose end takes its time, in which other threads run."""

    def __del__(self) -> None:
        time.sleep(2.0)


class Burst(pl.Callback):
    """Leaves the thread of every group with a collective that is over and still needs the
    interpreter for a second."""

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        KEPT.extend([trainer, module, Slow()])
        compat.at_end_of_main_thread(self.count, last=True)
        for group in [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]:
            dist.barrier(group)
            work = dist.all_reduce(torch.ones(2**21), group=group, async_op=True)
            assert work is not None
            done = work.get_future()
            done.add_done_callback(lambda _: time.sleep(1.0))
            done.wait()
            KEPT.append(group)

    def count(self) -> None:
        """Print how many threads of gloo this process has, after all else that happens at the end
        of the main thread."""
        names = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # one of Python's threads that has just ended
                names.append((task / "comm").read_text())
        os.write(1, f"LEFT {sum('gloo' in name for name in names)}\n".encode())


def main() -> None:
    start_method, data_parallel = sys.argv[1:3]
    strategy = MegatronStrategy(
        micro_batch_size=2, start_method=start_method, data_parallel=data_parallel
    )
    fit = trainer(strategy, devices=2, max_steps=2, limit_val_batches=0, callbacks=[Burst()])
    fit.fit(ToyModule(), datamodule=ToyData())
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
