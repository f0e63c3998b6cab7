"""Flags of the Trainer mean under every layout what they mean on one device: same losses, metrics
and steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    Timer,
)
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.determinism import set_determinism
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import Losses
from tests.lightning.support import (
    DDP2,
    DP2,
    MICRO,
    PP2,
    PP2_DP2,
    TP2_PP2,
    Layout,
    assert_close,
    layouts,
    mean_over_ranks,
    metrics_of,
    run,
    single,
)

CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_epochs": 2},
    "clip-norm": {"max_epochs": 1, "gradient_clip_val": 0.5},
    "clip-value": {"max_epochs": 1, "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "accumulate": {"max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    "val-interval": {"max_epochs": 2, "val_check_interval": 2},
    "val-fraction": {"max_epochs": 1, "val_check_interval": 0.5},
    "val-across-epochs": {
        "max_epochs": 2,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
    },
    "limits": {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1},
    "limit-fractions": {"max_epochs": 1, "limit_train_batches": 0.5, "limit_val_batches": 0.25},
    "max-steps": {"max_epochs": -1, "max_steps": 5},
    "sanity": {"max_epochs": 1, "num_sanity_val_steps": 2},
    "fast-dev-run": {"fast_dev_run": 2},
    "overfit-batches": {"max_epochs": 2, "overfit_batches": 2},
    "detect-anomaly": {"max_epochs": 1, "detect_anomaly": True, "limit_train_batches": 2},
    "check-every-2": {"max_epochs": 3, "check_val_every_n_epoch": 2, "limit_train_batches": 2},
    "bf16": {"max_epochs": 1, "precision": "bf16-mixed"},
    "double": {"max_epochs": 1, "precision": "64-true"},
    "reload": {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 2},
    "no-inference-mode": {"max_epochs": 1, "inference_mode": False, "limit_train_batches": 2},
    "barebones": {"max_epochs": 1, "barebones": True},
}
CALLBACKS: dict[str, Any] = {
    "accumulation-scheduler": lambda: GradientAccumulationScheduler({0: 1, 1: 3}),
    "early-stopping-train": lambda: EarlyStopping(
        "train_loss", patience=0, min_delta=0.9, check_on_train_epoch_end=True
    ),
    "early-stopping-divergence": lambda: EarlyStopping("val_loss", divergence_threshold=0.1),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1),
    "timer": lambda: Timer(duration={"hours": 1}),
}


def _flags(layout: Layout, folder: str, case: str) -> dict[str, Any]:
    record, validations = Losses(), _Validations()
    options = CASES.get(case, {"max_epochs": 3, "limit_train_batches": 4})
    callbacks = [CALLBACKS[case]()] if case in CALLBACKS else []
    if case == "barebones":
        options = {name: value for name, value in options.items() if name != "num_sanity_val_steps"}
        options |= {"logger": None, "enable_checkpointing": None, "num_sanity_val_steps": None}
    trainer = layout.trainer(folder, callbacks=[record, validations, *callbacks], **options)
    trainer.fit(_Quiet() if case == "barebones" else ToyModule(), datamodule=layout.data_module())
    return {
        "losses": record.losses,
        "norms": record.norms,
        "validations": validations.seen,
        "metrics": metrics_of(trainer),
        "progress": (
            trainer.global_step,
            trainer.current_epoch,
            trainer.num_training_batches,
            trainer.should_stop,
        ),
    }


class _Quiet(ToyModule):
    def log(self, *args: Any, **options: Any) -> None:
        """Barebones runs must not log."""


class _Validations(pl.Callback):
    """When validation ran, and how many batches of it."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, bool]] = []
        self._batches = 0

    def on_validation_batch_end(self, *_: Any) -> None:
        self._batches += 1

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen.append((trainer.global_step, self._batches, trainer.sanity_checking))
        self._batches = 0


# bf16: other micro-batches round other partial sums, one part in 256 each, averaged over the
# batch's tokens.
TOLERANCES = {"bf16": 2e-2}


