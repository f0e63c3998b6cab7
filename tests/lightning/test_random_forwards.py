"""Random numbers in a divided forward: equal on all stages between units, the same in a
recomputation, and never drawn twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from megatron_lightning.config import RecomputeOptions
from tests.lightning.support import PP2, PP2_DP2, Layout, layouts, make_layout, run
from tests.lightning.vectors import VectorModule, loader

PP4 = make_layout("pp4", 4, 1, pipeline_model_parallel_size=4, micro_batch_size=2)
PP2_ZBV = make_layout(
    "pp2-zbv",
    2,
    1,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    micro_batch_size=2,
    pipeline_schedule="zbv",
)
RECOMPUTED = make_layout(
    "pp2-recomputed",
    2,
    1,
    pipeline_model_parallel_size=2,
    micro_batch_size=2,
    recompute=RecomputeOptions(
        recompute_granularity="selective", recompute_modules=["**.blocks.*"]
    ),
)


class Noisy(nn.Module):
    """Four blocks with dropout; before each block it draws a number, and keeps it in ``drawn``."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(8, 4)
        self.checkpoints = checkpoints
        self.drawn: list[tuple[int, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            noise = torch.rand(())
            if torch.is_grad_enabled() and not isinstance(noise, FakeTensor):
                self.drawn.append((index, float(noise)))
            x = x + noise
            again = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            x = x + again
        return self.head(x)


def _train(layout: Layout, folder: str, checkpoints: bool) -> tuple[list[float], Any]:
    module, losses = VectorModule(Noisy(checkpoints)), []
    trainer = layout.trainer(folder, max_epochs=1)
    module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
    trainer.fit(module, loader(layout))
    return losses, module.net.drawn


@layouts(PP2, slow=[PP2_DP2, PP4])
def test_stages_draw_the_same_numbers_between_units(layout: Layout, tmp_path: Path) -> None:
    ranks = [set(drawn) for _, drawn in run(layout, _train, tmp_path, False)]
    replicas = [ranks[index :: layout.data] for index in range(layout.data)]
    for stages in replicas:
        longest = max(stages, key=len)
        assert len(longest) == 4 * 4 * 4 // layout.data  # blocks, micro-batches, steps: all differ
        assert all(stage <= longest for stage in stages)
    assert len(set.union(*ranks)) == 4 * 4 * 4  # replicas differ too


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(PP2, _train, tmp_path_factory.mktemp("pp2"), False)[0][0]


@layouts(PP2, slow=[PP4, PP2_ZBV, RECOMPUTED])
@pytest.mark.parametrize("checkpoints", [True, False])
def test_dropout_depends_on_no_layout_and_repeats_in_recomputation(
    layout: Layout, checkpoints: bool, losses: list[float], tmp_path: Path
) -> None:
    found = run(layout, _train, tmp_path, checkpoints)[0][0]
    assert found == pytest.approx(losses, rel=1e-5)  # fp32
