"""Every hook of callbacks, module and data module fires as often and in the same order as on one
device, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.helpers.toy import ToyData, ToyModule
from tests.lightning.support import DDP2, DP2, MICRO, PP2, PP2_DP2, Layout, layouts, run, single

# Called by the strategy for each micro-batch and stage, not by Lightning's loops.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_MODULE_HOOKS = (
    "prepare_data",
    "setup",
    "configure_model",
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "transfer_batch_to_device",
    "teardown",
)
_DATA_HOOKS = (
    "prepare_data",
    "setup",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "teardown",
)


def _recorded(kind: type, label: str, names: list[str], events: list[str]) -> type:
    """Return a subclass of ``kind`` that notes every call of the named methods."""

    def noting(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(f"{label}.{name}")
            return method(*args, **kwargs)

        return call

    return type(f"Recorded{kind.__name__}", (kind,), {name: noting(name) for name in names})


def _hooks(kind: type, more: tuple[str, ...]) -> list[str]:
    return sorted(
        {*(name for name in dir(kind) if name.startswith("on_")), *more} - set(_STEPS) - {"on_gpu"}
    )


def _events(layout: Layout, folder: str, accumulate: int) -> dict[str, list[str]]:
    events: list[str] = []
    callback = _recorded(
        pl.Callback, "callback", _hooks(pl.Callback, ("setup", "teardown", "state_dict")), events
    )()
    module = _recorded(ToyModule, "module", _hooks(pl.LightningModule, _MODULE_HOOKS), events)()
    data = _recorded(ToyData, "data", _hooks(pl.LightningDataModule, _DATA_HOOKS), events)(
        8 // layout.data, 32
    )
    trainer = layout.trainer(
        folder,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        val_check_interval=2,
        gradient_clip_val=1.0,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        callbacks=[callback, pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=2)],
    )
    found = {}
    for name in ("fit", "validate", "test", "predict"):
        getattr(trainer, name)(module, datamodule=data)
        found[name], events[:] = list(events), []
    return found


@pytest.mark.spread(1)
@pytest.mark.parametrize("accumulate", [1, 3])
@layouts(PP2, DP2, slow=[MICRO, DDP2, PP2_DP2])
def test_order_of_events(layout: Layout, accumulate: int, tmp_path: Path) -> None:
    expected = single(_events, accumulate)
    assert len(expected["fit"]) > 150
    order = [
        event
        for event in expected["fit"]
        if "backward" in event or event.endswith(("zero_grad", "optimizer_step"))
    ]
    assert "module.on_after_backward" in order
    for rank, found in enumerate(run(layout, _events, tmp_path, accumulate)):
        for name in expected:
            assert found[name] == expected[name], f"{name} on rank {rank}"
