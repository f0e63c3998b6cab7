"""Collectives that a user calls: over the data-parallel ranks where they mean the world, refused in
steps where that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.config import MoEConfig
from megatron_lightning.errors import ConfigError, PipelineError
from megatron_lightning.layers import CoreAttention
from megatron_lightning.layers.styles import ColumnParallel, ContextAttention
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.resilience.failure import PeerFailure
from tests.helpers.layouts import tiny_config
from tests.lightning.support import (
    DDP2,
    DP2,
    PP2_WHOLE,
    Layout,
    assert_close,
    layouts,
    make_layout,
    run,
    single,
    thinned,
)

SIZE, SAMPLES = 4, 16
PLAN = ShardingPlan(modules={"model.layers.0": ColumnParallel(gather_output=True)})
TP = {"tensor_model_parallel_size": 2, "sharding_plan": PLAN}
TP2 = make_layout("tp2", 2, 1, **TP)
TP2_DP2 = make_layout("tp2-dp2", 4, 2, **TP)
TP2_MICRO = make_layout("tp2-micro", 2, 1, micro_batch_size=4, **TP)
CP2 = make_layout(
    "cp2",
    2,
    1,
    context_parallel_size=2,
    sharding_plan=ShardingPlan(modules={"model.core": ContextAttention()}, positions=""),
)
EXPERTS_DP2 = make_layout("experts-dp2", 2, 2)
EXPERTS_EP2 = make_layout("experts-ep2", 2, 2, expert_model_parallel_size=2)
EXPERTS_TP2_EP2 = make_layout(
    "experts-tp2-ep2", 4, 2, tensor_model_parallel_size=2, expert_model_parallel_size=2
)
CONFIG = tiny_config(
    num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=30, max_sequence_length=8,
    moe=MoEConfig(num_experts=4),
)  # fmt: skip
PP2_DP2 = make_layout("pp2-dp2", 4, 2, pipeline_model_parallel_size=2, micro_batch_size=2)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(2)])

    def pipeline_units(self) -> list[str]:
        return ["layers.0", "layers.1"]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class _Attention(nn.Module):
    """For context-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.core = CoreAttention(0.0)
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).transpose(0, 1).unsqueeze(2)
        return self.core(heads, heads, heads).transpose(0, 1)


class _Module(pl.LightningModule):
    """``observe`` is called with this module and the output of every training step, ``at_end`` at
    the end of every validation."""

    sequence_dims = {"x": 1}  # noqa: RUF012

    def __init__(
        self,
        observe: Callable[[Any, Tensor], Tensor] | None = None,
        at_end: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = _Model()
        self.observe, self.at_end = observe, at_end
        self.world = dist.group.WORLD if dist.is_initialized() else None
        self.count, self.result, self.losses = 0.0, None, list[float]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        z = self.model(batch["x"])
        return z.square().mean() if self.observe is None else self.observe(self, z)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.model(batch["x"])

    def on_validation_batch_end(self, outputs: Any, batch: dict[str, Tensor], *_: Any) -> None:
        self.count += len(batch["x"])

    def on_validation_epoch_end(self) -> None:
        self.result = self.at_end(self) if self.at_end is not None else None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class _Experts(GPTLightningModule):
    """``observe`` is called with this module and the loss of every training step."""

    def __init__(self, observe: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(CONFIG)
        self.observe = observe

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": self.observe(self, output["loss"])}


def _made(layout: Layout, **functions: Any) -> tuple[pl.LightningModule, DataLoader[Any]]:
    """Return a module for the layout, and its data."""
    if layout.name.startswith("experts"):
        pl.seed_everything(0, verbose=False)
        tokens = torch.randint(0, 30, (SAMPLES, 9))
        texts = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
        return _Experts(**functions), DataLoader(texts, batch_size=8 // layout.data)
    module, width = _Module(**functions), (SIZE,)
    if layout.name == "cp2":
        module.model, width = _Attention(), (4, SIZE)
    generator = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(*width, generator=generator)} for _ in range(SAMPLES)]
    return module, DataLoader(rows, batch_size=8 // layout.data)


def _counts(module: _Module) -> dict[str, Any]:
    count = torch.tensor(module.count)
    found = {
        "default": module.all_gather(count).sum(),
        "nested": module.all_gather({"counts": [count]})["counts"][0].sum(),
        "number": module.all_gather(module.count).sum(),
        "strategy": module.trainer.strategy.all_gather(count).sum(),
        "bools": module.all_gather(torch.tensor([True, False])).float().mean(),
    }
    if dist.is_initialized():
        strategy: Any = module.trainer.strategy
        found["world"] = module.all_gather(count, group=dist.group.WORLD).sum()
        found["reduced"] = strategy.reduce(count.clone(), dist.group.WORLD, "sum")
        summed = count.clone()
        dist.all_reduce(summed, group=strategy.data_parallel_group)
        found["own"] = summed
        for axis in ("tp", "pp"):  # groups that the user names are used, also if they are the world
            group = strategy.context.axis(axis).process_group
            found[axis] = len(module.all_gather(count, group=group)) if group else 1
    return {name: float(value) for name, value in found.items()}


def _validate(layout: Layout, folder: str, at_end: Any) -> Any:
    module: Any
    module, loader = _made(layout, at_end=at_end)
    layout.trainer(folder).validate(module, loader, verbose=False)
    return module.result


@layouts(PP2_WHOLE, CP2, slow=[DP2, TP2, TP2_DP2, PP2_DP2])
def test_the_values_of_a_replica_are_gathered_once(layout: Layout, tmp_path: Path) -> None:
    sizes = {name: 2.0 if name in layout.name else 1.0 for name in ("tp", "pp")}
    expected = dict.fromkeys(("default", "nested", "number", "strategy"), float(SAMPLES))
    expected |= dict.fromkeys(("world", "reduced", "own"), float(SAMPLES))
    for found in run(layout, _validate, tmp_path, _counts):
        if layout.name.startswith("cp"):
            found["reduced"] = SAMPLES  # sums over the parts of sequences, as documented
        assert found == {**expected, "bools": 0.5, **sizes}


def _contrast(module: _Module, z: Tensor) -> Tensor:
    """A loss over the samples of all ranks."""
    z = F.normalize(z, dim=-1)
    if module.trainer.world_size > 1:
        z = module.all_gather(z, sync_grads=True).flatten(0, 1)
    loss = F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)).roll(1))
    module.losses.append(float(loss))
    return loss