def _check(case: str, layout: Layout, folder: Path) -> None:
    expected, ranks = single(_flags, case), run(layout, _flags, folder, case)
    tolerance = TOLERANCES.get(case, 1e-5)
    assert_close(mean_over_ranks([rank["losses"] for rank in ranks]), expected["losses"], tolerance)
    for rank in ranks:
        for key in ("norms", "validations", "metrics", "progress"):
            if not (key == "metrics" and case == "overfit-batches" and layout.data > 1):
                assert_close(
                    rank[key],
                    expected[key],
                    10 * tolerance if key == "norms" and case == "bf16" else tolerance,
                    key,
                )


SPREAD = [
    ("clip-norm", PP2),
    ("clip-value", PP2),
    ("accumulate", DDP2),
    ("val-interval", PP2),
    ("limits", DP2),
    ("max-steps", PP2),
    ("sanity", PP2),
    ("fast-dev-run", PP2),
    ("overfit-batches", PP2),
    ("detect-anomaly", PP2),
    ("bf16", PP2),
    ("accumulation-scheduler", PP2),
]
MATRIX = [
    (case, layout)
    for case in (*CASES, *CALLBACKS)
    for layout in (MICRO, PP2, DP2, DDP2, PP2_DP2, TP2_PP2)
    if (case, layout) not in SPREAD
]


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("case", "layout"), SPREAD, ids=[f"{case}-{layout.name}" for case, layout in SPREAD]
)
def test_flags(case: str, layout: Layout, tmp_path: Path) -> None:
    _check(case, layout, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout"), MATRIX, ids=[f"{case}-{layout.name}" for case, layout in MATRIX]
)
def test_flags_matrix(case: str, layout: Layout, tmp_path: Path) -> None:
    _check(case, layout, tmp_path)


