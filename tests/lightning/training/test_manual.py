"""Manual optimization on several ranks: two optimizers, toggling, accumulation by hand and
clipping, as on one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.config import DataParallelOptions, LossScaleOptions
from megatron_lightning.layers.styles import ColumnParallel, RowParallel
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.strategies import MegatronMixedPrecision, MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import VOCABULARY, ToyData
from tests.helpers.toy_decoder import HIDDEN
from tests.helpers.trainers import trainer
from tests.lightning.support import (
    DDP2,
    DP2,
    TP2,
    TP2_DP2,
    Layout,
    assert_close,
    layouts,
    make_layout,
    mean_over_ranks,
    metrics_of,
    run,
    single,
)
from tests.lightning.vectors import loader

Toggle = Literal["toggled", "unsynchronised", "never"]


class _Game(pl.LightningModule):
    """A model that predicts tokens and a judge of its predictions, trained against each other, each
    by its own optimizer.

    The model's gradients are accumulated over two batches; the judge is toggled off meanwhile, and
    learns in every batch. "unsynchronised": the ranks exchange the model's gradients with those of
    the second batch only.
    """

    def __init__(self, toggle: Toggle) -> None:
        super().__init__()
        self.automatic_optimization, self.toggle = False, toggle
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(VOCABULARY, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCABULARY)
        )
        self.judge = nn.Sequential(nn.Linear(VOCABULARY, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        model_optimizer, judge_optimizer = self.optimizers()
        with self._toggled(model_optimizer, sync_grad=batch_idx % 2 == 1):
            logits = self.model(batch["ids"])
            judged = self.judge(logits.softmax(-1)).mean()
            loss = F.cross_entropy(logits.flatten(0, 1), batch["tgt"].flatten()) - 0.1 * judged
            self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            self.clip_gradients(
                model_optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm"
            )
            model_optimizer.step()
            model_optimizer.zero_grad()
        if self.toggle == "never":
            judge_optimizer.zero_grad()
        judged = (
            self.judge(logits.detach().softmax(-1)).mean()
            - self.judge(F.one_hot(batch["tgt"], VOCABULARY).float()).mean()
        )
        self.manual_backward(judged)
        judge_optimizer.step()
        judge_optimizer.zero_grad()
        self.log_dict({"loss": loss, "judged": judged}, on_step=True, on_epoch=True, sync_dist=True)

    def _toggled(self, optimizer: Any, *, sync_grad: bool) -> AbstractContextManager[None]:
        if self.toggle == "never":
            return nullcontext()
        return optimizer.toggle_model(sync_grad=sync_grad or self.toggle == "toggled")

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log(
            "val_loss",
            F.cross_entropy(self.model(batch["ids"]).flatten(0, 1), batch["tgt"].flatten()),
            sync_dist=True,
        )

    def configure_optimizers(self) -> Any:
        model = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        return [model, torch.optim.SGD(self.judge.parameters(), lr=0.1, momentum=0.9)], [
            torch.optim.lr_scheduler.StepLR(model, 1, 0.5)
        ]


def _play(layout: Layout, folder: str, toggle: Toggle) -> dict[str, Any]:
    fitted = layout.trainer(folder, max_epochs=2)
    module = _Game(toggle)
    fitted.fit(module, datamodule=layout.data_module())
    fitted.save_checkpoint(f"{folder}/a.ckpt")
    resumed, again = layout.trainer(folder, max_epochs=3), _Game(toggle)
    resumed.fit(again, datamodule=layout.data_module(), ckpt_path=f"{folder}/a.ckpt")
    return {
        "metrics": metrics_of(fitted),
        "state": {name: p.detach() for name, p in module.named_parameters()},
        "resumed": metrics_of(resumed),
        "steps": (fitted.global_step, resumed.global_step),
    }


@pytest.mark.spread(1)
@pytest.mark.parametrize("toggle", ["toggled", "unsynchronised", "never"])
@layouts(DP2, DDP2)
def test_two_optimizers(layout: Layout, toggle: Toggle, tmp_path: Path) -> None:
    """With ZeRO the optimizers step shards, which toggling does not reach: no gradient may leak
    from one into the other."""
    expected = single(_play, toggle)
    ranks = run(layout, _play, tmp_path, toggle)
    for rank in ranks:
        assert_close(rank["state"], expected["state"])
        assert_close(rank["steps"], expected["steps"])
    for key in ("metrics", "resumed"):
        for name in expected[key]:
            if not name.endswith("_step") and name != "loss" and name != "judged":
                assert_close(
                    mean_over_ranks([[rank[key][name]] for rank in ranks]),
                    [expected[key][name]],
                    where=name,
                )


class _OneBackward(pl.LightningModule):
    """Two optimizers that step what one backward pass gives them; one layer each."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first, self.second, self.factor = nn.Linear(4, 4), nn.Linear(4, 4), factor

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(
            (
                self.second(batch) + self.first(batch) * (self.factor if batch_idx == 1 else 1.0)
            ).sum()
        )
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=1e-2) for layer in (self.first, self.second)]