def _contrastive(layout: Layout, folder: str) -> Any:
    module = _Module(_contrast)
    generator = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(SIZE, generator=generator)} for _ in range(SAMPLES)]
    size = 8 // layout.data  # neighbors: the samples of a global batch are in one device's order
    rank = dist.get_rank() // (layout.ranks // layout.data) if layout.data > 1 else 0
    shares = [batch[rank * size : (rank + 1) * size] for batch in (rows[:8], rows[8:])]
    loader = DataLoader(shares[0] + shares[1], batch_size=size)
    trainer = layout.trainer(folder, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module, loader)
    weights = {n: p.detach() for n, p in module.named_parameters() if n.endswith("1.weight")}
    return {"losses": module.losses, "weights": weights}


@layouts(TP2_DP2, slow=[DP2, DDP2, TP2])
def test_losses_over_the_samples_of_all_ranks(layout: Layout, tmp_path: Path) -> None:
    expected = single(_contrastive)
    for found in run(layout, _contrastive, tmp_path):
        assert_close(found, expected)


def _gathers_in_step(module: _Module, z: Tensor) -> Tensor:
    return module.all_gather(z.square().mean(), sync_grads=True).mean()


def _own_group(module: _Module, z: Tensor) -> Tensor:
    group = module.trainer.strategy.data_parallel_group
    return module.all_gather(z.square().mean(), group=group, sync_grads=True).mean()


def _gathered(layout: Layout, folder: str, observe: Any) -> Any:
    module, loader = _made(layout, observe=observe)
    layout.trainer(folder, max_steps=1).fit(module, loader)
    return {name: p.detach() for name, p in module.named_parameters()}


def _refused(layout: Layout, folder: str, observe: Any) -> str | None:
    """Return the message of the refusal; None where another rank has refused first."""
    with pytest.raises((PipelineError, PeerFailure)) as caught:
        layout.trainer(folder, max_steps=2).fit(*_made(layout, observe=observe))
    return None if isinstance(caught.value, PeerFailure) else str(caught.value)


def test_all_gather_in_a_pipelined_step_is_refused(tmp_path: Path) -> None:
    message = run(PP2_WHOLE, _refused, tmp_path, _gathers_in_step)[0]
    assert "self.all_gather was asked for in the middle of a step of _Module" in message
    assert "gather it at the end of the epoch" in message


def test_a_group_that_the_user_names_passes_in_a_pipelined_step(tmp_path: Path) -> None:
    for found in run(PP2_DP2, _gathered, tmp_path, _own_group):
        for name, weight in found.items():
            assert_close(weight, single(_gathered, None)[name])


def _all_reduce(module: _Module, z: Tensor) -> Tensor:
    number = torch.ones(())
    dist.all_reduce(number)
    return z.square().mean() * number


def _world_by_name(module: _Module, z: Tensor) -> Tensor:
    dist.barrier(group=dist.group.WORLD)
    return z.square().mean()


