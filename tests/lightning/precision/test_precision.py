"""Precision: losses, the loss scale and its skipped steps, and what the batch becomes, on one
device and on layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from megatron_lightning.config import LossScaleOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.strategies import (
    MegatronHalfPrecision,
    MegatronMixedPrecision,
    MegatronStrategy,
    ShardedCheckpointIO,
)
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import Losses
from tests.helpers.trainers import trainer as make_trainer
from tests.lightning.support import (
    DDP2,
    DP2,
    MICRO,
    ONE,
    PP2,
    PP2_DP2,
    Layout,
    assert_close,
    layouts,
    mean_over_ranks,
    run,
    single,
)

SCRIPT = "..o.oo...o.."  # o: the step overflows on one rank, in one micro-batch
OPTIONS = LossScaleOptions(initial_scale=2.0**10, growth_interval=3)
SCALES = [1024, 1024, 1024, 1024, 512, 256, 256, 256, 512, 512, 512, 512]


class _Overflowing(ToyModule):
    """The loss of one sample is infinite in the steps that the script names; it lies on one
    data-parallel rank only."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step(batch, batch_idx)
        wrong = (batch["ids"] == -1).any()
        output["loss"] = output["loss"] * torch.where(wrong, float("inf"), 1.0)
        return output

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return super()._loss({**batch, "ids": batch["ids"].clamp(min=0)})


class _Scripted(pl.LightningDataModule):
    """ToyData whose last sample of a scripted step is marked with an impossible id."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._data = layout.data_module(num_samples=8 * len(SCRIPT))

    def train_dataloader(self) -> Any:
        loader = self._data.train_dataloader()
        for step, mark in enumerate(SCRIPT):
            if mark == "o":
                loader.dataset[8 * step + 7]["ids"] = torch.full_like(loader.dataset[0]["ids"], -1)
        return loader


class _Scales(pl.Callback):
    """After every batch: the scale, the learning rate, the samples consumed, a parameter's bits."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, int, int]] = []
        self.moved: list[bool] = []
        self._before: list[Tensor] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any
    ) -> None:
        self._before = [parameter.detach().clone() for parameter in module.parameters()]

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        strategy, plugin = trainer.strategy, trainer.precision_plugin
        assert isinstance(plugin, MegatronMixedPrecision)
        assert isinstance(strategy, MegatronStrategy)
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((plugin.scale, rate, strategy.consumed_samples, strategy.skipped_steps))
        self.moved.append(
            any(
                not torch.equal(a, b)
                for a, b in zip(self._before, module.parameters(), strict=True)
            )
        )


def _scripted(
    layout: Layout, folder: str, stop: int | None = None, resume: bool = False
) -> dict[str, Any]:
    scales, record = _Scales(), Losses()
    callbacks: list[pl.Callback] = [scales, record]
    if stop is not None:
        callbacks.append(ModelCheckpoint(dirpath=folder, filename="at", every_n_train_steps=stop))
    trainer = layout.trainer(
        folder,
        max_steps=len(SCRIPT) if stop is None or resume else stop,
        callbacks=callbacks,
        plugins=[MegatronMixedPrecision("16-mixed", device="cpu", loss_scale=OPTIONS)],
        gradient_clip_val=0.5,
        enable_checkpointing=stop is not None,
    )
    module = _Overflowing(lr=1e-3)
    trainer.fit(
        module, datamodule=_Scripted(layout), ckpt_path=f"{folder}/at.ckpt" if resume else None
    )
    state = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return {
        "seen": scales.seen,
        "moved": scales.moved,
        "losses": record.losses,
        "norms": record.norms,
        "state": state,
    }


@pytest.mark.spread(1)
@layouts(MICRO, DP2, PP2_DP2, slow=[PP2, DDP2])
def test_loss_scale_and_skipped_steps_on_every_rank(layout: Layout, tmp_path: Path) -> None:
    """The scale moves by Megatron's rule, a skipped step moves neither weights nor schedule, and
    its samples count."""
    rates, stepped, skipped = [], 0, 0
    for mark in SCRIPT:
        stepped, skipped = stepped + (mark == "."), skipped + (mark == "o")
        rates.append((0.98**stepped * 1e-3, skipped))
    for rank in run(layout, _scripted, tmp_path):
        assert [seen[0] for seen in rank["seen"]] == SCALES
        assert [seen[1] for seen in rank["seen"]] == pytest.approx([rate for rate, _ in rates])
        assert [seen[2] for seen in rank["seen"]] == [8 * (step + 1) for step in range(len(SCRIPT))]
        assert [seen[3] for seen in rank["seen"]] == [skips for _, skips in rates]
        assert rank["moved"] == [mark == "." for mark in SCRIPT]
        finite = [norm for norm, mark in zip(rank["norms"], SCRIPT, strict=True) if mark == "."]
        assert max(finite) < 100.0  # unscaled before the hooks and the clipping


