"""Parameters as models of users have them: empty, scalar, transposed, complex, left out of the
optimizer, never used.

fp32 losses, and weights after five steps, are compared with one device to 1e-5, as in test_layouts.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

GLOBAL_BATCH, STEPS, TOLERANCE = 4, 5, 1e-5
OFFLOAD = DataParallelOptions(optimizer_cpu_offload=True)


class _Unusual(pl.LightningModule):
    def __init__(self, *, phases: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 13)
        self.first.weight = nn.Parameter(self.first.weight.detach().t().contiguous().t())
        self.second = nn.Linear(13, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(3, 3)
        self.left_out = nn.Parameter(torch.ones(13))
        self.phases = (
            nn.Parameter(torch.polar(torch.ones(13), torch.arange(13.0))) if phases else None
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = torch.tanh(self.first(batch)) * self.left_out
        if self.phases is not None:
            h = (h * self.phases).real + self.phases.imag
        return F.mse_loss(self.second(h) * self.scale, batch.sum(-1, keepdim=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [p for name, p in self.named_parameters() if name != "left_out"], lr=1e-2
        )


def _weights(
    strategy: MegatronStrategy | str, *, phases: bool = False, precision: Any = "32-true"
) -> dict[str, Any]:
    world = 1 if strategy == "auto" else 2
    rows: Any = torch.randn(STEPS * GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(1))
    module = _Unusual(phases=phases)
    fit = trainer(strategy, max_epochs=1, precision=precision)
    fit.fit(module, DataLoader(rows, batch_size=GLOBAL_BATCH // world))
    kept = {name: value.detach() for name, value in module.state_dict().items()}
    return {
        name: (torch.view_as_real(value) if value.is_complex() else value).double().numpy()
        for name, value in kept.items()
    }


def _one_device() -> dict[str, Any]:
    return _weights("auto", phases=True)


def _two_ranks() -> list[dict[str, Any]]:
    half = DataParallelOptions(grad_reduce_in_bf16=True)
    return [
        _weights(MegatronStrategy(data_parallel="zero1"), phases=True),
        _weights(MegatronStrategy(data_parallel="ddp"), phases=True),
        _weights(MegatronStrategy(data_parallel="zero1", data_parallel_options=half), phases=True),
        _weights(MegatronStrategy(data_parallel="zero1"), precision="bf16-true"),
        _weights(
            MegatronStrategy(data_parallel="zero1", data_parallel_options=OFFLOAD),
            precision="bf16-true",
        ),
    ]


def _largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(abs(one[name] - other[name]).max(initial=0.0)) for name in one)


def test_unusual_parameters_equal_one_device() -> None:
    plain = run_ranks(1, _one_device)[0]
    for zero1, ddp, sent_as_bf16, masters, masters_on_the_host in run_ranks(2, _two_ranks):
        assert _largest_difference(zero1, plain) < TOLERANCE
        assert _largest_difference(ddp, plain) < TOLERANCE
        # Rounding a gradient turns few of Adam's five steps of 1e-2; a part that is lost turns none
        # of them into a step.
        assert _largest_difference(sent_as_bf16, plain) < 1e-2
        assert _largest_difference(masters_on_the_host, masters) == 0.0
