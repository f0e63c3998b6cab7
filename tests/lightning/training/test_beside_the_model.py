"""What a step reads beside the output of the pipelined model: it travels, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.errors import MegatronLightningError
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import (
    PP2,
    Layout,
    assert_close,
    layouts,
    make_layout,
    metrics_of,
    run,
    single,
)
from tests.lightning.training.test_divided_forwards import Block, Chain
from tests.lightning.vectors import VectorModule, loader

PP2_VPP2 = make_layout(
    "pp2-vpp2",
    2,
    1,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    micro_batch_size=2,
)


class _Beside(pl.LightningModule):
    """Its own forward is divided; it leaves early activations on attributes and in the log."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 4)
        self.kept: dict[str, Any] = {}
        self.scale = 0.0
        self.register_buffer("smooth", torch.zeros(()))
        # Hooks change outputs that are sent, by value and in place.
        self.blocks[0].register_forward_hook(lambda _, given, output: output.mul_(0.7))
        self.blocks[1].register_forward_hook(lambda _, given, output: output + 0.1 * given[0])
        self.blocks[1].register_forward_hook(self._keep)
        self.blocks[2].register_forward_hook(lambda _, given, output: output * 0.5)

    def _keep(self, block: nn.Module, given: Any, output: Tensor) -> None:
        self.hooked = output

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.reg = x.square().mean()
        self.log("early", x.mean())
        self.log("early_number", float(x.abs().mean()))
        self.kept["first"] = [x]
        self.smooth.mul_(0.9).add_(0.1 * x.detach().mean())
        self.scale = x.mean(0).abs().mean().item()
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1]) + 0.1 * self.reg
        loss = loss + 0.1 * self.kept["first"][0].abs().mean() + 0.1 * self.hooked.square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.scale > 0 and bool(self.smooth != 0) and bool(self.smooth.isfinite())
        assert float(self.reg) > 0 and self.hooked.shape[1] == 8

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _beside(layout: Layout, folder: str) -> dict[str, float]:
    torch.manual_seed(0)
    fit = layout.trainer(folder, max_epochs=2)
    fit.fit(_Beside(), loader(layout))
    return metrics_of(fit)


@pytest.mark.spread(1)
@layouts(PP2, PP2_VPP2)
def test_early_activations_reach_the_loss_and_the_log(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _beside, tmp_path):
        assert_close(rank, single(_beside))


class _Penalty(VectorModule):
    """Computes with parameters in a step; ``way`` says how it finds them."""

    ways: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "all": lambda module: sum(p.square().sum() for p in module.parameters()),
        "named": lambda module: sum(
            p.norm() for name, p in module.net.named_parameters() if name.endswith("weight")
        ),
        "layer by layer": lambda module: sum(
            p.abs().sum() for layer in module.net for p in layer.parameters()
        ),
        "held": lambda module: sum(p.square().sum() for p in module.held["decayed"]),
        "flat": lambda module: nn.utils.parameters_to_vector(module.net.parameters()).norm(),
    }

    def __init__(self, way: str, hook: str = "training_step") -> None:
        super().__init__()
        self.held = {"decayed": list(self.net.parameters())}
        self.way, self.hook = way, hook

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * self.ways[self.way](self) if self.hook == "training_step" else loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.hook == "validation_step":
            self.log("norm", self.ways[self.way](self))


class _LeavesLoss(Block):
    """As layers with a balancing loss do."""

    aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = out.square().mean()
        return out


class _ReadsUnits(VectorModule):
    """Adds up what the blocks have left, some after they were reset."""

    def __init__(self, *, resets: bool) -> None:
        super().__init__(Chain())
        self.net.blocks = nn.ModuleList(_LeavesLoss() for _ in range(4))
        self.resets = resets

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        blocks: Any = self.net.blocks
        for block in blocks if self.resets else ():
            block.aux = 0.0
        return super().training_step(batch, batch_idx) + sum(block.aux for block in blocks)


_OTHERS = r"net.*weight belongs to a unit on another .* parameters\(\) .* weight_decay"
_LEFT = r"blocks.0.aux belongs to a unit on another .* leaves it on itself .* StepReport"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **{way: (partial(_Penalty, way), _OTHERS) for way in _Penalty.ways},
    "held": (partial(_Penalty, "held"), r"a list or dict holds net.* belongs .* weight_decay"),
    "validation": (partial(_Penalty, "named", "validation_step"), _OTHERS),
    "left": (partial(_ReadsUnits, resets=False), _LEFT),
    "reset": (partial(_ReadsUnits, resets=True), _LEFT),
}


class _Asks(VectorModule):
    """Asks parameters what they are, and does not compute with them."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        first = next(self.net.parameters())
        x = batch[0].to(first.device, first.dtype)
        count = sum(p.numel() for p in self.parameters() if p.requires_grad)
        self.log("count", float(count))
        self.log("tensors", float(len({*self.parameters()})))
        return super().training_step([x, batch[1]], batch_idx)


def _asks(layout: Layout, folder: str) -> dict[str, float]:
    fit = layout.trainer(folder, max_epochs=1)
    fit.fit(_Asks(), loader(layout))
    return metrics_of(fit)


@layouts(PP2)
def test_questions_about_parameters_are_answered(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _asks, tmp_path):
        assert_close(rank, single(_asks))


def _refused(layout: Layout, folder: str, case: str) -> str | None:
    try:
        layout.trainer(folder, max_epochs=1).fit(REFUSED[case][0](), loader(layout), loader(layout))
    except MegatronLightningError as error:
        return str(error)
    except (PeerFailure, RuntimeError) as error:  # the other rank is gone
        return f"peer: {error}"
    return None


_SLOW = {"flat", "layer by layer", "left"}  # found in the same place as the others


@pytest.mark.spread(1)
@layouts(PP2, slow=[PP2_VPP2])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in _SLOW else []) for case in REFUSED],
)
def test_what_other_stages_have_is_refused_by_name(
    layout: Layout, case: str, tmp_path: Path
) -> None:
    errors = run(layout, _refused, tmp_path, case)
    said = [error for error in errors if error and not error.startswith("peer: ")]
    assert None not in errors and said
    for error in said:
        assert re.search(REFUSED[case][1], error, re.DOTALL), error
