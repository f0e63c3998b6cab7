"""Every guard can be passed by its name, and by the mode if nothing worse than a wrong number
follows. A mutant for each guard: a program with the mistake that the guard finds."""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from jsonargparse import ArgumentParser
from torch import nn
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import ClosingSummary
from megatron_lightning.config import GuardOptions, MoEConfig
from megatron_lightning.config.training import GUARDS
from megatron_lightning.doctor.folder import look_at
from megatron_lightning.errors import ConfigError
from megatron_lightning.guards.table import TABLE, describe
from megatron_lightning.layers.styles import ColumnParallel, RowParallel
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import LAYOUTS, fit_losses, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer
from tests.lightning.support import DP2, MICRO, Layout, make_layout, run
from tests.lightning.vectors import Net, VectorModule, loader, vectors

PLAN = ShardingPlan(modules={"net.0": ColumnParallel(), "net.2": RowParallel()})
CP2 = make_layout("cp2", 2, 1, cp=2)
FSDP2 = make_layout("fsdp2", 2, 2, dp="fsdp")
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


class EqualDraws(VectorModule):
    def on_train_start(self) -> None:
        weight = self.net[0].weight.data  # NumPy's draws are not seen by hook_draws
        weight.copy_(torch.from_numpy(np.random.default_rng(0).normal(size=weight.shape)))


class ShardWrites(VectorModule):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net[0].weight.mul_(0.9)


class _Average(pl.Callback):
    def __init__(self, net: nn.Module) -> None:
        self.net = copy.deepcopy(net)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        for own, other in zip(self.net.parameters(), pl_module.net.parameters(), strict=False):
            if own.shape == other.shape:
                own.data.lerp_(other.data, 0.1)


class Averages(VectorModule):
    def configure_callbacks(self) -> Any:
        return [_Average(self.net)]


class FsdpShards(VectorModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        penalty = sum(p.square().sum() for p in self.parameters())
        return super().training_step(batch, batch_idx) + penalty


class ShardingPlanValues(VectorModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * self.net[0].weight.square().sum()


class ShardedGradients(VectorModule):
    def on_before_optimizer_step(self, *_: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class SequencePositions(VectorModule):
    """Reads token 0 of each part."""

    def __init__(self) -> None:
        super().__init__(GPTModel(tiny_config(num_layers=1)))
        self.sequence_dims = {"tokens": 1, "labels": 1}

    def train_dataloader(self) -> Any:
        tokens = torch.arange(64).view(4, 16) % 30
        return DataLoader([{"tokens": row, "labels": row} for row in tokens], batch_size=2)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch["tokens"], labels=batch["labels"]).mean()
        return loss + 0.0 * batch["tokens"][:, 0].float().mean()


class ContextAttention(SequencePositions):
    """Attends outside of the model's bound attention."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch["tokens"], labels=batch["labels"]).mean()
        rows = torch.ones(1, 1, 4, 8)
        return loss + 0.0 * F.scaled_dot_product_attention(rows, rows, rows).mean()


class SameSteps(SequencePositions):
    """Returns a note on one of the ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch["tokens"], labels=batch["labels"]).mean()
        return {"loss": loss, "note": "first"} if dist.get_rank() == 0 else {"loss": loss}


class UnreducedGradients(VectorModule):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        super().training_step(batch, batch_idx).backward()
        optimizer.step()


class PartSaving(VectorModule):
    def on_train_end(self) -> None:
        self.to_torchscript()


class LeftGradients(VectorModule):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()  # type: ignore[union-attr]


class ZeroGrad(VectorModule):
    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


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
    "equal_draws": (TP2, EqualDraws),
    "shard_writes": (TP2, ShardWrites),
    "averages": (PP2, Averages),
    "fsdp_shards": (FSDP2, FsdpShards),
    "sharding_plan": (TP2, ShardingPlanValues),
    "left_gradients": (DP2, LeftGradients),
    "zero_grad": (DP2, ZeroGrad),
    "part_saving": (TP2, PartSaving),
    "sharded_gradients": (TP2, ShardedGradients),
    "sequence_positions": (CP2, SequencePositions),
    "context_attention": (CP2, ContextAttention),
    "same_steps": (CP2, SameSteps),
    "unreduced_gradients": (DP2, UnreducedGradients),
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
        except (Exception, SystemExit) as error:  # also of another rank, or of torch
            found |= {"refuses"} if str(error).endswith(end) else {"fails"}
    found |= {"warns" for warning in caught if str(warning.message).endswith(end)}
    assert not found & {"refuses", "warns"} or strategy.progress.fired[guard]
    return found


def _body(layout: Layout, folder: str, guard: str, modes: list[Any]) -> list[set[str]]:
    findings = list[set[str]]()
    for options in modes:
        findings.append(_findings(layout, folder, guard, options))
        if findings[-1] & {"refuses", "fails"}:  # and the process groups have ended
            break
    return findings


@pytest.mark.spread(2)
@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_is_passed_by_its_name(guard: str, tmp_path: Path) -> None:
    layout = MUTANTS[guard][0]
    [kind] = [kind for kind in TABLE if kind.title() == guard]
    passed = GuardOptions(ignore=[guard])
    if kind.may_warn:
        # A refusal ends the process groups, so that it comes last.
        ranks = run(layout, _body, tmp_path, guard, [passed, "ignore", "warn", "refuse"])
        refuses = {"warns"} if guard in ONLY_WARN else {"refuses"}
        assert ranks[0][:3] == [set(), set(), {"warns"}] and refuses <= ranks[0][3]
    else:
        for mode in ("refuse", "ignore"):
            ranks = run(layout, _body, tmp_path, guard, [mode])
            assert {"refuses"} in ranks[0] + ranks[-1], mode
        ranks = run(layout, _body, tmp_path, guard, [passed])
        assert not {"refuses", "warns"} & ranks[0][0]


ONLY_WARN = {"left_gradients", "shard_writes", "step_hints"}


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "single"])
def test_losses_do_not_depend_on_guards(name: str) -> None:
    layout = LAYOUTS[name]
    config = tiny_config(num_layers=4, moe=MoEConfig(num_experts=4) if name == "ep2" else None)
    runs = [
        run_ranks(layout.ranks, partial(fit_losses, dict(options), config, steps=3))
        for options in (layout.options or (), (*(layout.options or ()), ("guards", "ignore")))
    ]
    assert runs[0] == runs[1]  # to the bit


def test_findings_are_named_at_the_end_and_by_the_doctor(tmp_path: Path) -> None:
    summary, strategy = ClosingSummary(), MegatronStrategy(micro_batch_size=2)
    fit = trainer(strategy, max_steps=1, default_root_dir=tmp_path, callbacks=[summary])
    fit.fit(StepHints(), loader(MICRO))
    fit.save_checkpoint(tmp_path / "saved")
    assert "findings of guards: step_hints (1)" in summary.text
    assert look_at(tmp_path, None, 1)["findings"] == {"step_hints": 1}


def test_names_are_those_of_the_table_with_a_sentence_in_the_docs() -> None:
    assert tuple(sorted(kind.title() for kind in TABLE)) == GUARDS == tuple(sorted(MUTANTS))
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
