"""Megatron-Energon: every sample is read by one replica, and a run resumes to the sample."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

energon = pytest.importorskip("megatron.energon")

NUM_SHARDS, SHARD, BATCH, STEPS = 4, 12, 4, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write numbers as text, in shards that Energon's own command prepares."""
    path = tmp_path_factory.mktemp("energon")
    for shard in range(NUM_SHARDS):
        with tarfile.open(path / f"shard-{shard}.tar", "w") as file:
            for number in range(shard * SHARD, (shard + 1) * SHARD):
                info = tarfile.TarInfo(f"{number:05d}.txt")
                info.size = len(data := str(number).encode())
                file.addfile(info, io.BytesIO(data))
    command = [
        *(sys.executable, "-m", "megatron.energon.cli.main", "prepare", "--non-interactive"),
        *("--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map"),
        *('{"text": "txt"}', "--num-workers", "1", str(path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return str(path)


class Encoder(energon.DefaultTaskEncoder):  # type: ignore[misc]
    """Returns batches of tensors. Energon's own hold frozen records, which Lightning refuses."""

    def encode_batch(self, batch: Any) -> dict[str, Tensor]:
        return {"number": torch.tensor([int(text) for text in batch.text])}


class Numbers(pl.LightningModule):
    """Fits a line through numbers, and collects them."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.folder = folder
        self.numbers: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.numbers.append(batch["number"].tolist())
        x = batch["number"].float()[:, None]
        loss: Tensor = (self.line(x / 48) - x).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        share = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        config = energon.WorkerConfig(
            rank=share["rank"], world_size=share["num_replicas"], num_workers=0
        )
        dataset = energon.get_train_dataset(
            self.folder, worker_config=config, batch_size=BATCH, shuffle_buffer_size=None,
            max_samples_per_sequence=None, virtual_epoch_length=STEPS, task_encoder=Encoder(),
        )  # fmt: skip
        return energon.get_savable_loader(dataset)


def _train(folder: str, kept: str, ckpt_path: str | None) -> tuple[list[list[int]], list[float]]:
    """Return the samples of every step of this rank, and the trained weights."""
    pl.seed_everything(1, verbose=False)
    keep = ModelCheckpoint(kept, "{step}", every_n_train_steps=2, save_top_k=-1)
    run = trainer(MegatronStrategy(), max_epochs=1, callbacks=[keep], enable_checkpointing=True)
    module = Numbers(folder)
    run.fit(module, ckpt_path=ckpt_path)
    return module.numbers, [float(p.detach()) for p in module.parameters()]


def test_resumed_to_the_sample(folder: str, tmp_path: Path) -> None:
    whole = run_ranks(2, _train, folder, str(tmp_path), None, timeout_s=60)
    read = sorted(number for rank, _ in whole for batch in rank for number in batch)
    assert read == list(range(NUM_SHARDS * SHARD))
    assert whole[0][1] == whole[1][1]
    resumed = run_ranks(2, _train, folder, str(tmp_path / "2"), f"{tmp_path}/step=2.ckpt")
    for (numbers, weights), (rest, others) in zip(whole, resumed, strict=True):
        assert rest == numbers[2:] and others == weights
