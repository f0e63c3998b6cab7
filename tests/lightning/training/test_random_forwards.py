"""Random numbers in a divided forward: equal on all stages between units, the same in a
recomputation, and never drawn twice.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
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


@pytest.mark.spread(1)
@layouts(PP2, slow=[PP4, PP2_ZBV, RECOMPUTED])
@pytest.mark.parametrize("checkpoints", [True, False])
def test_dropout_depends_on_no_layout_and_repeats_in_recomputation(
    layout: Layout, checkpoints: bool, losses: list[float], tmp_path: Path
) -> None:
    found = run(layout, _train, tmp_path, checkpoints)[0][0]
    assert found == pytest.approx(losses, rel=1e-5)  # fp32


def _resume(layout: Layout, folder: str) -> list[list[float]]:
    """Return the losses of a run, of one that resumes it in the middle, and of one without any
    evaluation.
    """
    results = []
    for options in (
        {"callbacks": [ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)]},
        {"ckpt_path": f"{folder}/step=2.ckpt"},
        {"limit_val_batches": 0},
    ):
        torch.manual_seed(0)
        module, losses = VectorModule(Noisy()), []
        path = options.pop("ckpt_path", None)
        module.on_train_batch_end = lambda outputs, *_, kept=losses: kept.append(
            float(outputs["loss"])
        )
        trainer = layout.trainer(
            folder,
            max_steps=4,
            **{"val_check_interval": 2, "num_sanity_val_steps": 1, "enable_checkpointing": True}
            | options,
        )
        trainer.fit(module, loader(layout), loader(layout), ckpt_path=path)
        results.append(losses)
    return results


@pytest.mark.slow
def test_evaluations_do_not_change_what_training_draws(tmp_path: Path) -> None:
    """A checkpoint lies before the validation of its step, which a resumed run leaves out."""
    whole, resumed, alone = run(PP2, _resume, tmp_path)[0]
    assert resumed == whole[2:]
    assert alone == whole


class Mixed(VectorModule):
    """Mixes samples by numbers of Python and NumPy that the step draws."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        share = np.random.beta(1, 1) * random.random()
        mixed = share * batch[0] + (1 - share) * batch[0].flip(0)
        self.drawn.append(share)
        return F.cross_entropy(self.net(mixed), batch[1])


PP2_VPP2 = make_layout(
    "pp2-vpp2",
    2,
    1,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    micro_batch_size=2,
)


def _mix(layout: Layout, folder: str) -> list[float]:
    random.seed(0)
    np.random.seed(0)
    module = Mixed()
    module.drawn = []
    layout.trainer(folder, max_epochs=1).fit(module, loader(layout))
    return module.drawn


def test_steps_draw_the_same_numbers_of_python_and_numpy_on_all_stages(tmp_path: Path) -> None:
    first, second = (set(drawn) for drawn in run(PP2_VPP2, _mix, tmp_path))
    assert first == second and len(first) == 4 * 4  # micro-batches, steps


class _DropPath(nn.Linear):
    """Scales samples by numbers that NumPy and Python draw, as public code does."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.tensor(np.random.rand(len(x), 1) < 0.7, dtype=x.dtype)
        return super().forward(x).tanh() * kept * random.uniform(0.5, 1.5)


class _NoisyOnHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_DropPath(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x + random.random()) * np.random.rand()
        return self.head(x)


def _train_on_host(layout: Layout, folder: str) -> list[float]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    module, losses = VectorModule(_NoisyOnHost()), []
    module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
    layout.trainer(folder, max_epochs=1).fit(module, loader(layout))
    return losses


def test_numbers_of_python_and_numpy_in_forwards_depend_on_no_layout(tmp_path: Path) -> None:
    first, *others = [run(layout, _train_on_host, tmp_path)[0] for layout in (PP2, PP2_VPP2)]
    assert len(set(first)) == 4
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-5)  # fp32
