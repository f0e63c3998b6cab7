"""Metric learning with the whole global batch as negatives, on any layout.

The loss compares every pair with all others, and a pipeline sees a micro-batch at a time. So the
step asks for all embeddings first, without gradients, computes the loss and its gradient by the
embeddings of all micro-batches and data-parallel ranks, and passes the gradient to the forwards
that train (https://arxiv.org/abs/2101.06983). Memory is that of a micro-batch. The model must not
draw random numbers, such as those of dropout, since both forwards have to agree.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megatron_lightning.config import PipelineOptions
from megatron_lightning.strategies import MegatronStrategy, run_pipeline


class Contrastive(pl.LightningModule):
    """Two views of a sample have near embeddings, and those of other samples are far (InfoNCE)."""

    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
        self.encoder = nn.Sequential(*blocks, nn.Linear(16, 8))
        self.temperature = temperature

    def embed(self, batch: list[Tensor]) -> Tensor:
        """Return embeddings [b, 2, d] of two views [b, f] each."""
        views = self.encoder(torch.cat(batch[:2]))
        return F.normalize(torch.stack(views.chunk(2), 1), dim=-1)

    def contrast(self, embeddings: Tensor) -> Tensor:
        """Return the loss of all embeddings [n, 2, d]."""
        first, second = embeddings.unbind(1)
        scores = first @ second.t() / self.temperature
        target = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2

    def all_ranks(self, embeddings: Tensor) -> tuple[Tensor, slice]:
        """Return the embeddings of all data-parallel ranks, and the place of this rank's."""
        mesh = self.device_mesh
        if mesh is None or mesh["dp"].size() == 1:
            return embeddings, slice(len(embeddings))
        parts = [torch.empty_like(embeddings) for _ in range(mesh["dp"].size())]
        dist.all_gather(parts, embeddings.contiguous(), group=mesh["dp"].get_group())
        begin = len(embeddings) * mesh["dp"].get_local_rank()
        return torch.cat(parts), slice(begin, begin + len(embeddings))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            embeddings, own = self.all_ranks(run_pipeline(self, self.embed, batch))
        leaf = embeddings.detach().requires_grad_()
        loss = self.contrast(leaf)
        (gradient,) = torch.autograd.grad(loss, leaf)
        # A step's loss is a mean over samples, and this gradient is of a sum.
        gradient = gradient[own] * len(gradient)
        carried = run_pipeline(self, self.with_gradient, [*batch, gradient])
        self.log("loss", loss.detach())
        return carried - carried.detach() + loss.detach()  # the loss, with that gradient

    def with_gradient(self, batch: list[Tensor]) -> Tensor:
        """Return a value with the gradient of the loss."""
        return (self.embed(batch) * batch[2]).flatten(1).sum(1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


if __name__ == "__main__":
    pl.seed_everything(0)
    first = torch.randn(64, 16)
    views = TensorDataset(first, first + 0.1 * torch.randn_like(first))
    strategy = MegatronStrategy(
        pipeline_model_parallel_size=2,
        micro_batch_size=4,
        pipeline_options=PipelineOptions(explicit_steps=True),
    )
    trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=20)
    trainer.fit(Contrastive(), DataLoader(views, batch_size=16))
