"""Hooks of the module and of callbacks: collectives over all ranks, and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_lightning.errors import PipelineError, ShardingError
from megatron_lightning.layers.styles import ColumnParallel, RowParallel
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import Layout, assert_close, layouts, make_layout, run
from tests.lightning.vectors import VectorModule, loader

PLAN = ShardingPlan(modules={"net.0": ColumnParallel(), "net.2": RowParallel()})
TP2 = make_layout("tp2", 2, 1, tensor_model_parallel_size=2, sharding_plan=PLAN)
PP2 = make_layout("pp2", 2, 1, pipeline_model_parallel_size=2, micro_batch_size=4)
ZERO1 = make_layout("zero1", 2, 2)
FSDP2 = make_layout("fsdp", 2, 2, data_parallel="fsdp")


class Hook(pl.Callback):
    """Calls a function where a case says."""

    def __init__(self, where: str, call: Callable[[pl.Trainer, nn.Module], object]) -> None:
        self.where, self.call = where, call

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.where == "start":
            self.call(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if self.where == "batch" and trainer.global_step == 2:
            self.call(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.where == "validation":
            self.call(trainer, pl_module)


class LateCollective(VectorModule):
    """Calls a collective over all ranks from the third step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            dist.all_reduce(torch.ones(()), group=dist.group.WORLD)
        return super().training_step(batch, batch_idx)


def _sums(trainer: pl.Trainer, module: nn.Module) -> None:
    dist.all_reduce(torch.ones(()))


def _gathers(trainer: pl.Trainer, module: nn.Module) -> None:
    dist.all_gather_object([None] * dist.get_world_size(), 1.0)


def _passes(trainer: pl.Trainer, module: nn.Module) -> None:
    strategy: Any = trainer.strategy
    number = torch.full((), float(dist.get_rank()))
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    assert float(number) == dist.get_world_size() - 1
    dist.barrier()
    dist.broadcast(number, 0)
    dist.all_reduce(number, group=strategy.data_parallel_group)
    strategy.full_state_dict()
    strategy.reduce_boolean_decision(True)
    torch.randn(3, generator=torch.Generator().manual_seed(0))  # no parameter's shape
    with torch.no_grad():
        next(module.parameters()).mul_(1.0)


def _draws(trainer: pl.Trainer, module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def _draws_alike(trainer: pl.Trainer, module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))


def _fills_matrices(trainer: pl.Trainer, module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.kaiming_uniform_(parameter)


def _fills_data(trainer: pl.Trainer, module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data.normal_()


CASES: dict[str, tuple[Any, type[Exception], str]] = {
    "sum": (Hook("validation", _sums), PipelineError, "on_validation_epoch_end of Hook called"),
    "gather": (Hook("batch", _gathers), PipelineError, "on_train_batch_end of Hook called"),
    "late": (None, PipelineError, "training_step of LateCollective called"),
    "generator": (Hook("start", _draws), ShardingError, "on_train_start of Hook draws random"),
    "alike": (Hook("batch", _draws_alike), ShardingError, "on_train_batch_end of Hook draws"),
    "matrices": (Hook("batch", _fills_matrices), ShardingError, "on_train_batch_end of Hook draws"),
    "data": (Hook("start", _fills_data), ShardingError, "on_train_start of Hook draws random"),
}


def _fit(layout: Layout, folder: str, hook: Hook | None) -> Any:
    module = VectorModule() if hook is not None else LateCollective()
    trainer = layout.trainer(folder, max_epochs=1, callbacks=[] if hook is None else [hook])
    trainer.fit(module, loader(layout), loader(layout))
    return {name: tensor.detach() for name, tensor in module.named_parameters()}


def _refused(layout: Layout, folder: str, name: str) -> str:
    hook, error, _ = CASES[name]
    with pytest.raises((error, PeerFailure)) as caught:
        _fit(layout, folder, hook)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (PP2, "sum"),
        (TP2, "generator"),
        pytest.param(PP2, "matrices", marks=pytest.mark.slow),
        (FSDP2, "data"),
        *(
            pytest.param(layout, name, marks=pytest.mark.slow)
            for layout in (TP2, PP2)
            for name in CASES
            if (layout.name, name)
            not in {
                ("pp2", "sum"),
                ("tp2", "generator"),
                ("pp2", "late"),
                ("pp2", "matrices"),
                ("pp2", "data"),
            }
        ),
    ],
)
def test_what_counts_copies_or_draws_for_parts_is_refused(
    layout: Layout, name: str, tmp_path: Path
) -> None:
    messages = run(layout, _refused, tmp_path, name)
    assert any(CASES[name][2] in message for message in messages), messages


def _both(layout: Layout, folder: str) -> Any:
    world = dist.group.WORLD
    found = [_fit(layout, folder, Hook(where, _passes)) for where in ("batch", "never")]
    assert dist.group.WORLD is world
    return found


@layouts(TP2, slow=[PP2])
def test_what_copies_do_not_change_passes(layout: Layout, tmp_path: Path) -> None:
    hooked, plain = run(layout, _both, tmp_path)[0]
    assert_close(hooked, plain)


@pytest.mark.slow
def test_replicas_of_one_rank_sum_over_all(tmp_path: Path) -> None:
    for name in ("sum", "gather", "generator"):
        run(ZERO1, _fit, tmp_path, CASES[name][0])
