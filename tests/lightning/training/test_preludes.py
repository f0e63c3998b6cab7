"""Steps and forwards around modules before the units of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from megatron_lightning.config import PipelineOptions
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

STEPS, BATCH, WIDTH = 4, 4, 8
RTOL = 1e-5  # fp32, 4 optimizer steps; micro-batches sum in another order than one batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cross = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, features: Tensor | None = None) -> Tensor:
        read = 0.0 if features is None else self.cross(features)
        return hidden + (self.linear(hidden) + read).tanh()


class Tower(nn.Module):
    """Two layers, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, images: Tensor) -> Tensor:
        self.num_calls += 1
        return self.second(self.first(images).tanh())

    def encode(self, images: Tensor) -> Tensor:
        return self(images)


class Model(nn.Module):
    """The features are added before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def begin(self, x: Tensor, images: Tensor | None) -> Tensor:
        hidden: Tensor = self.embed(x)
        return hidden if images is None else hidden + self.tower(images)

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        hidden = self.begin(x, images)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Twice(Model):
    """Images and their mirror images; the second output is read by every block."""

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        hidden, features = self.embed(x), None
        if images is not None:
            hidden = hidden + self.tower(images)
            features = self.tower(-images)
        for block in self.blocks:
            hidden = block(hidden, features)
        return self.head(hidden)


class Checkpointed(Model):
    def begin(self, x: Tensor, images: Tensor | None) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return Model.begin(self, x, images)

        return checkpoint(run, x, use_reentrant=False)


class Tied(Model):
    """The tower shares weights with blocks of both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.tower.second.weight = self.blocks[1].linear.weight
        self.blocks[2].linear.weight = self.blocks[1].linear.weight


class Frozen(Model):
    """The tower runs without a graph, although its parameters could be trained."""

    def begin(self, x: Tensor, images: Tensor | None) -> Tensor:
        hidden: Tensor = self.embed(x)
        if images is not None:
            with torch.no_grad():
                features = self.tower(images)
            hidden = hidden + features
        return hidden


class Before(Model):
    """The step calls the tower, and hands on twice what it returns."""

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden, images)
        return self.head(hidden)


class Hooked(Model):
    """A hook changes what the tower returns."""

    def __init__(self) -> None:
        super().__init__()
        self.tower.register_forward_hook(lambda module, args, output: 2 * output)


class Sometimes(Model):
    def begin(self, x: Tensor, images: Tensor | None) -> Tensor:
        seen = images if images is not None and bool(images.sum() > 0) else None
        return Model.begin(self, x, seen)


class Late(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, WIDTH)  # a buffer may not be written on several stages

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden if images is None else hidden + self.tower(images))


class Leaky(Model):
    """The head reads what a hook in the tower leaves on the model."""

    kept = torch.zeros(1)

    def __init__(self) -> None:
        super().__init__()
        self.tower.second.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        hidden = self.begin(x, images)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden if images is None else hidden + self.kept)


class Step(pl.LightningModule):
    """A regression, whose example has no images."""

    def __init__(self, kind: Callable[[], Model]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = kind()
        self.example_input_array = {"x": torch.zeros(2, 3)}
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        images = batch.get("images")
        if isinstance(self.model, Before) and images is not None:
            images = 2 * self.model.tower(images)
        return F.mse_loss(self.model(batch["x"], images), batch["y"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1)


def _loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(STEPS * BATCH, 8, generator=draw)
    rows = [{"x": row[:3], "images": row[3:6], "y": row[6:]} for row in rows]
    return DataLoader(rows, BATCH)


def _fit(kind: type[Model], pp: int, folder: str = "", **options: Any) -> Any:
    """Return losses, norms, the validation loss, full weights and this rank's calls of the
    tower."""
    module, layout = Step(kind), None
    if pp > 1 or kind is Sometimes:  # which branches for every micro-batch
        layout = {"pp": pp, "mbs": 1, "pipeline_options": PipelineOptions(**options)}
    run = fit(layout, module, _loader(), _loader(), steps=STEPS)
    strategy = run.trainer.strategy
    is_ours = isinstance(strategy, MegatronStrategy)
    state = strategy.full_state_dict() if is_ours else module.state_dict()
    weights = {k: v.numpy() for k, v in state.items() if v.is_floating_point()}
    if folder:
        run.trainer.save_checkpoint(f"{folder}/{pp}.ckpt")
    calls = getattr(module.model.tower, "num_calls", 0)
    is_held = any(True for _ in module.model.tower.parameters())
    return run.losses, run.norms, run.logged["val"], weights, int(calls) if is_held else 0


RIGHT = [Model, Twice, Checkpointed, Tied, Frozen, Before, Hooked]


def _fit_all(pp: int, folder: str) -> list[Any]:
    cases = [_fit(kind, pp, folder if kind is Model else "") for kind in RIGHT]
    cases.append(_fit(Sometimes, pp, variable_seq_lengths=True))
    cases.append(_fit(Late, pp, replicated_modules=["tower"]))
    return cases


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_steps_with_towers_equal_one_device(tmp_path: Path) -> None:
    ranks = run_ranks(2, _fit_all, 2, str(tmp_path), timeout_s=180)
    alone = run_ranks(1, _fit_all, 1, "")[0]
    for index, kind in enumerate([*RIGHT, Sometimes, Late]):
        losses, norms, val, weights, _ = alone[index]
        for rank in ranks:
            found = rank[index]
            assert found[0] == pytest.approx(losses, rel=RTOL), kind
            assert found[1] == pytest.approx(norms, rel=RTOL), kind
            assert found[2] == pytest.approx(val, rel=RTOL), kind
            for name in weights if found[3] else ():
                assert np.allclose(found[3][name], weights[name], atol=1e-6), (kind, name)
        if kind is not Late:
            assert ranks[0][index][4] == 0 < ranks[1][index][4], kind


REFUSED = {
    Sometimes: r"'tower' is called in some micro-batches, and not in .* variable_seq_lengths",
    Late: r"'tower' behind the first pipeline stage.*replicated_modules=\['tower'\]",
    Leaky: r"'tower'.* hands state to code behind .*replicated_modules=\['tower'\]",
}


def _refused(name: str) -> None:
    _fit({kind.__name__: kind for kind in REFUSED}[name], 2)


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", REFUSED)
def test_calls_that_a_first_stage_cannot_run_are_refused(kind: type[Model]) -> None:
    with pytest.raises(AssertionError, match=REFUSED[kind]):
        run_ranks(2, _refused, kind.__name__)
