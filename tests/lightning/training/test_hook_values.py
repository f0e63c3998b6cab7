"""Values that hooks log, and optimizers that hooks step: as on one device, or named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import (
    DDP2,
    DP2,
    PP2,
    Layout,
    assert_close,
    layouts,
    make_layout,
    mean_over_ranks,
    run,
    single,
)
from tests.lightning.vectors import VectorModule, loader, vectors

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
CALLS = {"steps": 0.0}


class Logs(VectorModule):
    """Logs what each stage has of its own, and what all have."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        CALLS["steps"] += 1
        return output

    def on_train_epoch_end(self) -> None:
        own = [parameter.norm() for parameter in self.parameters()]
        self.log("norm", torch.stack(own).norm())
        self.log("steps", CALLS["steps"])
        self.log("equal", float(self.trainer.global_step))


def _warned(layout: Layout, folder: str) -> list[str]:
    trainer = layout.trainer(folder, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Logs(), loader(layout, vectors(16)))
    return [str(w.message) for w in caught if "hooks have logged" in str(w.message)]


@layouts(PP2, slow=[DP2])
def test_values_of_one_rank_that_hooks_log_are_named_once(layout: Layout, tmp_path: Path) -> None:
    texts, others = run(layout, _warned, tmp_path)
    assert others == [] and len(texts) == (layout is PP2)
    for text in texts:
        assert "hooks have logged 'norm', 'steps' with other values" in text
        assert "strategy.full_tensors()" in text


class Own(VectorModule):
    """Steps an optimizer that the Trainer does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_fit_start(self) -> None:
        self.own = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_after_backward(self) -> None:
        self.own.step()
        self.own.zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return None


def _losses(layout: Layout, folder: str) -> list[float]:
    module = Own()
    layout.trainer(folder, max_epochs=1).fit(module, loader(layout, vectors(32)))
    return module.losses


@layouts(DP2, slow=[DDP2])
def test_an_optimizer_of_hooks_alone_steps_full_gradients(layout: Layout, tmp_path: Path) -> None:
    assert_close(mean_over_ranks(run(layout, _losses, tmp_path)), single(_losses))


def _refused(layout: Layout, folder: str) -> str:
    with pytest.raises((ConfigError, PeerFailure)) as caught:
        _losses(layout, folder)
    return "" if isinstance(caught.value, PeerFailure) else str(caught.value)


def test_an_optimizer_of_hooks_alone_is_refused_where_parameters_are_sharded(
    tmp_path: Path,
) -> None:
    texts = run(FSDP2, _refused, tmp_path)
    assert any(texts)
    assert all(not text or "configure_optimizers returned None" in text for text in texts)


class Lists(pl.Callback):
    """Saves weights as numbers and as bytes."""

    def state_dict(self) -> dict[str, Any]:
        weight = max((p.detach() for p in self.module.parameters()), key=Tensor.numel)
        return {
            "numbers": {"deep": weight.tolist()},
            "bytes": weight.numpy().tobytes(),
            "equal": list(range(100)),
        }

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.module = pl_module


def _saved(layout: Layout, folder: str) -> list[str]:
    trainer = layout.trainer(folder, max_steps=1, callbacks=[Lists()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(VectorModule(), loader(layout, vectors(16)))
        trainer.save_checkpoint(f"{folder}/saved")
    return [str(w.message) for w in caught if "of the state to be saved differ" in str(w.message)]


def test_lists_and_bytes_of_one_rank_are_named_when_saved(tmp_path: Path) -> None:
    texts, others = run(PP2, _saved, tmp_path)
    assert others == [] and len(texts) == 1
    assert "numbers.deep" in texts[0] and ".bytes" in texts[0] and "equal" not in texts[0]
