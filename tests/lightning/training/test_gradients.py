"""Gradients where users meet them: in ``p.grad`` between the hooks, in ``strategy.gradients()``,
weighted by ``num_items``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.errors import ShardingError
from megatron_lightning.models.plans.gpt import gpt_plan
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim.gradients.gradient_proxies import gradient_of
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.resilience.collective_log import Record, apart
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.language_model import losses_of, small_gpt
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import VOCABULARY, ToyModule, samples
from tests.helpers.trainers import Losses
from tests.lightning.support import (
    DDP2,
    DP2,
    MICRO,
    PP2,
    PP2_DDP2,
    PP2_DP2,
    PP2_WHOLE,
    Layout,
    assert_close,
    layouts,
    mean_over_ranks,
    metrics_of,
    run,
    single,
)


class _Grads(pl.Callback):
    """Gradients of every parameter on this rank, as hooks see them, at the hooks between backward
    and step."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Tensor | None]] = {}

    def _note(self, hook: str, module: pl.LightningModule) -> None:
        if module.trainer.fit_loop._should_accumulate():
            return
        self.seen[hook] = {
            name: gradient if (gradient := gradient_of(p)) is None else gradient.clone()
            for name, p in module.named_parameters()
        }

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._note("on_after_backward", module)
        strategy = trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            self.seen["strategy"] = {
                name: gradient.clone() for name, gradient in strategy.gradients().items()
            }

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any
    ) -> None:
        self._note("on_before_optimizer_step", module)


def _visible(layout: Layout, folder: str, accumulate: int) -> dict[str, Any]:
    grads = _Grads()
    trainer = layout.trainer(
        folder,
        max_steps=2,
        accumulate_grad_batches=accumulate,
        callbacks=[grads],
        limit_val_batches=0,
    )
    trainer.fit(ToyModule(lr=1e-3), datamodule=layout.data_module(num_samples=64))
    return grads.seen


