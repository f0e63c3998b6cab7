"""Tensors in the states of callbacks and hooks, which differ between the ranks of a replica."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from megatron_lightning.checkpoint import read_full
from megatron_lightning.checkpoint.tools.averaging import average
from megatron_lightning.errors import CheckpointError, ShardingError
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    DP2,
    ONE,
    PP2,
    PP2_DP2,
    SINGLE,
    TP2_PP2,
    TP2_TOY,
    Layout,
    layouts,
    make_layout,
    run,
)

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")


def _nested(values: dict[str, Tensor]) -> dict[str, Any]:
    levels: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        reduce(lambda level, key: level.setdefault(key, {}), parents, levels)[last] = value
    return levels


def _copies(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def _spelled(module: pl.LightningModule) -> dict[str, Any]:
    """Return copies of the weights under every spelling that is found, and values of nobody's."""
    copies = _copies(module)
    inner = {name.removeprefix("model."): value for name, value in copies.items()}
    return {
        "dots": copies,
        "prefix": {f"module.{name}": value for name, value in copies.items()},
        "underscores": {f"ema_{name.replace('.', '_')}": value for name, value in copies.items()},
        "letters": {name.replace(".", ""): value for name, value in copies.items()},
        "levels": {"deeper": [_nested(copies), 3]},
        "list": list(copies.values()),
        "inner": {"module." + name: value for name, value in inner.items()}
        | {"n_averaged": torch.tensor(5)},
        "same": torch.arange(6.0),
        "zero": torch.tensor(2.0),
        "number": 7,
    }


class _Spellings(pl.Callback):
    """Keeps copies of the weights in its state, and others in a hook's entries."""

    def __init__(self) -> None:
        self.restored: dict[str, Any] = {}
        self.top: dict[str, Tensor] = {}
        self.expected: dict[str, Any] = {}
        self.module: pl.LightningModule | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.module = pl_module

    def state_dict(self) -> dict[str, Any]:
        assert self.module is not None
        return _spelled(self.module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["top"] = _copies(pl_module)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.top, self.expected = checkpoint["top"], _spelled(pl_module)


def _save(layout: Layout, folder: str) -> None:
    trainer = layout.trainer(folder, max_steps=2, callbacks=[_Spellings()])
    trainer.fit(ToyModule(num_layers=2), datamodule=layout.data_module())
    trainer.save_checkpoint(f"{folder}/last.ckpt")


def _load(layout: Layout, folder: str) -> list[str]:
    """Return the paths at which a rank got back other values than its weights."""
    callback = _Spellings()
    trainer = layout.trainer(folder, max_steps=3, callbacks=[callback])
    module = ToyModule(num_layers=2)
    trainer.fit(module, datamodule=layout.data_module(), ckpt_path=f"{folder}/last.ckpt")
    assert len(callback.restored) == len(callback.expected) == 10
    return [
        *_wrong(callback.restored, callback.expected),
        *_wrong(callback.top, callback.expected["dots"]),
    ]


def _evaluate(layout: Layout, folder: str) -> None:
    """Load a checkpoint of weights alone."""
    trainer = layout.trainer(folder)
    module = ToyModule(num_layers=2)
    trainer.validate(
        module, datamodule=layout.data_module(), ckpt_path=f"{folder}/mean.ckpt", verbose=False
    )


def _wrong(found: Any, expected: Any, path: str = "") -> list[str]:
    if isinstance(expected, Tensor):
        full = getattr(expected, "to_local", lambda: expected)()
        mine = getattr(found, "to_local", lambda: found)()
        return [] if torch.equal(mine, full) else [path]
    if isinstance(expected, dict):
        if set(found) != set(expected):
            return [f"{path}: {set(found) ^ set(expected)}"]
        return [
            text for key in expected for text in _wrong(found[key], expected[key], f"{path}.{key}")
        ]
    if isinstance(expected, list):
        if len(found) != len(expected):
            return [f"{path}: {len(found)}"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [text for i, (one, other) in pairs for text in _wrong(one, other, f"{path}.{i}")]
    return [] if found == expected else [path]


@pytest.mark.spread(1)
@layouts(TP2_TOY, PP2, FSDP2, slow=[DP2, TP2_PP2, PP2_DP2])
def test_every_rank_gets_its_own_part_back(layout: Layout, tmp_path: Path) -> None:
    run(layout, _save, tmp_path)
    for wrong in run(layout, _load, tmp_path):
        assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SINGLE, TP2_TOY),
        (PP2, ONE),
        (SINGLE, PP2),
        (TP2_TOY, PP2),
    ],
    ids=lambda layout: layout.name,
)
def test_states_move_between_layouts(before: Layout, after: Layout, tmp_path: Path) -> None:
    run(before, _save, tmp_path)
    for wrong in run(after, _load, tmp_path):
        assert not wrong
    if before is PP2:  # as one device has it, in its order
        full = read_full(tmp_path / "last.ckpt")
        state = full["callbacks"]["_Spellings"]
        names = list(state["dots"])
        module = ToyModule(num_layers=2)
        module.configure_model()
        assert names == [name for name, _ in module.named_parameters()]
        assert len(state["list"]) == len(names)
        for name, entry in zip(names, state["list"], strict=True):
            assert torch.equal(entry, full["state_dict"][name])
        average(tmp_path / "mean.ckpt", [tmp_path / "last.ckpt"])
        run(ONE, _evaluate, tmp_path)