@pytest.mark.slow  # test_resume_product resumes in fp16
@layouts(PP2, slow=[MICRO, DP2, DDP2, PP2_DP2])
def test_loss_scale_resumes_bit_equal(layout: Layout, tmp_path: Path) -> None:
    """Stopped between two overflows, when the hysteresis is half used up."""
    whole = run(layout, _scripted, tmp_path / "whole")
    run(layout, _scripted, tmp_path, 4)
    for rank, rest in zip(whole, run(layout, _scripted, tmp_path, 4, True), strict=True):
        assert rest["seen"] == rank["seen"][4:]
        # As text: a skipped step's infinity or NaN equals itself.
        assert str(rest["losses"]) == str(rank["losses"][4:])
        for name, value in rest["state"].items():
            assert torch.equal(value, rank["state"][name]), name


def _fp16(layout: Layout, folder: str, own: bool) -> dict[str, Any]:
    """Train in fp16 with a scale that never overflows: ours, or torch's GradScaler under
    Lightning's own plugin."""
    if own:
        plugin: MixedPrecision = MegatronMixedPrecision(
            "16-mixed", "cpu", LossScaleOptions(initial_scale=1024)
        )
    else:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024))
    record = Losses()
    trainer = layout.trainer(
        folder, max_epochs=2, gradient_clip_val=0.5, callbacks=[record], plugins=[plugin]
    )
    trainer.fit(ToyModule(lr=1e-3), datamodule=layout.data_module())
    return {"losses": record.losses, "norms": record.norms}


def test_fp16_equals_torchs_scaler_on_one_device() -> None:
    """The same arithmetic as torch's GradScaler while nothing overflows: powers of two change no
    digit."""
    assert single(_fp16, True) == single(_fp16, False)


@layouts(PP2, slow=[MICRO, DP2, DDP2, PP2_DP2])
def test_fp16_on_layouts(layout: Layout, tmp_path: Path) -> None:
    """fp16 has 11 bits; sums in another order may differ in the last, so 2^-9 after eight steps."""
    expected, ranks = single(_fp16, False), run(layout, _fp16, tmp_path, True)
    assert_close(mean_over_ranks([rank["losses"] for rank in ranks]), expected["losses"], 2e-3)
    for rank in ranks:
        assert_close(rank["norms"], expected["norms"], 1e-2)


def _precision(layout: Layout, folder: str, precision: str) -> dict[str, Any]:
    record = Losses()
    trainer = layout.trainer(
        folder, max_epochs=1, gradient_clip_val=0.5, callbacks=[record], precision=precision
    )
    module = ToyModule(lr=1e-3)
    trainer.fit(module, datamodule=layout.data_module())
    return {
        "losses": record.losses,
        "norms": record.norms,
        "dtype": str(next(module.parameters()).dtype),
    }


# bf16 has 8 bits: 2^-8 = 4e-3 for one rounding; sums are fp32. 64-true has fp64 sums, but the
# losses are recorded in fp32.
TOLERANCES = {"32-true": 1e-5, "bf16-mixed": 2e-2, "bf16-true": 2e-2, "64-true": 1e-7}


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    ["bf16-true", "bf16-mixed", "64-true"],
)
@layouts(PP2_DP2, MICRO, PP2, DP2, DDP2)
def test_precision_strings(layout: Layout, precision: str, tmp_path: Path) -> None:
    """The string means what it means on one device; bf16-true is moreover close to fp32, as its
    masters are."""
    expected = single(_precision, precision)
    ranks = run(layout, _precision, tmp_path, precision)
    assert_close(
        mean_over_ranks([rank["losses"] for rank in ranks]),
        expected["losses"],
        TOLERANCES[precision],
    )
    # Random initial weights are others in fp64, which has nothing to lose against fp32 anyway.
    exact, tolerance = (
        (expected, 1e-5) if precision == "64-true" else (single(_precision, "32-true"), 5e-2)
    )
    for rank in ranks:
        assert rank["dtype"] == expected["dtype"]
        assert_close(rank["norms"], exact["norms"], tolerance)


@pytest.mark.slow
@layouts(DP2, MICRO, PP2, DDP2, PP2_DP2)
def test_fp16_weights_on_layouts(layout: Layout, tmp_path: Path) -> None:
    """With fp32 masters on every layout, one rank included; Lightning's own fp16 steps lose Adam's
    eps of 1e-8.

    fp16 has 11 bits: losses to an eighth of the tolerance of bf16. Norms to 2e-2 of fp32 ones,
    since Adam's first steps make whole steps of what rounding leaves of gradients that are zero
    (the key's bias).
    """
    [expected] = run(ONE, _precision, tmp_path, "16-true")
    exact, ranks = single(_precision, "32-true"), run(layout, _precision, tmp_path, "16-true")
    assert_close(mean_over_ranks([rank["losses"] for rank in ranks]), expected["losses"], 2.5e-3)
    for rank in ranks:
        assert rank["dtype"] == expected["dtype"] == "torch.float16"
        assert_close(rank["norms"], exact["norms"], 2e-2)