@pytest.mark.spread(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@layouts(PP2, DDP2, slow=[MICRO, PP2_DDP2])
def test_p_grad_is_the_full_gradient(layout: Layout, accumulate: int, tmp_path: Path) -> None:
    expected = single(_visible, accumulate)
    seen_names = set()
    for rank in run(layout, _visible, tmp_path, accumulate):
        for hook in ("on_after_backward", "on_before_optimizer_step"):
            seen_names |= rank[hook].keys()
            for name, gradient in rank[hook].items():
                assert_close(gradient, expected[hook][name], where=name)
                assert_close(
                    rank["strategy"][name], expected["on_after_backward"][name], where=name
                )
    assert seen_names == expected["on_after_backward"].keys()


@layouts(DP2, slow=[PP2_DP2])
def test_zero1_gradients_are_in_the_strategy(layout: Layout, tmp_path: Path) -> None:
    """Each rank holds its shard of the flat gradients; p.grad is None, as the design says."""
    expected = single(_visible, 1)["on_after_backward"]
    ranks = run(layout, _visible, tmp_path, 1)
    total: dict[str, int] = {}
    for rank in ranks:
        assert all(gradient is None for gradient in rank["on_after_backward"].values())
        for name, shard in rank["strategy"].items():
            total[name] = total.get(name, 0) + shard.numel()
            flat = expected[name].flatten()
            windows = flat.unfold(0, shard.numel(), 1) if shard.numel() else flat.new_zeros(1, 0)
            assert (windows - shard.flatten()).abs().amax(-1).min() < 1e-6, name
    assert total == {name: gradient.numel() for name, gradient in expected.items()}


class _Weighted(pl.LightningModule):
    """Tokens with ignored labels: the mean over valid tokens, and how many there are."""

    def __init__(self, weighted: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.weighted = ToyModule(), weighted
        self.model.configure_model()
        self.model = self.model.model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self.model(batch["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["tgt"].flatten(), ignore_index=-100)
        items = (batch["tgt"] != -100).sum()
        self.log("loss", loss, batch_size=int(items), on_step=False, on_epoch=True, sync_dist=True)
        return {"loss": loss, "num_items": items}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _ragged_samples() -> list[dict[str, Tensor]]:
    ragged = samples(32, 1)
    for index, sample in enumerate(ragged):  # 1 to 5 valid tokens, 95 in all, unequal everywhere
        valid = 1 + (index * index) % 7
        sample["tgt"] = sample["tgt"].clone()
        sample["tgt"][valid:] = -100
    return ragged


def _weighted(layout: Layout, folder: str, flushes: int) -> dict[str, Any]:
    """Train on the same 16 samples a step, in ``flushes`` parts (one device: in one part)."""
    flushes = flushes if layout.options is not None else 1
    record = Losses()
    trainer = layout.trainer(
        folder,
        max_epochs=2,
        accumulate_grad_batches=flushes,
        callbacks=[record],
        limit_val_batches=0,
    )
    loader = DataLoader(_ragged_samples(), batch_size=16 // layout.data // flushes)
    module = _Weighted()
    trainer.fit(module, loader)
    logged = float(trainer.callback_metrics["loss"])
    return {
        "norms": record.norms,
        "logged": logged,
        "state": {name: p.detach() for name, p in module.named_parameters()},
    }


@pytest.mark.spread(1)
@pytest.mark.parametrize("flushes", [1, 2])
@layouts(PP2, DP2, slow=[MICRO, DDP2, PP2_DP2, PP2_DDP2])
def test_num_items_is_exact(layout: Layout, flushes: int, tmp_path: Path) -> None:
    """However the tokens are spread over micro-batches, ranks and flushes: gradients of the mean
    over all valid tokens."""
    expected = single(_weighted, 1)
    for rank in run(layout, _weighted, tmp_path, flushes):
        assert rank["logged"] == pytest.approx(expected["logged"], rel=1e-5)
        assert_close(rank["norms"], expected["norms"])
        for name, parameter in rank["state"].items():
            assert_close(parameter, expected["state"][name], where=name)


class _Outside(ToyModule):
    """Parameters outside the pipelined module, used before the call, after it, in both places, and
    never; one is frozen."""

    def __init__(self) -> None:
        super().__init__(lr=1e-3)
        torch.manual_seed(1)
        self.before = nn.Embedding(VOCABULARY, VOCABULARY)
        self.after = nn.Linear(VOCABULARY, VOCABULARY)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(VOCABULARY, VOCABULARY)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def configure_model(self) -> None:
        super().configure_model()
        self.model.__class__ = _SoftDecoder

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        soft = self.before(batch["ids"]).softmax(-1) * self.scale
        logits = self.frozen(self.after(self.model(soft))) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), batch["tgt"].flatten()), logits


class _SoftDecoder(nn.Module):
    """ToyDecoder with a mixture of tokens as input, so that gradients reach what made it."""

    def pipeline_units(self) -> list[str]:
        return [*(f"layers.{key}" for key in self.layers), "norm", "head"]

    def forward(self, soft: Tensor) -> Tensor:
        h = soft @ self.embed.weight
        for layer in self.layers.values():
            h = layer(h)
        return self.head(self.norm(h))


def _outside(layout: Layout, folder: str) -> dict[str, Any]:
    record, grads = Losses(), _Grads()
    trainer = layout.trainer(folder, max_epochs=2, gradient_clip_val=0.5, callbacks=[record, grads])
    module = _Outside()
    trainer.fit(module, datamodule=layout.data_module())
    return {
        "losses": record.losses,
        "norms": record.norms,
        "metrics": metrics_of(trainer),
        "grads": {
            name: g
            for name, g in grads.seen["on_after_backward"].items()
            if not name.startswith("model.")
        },
        "state": {
            name: p.detach()
            for name, p in module.named_parameters()
            if not name.startswith("model.")
        },
    }


@pytest.mark.slow
@layouts(PP2, MICRO, PP2_DP2, DP2, DDP2, PP2_WHOLE, PP2_DDP2)
def test_parameters_outside_the_pipelined_module(layout: Layout, tmp_path: Path) -> None:
    expected, ranks = single(_outside), run(layout, _outside, tmp_path)
    assert_close(mean_over_ranks([rank["losses"] for rank in ranks]), expected["losses"])
    for rank in ranks:
        for key in ("norms", "metrics", "state"):
            assert_close(rank[key], expected[key], where=key)
        if not (layout.data > 1 and "ddp" not in layout.name):
            for name in ("before.weight", "after.weight", "scale"):
                assert_close(rank["grads"][name], expected["grads"][name], where=name)


class _Freezing(ToyModule):
    """Only the head learns."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.requires_grad_(False)
        self.model.head.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _frozen(layout: Layout, folder: str) -> dict[str, Any]:
    record = Losses()
    trainer = layout.trainer(folder, max_epochs=1, gradient_clip_val=0.5, callbacks=[record])
    module = _Freezing()
    trainer.fit(module, datamodule=layout.data_module())
    return {"losses": record.losses, "norms": record.norms, "metrics": metrics_of(trainer)}


@layouts(PP2, slow=[MICRO, DP2, DDP2, PP2_DP2])
def test_frozen_stages(layout: Layout, tmp_path: Path) -> None:
    """A stage without anything to train: its backward passes gradients on, its optimizer has
    nothing to do."""
    expected, ranks = single(_frozen), run(layout, _frozen, tmp_path)
    assert_close(mean_over_ranks([rank["losses"] for rank in ranks]), expected["losses"])
    for rank in ranks:
        assert_close(rank["norms"], expected["norms"])
        assert_close(rank["metrics"], expected["metrics"])


class _Skips(ToyModule):
    """Returns None for some batches: Lightning skips their optimizer step (on several ranks it
    refuses that itself)."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else output


def _skips(layout: Layout, folder: str) -> dict[str, float]:
    trainer = layout.trainer(folder, max_epochs=1)
    trainer.fit(_Skips(), datamodule=layout.data_module())
    return metrics_of(trainer)


@layouts(MICRO)
def test_a_step_that_returns_none(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _skips, tmp_path):
        assert_close(rank, single(_skips))


class _FirstReplicaNorm(pl.Callback):
    """Takes the norm on the ranks of one replica."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if strategy.context.dp.rank == 0:
            strategy.gradient_norm()


def _record_of(layout: Layout, folder: str) -> Record:
    trainer = layout.trainer(folder, max_steps=2, callbacks=[_FirstReplicaNorm()])
    trainer.fit(ToyModule(), datamodule=layout.data_module())
    strategy: Any = trainer.strategy
    course = strategy.ranks.course
    return Record(trainer.global_rank, course.marks(), course.num_calls)


@layouts(DDP2, slow=[PP2_DDP2])
def test_one_replica_may_take_the_norm_of_full_gradients(layout: Layout, tmp_path: Path) -> None:
    first, *others = run(layout, _record_of, tmp_path)
    assert any("gradient_norm" in mark.what for mark in first.marks)
    assert all(apart(first, other) is None for other in others)


def _trained_without(style: str, sequence_parallel: bool) -> str | None:
    """Train with a table that lacks a row; return the error."""
    config = small_gpt(1, qk_layernorm=True)
    whole = gpt_plan(config)
    plan = ShardingPlan(
        modules={f"model.{path}": kept for path, kept in whole.modules.items() if path != style},
        attributes={f"model.{path}": rewrite for path, rewrite in whole.attributes.items()},
    )
    strategy = MegatronStrategy(
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, sharding_plan=plan
    )
    try:
        losses_of(GPTLightningModule(config), strategy, [])
    except ShardingError as error:
        return str(error)
    return None


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("style", "sequence_parallel", "found"),
    [
        (
            "decoder.final_layernorm",
            True,
            r"gradients of 1 parameter\(s\) differ .* model\.decoder\.final_layernorm\.weight\.",
        ),
        (
            "decoder.layers.*.self_attention.q_layernorm",
            False,
            r"diverge: model\.decoder\.layers\.0\.\S+\.q_layernorm",
        ),
        ("none", True, None),
    ],
)
def test_a_row_that_the_table_lacks_is_found(
    style: str, sequence_parallel: bool, found: str | None
) -> None:
    """The ranks would step the same weight by different gradients, and nobody would notice."""
    for error in run_ranks(2, _trained_without, style, sequence_parallel):
        assert error is None if found is None else re.search(found, error or "")
