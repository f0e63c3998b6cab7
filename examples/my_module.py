"""User-defined module on two pipeline stages: ``python examples/my_module.py``."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from megatron_lightning.strategies import MegatronStrategy


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0)  # every process draws the same data
    x = torch.randn(512, 32)
    data = DataLoader(TensorDataset(x, (x.sum(dim=1) > 0).long()), batch_size=64)
    strategy = MegatronStrategy(pipeline_model_parallel_size=2, micro_batch_size=16)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=5,
        logger=False,
    )
    trainer.fit(Classifier(), data)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}")
