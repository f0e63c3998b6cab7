"""A GPT on samples that litData streams, stopped and resumed.

    python examples/streaming.py --steps 6                 # TP 2 x PP 2
    python examples/streaming.py --steps 12                # resumes

Needs litData (``pip install litdata``). The first run writes samples of 16 tokens to
demo/stream. litData shards by processes; under tensor and pipeline parallelism several processes
share a replica, and read the same samples.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import litdata
import torch

from megatron_lightning.config import TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy


def sample(number: int) -> dict[str, Any]:
    """Return a sample: ascending numbers, from a number on."""
    tokens = (torch.arange(17) + number) % 50
    return {"number": number, "tokens": tokens[:-1], "labels": tokens[1:]}


@contextmanager
def replicas(num_replicas: int, rank: int) -> Iterator[None]:
    """Show the data-parallel ranks to litData as the processes of the job."""
    names = {"WORLD_SIZE": str(num_replicas), "GLOBAL_RANK": str(rank), "NNODES": "1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


class ReplicaLoader(litdata.StreamingDataLoader):
    """litData's loader, sharded by data-parallel ranks.

    Args:
        folder: Folder written by ``litdata.optimize``.
        share: ``num_replicas`` and ``rank``.
        options: Options of the loader.
    """

    def __init__(self, folder: str, share: dict[str, int], **options: Any) -> None:
        self.share = share
        with replicas(**share):
            stream = litdata.StreamingDataset(folder, shuffle=True, drop_last=True)
            super().__init__(stream, **options)

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Resume. litData compares the numbers of processes."""
        with replicas(**self.share):
            super().load_state_dict(obj)


class Stream(pl.LightningDataModule):
    """Samples of a folder.

    Args:
        folder: Folder written by ``litdata.optimize``.
        global_batch: Samples of a step over all replicas, equal in every run.
        num_workers: Worker processes of a loader.
    """

    def __init__(self, folder: str, global_batch: int, num_workers: int = 0) -> None:
        super().__init__()
        self.folder, self.global_batch, self.num_workers = folder, global_batch, num_workers

    def train_dataloader(self) -> ReplicaLoader:
        """Return the loader of this data-parallel rank."""
        share = dict(self.trainer.strategy.distributed_sampler_kwargs)  # type: ignore[union-attr]
        return ReplicaLoader(
            self.folder,
            share,
            batch_size=self.global_batch // share["num_replicas"],
            num_workers=self.num_workers,
        )


def model() -> GPTLightningModule:
    """Return a tiny GPT."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=50, max_sequence_length=16
    )
    return GPTLightningModule(config, learning_rate=1e-3)


def layout(num_replicas: int) -> MegatronStrategy:
    """Return TP 2 x PP 2 for one replica, or data parallelism."""
    if num_replicas == 1:
        return MegatronStrategy(
            tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=4
        )
    return MegatronStrategy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    pl.seed_everything(0)
    folder, checkpoint = Path("demo/stream"), Path("demo/stream.ckpt")
    devices = 4 if options.replicas == 1 else options.replicas
    trainer = pl.Trainer(
        strategy=layout(options.replicas),
        accelerator="cpu",
        devices=devices,
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
    )
    if trainer.is_global_zero and not folder.exists():
        litdata.optimize(sample, list(range(384)), str(folder), num_workers=1, chunk_size=16)
    resumed = str(checkpoint) if checkpoint.exists() else None
    trainer.fit(model(), Stream(str(folder), global_batch=16), ckpt_path=resumed)
    trainer.save_checkpoint(checkpoint)
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}, loss {trainer.callback_metrics['train_loss']:.4f}")