def _one_backward(factor: float, **options: Any) -> list[float]:
    """Return how far each layer's bias went in three steps of 1e-2."""
    strategy = MegatronStrategy(data_parallel="ddp", non_finite=options.pop("non_finite", "ignore"))
    fitted, module = trainer(strategy, max_steps=6, **options), _OneBackward(factor)
    before = [layer.bias.detach().clone() for layer in (module.first, module.second)]
    fitted.fit(module, DataLoader(torch.ones(3, 4), batch_size=1))  # type: ignore[arg-type]
    moved = zip(before, (module.first, module.second), strict=True)
    return [float((start - layer.bias).detach().mean()) for start, layer in moved]


def test_no_optimizer_steps_what_is_not_finite() -> None:
    """The verdict on one backward pass holds for every optimizer that steps afterwards, and not for
    the next pass."""
    moved = run_ranks(1, _not_finite)[0]
    assert moved == pytest.approx([0.02, 0.02])


def _not_finite() -> list[float]:
    return _one_backward(float("nan"), non_finite="skip")


def test_an_optimizer_unscales_by_what_its_losses_were_scaled_with() -> None:
    """The first one overflows and halves the scale; the second one's gradients are still of the
    scale before."""
    moved = run_ranks(1, _overflowing)[0]
    assert moved == pytest.approx([0.02, 0.03])


def _overflowing() -> list[float]:
    scale = LossScaleOptions(initial_scale=2.0**10, hysteresis=1)
    return _one_backward(1e38, plugins=[MegatronMixedPrecision("16-mixed", "cpu", scale)])


class _Language(pl.LightningModule):
    """Two passes of a model whose layers are split, accumulated by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        config = tiny_config(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            ffn_hidden_size=32,
            vocab_size=20,
            max_sequence_length=8,
        )
        self.model = GPTModel(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for ids, tgt in zip(batch["ids"].chunk(2), batch["tgt"].chunk(2), strict=True):
            loss = self.model(ids, labels=tgt).mean()
            self.manual_backward(loss / 2)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _language(layout: Layout, folder: str) -> dict[str, float]:
    fitted = trainer(layout.strategy(), max_epochs=2, default_root_dir=folder, limit_val_batches=0)
    fitted.fit(_Language(), datamodule=ToyData(8 // layout.data, 32))
    return metrics_of(fitted)


DP2_OFFLOAD = make_layout(
    "dp2-offload", 2, 2, data_parallel_options=DataParallelOptions(optimizer_cpu_offload=True)
)


@layouts(DP2_OFFLOAD, slow=[TP2, TP2_DP2])
def test_split_layers(layout: Layout, tmp_path: Path) -> None:
    expected = single(_language)
    for rank in run(layout, _language, tmp_path):
        assert_close(rank, expected)


class _Matrices(pl.LightningModule):
    """Matrices that Muon steps in full, on a rank that may hold a shard of them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon(self.parameters(), lr=1e-2)


def _with_muon(layout: Layout, folder: str) -> dict[str, float]:
    fitted = layout.trainer(folder, max_epochs=2)
    fitted.fit(_Matrices(), loader(layout))
    return metrics_of(fitted)


MATRICES_TP2 = make_layout(
    "tp2-matrices",
    2,
    1,
    tensor_model_parallel_size=2,
    sequence_parallel=False,
    sharding_plan=ShardingPlan(modules={"net.0": ColumnParallel(), "net.2": RowParallel()}),
)


@layouts(MATRICES_TP2, slow=[DP2])
def test_matrices_are_stepped_by_their_own_gradients(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _with_muon, tmp_path):
        assert_close(rank, single(_with_muon))
