"""Small models that classify vectors, with data for every layout."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.lightning.support import Layout


class Net(nn.Sequential):
    def pipeline_units(self) -> list[str]:
        return list(self._modules)


class VectorModule(pl.LightningModule):
    """Classifies vectors."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net or Net(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def vectors(num: int = 32, seed: int = 0) -> TensorDataset:
    x = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(dim=1) > 0).long() + (x[:, 0] > 0).long())


def loader(layout: Layout, data: Any = None) -> DataLoader[Any]:
    return DataLoader(data or vectors(), batch_size=8 // layout.data)
