"""An ordinary LightningModule of a user's own; the only part for a pipeline is
``pipeline_units``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from megatron_lightning.data.order.reading_thread import ReadingThreadLoader
from tests.helpers.toy_decoder import SEQUENCE, VOCABULARY, ToyDecoder


class ToyModule(pl.LightningModule):
    def __init__(
        self, lr: float = 1e-2, num_layers: int = 4, plateau: bool = False, mask: bool = False
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: ToyDecoder | None = None
        self.val_acc = MulticlassAccuracy(VOCABULARY, average="micro")
        self.train_mean = MeanMetric()

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = ToyDecoder(self.hparams.num_layers)

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        ids = batch["ids"]
        if self.hparams.mask:
            ids = torch.where(torch.rand(ids.shape) < 0.2, torch.zeros_like(ids), ids)
        logits = self.model(ids)
        return F.cross_entropy(logits.flatten(0, 1), batch["tgt"].flatten()), logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss, _ = self._loss(batch)
        self.train_mean(loss)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
        self.log(
            "tokens",
            float(batch["ids"].numel()),
            reduce_fx="sum",
            on_step=False,
            on_epoch=True,
            sync_dist=True,
        )
        return {"loss": loss, "ppl": loss.detach().exp()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, logits = self._loss(batch)
        self.val_acc.update(logits.flatten(0, 1), batch["tgt"].flatten())
        self.log("val_acc", self.val_acc, on_epoch=True)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, _ = self._loss(batch)
        self.log_dict({"test_loss": loss}, sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["ids"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        if self.hparams.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def samples(num: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (num, SEQUENCE), generator=generator)
    return [{"ids": ids[i], "tgt": (ids[i] * 3 + 1) % VOCABULARY} for i in range(num)]


class ToyData(pl.LightningDataModule):
    def __init__(
        self,
        batch_size: int = 8,
        num_samples: int = 64,
        shuffle: bool = False,
        num_workers: int = 0,
        reading_thread: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def _loader(self, num: int, seed: int, **options: Any) -> DataLoader[Any]:
        kind = ReadingThreadLoader if self.hparams.reading_thread else DataLoader
        return kind(samples(num, seed), batch_size=self.hparams.batch_size, **options)

    def train_dataloader(self) -> DataLoader[Any]:
        options = {"shuffle": self.hparams.shuffle, "num_workers": self.hparams.num_workers}
        # A rank of the fork server would start workers through a fork server of its own.
        if self.hparams.num_workers:
            options["multiprocessing_context"] = "fork"
        return self._loader(self.hparams.num_samples, 1, **options)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(32, 2)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(32, 3)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self._loader(16, 4)
