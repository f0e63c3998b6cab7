"""Checkpoints without frozen weights: on other layouts, beside other weights, outside of fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.bridge.export_model import tensors_of_checkpoint
from megatron_lightning.checkpoint import consolidate, open_checkpoint
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.inference import Engine
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

ONLY: dict[str, Any] = {"checkpoint_options": CheckpointOptions(trainable_only=True)}
WIDTH = 8
TOWER = {"tower.0.weight", "tower.0.bias", "tower.1.weight", "tower.1.bias"}
ROWS = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3))


def _tower() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


class Sighted(pl.LightningModule):
    """A frozen tower from a file, a trained trunk and, if ``moves``, frozen layers that change."""

    def __init__(self, tower: str, moves: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.tower = _tower().requires_grad_(False)
        self.tower.load_state_dict(torch.load(tower))
        self.trunk = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.norm = nn.BatchNorm1d(WIDTH).requires_grad_(False) if moves else nn.Identity()
        self.average = nn.Linear(WIDTH, WIDTH).requires_grad_(False) if moves else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, w] to [b, w]."""
        found: Tensor = self.trunk(self.norm(self.tower(x)))
        return found

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss."""
        return self(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        """Average the first layer, by less than the precision of bf16."""
        if self.average is not None:
            self.average.weight.lerp_(self.trunk[0].weight.detach(), 1e-6)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Give the optimizer also what it never steps."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit(
    tower: str,
    options: dict[str, Any] | None,
    steps: int,
    load: str | None = None,
    save: str | None = None,
    *,
    moves: bool = False,
    size: int = 4,
) -> list[float]:
    module = Sighted(tower, moves=moves)
    run = fit(options, module, DataLoader(ROWS, batch_size=size), steps=steps, ckpt_path=load)
    if save is not None:
        run.trainer.save_checkpoint(save)
    return run.losses


def _on_two(tower: str, save: str) -> list[float]:
    return _fit(tower, {**ONLY, "data_parallel": "fsdp"}, 2, save=save, size=2)


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tower") / "tower.pt"
    torch.manual_seed(7)
    torch.save(_tower().state_dict(), path)
    return str(path)


@pytest.fixture(scope="module")
def trained(tower: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on two ranks with shards of the tower."""
    path = tmp_path_factory.mktemp("trained") / "trained.ckpt"
    run_ranks(2, _on_two, tower, str(path))
    return path


def _stored(path: Path) -> set[str]:
    names = open_checkpoint(path).tensors()
    return {n.removeprefix("state_dict.") for n in names if n.startswith("state_dict.")}


def _other(tower: str, path: Path) -> str:
    state = torch.load(tower)
    state["0.bias"][3] += 0.1
    torch.save(state, path)
    return str(path)


def test_another_layout_continues_without_the_tower(tower: str, trained: Path) -> None:
    source = open_checkpoint(trained)
    assert {name.partition(".")[0] for name in _stored(trained)} == {"trunk"}
    assert not any("tower" in name for name in source.tensors())
    assert source.state()["left_out"].keys() == TOWER
    losses = _fit(tower, None, 4)
    # fp32, sums over two ranks in another order.
    assert _fit(tower, {}, 4, str(trained)) == pytest.approx(losses[2:], rel=1e-5)


def test_the_same_layout_continues_to_the_bit(tower: str, tmp_path: Path) -> None:
    """Frozen weights that change are saved: statistics, and an average."""
    path = tmp_path / "two.ckpt"
    losses = _fit(tower, dict(ONLY), 4, moves=True)
    _fit(tower, dict(ONLY), 2, save=str(path), moves=True)
    stored = _stored(path)
    assert {"norm.running_mean", "average.weight"} < stored
    assert not stored & {*TOWER, "norm.weight", "average.bias"}
    assert _fit(tower, dict(ONLY), 4, str(path), moves=True) == losses[2:]


def test_another_tower_is_refused_by_name(tower: str, trained: Path, tmp_path: Path) -> None:
    other = _other(tower, tmp_path / "other.pt")
    with pytest.raises(
        CheckpointError, match=r"leaves 4 .* in tower\.0\.bias\. tower\.0\.bias had"
    ):
        _fit(other, {}, 4, str(trained))
    with pytest.raises(CheckpointError, match=r"than the module has in tower\.0\.bias\."):
        Sighted.load_from_checkpoint(trained, tower=other)


def test_a_module_is_loaded_beside_its_own_tower(
    tower: str, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    consolidate(trained, tmp_path / "plain.ckpt")
    for path in (trained, tmp_path / "plain.ckpt"):
        caplog.clear()
        with caplog.at_level("INFO"):
            module = Sighted.load_from_checkpoint(path)
        assert "4 frozen weights are not in the checkpoint: tower.0.bias" in caplog.text
        assert torch.equal(module.tower[0].bias, torch.load(tower)["0.bias"])
        assert not torch.equal(module.trunk[0].weight, Sighted(tower).trunk[0].weight)
    state = torch.load(tmp_path / "plain.ckpt")
    del state["state_dict"]["trunk.1.bias"]
    torch.save(state, tmp_path / "less.ckpt")
    with pytest.raises(CheckpointError, match=r"and also lacks: trunk\.1\.bias"):
        Sighted.load_from_checkpoint(tmp_path / "less.ckpt")


def test_weights_of_a_full_checkpoint_are_not_left_out(tower: str, tmp_path: Path) -> None:
    """The module would make others again."""
    other, full, again = _other(tower, tmp_path / "other.pt"), tmp_path / "full", tmp_path / "again"
    _fit(other, {}, 1, save=str(full))
    _fit(tower, dict(ONLY), 2, str(full), str(again))
    assert _stored(again) & TOWER == {"tower.0.bias"}
    assert _fit(tower, {}, 4, str(again)) == _fit(other, {}, 4, str(full))[1:]


def test_tools_for_full_models_say_what_is_missing(trained: Path) -> None:
    for use in (Engine.load, tensors_of_checkpoint):
        with pytest.raises(CheckpointError, match=r"leaves 4 frozen weights to the trained module"):
            use(trained)


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="trainable_only is set with also_save_hf='end'"):
        CheckpointOptions(trainable_only=True, also_save_hf="end")
    with pytest.raises(ConfigError, match="are both set"):
        CheckpointOptions(trainable_only=True, adapters_only=True)


def test_a_weight_that_was_trained_before_it_was_frozen_is_saved(tmp_path: Path) -> None:
    """By less than the precision of bf16."""

    class Staged(pl.LightningModule):
        def __init__(self, is_frozen: bool) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.norm.requires_grad_(not is_frozen)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.last(self.norm(batch)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([x for x in self.parameters() if x.requires_grad], lr=1e-4)

    first, second, data = tmp_path / "1.ckpt", tmp_path / "2.ckpt", DataLoader(ROWS, batch_size=8)
    fit({}, Staged(False), data, steps=1).trainer.save_checkpoint(first)
    module = Staged(True)
    run = fit(dict(ONLY), module, data, steps=2, ckpt_path=str(first))
    run.trainer.save_checkpoint(second)
    assert {"norm.weight", "last.weight"} <= _stored(second)
