"""A job in which one rank makes a call alone: ``python -m tests.faults.lone CASE LAYOUT``."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch

from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.toy_decoder import SEQUENCE
from tests.helpers.trainers import trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2, "sharding_plan": "auto"},
    "pp2": {"pipeline_model_parallel_size": 2, "micro_batch_size": 2},
    "fsdp2": {"data_parallel": "fsdp"},
    "zero1": {},
}


class Alone(pl.Callback):
    """Rank 0, or rank 1, does alone what all ranks have to do."""

    def __init__(self, case: str) -> None:
        self.case, _, rank = case.partition("-of-")
        self.rank = int(rank or 0)

    def _is_due(self, trainer: pl.Trainer, case: str) -> bool:
        due = self.case == case and trainer.global_step == 2 and trainer.global_rank == self.rank
        if due:
            print(f"FAULT {time.time()}", flush=True)
        return due

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due(trainer, "stop"):
            trainer.should_stop = True
        if self._is_due(trainer, "full"):
            trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        if self._is_due(trainer, "forward"):
            module.model(torch.zeros(2, SEQUENCE, dtype=torch.long))
        if self._is_due(trainer, "broadcast"):
            print(trainer.log_dir)
        if self.case == "slow" and trainer.global_step == 2 and trainer.global_rank == self.rank:
            time.sleep(8.0)  # alone, but in no collective


class Skipping(ToyModule):
    """Ends its epoch on one rank."""

    case = ""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        rank = int(self.case.partition("-of-")[2] or 0)
        if self.trainer.global_step == 2 and self.trainer.global_rank == rank:
            print(f"FAULT {time.time()}", flush=True)
            return -1
        return None


def main() -> None:
    case, layout = sys.argv[1:3]
    module = Skipping() if case.startswith("skip") else ToyModule()
    vars(module)["case"] = case
    strategy = MegatronStrategy(**LAYOUTS[layout], timeout_s=100.0)
    fit = trainer(strategy, devices=2, callbacks=[Alone(case)], max_epochs=2)
    fit.fit(module, datamodule=ToyData(num_samples=32))
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