def _nested() -> dict[str, Any]:
    values = torch.tensor([257.0, 1e-3])
    return {
        "pixels": values,
        "loss_mask": values,
        "extra": {"position_scales": values, "x": values},
        "ids": torch.tensor([3]),
    }


def _dtypes(data: Any) -> Iterator[tuple[str, torch.dtype]]:
    for name, value in data.items():
        if isinstance(value, Tensor):
            yield name, value.dtype
        else:
            yield from _dtypes(value)


def test_half_precision_leaves_masks_and_positions_alone() -> None:
    plugin = MegatronHalfPrecision("bf16-true")
    assert dict(_dtypes(plugin.convert_input(_nested()))) == {
        "pixels": torch.bfloat16,
        "loss_mask": torch.float32,
        "position_scales": torch.float32,
        "x": torch.bfloat16,
        "ids": torch.int64,
    }
    pair = plugin.convert_input((torch.ones(2), torch.ones(2, dtype=torch.int64)))
    assert [tensor.dtype for tensor in pair] == [torch.bfloat16, torch.int64]
    (first, second) = plugin.convert_input([_nested(), {"image": torch.ones(1)}])
    assert first["loss_mask"].dtype == torch.float32
    assert second["image"].dtype == torch.bfloat16


def test_strings_and_plugins_become_ours() -> None:
    kinds = {
        "bf16-mixed": MegatronMixedPrecision,
        "bf16-true": MegatronHalfPrecision,
        "16-true": MegatronHalfPrecision,
    }
    for string, kind in kinds.items():
        assert type(make_trainer(MegatronStrategy(), precision=string).precision_plugin) is kind
    default = make_trainer(
        MegatronStrategy(), plugins=[MixedPrecision("16-mixed", "cpu")]
    ).precision_plugin
    assert isinstance(default, MegatronMixedPrecision)
    assert default.scale == 2.0**32
    with pytest.raises(ConfigError, match="GradScaler of its own"):
        make_trainer(
            MegatronStrategy(),
            plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 4.0))],
        )


def test_layouts_without_ranks_scale_too(tmp_path: Path) -> None:
    """One rank and one micro-batch: Lightning's own steps run, and skipped steps hold the schedule
    all the same."""
    (rank,) = run(ONE, _scripted, tmp_path)
    assert [seen[0] for seen in rank["seen"]] == SCALES
    assert rank["moved"] == [mark == "." for mark in SCRIPT]


def test_a_plain_trainers_loss_scale_is_taken_over(tmp_path: Path) -> None:
    """Two steps in a plain Trainer with torch's GradScaler, the third with the strategy, which
    would begin at 2^10."""
    theirs = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    make_trainer(
        "auto",
        max_steps=2,
        plugins=[theirs],
        callbacks=[ModelCheckpoint(tmp_path, "at", every_n_train_steps=2)],
        enable_checkpointing=True,
    ).fit(ToyModule(), datamodule=ToyData())
    ours = MegatronMixedPrecision("16-mixed", "cpu", OPTIONS)
    fit = make_trainer(MegatronStrategy(), max_steps=3, plugins=[ours])
    fit.fit(ToyModule(), datamodule=ToyData(), ckpt_path=str(tmp_path / "at.ckpt"))
    assert fit.global_step == 3 and ours.loss_scale is not None
    # Three clean steps in a row, two of them theirs, raise the scale.
    assert ours.loss_scale.state_dict() == {
        "scale": 128.0,
        "growth_tracker": 0,
        "hysteresis_tracker": 2,
    }


def test_a_plain_trainer_takes_over_the_loss_scale(tmp_path: Path) -> None:
    """The other way round, from a directory: the plain Trainer's scaler would begin at 2^16."""
    make_trainer(
        MegatronStrategy(),
        max_steps=2,
        plugins=[MegatronMixedPrecision("16-mixed", "cpu", OPTIONS)],
        callbacks=[ModelCheckpoint(tmp_path, "at", every_n_train_steps=2)],
        enable_checkpointing=True,
    ).fit(ToyModule(), datamodule=ToyData())
    theirs = MixedPrecision("16-mixed", "cpu")
    fit = make_trainer("auto", max_steps=3, plugins=[theirs, ShardedCheckpointIO()])
    fit.fit(ToyModule(), datamodule=ToyData(), ckpt_path=str(tmp_path / "at.ckpt"))
    assert fit.global_step == 3
    # Three clean steps in a row, two of them ours, raise it.
    scale = OPTIONS.initial_scale * OPTIONS.growth_factor
    assert (theirs.scaler.get_scale(), theirs.scaler._get_growth_tracker()) == (scale, 0)
