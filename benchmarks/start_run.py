"""A script that a user could start: imports, a Trainer, one training step. ``bench_start`` runs it.

    python benchmarks/start_run.py plain|ours RANKS FILE

Rank 0 writes the time of day and its processor seconds, both at the end of the first step, to FILE.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

_WIDTH, _LENGTH, _ROWS = 64, 32, 8


class _Module(pl.LightningModule):
    """Four blocks of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.TransformerEncoderLayer(_WIDTH, 4, batch_first=True) for _ in range(4))
        self.net = nn.Sequential(*blocks, nn.Linear(_WIDTH, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class _FirstStep(pl.Callback):
    """Writes when the first step has ended."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = used.ru_utime + used.ru_stime
            self._file.write_text(json.dumps({"time_s": time.time(), "cpu_s": seconds}))


def main() -> None:
    """Train one step."""
    kind, ranks, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    strategy: Any = "auto" if ranks == 1 else "ddp"
    if kind == "ours":
        from megatron_lightning.strategies import MegatronStrategy

        strategy = MegatronStrategy()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        max_steps=1,
        callbacks=[_FirstStep(file)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Module(), DataLoader(torch.randn(4 * _ROWS, _LENGTH, _WIDTH), batch_size=_ROWS))


if __name__ == "__main__":
    main()
