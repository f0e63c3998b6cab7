"""Every guard can be passed by its name, and by the mode if nothing worse than a wrong number
follows. A mutant for each guard: a program with the mistake that the guard finds."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import yaml
from jsonargparse import ArgumentParser
from torch import nn
from torch.utils.data import DataLoader

from megatron_lightning.config import GuardOptions
from megatron_lightning.config.training import GUARDS
from megatron_lightning.errors import ConfigError, MegatronLightningError
from megatron_lightning.guards.table import TABLE, describe
from megatron_lightning.layers.styles import ColumnParallel, RowParallel
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.trainers import trainer
from tests.lightning.support import MICRO, Layout, make_layout, run
from tests.lightning.vectors import Net, VectorModule, loader, vectors

PLAN = ShardingPlan(modules={"net.0": ColumnParallel(), "net.2": RowParallel()})
PP2 = make_layout("pp2", 2, 1, pp=2, mbs=4)
TP2 = make_layout("tp2", 2, 1, tensor_model_parallel_size=2, sharding_plan=PLAN)


class SameBatches(VectorModule):
    def train_dataloader(self) -> Any:
        return DataLoader(vectors(seed=dist.get_rank()), batch_size=8)


class WorldCollectives(VectorModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        dist.all_reduce(torch.ones(()))
        return super().training_step(batch, batch_idx)


class RankAgreement(VectorModule):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())


class StepHints(VectorModule):
    def __init__(self) -> None:
        super().__init__(Net(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)))


class ModuleHooks(VectorModule):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_forward_hook(lambda *_: None)


class HookDraws(VectorModule):
    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)


class TrainedParameters(VectorModule):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.expects_gradients = True


MUTANTS: dict[str, tuple[Layout, type[VectorModule]]] = {
    "same_batches": (PP2, SameBatches),
    "world_collectives": (TP2, WorldCollectives),
    "rank_agreement": (PP2, RankAgreement),
    "step_hints": (MICRO, StepHints),
    "module_hooks": (TP2, ModuleHooks),
    "hook_draws": (TP2, HookDraws),
    "trained_parameters": (MICRO, TrainedParameters),
}


def _findings(layout: Layout, folder: str, guard: str, options: Any) -> set[str]:
    """Return whether ``guard`` has refused or warned in a fit of its mutant."""
    torch.manual_seed(0)
    module = MUTANTS[guard][1]()
    strategy = layout.strategy(guards=options)
    assert isinstance(strategy, MegatronStrategy)
    fit = trainer(strategy, max_steps=4, default_root_dir=folder)
    own_loader = type(module).train_dataloader is not pl.LightningModule.train_dataloader
    found, end = set(), f"[guard: {guard}]"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit.fit(module, None if own_loader else loader(layout))
        except MegatronLightningError as error:
            if str(error).endswith(end):
                found.add("refuses")
    if any(str(warning.message).endswith(end) for warning in caught):
        found.add("warns")
    assert bool(strategy.progress.fired.get(guard)) == bool(found)
    return found


def _body(layout: Layout, folder: str, guard: str) -> list[set[str]]:
    # A refusal ends the process groups, so that it comes last.
    modes: list[Any] = [GuardOptions(ignore=[guard]), "ignore", "warn", "refuse"]
    if not next(kind for kind in TABLE if kind.title() == guard).may_warn:
        modes = [modes[0], "ignore"]
    return [_findings(layout, folder, guard, options) for options in modes]


@pytest.mark.spread(2)
@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_is_passed_by_its_name(guard: str, tmp_path: Path) -> None:
    findings = run(MUTANTS[guard][0], _body, tmp_path, guard)
    for of_rank in zip(*findings, strict=True):
        assert len({frozenset(found) for found in of_rank}) == 1 or guard == "step_hints"
    [kind] = [kind for kind in TABLE if kind.title() == guard]
    refuses = {"warns"} if guard in ONLY_WARN else {"refuses"}
    if kind.may_warn:
        assert findings[0] == [set(), set(), {"warns"}, refuses]
    else:
        assert findings[0] == [set(), {"refuses"}]


ONLY_WARN = {"step_hints"}


def test_names_are_those_of_the_table_with_a_sentence_in_the_docs() -> None:
    assert tuple(sorted(kind.title() for kind in TABLE)) == GUARDS
    page = Path(__file__).parents[3] / "docs" / "differences.md"
    assert describe() in page.read_text(), "print(megatron_lightning.guards.table.describe())"


def test_a_wrong_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest name is 'hook_draws'"):
        GuardOptions(ignore=["hook_drawn"])
    with pytest.raises(ConfigError, match="no list"):
        GuardOptions(ignore="hook_draws")
    with pytest.raises(ConfigError, match=re.escape("'off'")):
        MegatronStrategy(guards="off")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["guards: warn", "guards: {mode: warn}", "guards: {ignore: [hook_draws]}"]
)
def test_guards_are_options_of_yaml(text: str) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(MegatronStrategy, "strategy")
    parsed = parser.parse_object({"strategy": yaml.safe_load(text)})
    options = parser.instantiate_classes(parsed).strategy.options.guards
    assert (options.mode == "warn") == ("warn" in text)
    assert list(options.ignore) == (["hook_draws"] if "ignore" in text else [])
