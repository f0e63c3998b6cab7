"""Several runs of one strategy: each run assembles its own module, and finds nothing of the module
before."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn

from megatron_lightning.checkpoint import read_full
from megatron_lightning.config import RecomputeOptions
from tests.lightning.support import (
    DP2,
    ONE,
    PP2,
    Layout,
    assert_close,
    layouts,
    make_layout,
    run,
    single,
)
from tests.lightning.vectors import Net, VectorModule, loader

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")


def _second_module(layout: Layout, folder: str) -> dict[str, Tensor]:
    """Fit a module, then another one that each rank has initialized differently; return the weights
    of the second."""
    chosen = layout.trainer(folder, max_epochs=1)
    chosen.fit(VectorModule(), loader(layout))
    torch.manual_seed(10 + (dist.get_rank() if dist.is_initialized() else 0))
    # As the first has them.
    layers = (nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    second = VectorModule(Net(*layers))
    chosen.fit_loop.max_epochs = 2
    chosen.fit(second, loader(layout))
    chosen.save_checkpoint(Path(folder, "second.ckpt"))
    return dict(read_full(Path(folder, "second.ckpt"))["state_dict"])


@pytest.mark.spread(1)
@layouts(DP2, PP2, FSDP2)
def test_a_second_module_starts_equal_on_all_ranks(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _second_module, tmp_path):
        assert_close(rank, single(_second_module))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).sigmoid()


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(), _Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = layer(x)
        return x[:, :4]


def test_a_second_module_recomputes_as_the_first(tmp_path: Path) -> None:
    recompute = RecomputeOptions(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    chosen = pl.Trainer(
        strategy=ONE.strategy(recompute=recompute),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=tmp_path,
    )
    calls = []
    for epochs in (1, 2):
        module = VectorModule(_Blocks())
        chosen.fit_loop.max_epochs = epochs
        chosen.fit(module, loader(ONE))
        calls.append([layer.calls for layer in module.net.layers])  # type: ignore[union-attr]
    assert calls == [[8, 8], [8, 8]]  # 4 batches, each forward run twice


class _RecordsSync(LayerSync):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def apply(self, model: nn.Module) -> nn.Module:
        self.calls.append("apply")
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.calls.append("revert")
        return model


def _synchronized(layout: Layout, folder: str) -> list[str]:
    sync, module = _RecordsSync(), VectorModule()
    chosen = layout.trainer(folder, max_epochs=1, plugins=[sync])
    chosen.validate(module, loader(layout), verbose=False)
    chosen.fit(module, loader(layout))
    chosen.fit_loop.max_epochs = 2
    chosen.fit(module, loader(layout))
    return [call for call in sync.calls if call == "apply"]


def test_layers_are_synchronized_in_every_fit(tmp_path: Path) -> None:
    """Also after a validation of the same module, and again after the first fit has reverted
    them."""
    assert run(DP2, _synchronized, tmp_path) == [["apply", "apply"]] * 2
