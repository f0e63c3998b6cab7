"""Resume with other parameter groups, with layers that a callback has unfrozen, and with layers
that are frozen now."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.errors import CheckpointError
from megatron_lightning.resilience.failure import PeerFailure
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    DDP2,
    DP2,
    ONE,
    SINGLE,
    TP2_TOY,
    Layout,
    assert_close,
    layouts,
    make_layout,
    run,
    single,
)

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")


class _Transfer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8)
        self.backbone = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.backbone(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)


def _fit(
    layout: Layout, folder: str, epochs: int, ckpt_path: str | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    trainer = layout.trainer(
        folder,
        max_epochs=epochs,
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False)],
    )
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(torch.randn(16, 4, generator=generator), batch_size=8 // layout.data)
    module = _Transfer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    parameters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return parameters, [str(w.message) for w in caught if "had unfrozen" in str(w.message)]


def _resumed(layout: Layout, folder: str) -> tuple[Any, Any, list[str]]:
    whole, _ = _fit(layout, folder, 4)
    _fit(layout, folder, 2)
    again, texts = _fit(layout, folder, 4, f"{folder}/2.ckpt")
    return whole, again, texts


@layouts(ONE, DDP2)
def test_a_backbone_that_was_unfrozen_is_trained_again(layout: Layout, tmp_path: Path) -> None:
    for rank, (whole, again, texts) in enumerate(run(layout, _resumed, tmp_path)):
        assert_close(again, whole)
        assert len(texts) == (rank == 0), texts


class _Grouped(ToyModule):
    def __init__(self, first: int, decays: tuple[float, float]) -> None:
        super().__init__(num_layers=2)
        self.first, self.decays = first, decays

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [parameters[: self.first], parameters[self.first :]]
        return torch.optim.AdamW(
            [
                {"params": params, "weight_decay": decay}
                for params, decay in zip(groups, self.decays, strict=True)
                if params
            ],
            lr=1e-3,
        )


def _regrouped(
    layout: Layout, folder: str, saves: tuple[Any, ...], loads: tuple[Any, ...], plain: bool
) -> str:
    saving = SINGLE if plain else layout
    trainer = saving.trainer(folder, max_steps=1, limit_val_batches=0)
    trainer.fit(_Grouped(*saves), datamodule=layout.data_module())
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    resumed = layout.trainer(folder, max_steps=2, limit_val_batches=0)
    try:
        resumed.fit(_Grouped(*loads), datamodule=layout.data_module(), ckpt_path=f"{folder}/a.ckpt")
    except CheckpointError as error:
        return str(error)
    except PeerFailure:
        return "refused"
    return ""


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("saves", "loads", "plain", "text"),
    [
        ((99, (0.1, 0.1)), (3, (0.1, 0.0)), False, "saved in one group, and are now in groups"),
        ((3, (0.1, 0.0)), (5, (0.1, 0.0)), False, "in one group now, and were saved in groups"),
        ((3, (0.1, 0.1)), (5, (0.1, 0.1)), False, ""),
        ((3, (0.1, 0.0)), (3, (0.2, 0.0)), False, ""),  # the saved options are taken, as in torch
        ((3, (0.1, 0.0)), (5, (0.1, 0.0)), True, "of other parameters"),
    ],
    ids=["divided", "moved", "equal", "same", "plain"],
)
@layouts(ONE, slow=[DP2, TP2_TOY, FSDP2])
def test_parameters_take_no_other_groups_options(
    layout: Layout, saves: Any, loads: Any, plain: bool, text: str, tmp_path: Path
) -> None:
    for found in run(layout, _regrouped, tmp_path, saves, loads, plain):
        assert (text in found and "Group the parameters" in found) if text else not found, found


class _Frozen(ToyModule):
    """The first layer is frozen, and in the optimizer."""

    def __init__(self, frozen: bool) -> None:
        super().__init__(num_layers=2)
        self.frozen = frozen

    def configure_model(self) -> None:
        super().configure_model()
        self.model.layers["0"].requires_grad_(not self.frozen)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _freeze(layout: Layout, folder: str) -> list[float]:
    """Train all, then without the first layer, then all again: its momentum was kept."""
    path = None
    for epochs, frozen in ((1, False), (2, True), (3, False)):
        trainer = layout.trainer(folder, max_epochs=epochs, limit_val_batches=0)
        trainer.fit(_Frozen(frozen), datamodule=layout.data_module(), ckpt_path=path)
        path = f"{folder}/{epochs}.ckpt"
        trainer.save_checkpoint(path)
    return [float(trainer.callback_metrics["train_loss_step"])]


@pytest.mark.slow
@layouts(FSDP2, DP2)
def test_a_layer_that_is_frozen_now_keeps_its_state(layout: Layout, tmp_path: Path) -> None:
    ranks = run(layout, _freeze, tmp_path)
    mean = sum(rank[0] for rank in ranks) / len(ranks)
    assert_close(mean, single(_freeze)[0])
