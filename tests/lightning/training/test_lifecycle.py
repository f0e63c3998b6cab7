"""Trainers after one another, stages of one Trainer after one another, and what validate, test and
predict return."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.plugins.environments import LightningEnvironment

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses, trainer
from tests.lightning.support import (
    DDP2,
    DP2,
    MICRO,
    PP2,
    PP2_DP2,
    SINGLE,
    Layout,
    assert_close,
    layouts,
    metrics_of,
    run,
    single,
)


def _in_turn(layout: Layout, folder: str) -> dict[str, Any]:
    """fit, validate, fit, test, predict with one Trainer, then everything again with a second one
    and the same module."""
    module, record = ToyModule(), Losses()
    first = layout.trainer(folder, max_epochs=1, callbacks=[record])
    results: dict[str, Any] = {}
    first.fit(module, datamodule=layout.data_module())
    results["validate"] = first.validate(module, datamodule=layout.data_module(), verbose=False)
    first.fit_loop.max_epochs = 2
    first.fit(module, datamodule=layout.data_module())
    results["fit"] = metrics_of(first)
    results["test"] = first.test(module, datamodule=layout.data_module(), verbose=False)
    results["predict"] = (
        first.predict(module, datamodule=layout.data_module()) if layout.data == 1 else None
    )
    second = layout.trainer(folder, max_epochs=1, callbacks=[record], gradient_clip_val=0.1)
    results["validate again"] = second.validate(
        module, datamodule=layout.data_module(), verbose=False
    )
    second.fit(module, datamodule=layout.data_module())
    results["second"] = metrics_of(second)
    return {**results, "norms": record.norms}


@layouts(DP2, slow=[PP2, MICRO, DDP2, PP2_DP2])
def test_one_module_in_several_trainers(layout: Layout, tmp_path: Path) -> None:
    expected = single(_in_turn)
    for rank in run(layout, _in_turn, tmp_path):
        if layout.data > 1:
            rank["predict"] = expected["predict"]
        assert_close(rank, expected)


def _evaluate_only(layout: Layout, folder: str) -> dict[str, Any]:
    """Without any fit before: the module is cut for evaluation alone."""
    return {
        name: getattr(layout.trainer(folder), name)(
            ToyModule(), datamodule=layout.data_module(), verbose=False
        )
        for name in ("validate", "test")
    }


@layouts(PP2, slow=[MICRO, DP2, PP2_DP2])
def test_return_values_of_validate_and_test(layout: Layout, tmp_path: Path) -> None:
    expected = single(_evaluate_only)
    assert expected["test"][0].keys() == {"test_loss"}
    for rank in run(layout, _evaluate_only, tmp_path):
        assert_close(rank, expected)


def _by_name(layout: Layout, folder: str) -> dict[str, Any]:
    record = Losses()
    named = trainer("megatron", default_root_dir=folder, max_epochs=1, callbacks=[record])
    assert isinstance(named.strategy, MegatronStrategy)
    named.fit(ToyModule(), datamodule=layout.data_module())
    return {"norms": record.norms, "metrics": metrics_of(named)}


def _plain(layout: Layout, folder: str) -> dict[str, Any]:
    record = Losses()
    plain = layout.trainer(folder, max_epochs=1, callbacks=[record])
    plain.fit(ToyModule(), datamodule=layout.data_module())
    return {"norms": record.norms, "metrics": metrics_of(plain)}


def test_strategy_by_name(tmp_path: Path) -> None:
    for rank in run(DP2, _by_name, tmp_path):
        assert_close(rank, single(_plain))


def _another_layout(layout: Layout, folder: str) -> None:
    module = ToyModule()
    layout.trainer(folder, max_epochs=1, limit_train_batches=1).fit(
        module, datamodule=layout.data_module()
    )
    with pytest.raises(
        ConfigError, match=r"sharded for tensor 1 x pipeline 2 .* Create a new module"
    ):
        DP2.trainer(folder, max_epochs=1).fit(module, datamodule=DP2.data_module())


@pytest.mark.slow
def test_a_module_cannot_change_its_layout(tmp_path: Path) -> None:
    run(PP2, _another_layout, tmp_path)


def _another_strategy(layout: Layout, folder: str) -> dict[str, Any]:
    """Two Trainers of different layouts after one another, and one of a single device, in the same
    processes."""
    layout.trainer(folder, max_epochs=1).fit(ToyModule(), datamodule=layout.data_module())
    module, record = ToyModule(), Losses()
    other = layout if layout.options is None else DP2
    second = other.trainer(folder, max_epochs=1, callbacks=[record])
    second.fit(module, datamodule=other.data_module())
    results = {"norms": record.norms, "metrics": metrics_of(second)}
    strategy = MegatronStrategy() if layout.options is not None else "auto"
    alone = trainer(strategy, devices=1, default_root_dir=folder, plugins=[LightningEnvironment()])
    results["alone"] = alone.test(ToyModule(), datamodule=SINGLE.data_module(), verbose=False)
    results["predicted"] = alone.predict(ToyModule(), datamodule=SINGLE.data_module())
    return {**results, "world": alone.world_size}


@pytest.mark.slow
def test_another_layout_in_the_same_process(tmp_path: Path) -> None:
    expected = single(_another_strategy)
    for rank in run(PP2, _another_strategy, tmp_path):
        assert_close(rank, expected)


def _other_world(layout: Layout, folder: str) -> None:
    layout.trainer(folder).test(ToyModule(), datamodule=layout.data_module(), verbose=False)
    with pytest.raises(
        ConfigError, match=r"devices is 4, and this process is already one of 2 ranks.* Set devices"
    ):
        larger = trainer(MegatronStrategy(), devices=4, plugins=[LightningEnvironment()])
        larger.test(ToyModule(), datamodule=layout.data_module(), verbose=False)


def test_a_larger_world_in_the_same_process_is_refused(tmp_path: Path) -> None:
    run(DP2, _other_world, tmp_path)


class _Pruned(pl.Callback):
    """Ends the first run with an exception on every rank, as a search for hyper-parameters ends
    trials."""

    def __init__(self) -> None:
        self.armed = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.armed and trainer.global_step == 2:
            self.armed = False
            raise ValueError("pruned")


def _after_exceptions(layout: Layout, folder: str) -> dict[str, Any]:
    """Two trials that an exception ends, the second Trainer once more, and a third trial."""
    box, world = [find_free_network_port()], dist.group.WORLD
    if layout.options is not None:
        dist.broadcast_object_list(box)
    results: dict[str, Any] = {}
    for _ in range(2):
        module, record = ToyModule(), Losses()
        chosen = layout.trainer(
            folder, devices=layout.ranks, max_epochs=1, callbacks=[_Pruned(), record]
        )
        os.environ["MASTER_PORT"] = str(box[0])
        with pytest.raises(ValueError, match="pruned"):
            chosen.fit(module, datamodule=layout.data_module())
    chosen.fit(module, datamodule=layout.data_module())
    results |= {"same": record.losses, "metrics": metrics_of(chosen)}
    if layout.options is not None:
        # As a tensor-parallel layer holds it.
        module.model.group = AxisGroup("tp", (0, 1), dist.get_rank(), world)
        with pytest.raises(ConfigError, match=r"broken\. Create a new module"):
            chosen.test(module, datamodule=layout.data_module(), verbose=False)
    third = layout.trainer(folder, devices=layout.ranks)
    os.environ["MASTER_PORT"] = str(box[0])
    results["third"] = third.test(ToyModule(), datamodule=layout.data_module(), verbose=False)
    return results


@pytest.mark.slow
def test_runs_after_exceptions_on_all_ranks(tmp_path: Path) -> None:
    expected = single(_after_exceptions)
    assert len(expected["same"]) > 4
    for rank in run(PP2, _after_exceptions, tmp_path):
        assert_close(rank, expected)