def _objects(module: _Module, z: Tensor) -> Tensor:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, 1.0)
    return z.square().mean() * sum(found)


def _functional(module: _Module, z: Tensor) -> Tensor:
    return functional.all_reduce(z.square().mean(), "sum", dist.group.WORLD)


def _kept(module: _Module, z: Tensor) -> Tensor:
    number = torch.ones(())
    dist.all_reduce(number, group=module.world)
    return z.square().mean() * number


def _passing(module: _Module, z: Tensor) -> Tensor:
    """The strategy's own collectives, and those on the data-parallel group."""
    number = torch.ones(())
    strategy: Any = module.trainer.strategy
    dist.all_reduce(number, group=strategy.data_parallel_group)
    assert dist.get_world_size(strategy.data_parallel_group) == 1
    assert float(number) == 1.0
    strategy.barrier()
    assert strategy.broadcast(dist.get_rank()) == 0
    return z.square().mean()


def _fit_with(layout: Layout, folder: str, observe: Any) -> Any:
    world = dist.group.WORLD
    weights = _gathered(layout, folder, observe)
    assert dist.group.WORLD is world  # nothing stays of the watch
    return weights


@pytest.mark.spread(1)
@layouts(TP2, CP2)
def test_other_collectives_pass(layout: Layout, tmp_path: Path) -> None:
    found, plain = (run(layout, _fit_with, tmp_path, step)[0] for step in (_passing, None))
    assert_close(found, plain)


def _sums_parts(module: _Module, z: Tensor) -> Tensor:
    number = torch.ones(())
    strategy: Any = module.trainer.strategy
    dist.all_reduce(number, group=strategy.context.dp_cp.process_group)
    assert float(number) == 2.0
    return z.square().mean()


def test_sums_over_the_parts_of_sequences_pass(tmp_path: Path) -> None:
    found, plain = (run(CP2, _fit_with, tmp_path, step)[0] for step in (_sums_parts, None))
    assert_close(found, plain)


@pytest.mark.slow
def test_ranks_that_share_only_experts_hold_different_samples(tmp_path: Path) -> None:
    found, plain = (
        run(layout, _fit_with, tmp_path, _all_reduce)[0] for layout in (EXPERTS_EP2, EXPERTS_DP2)
    )
    dense = [name for name in plain if "experts" not in name]
    assert_close({name: found[name] for name in dense}, {name: plain[name] for name in dense})


@pytest.mark.parametrize(
    ("step", "name"),
    thinned(
        [
            (_all_reduce, "allreduce"),
            (_world_by_name, "barrier"),
            (_objects, "allgather"),
            (_functional, "a collective of torch.distributed"),
            (_kept, "a collective of torch.distributed"),
        ]
    ),
)
def test_collectives_over_all_ranks_are_refused_in_a_step(
    step: Any, name: str, tmp_path: Path
) -> None:
    layout = TP2_MICRO if step is _objects else TP2
    _check_refused(
        run(layout, _refused, tmp_path, step), f"{name} on the default", "2 of them (tensor 2)"
    )


@layouts(CP2, slow=[EXPERTS_TP2_EP2])
def test_only_ranks_that_hold_the_same_samples_are_counted(layout: Layout, tmp_path: Path) -> None:
    copies = "2 of them (context 2)" if layout is CP2 else "2 of them (tensor 2)"
    messages = run(layout, _refused, tmp_path, _all_reduce)
    _check_refused(
        messages, f"allreduce on the default process group of all {layout.ranks} ranks", copies
    )
    parts = "group=self.trainer.strategy.context.dp_cp.process_group"
    assert any(message and parts in message for message in messages) == (layout is CP2)


def _check_refused(messages: list[str | None], call: str, copies: str) -> None:
    found = [message for message in messages if message]
    assert found
    for message in found:
        assert call in message
        assert f"{copies} hold the same samples" in message
        assert "group=self.trainer.strategy.data_parallel_group" in message


def test_collectives_over_all_ranks_are_refused_before_a_stage_waits(tmp_path: Path) -> None:
    message = run(PP2_WHOLE, _refused, tmp_path, _all_reduce)[0]
    assert "allreduce on the default process group" in message
    assert "Only the last pipeline stage reaches the code after the model" in message


def _gather_parts(module: _Module) -> Any:
    return module.all_gather(torch.tensor(float(dist.get_rank())))


def _parts(layout: Layout, folder: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _validate(layout, folder, _gather_parts)
    return str(caught.value)


def test_values_of_parts_of_sequences_need_a_group(tmp_path: Path) -> None:
    for message in run(CP2, _parts, tmp_path):
        assert "group=self.trainer.strategy.context.dp_cp.process_group" in message