def _plateau(layout: Layout, folder: str) -> list[float]:
    # Too high on purpose: validation gets worse and the scheduler acts.
    module = ToyModule(lr=0.5, plateau=True)
    rates: list[float] = []

    class Rates(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    layout.trainer(folder, max_epochs=6, limit_train_batches=2, callbacks=[Rates()]).fit(
        module, datamodule=layout.data_module()
    )
    return rates


@pytest.mark.spread(1)
@layouts(PP2, DP2, PP2_DP2, MICRO)
def test_reduce_on_plateau(layout: Layout, tmp_path: Path) -> None:
    expected = single(_plateau)
    assert expected[-1] < expected[0], "the scheduler should act"
    for rank in run(layout, _plateau, tmp_path):
        assert rank == expected


class _TwoLoaders(ToyModule):
    """Two validation loaders, metrics by name and with the loader's index appended."""

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        loss, _ = self._loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log(
            f"own_{dataloader_idx}",
            loss.detach() + dataloader_idx,
            add_dataloader_idx=False,
            sync_dist=True,
        )
        return loss


class _TwoLoadersData(ToyData):
    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [super().val_dataloader(), super().test_dataloader()]


def _two_loaders(layout: Layout, folder: str) -> dict[str, Any]:
    data = _TwoLoadersData(batch_size=8 // layout.data, num_samples=16)
    trainer = layout.trainer(folder, max_epochs=1)
    module = _TwoLoaders()
    trainer.fit(module, datamodule=data)
    return {
        "metrics": metrics_of(trainer),
        "validate": trainer.validate(module, datamodule=data, verbose=False),
    }


@pytest.mark.spread(1)
@layouts(PP2, DP2, PP2_DP2)
def test_two_validation_loaders(layout: Layout, tmp_path: Path) -> None:
    expected = single(_two_loaders)
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1", "own_1"} <= expected[
        "metrics"
    ].keys()
    for rank in run(layout, _two_loaders, tmp_path):
        assert_close(rank, expected)


def _max_time(layout: Layout, folder: str) -> int:
    trainer = layout.trainer(
        folder, max_epochs=10_000, max_time={"seconds": 0.5}, limit_val_batches=0
    )
    trainer.fit(ToyModule(), datamodule=layout.data_module())
    return trainer.global_step


def test_max_time_ends_the_run(tmp_path: Path) -> None:
    """The ranks' clocks differ; rank 0 decides, or the others would hang."""
    steps = run(PP2, _max_time, tmp_path)
    assert steps[0] == steps[1] > 0


class _Ahead(pl.Callback):
    """Puts the clock of one rank forward, beyond the time to validate."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer._last_val_time -= 1000.0 * (trainer.global_rank == self._rank)


def _time_to_validate(layout: Layout, folder: str, rank: int) -> list[tuple[int, int, bool]]:
    validations = _Validations()
    interval = {"seconds": 500}
    trainer = layout.trainer(
        folder, max_epochs=1, val_check_interval=interval, callbacks=[validations, _Ahead(rank)]
    )
    trainer.fit(ToyModule(), datamodule=layout.data_module())
    return validations.seen


@pytest.mark.spread(1)
@pytest.mark.parametrize(("rank", "expected"), [(0, [(1, 4, False)]), (1, [])])
def test_time_to_validate_is_rank_0s(
    rank: int, expected: list[tuple[int, int, bool]], tmp_path: Path
) -> None:
    """One validation after the first step, which sets the clock again; or none."""
    assert run(PP2, _time_to_validate, tmp_path, rank) == [expected] * 2


def _unequal_last_batch(layout: Layout, folder: str) -> dict[str, Any]:
    """29 samples: the last batch of training and validation is short, and cut into unequal
    micro-batches."""
    record = Losses()
    trainer = layout.trainer(folder, max_epochs=2, callbacks=[record])
    data = layout.data_module(num_samples=29)
    data.val_dataloader = lambda: data._loader(29, 2)
    trainer.fit(ToyModule(), datamodule=data)
    metrics = metrics_of(trainer)
    # Updated once a micro-batch without weights: the mean of other numbers, by the module's own
    # wish.
    del metrics["train_mean"]
    return {"losses": record.losses, "norms": record.norms, "metrics": metrics}


@layouts(PP2, slow=[MICRO])
def test_unequal_last_batch(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _unequal_last_batch, tmp_path):
        assert_close(rank, single(_unequal_last_batch))


@pytest.fixture
def deterministic_kernels() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic_kernels")
def test_deterministic_sets_and_checks_what_gpus_need() -> None:
    variables: dict[str, str] = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    set_determinism("cuda", "auto", variables)
    assert variables == {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "NCCL_ALGO": "^NVLS",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "FLASH_ATTENTION_DETERMINISTIC": "1",
    }
    for value in ("ring", "Ring,Tree", "^nvls,NVLSTree"):
        set_determinism("cuda", "efficient", {"NCCL_ALGO": value})
    for value in ("NVLS", "Ring,NVLSTree", "^Tree", "allreduce:ring"):
        with pytest.raises(ConfigError, match=r"NCCL_ALGO=.*Unset NCCL_A.*such as Ring,Tree"):
            set_determinism("cuda", "auto", {"NCCL_ALGO": value})
    with pytest.raises(ConfigError, match='attention_backend="cudnn", whose backward adds in'):
        set_determinism("cuda", "cudnn", {})
    untouched: dict[str, str] = {}
    set_determinism("cpu", "auto", untouched)
    torch.use_deterministic_algorithms(True, warn_only=True)
    set_determinism("cuda", "cudnn", untouched)
    assert not untouched


def _twice(layout: Layout, folder: str) -> list[dict[str, float]]:
    metrics = []
    for _ in range(2):
        trainer = layout.trainer(folder, max_epochs=1, deterministic=True)
        trainer.fit(ToyModule(), datamodule=layout.data_module())
        metrics.append(metrics_of(trainer))
    return metrics


@pytest.mark.spread(1)
@layouts(PP2_DP2, DP2, TP2_PP2)
def test_a_deterministic_run_has_the_same_bits_twice(layout: Layout, tmp_path: Path) -> None:
    for first, second in run(layout, _twice, tmp_path):
        assert first == second and first
