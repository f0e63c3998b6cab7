"""A made-up layer of experts, its style, and an ordinary LightningModule around it.

Every token uses all experts, weighted by a router, so that one process is the reference and no
token is dropped. Under a layout the tokens are divided over the tensor-parallel ranks, gathered
over the ranks that together hold all experts (``etp-ep``), and what these compute of them is
reduce-scattered.

    E = experts, F = width of an expert, H = hidden size, T = tokens of a rank, A = tokens gathered
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.layers.styles import ColumnParallel, RowParallel
from megatron_lightning.optim import ChainedOptimizer
from megatron_lightning.parallel import ParallelContext, ShardingPlan, ShardSpec
from megatron_lightning.parallel.collectives import (
    gather,
    gather_sequence,
    reduce_scatter,
    scatter,
)
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup
from megatron_lightning.parallel.random.rng import RngStreams
from megatron_lightning.parallel.shards.sharding import take_shards

HIDDEN, WIDTH, EXPERTS, SEQUENCE = 8, 12, 4, 4


class ToyExperts(nn.Module):
    """Gated experts and their router; plain PyTorch on one process."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.5)
        self.fc1 = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) * 0.5)
        self.fc2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.1)
        self.own: AxisGroup = ALONE
        """Ranks that divide the tokens of a replica."""
        self.all: AxisGroup = ALONE
        """Ranks that together hold all experts."""
        self.first, self.num_shards = 0, 1
        self.dropout = dropout
        self.rng: RngStreams | None = None

    def forward(self, x_TH: Tensor) -> Tensor:
        x_TH = scatter(x_TH, self.own)
        probs_TE = (x_TH @ self.router.T).softmax(-1)
        seen = gather_sequence(torch.cat([x_TH, probs_TE], dim=1), self.all)
        x_AH, probs_AE = seen.split([HIDDEN, EXPERTS], dim=1)
        gate_AEF, up_AEF = torch.einsum("ah,efh->aef", x_AH, self.fc1).chunk(2, dim=-1)
        hidden_AEF = F.silu(gate_AEF) * up_AEF
        if self.dropout and self.rng is not None:
            with self.rng.fork("expert-parallel-rng"):
                hidden_AEF = F.dropout(hidden_AEF, self.dropout)
        # Every rank adds its share of the bias to its partial sum over F.
        out_AEH = torch.einsum("aef,ehf->aeh", hidden_AEF, self.fc2) + self.bias / self.num_shards
        mine_AE = probs_AE.narrow(1, self.first, len(self.fc1))
        out_AH = torch.einsum("ae,aeh->ah", mine_AE, out_AEH)
        return gather(reduce_scatter(out_AH, self.all), self.own, dim=0)


class ExpertStyle:
    """Split :class:`ToyExperts`: experts over ``ep``, the width of each over ``etp``."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        assert isinstance(module, ToyExperts)
        take_shards(module, module, specs_of(module, context))
        module.own, module.all = context.tp, context.axis("etp-ep")
        module.first = context.ep.rank * EXPERTS // context.ep.size
        module.num_shards = context.etp.size
        module.rng = context.rng
        return module


def specs_of(module: ToyExperts, context: ParallelContext) -> dict[str, ShardSpec]:
    """Return the spec of every parameter of the layer on one rank."""
    ep: Any = {"size": context.ep.size, "rank": context.ep.rank, "axis": "ep"}
    etp: Any = {"size": context.etp.size, "rank": context.etp.rank, "axis": "etp"}
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    experts = {
        name: ShardSpec.split(shape, dim=0, **ep)
        for name, shape in shapes.items()
        if name != "router"
    }
    rows = ShardSpec.split(shapes["fc1"], dim=1, blocks=2, **etp)
    columns = ShardSpec.split(shapes["fc2"], dim=2, **etp)
    return {
        "router": ShardSpec.replicated(shapes["router"], partial_over=("tp",)),
        "fc1": experts["fc1"].crossed(rows),
        "fc2": experts["fc2"].crossed(columns),
        "bias": experts["bias"].crossed(
            ShardSpec.replicated(shapes["bias"], partial_over=("etp",))
        ),
    }


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.experts = ToyExperts(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.experts(x.flatten(0, 1)).view_as(x)


class ToyNet(nn.Module):
    """Two blocks of dense layers and experts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(_Block(dropout) for _ in range(2))
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def init_weights(self, name: str, tensor: Tensor) -> None:
        """Fill a parameter by a seed of its name, as models that are built on ``meta`` do."""
        tensor.normal_(generator=torch.Generator().manual_seed(crc32(name.encode())))

    def sharding_plan(self) -> ShardingPlan:
        return ShardingPlan(
            sequence_dim=1,
            modules={
                "blocks.*.up": ColumnParallel(),
                "blocks.*.down": RowParallel(),
                "blocks.*.experts": ExpertStyle(),
            },
        )


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    # Unlike Adam's, its steps show the scale of a gradient.
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _muon(module: nn.Module) -> torch.optim.Optimizer:
    dense = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.dim() == 2 and "experts" not in name
    }
    rest = [parameter for name, parameter in module.named_parameters() if name not in dense]
    return ChainedOptimizer(
        torch.optim.Muon(dense.values(), lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)
    )


OPTIMIZERS: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "muon": _muon,
}


class ExpertModule(pl.LightningModule):
    """Regression on tokens, of which a different number counts in every sample."""

    def __init__(self, optimizer: str = "adamw", dropout: float = 0.0) -> None:
        super().__init__()
        self.net: ToyNet | None = None
        self._optimizer, self._dropout = optimizer, dropout

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            self.net = ToyNet(self._dropout)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        errors = (self.net(batch["x"]) - batch["y"]).square().mean(-1)
        count = batch["mask"].sum()
        return {"loss": (errors * batch["mask"]).sum() / count, "num_items": count}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self._optimizer](self)


def loader(num_samples: int, batch_size: int) -> DataLoader[Any]:
    """Return batches in a fixed order; samples have one to ``SEQUENCE`` tokens that count."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_samples, SEQUENCE, HIDDEN, generator=generator)
    lengths = torch.randint(1, SEQUENCE + 1, (num_samples, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < lengths).float()
    return DataLoader(
        [{"x": x[i], "y": x[i].roll(1, -1).sin() * 2, "mask": mask[i]} for i in range(num_samples)],
        batch_size=batch_size,
    )
