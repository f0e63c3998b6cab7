"""Hooks that read, compute with, replace, rename and delete entries of a loaded ``state_dict``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megatron_lightning.errors import CheckpointError
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    ONE,
    PP2,
    SINGLE,
    TP2_TOY,
    Layout,
    assert_close,
    layouts,
    make_layout,
    run,
    single,
)
from tests.lightning.vectors import VectorModule, loader

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
_FIRST, _SECOND = "model.layers.0.linear1.weight", "model.layers.1.linear1.weight"


def _edit(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict that a hook makes."""
    if kind == "replace":
        return {name: torch.full_like(value, 0.1) for name, value in state.items()}
    if kind == "compute":
        return {
            **state,
            _FIRST: state[_FIRST] * 2,
            _SECOND: state[_FIRST][:4].mean() + state[_SECOND],
        }
    if kind == "in place":
        state[_FIRST].mul_(2)
        state[_SECOND][3:] = 0.5
    elif kind == "rename":
        return {**state, _FIRST: state[_SECOND], _SECOND: copy.deepcopy(state[_FIRST])}
    elif kind == "delete":
        del state[_FIRST]
    elif kind == "add":
        state["extra"] = torch.zeros(2)
    return state


class _Hooked(ToyModule):
    kind = "nothing"
    seen: Any = None
    again = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.seen = [(name, list(value.shape), str(value.dtype)) for name, value in state.items()]
        checkpoint["state_dict"] = _edit(self.kind, state)
        if self.again:  # as modules do that load parts of it themselves
            self.load_state_dict(checkpoint["state_dict"])


class _CallbackHook(pl.Callback):
    """Callbacks see the checkpoint after the module is loaded."""

    total: Any = None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        pl_module.load_state_dict(checkpoint["state_dict"])
        if getattr(trainer.strategy, "options", None) is None or (
            trainer.strategy.options.data_parallel != "fsdp"  # FSDP2 refuses copies
        ):
            copy.deepcopy(pl_module).load_state_dict(checkpoint["state_dict"])
        self.total = float(checkpoint["state_dict"]["model.head.weight"].square().sum())


def _save(layout: Layout, folder: str) -> None:
    trainer = layout.trainer(folder, max_steps=2)
    trainer.fit(ToyModule(num_layers=2), datamodule=layout.data_module())
    trainer.save_checkpoint(f"{folder}/last.ckpt")


def _edited(layout: Layout, folder: str, kind: str, again: bool) -> dict[str, Any]:
    module, hook = _Hooked(num_layers=2), _CallbackHook()
    module.kind, module.again = kind, again
    trainer = layout.trainer(folder, callbacks=[hook])
    data, path = layout.data_module(), f"{folder}/last.ckpt"
    after = trainer.validate(module, datamodule=data, ckpt_path=path, verbose=False)
    return {"seen": module.seen, "after": after[0]["val_loss"], "total": hook.total}


_KINDS = ["nothing", "replace", "compute", "in place", "rename"]


def _all_edited(layout: Layout, folder: str) -> dict[str, Any]:
    again = [("again", "rename", True)]
    return {
        name: _edited(layout, folder, kind, twice)
        for name, kind, twice in [*((kind, kind, False) for kind in _KINDS), *again]
    }


@pytest.mark.slow
@pytest.mark.spread(1)
@layouts(TP2_TOY, PP2, FSDP2)
def test_hooks_see_and_change_the_state_of_one_device(layout: Layout, tmp_path: Path) -> None:
    run(SINGLE, _save, tmp_path / "plain")
    (tmp_path / "ours").mkdir()
    expected = run(SINGLE, _all_edited, tmp_path / "plain")[0]
    # Each edit changes the loss; loaded twice, the state is the same.
    assert len({float(edit["after"]) for edit in expected.values()}) == len(_KINDS)
    if layout is PP2:
        run(TP2_TOY, _save, tmp_path / "ours")
    folder = tmp_path / ("ours" if layout is PP2 else "plain")
    for rank in run(layout, _all_edited, folder):
        for kind, edit in expected.items():
            assert rank[kind]["seen"] == edit["seen"]
            # The directory was written by another run, whose sums have other last bits.
            assert_close(rank[kind], edit, where=kind)


def _strict(layout: Layout, folder: str, kind: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        _edited(layout, folder, kind, False)
    return str(caught.value)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("delete", f"missing from the checkpoint:\n  state_dict.{_FIRST}"),
        ("add", "unexpected in the checkpoint:\n  state_dict.extra"),
    ],
    ids=["delete", "add"],
)
def test_names_that_a_hook_deletes_or_adds_follow_strict_loading(
    kind: str, text: str, tmp_path: Path
) -> None:
    run(ONE, _save, tmp_path)
    for found in run(PP2, _strict, tmp_path, kind):
        assert text in found


class _Renamed(pl.LightningModule):
    """A later version of VectorModule, with another name for its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = VectorModule().net
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.trunk(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {n.replace("net.", "trunk.", 1): v for n, v in state.items()}

    configure_optimizers = VectorModule.configure_optimizers


def _resumed_under_other_names(layout: Layout, folder: str) -> list[float]:
    path = f"{folder}/{layout.name}.ckpt"
    first = layout.trainer(folder, max_epochs=1)
    first.fit(VectorModule(), loader(layout))
    first.save_checkpoint(path)
    module = _Renamed()
    layout.trainer(folder, max_epochs=2).fit(module, loader(layout), ckpt_path=path)
    return module.losses


@pytest.mark.slow
@layouts(PP2, ONE, FSDP2)
def test_states_of_optimizers_follow_renamed_entries(layout: Layout, tmp_path: Path) -> None:
    losses = single(_resumed_under_other_names)
    for rank in run(layout, _resumed_under_other_names, tmp_path):
        assert_close(rank, losses)
