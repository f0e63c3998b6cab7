"""Hooks, attributes, lists and classes by which users tell layers and parameters apart: as on one
device, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.layers.styles import ColumnParallel, RowParallel, VocabParallel
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import (
    DP2,
    ONE,
    Layout,
    assert_close,
    layouts,
    make_layout,
    mean_over_ranks,
    run,
    single,
    thinned,
)
from tests.lightning.vectors import loader, vectors

_PLAN = ShardingPlan(
    modules={
        "words": VocabParallel(),
        "blocks.*.up": ColumnParallel(),
        "blocks.*.down": RowParallel(),
        "head": ColumnParallel(gather_output=True),
    }
)
TP2 = make_layout("tp2", 2, 1, tensor_model_parallel_size=2, sharding_plan=_PLAN)
FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
PP2 = make_layout("pp2", 2, 1, pipeline_model_parallel_size=2, micro_batch_size=4)
DDP2 = make_layout("ddp2", 2, 2, data_parallel="ddp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Classifier(pl.LightningModule):
    """Classifies vectors, after an embedding of their signs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(2, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(8, 4)
        self.losses: list[float] = []
        self.sizes: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.words((batch[0][:, 0] > 0).long()) + batch[0]
        loss = F.cross_entropy(self.head(self.blocks(x)), batch[1])
        self.log("loss", loss, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))