class _State(pl.Callback):
    """Saves what a function makes of the module, and keeps what comes back."""

    def __init__(self, make: Any) -> None:
        self.make, self.value, self.restored = make, None, None

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.value = self.make(trainer, module)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state["value"]


def _part_without_a_name(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    return [{"first": next(iter(module.parameters())).detach().clone()}]


def _array_of_a_rank(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    return torch.full((3,), float(trainer.global_rank)).numpy()


def _number_of_a_rank(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    return {"number": trainer.global_rank, "scalar": torch.tensor(float(trainer.global_rank))}


def _averages_on_rank_0(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    return _copies(module) if trainer.is_global_zero else {}


_MAKERS = {m.__name__: m for m in (_part_without_a_name, _array_of_a_rank, _number_of_a_rank)}


def _refused(layout: Layout, folder: str, kind: str) -> str:
    trainer = layout.trainer(folder, max_steps=1, callbacks=[_State(_MAKERS[kind])])
    trainer.fit(ToyModule(num_layers=2), datamodule=layout.data_module())
    with pytest.raises(CheckpointError) as caught:
        trainer.save_checkpoint(f"{folder}/last.ckpt")
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "kind", "entry"),
    [
        (TP2_TOY, "_part_without_a_name", "callbacks._State.value.0.first"),
        (PP2, "_array_of_a_rank", "callbacks._State.value"),
    ],
    ids=["tensor", "array"],
)
def test_other_tensors_that_differ_are_refused(
    layout: Layout, kind: str, entry: str, tmp_path: Path
) -> None:
    for text in run(layout, _refused, tmp_path, kind):
        assert f"differ between ranks: {entry}. " in text
        assert "Name the tensors in a dict by the parameters" in text
        assert "or make them equal on all ranks" in text


def _kept(layout: Layout, folder: str, rank_0: bool) -> Any:
    """Numbers come from rank 0, as with Lightning, and so do averages that it alone keeps."""
    make = _averages_on_rank_0 if rank_0 else _number_of_a_rank
    callback, resumed = _State(make), _State(make)
    for state, steps, path in ((callback, 1, None), (resumed, 2, f"{folder}/last.ckpt")):
        trainer = layout.trainer(folder, max_steps=steps, callbacks=[state])
        module = ToyModule(num_layers=2)
        trainer.fit(module, datamodule=layout.data_module(), ckpt_path=path)
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        saved = trainer.strategy.broadcast(callback.value)
    return _wrong(resumed.restored, saved)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "rank_0"), [(DP2, True), (PP2, False)], ids=["dp2", "pp2"])
def test_what_comes_from_rank_0(layout: Layout, rank_0: bool, tmp_path: Path) -> None:
    for wrong in run(layout, _kept, tmp_path, rank_0):
        assert not wrong


class _OutsideOfTheUnits(ToyModule):
    """Keeps averages of the model as further weights, or as buffers."""

    kind = "weights"

    def configure_model(self) -> None:
        super().configure_model()
        names = {n: n.replace(".", "") for n, _ in self.model.named_parameters()}
        if self.kind == "weights":
            self.average = torch.nn.Module()
            self.average.module = torch.nn.ParameterDict(
                {names[n]: p.detach().clone() for n, p in self.model.named_parameters()}
            ).requires_grad_(False)
        elif self.kind == "buffers":
            self.average = torch.nn.Module()
            for name, p in self.model.named_parameters():
                self.average.register_buffer(names[name], p.detach().clone())

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            if self.kind == "rank":
                self.model.norm.weight.add_(self.global_rank)
            elif self.kind == "buffers":
                for name, p in self.model.named_parameters():
                    getattr(self.average, name.replace(".", "")).lerp_(p, 0.5)
            else:
                for average, p in zip(
                    self.average.module.values(), self.model.parameters(), strict=False
                ):
                    if average.shape == p.shape:
                        average.lerp_(p, 0.5)


def _drifting(layout: Layout, folder: str, kind: str, saves: bool) -> str:
    module = _OutsideOfTheUnits(num_layers=2, lr=0.0 if kind == "rank" else 0.01)
    module.kind = kind
    hooks: dict[str, Any] = {"limit_val_batches": 0}
    if saves:
        hooks |= {
            "enable_checkpointing": True,
            "callbacks": [pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=2)],
        }
    trainer = layout.trainer(folder, max_steps=3, **hooks)
    with pytest.raises(ShardingError) as caught:
        trainer.fit(module, datamodule=layout.data_module())
    # Some averages are found before the second batch, others by the save or when training ends.
    assert 1 <= trainer.global_step <= (2 if saves else 3)
    return str(caught.value)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "kind", "saves", "name"),
    [
        (PP2, "weights", False, "average.module."),
        (PP2, "buffers", True, "average."),
        (DP2, "rank", False, "model.norm.weight"),
        (TP2_TOY, "rank", False, "model.norm.weight"),
    ],
    ids=["weights", "buffers", "data", "tensor"],
)
def test_replicas_that_drift_apart_are_refused(
    layout: Layout, kind: str, saves: bool, name: str, tmp_path: Path
) -> None:
    for text in run(layout, _drifting, tmp_path, kind, saves):
        assert f"on some of them: {name}" in text
        assert "WeightAveraging" in text
