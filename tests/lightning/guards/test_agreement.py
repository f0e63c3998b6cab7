"""Options of optimizer groups and random states that differ between ranks are refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.errors import MegatronLightningError
from megatron_lightning.layers.styles import ColumnParallel
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import (
    DDP2,
    PP2,
    PP2_DP2,
    Layout,
    assert_close,
    layouts,
    make_layout,
    metrics_of,
    run,
    single,
)
from tests.lightning.vectors import Net, VectorModule, loader

TP2 = make_layout(
    "tp2",
    2,
    1,
    tensor_model_parallel_size=2,
    sharding_plan=ShardingPlan(modules={"net.0": ColumnParallel(gather_output=True)}),
)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class _Monitored(VectorModule):
    """Logs a metric of its own on each rank, which a scheduler follows."""

    def on_validation_epoch_end(self) -> None:
        self.log("own", float(self.current_epoch * _rank()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", patience=0, factor=0.5, threshold=0.0
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "own"}}


class _RateOfStage(VectorModule):
    """Divides the rate by the number of the rank."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [{"params": [p for p in parameters if (p.ndim > 1) is wide]} for wide in (0, 1)]
        return torch.optim.SGD(groups, lr=0.5 / (1 + _rank()))


class _SetsRate(pl.Callback):
    """Sets a rate on one rank after the third batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3 and _rank() == 0:
            trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.5


class _Draws(pl.Callback):
    """Draws random numbers in a hook, on rank 0 alone."""

    def __init__(self, draw: Callable[[], Any], hook: str, *, everywhere: bool = False) -> None:
        def drawing(*_: Any) -> None:
            if everywhere or _rank() == 0:
                draw()

        setattr(self, hook, drawing)


def _torch() -> None:
    torch.rand(1)


def _numpy() -> None:
    np.random.rand()


_RATES = r"options of optimizer groups differ between"
_STATES = r"random generators .* differ at the beginning of a step"
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "monitor": (_Monitored, pl.Callback, _RATES),
    "hook": (VectorModule, _SetsRate, _RATES),
    "rate": (_RateOfStage, pl.Callback, _RATES),
    "torch": (VectorModule, lambda: _Draws(_torch, "on_train_batch_start"), _STATES),
    "numpy": (VectorModule, lambda: _Draws(_numpy, "on_validation_end"), _STATES),
    "python": (VectorModule, lambda: _Draws(random.random, "on_train_batch_end"), _STATES),
}


def _refused(layout: Layout, folder: str, case: str) -> str | None:
    module, callback, _ = REFUSED[case]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    # Validations compare the weights, which drift in a hook's way first.
    validation = None if case == "hook" else loader(layout)
    try:
        layout.trainer(folder, max_epochs=4, callbacks=[callback()]).fit(
            module(), loader(layout), validation
        )
    except MegatronLightningError as error:
        return str(error)
    except (PeerFailure, RuntimeError) as error:  # the other rank is gone
        return f"peer: {error}"
    return None


def _check(layout: Layout, case: str, folder: Path) -> None:
    errors = run(layout, _refused, folder, case)
    said = [error for error in errors if error and not error.startswith("peer: ")]
    assert None not in errors and said
    for error in said:
        assert re.search(REFUSED[case][2], error, re.DOTALL), error


def test_a_rate_that_each_stage_computes_is_refused(tmp_path: Path) -> None:
    errors = run(PP2, _refused, tmp_path, "rate")
    for error in errors:
        assert re.search(r"set lr of their optimizer groups to 0\.\d+, 0\.\d+: ", str(error))


@pytest.mark.spread(1)
@pytest.mark.parametrize("case", [case for case in REFUSED if case != "rate"])
def test_stages_that_differ_are_found_in_the_next_step(case: str, tmp_path: Path) -> None:
    _check(PP2, case, tmp_path)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, id=f"{layout.name}-{case}")
        for layout, case in ((TP2, "torch"), (DDP2, "monitor"), (DDP2, "hook"))
    ],
)
def test_other_ranks_that_differ_are_found_by_the_next_epoch(
    layout: Layout, case: str, tmp_path: Path
) -> None:
    _check(layout, case, tmp_path)


def _in_an_epoch(layout: Layout, folder: str) -> tuple[str, int]:
    torch.manual_seed(0)
    fit = layout.trainer(
        folder,
        max_epochs=1,
        val_check_interval=3,
        callbacks=[_Draws(_torch, "on_validation_end")],
        num_sanity_val_steps=0,
    )
    with pytest.raises(MegatronLightningError) as error:
        fit.fit(VectorModule(), loader(layout), loader(layout))
    return str(error.value), fit.global_step


def test_tensor_ranks_compare_after_a_validation_in_an_epoch(tmp_path: Path) -> None:
    for error, steps in run(TP2, _in_an_epoch, tmp_path):
        assert re.search(_STATES, error) and steps == 3


class _GroupOfEach(VectorModule):
    """One group for each parameter, at rates that fall with the depth: stages have other groups,
    or as many with other rates."""

    def __init__(self, depth: int) -> None:
        super().__init__(Net(*(nn.Linear(8, 8) for _ in range(depth - 1)), nn.Linear(8, 4)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["momentum"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [parameter], "lr": 0.1 / (1 + int(name.split(".")[1]))}
            for name, parameter in self.named_parameters()
        ]
        optimizer = torch.optim.SGD(groups, momentum=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def _fitted(layout: Layout, folder: str, depth: int) -> dict[str, float]:
    torch.manual_seed(0)
    draws = [_Draws(draw, "on_train_batch_end", everywhere=True) for draw in (_torch, _numpy)]
    fit = layout.trainer(folder, max_epochs=2, callbacks=draws)
    fit.fit(_GroupOfEach(depth), loader(layout), loader(layout))
    return metrics_of(fit)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [4, 5])
@layouts(PP2, PP2_DP2)
def test_schedules_and_draws_of_all_ranks_pass(layout: Layout, depth: int, tmp_path: Path) -> None:
    for rank in run(layout, _fitted, tmp_path, depth):
        assert_close(rank, single(_fitted, depth))