class ByClass(Classifier):
    """Weight decay as minGPT chooses it, with its check."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decay, no_decay = set[str](), set[str]()
        for path, module in self.named_modules():
            for own, _ in module.named_parameters(recurse=False):
                name = f"{path}.{own}" if path else own
                if isinstance(module, nn.Linear) and own == "weight":
                    decay.add(name)
                elif own == "bias" or isinstance(module, nn.LayerNorm | nn.Embedding):
                    no_decay.add(name)
        parameters = dict(self.named_parameters())
        assert not decay & no_decay and decay | no_decay == parameters.keys()
        self.sizes = [len(decay), len(no_decay)]
        return torch.optim.AdamW(
            [
                {"params": [parameters[name] for name in sorted(decay)], "weight_decay": 10.0},
                {"params": [parameters[name] for name in sorted(no_decay)], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )


class ByAttribute(Classifier):
    """Weight decay by an attribute of the parameters, as in timm and mamba."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter._no_weight_decay = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for parameter in self.parameters():
            groups[getattr(parameter, "_no_weight_decay", False)].append(parameter)
        self.sizes = [len(groups[False]), len(groups[True])]
        return torch.optim.AdamW(
            [
                {"params": groups[False], "weight_decay": 10.0},
                {"params": groups[True], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )


class Listed(Classifier):
    """Steps a list of parameters that is as old as the model, and scales what layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = list(self.parameters())
        self.words.register_forward_hook(lambda _, args, output: output * 0.5)
        self.head.register_forward_hook(lambda _, args, output: output * 2)
        self.blocks[1].norm.weight.register_hook(torch.zeros_like)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.listed, lr=1e-2)


class Outside(Classifier):
    """Steps a tensor that it has not registered."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.offset = [torch.zeros(4, requires_grad=True), torch.zeros(4)]
        return torch.optim.SGD([*self.parameters(), *self.offset], lr=0.1)


def _fit(layout: Layout, folder: str, kind: type[Classifier]) -> tuple[list[float], list[int]]:
    module = kind()
    trainer = layout.trainer(folder, max_epochs=1, limit_train_batches=3)
    trainer.fit(module, loader(layout, vectors(24)))
    return module.losses, module.sizes


@pytest.mark.spread(1)
@layouts(TP2, PP2, slow=[FSDP2, DP2])
@pytest.mark.parametrize("kind", [ByClass, ByAttribute])
def test_weight_decay_groups_equal_one_device(
    layout: Layout, kind: type[Classifier], tmp_path: Path
) -> None:
    losses, sizes = single(_fit, kind)
    ranks = run(layout, _fit, tmp_path, kind)
    assert_close(mean_over_ranks([rank[0] for rank in ranks]), losses)
    assert all(rank[1] == sizes for rank in ranks)


@layouts(TP2, slow=[DP2, DDP2])
def test_hooks_and_lists_of_a_models_parameters_work_on(layout: Layout, tmp_path: Path) -> None:
    losses, _ = single(_fit, Listed)
    ranks = run(layout, _fit, tmp_path, Listed)
    assert_close(mean_over_ranks([rank[0] for rank in ranks]), losses)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (ONE, Outside),
        (DDP2, Outside),
        (DP2, Outside),
        (TP2, Outside),
        (FSDP2, Listed),
        (PP2, Listed),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_optimizers_of_other_tensors_are_refused(
    layout: Layout, kind: type[Classifier], tmp_path: Path
) -> None:
    """Where layers are kept in other tensors, a list of the old ones is refused."""
    message = r"AdamW steps \d+ tensor" if kind is Listed else r"SGD steps 1 tensor\(s\)"
    pattern = message + r".*no parameters of \w+: param_groups\[0\].*configure_optimizers"
    assert all(run(layout, _refused, tmp_path, kind, pattern))


def _refused(layout: Layout, folder: str, kind: type[Classifier], pattern: str) -> bool:
    with pytest.raises((ConfigError, PeerFailure)) as caught:
        _fit(layout, folder, kind)
    if isinstance(caught.value, ConfigError):
        caught.match(pattern)
    return True


class Late(Classifier):
    """Registers a hook when its layers are parallel: what ``register`` does with this module."""

    def __init__(self, register: Callable[[Any], Any], when: str) -> None:
        super().__init__()
        self.register, self.when = register, when

    def on_fit_start(self) -> None:
        if self.when == "on_fit_start":
            self.register(self)

    def on_validation_start(self) -> None:
        if self.when == "on_validation_start":
            self.register(self)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Activated(Block):
    """Has a module between its parallel layers."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def _forward_hook(module: Any) -> None:
    module.blocks[0].up.register_forward_hook(lambda _, args, output: output / output.norm())


def _between(module: Any) -> None:
    module.blocks[0].act.register_forward_pre_hook(lambda _, args: (args[0] / args[0].norm(),))


def _backward_hook(module: Any) -> None:
    module.blocks[0].down.register_full_backward_hook(lambda _, inputs, outputs: None)


def _parameter_hook(module: Any) -> None:
    module.blocks[0].up.weight.register_hook(lambda gradient: gradient / gradient.norm())


def _full(module: Any) -> None:
    module.blocks[0].register_forward_hook(lambda _, args, output: output / output.norm())
    module.head.register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 2,))
    module.blocks[1].norm.weight.register_hook(torch.zeros_like)


def _late(layout: Layout, folder: str, register: Any, when: str, epochs: int = 1) -> Any:
    module = Late(register, when)
    module.blocks = nn.Sequential(*(Activated() for _ in range(2)))
    trainer = layout.trainer(folder, max_epochs=epochs, limit_train_batches=2)
    data = loader(layout, vectors(24))
    try:
        trainer.fit(module, data, data if when == "on_validation_start" else None)
    except PeerFailure:
        return None
    except ShardingError as error:
        return str(error)
    return module.losses


@pytest.mark.parametrize(
    ("register", "when", "text"),
    thinned(
        [
            (_forward_hook, "on_fit_start", r"blocks.0.up .* the output differs"),
            (_between, "on_validation_start", r"blocks.0.act .* the input differs"),
            (_backward_hook, "on_fit_start", r"blocks.0.down .*gradient of its input differs"),
            (_parameter_hook, "on_fit_start", r"blocks.0.up.weight has a gradient hook"),
            (_forward_hook, "on_validation_start", r"blocks.0.up .* the output differs"),
        ],
        usual=2,
    ),
)
def test_hooks_that_come_late_and_see_shards_are_refused(
    register: Any, when: str, text: str, tmp_path: Path
) -> None:
    texts = run(TP2, _late, tmp_path, register, when)
    assert any(texts)
    for found in texts:
        assert found is None or re.search(text, found), found


def _begins_with_zeros(module: Any) -> None:
    """At the first call the layer's output is zero on all ranks. Then the layer learns."""
    up = module.blocks[0].up
    if not up._forward_hooks:
        torch.nn.init.zeros_(up.weight)
        torch.nn.init.zeros_(up.bias)
        up.register_forward_hook(lambda _, args, output: output / (1 + output.norm()))


@pytest.mark.slow
def test_hooks_on_zeros_are_looked_at_again(tmp_path: Path) -> None:
    texts = run(TP2, _late, tmp_path, _begins_with_zeros, "on_validation_start", 3)
    assert any(texts)
    for found in texts:
        assert found is None or re.search(r"blocks.0.up .* the output differs", found), found


def test_hooks_that_come_late_and_see_full_tensors_work(tmp_path: Path) -> None:
    losses = single(_late, _full, "on_fit_start")
    for found in run(TP2, _late, tmp_path, _full, "on_fit_start"):
        assert_close(found, losses)


class Accumulated(Classifier):
    """Changes gradients by hooks that are registered when buckets exist."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_fit_start(self) -> None:
        def replace(parameter: nn.Parameter) -> None:
            parameter.grad = torch.zeros_like(parameter)

        def double(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(2)

        self.blocks[0].up.weight.register_post_accumulate_grad_hook(replace)
        self.head.weight.register_post_accumulate_grad_hook(double)


@layouts(DP2, slow=[DDP2, FSDP2])
def test_hooks_on_accumulated_gradients_that_come_late_work(layout: Layout, tmp_path: Path) -> None:
    losses, _ = single(_fit, Accumulated)
    ranks = run(layout, _fit, tmp_path, Accumulated)
    assert_close(mean_over_ranks([rank[0] for rank in ranks]), losses)
