"""Checkpoints of models with experts: any layout reads that of another, the optimizer included, and
training goes on as on one process.

Losses that balance a micro-batch depend on how batches are divided; there is none here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import consolidate, read_full
from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import EP, ETP, MICRO, PP, TP, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

STEPS, STOP, BATCH, SEQUENCE, VOCABULARY = 4, 2, 8, 16, 30
EXPERTS, WIDTH, HIDDEN = 4, 48, 32
LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "plain": (1, None),
    "one": (1, {}),
    "ep2-on-two": (2, {EP: 2, "data_parallel": "fsdp"}),
    "etp2-on-two": (2, {ETP: 2}),
    "ep4": (4, {EP: 4}),
    "ep2-etp2": (4, {EP: 2, ETP: 2}),
    "ep2-tp2": (4, {EP: 2, TP: 2}),
    "ep2-pp2": (4, {EP: 2, PP: 2, MICRO: 2}),
    "ep4-fsdp": (4, {EP: 4, "data_parallel": "fsdp"}),
    "ep2-fsdp": (4, {EP: 2, "data_parallel": "fsdp"}),
    "etp2-fsdp": (4, {ETP: 2, "data_parallel": "fsdp"}),
    "ep2-tp2-fsdp": (4, {EP: 2, TP: 2, "data_parallel": "fsdp"}),
}
"""Name -> ranks and options; None: plain Lightning."""


def _config(jitter: float | None = None) -> TransformerConfig:
    return tiny_config(
        num_layers=4,
        vocab_size=VOCABULARY,
        ffn_hidden_size=WIDTH,
        hidden_dropout=0.0 if jitter is None else 0.2,
        moe=MoEConfig(
            num_experts=EXPERTS,
            z_loss_coeff=0.01,
            input_jitter_eps=jitter,
            shared_expert_intermediate_size=24,
            layer_freq=(0, 1, 1, 1),
        ),
    )


class _First(pl.Callback):
    """Saves before the first step."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self._path)


def _train(
    layout: str, saved: str, steps: int, resumed: str | None = None, jitter: float | None = None
) -> tuple[list[float], list[float]]:
    """Return this replica's losses and the norms of the gradients; save first and last."""
    world, options = LAYOUTS[layout]
    replicas, strategy = 1, "auto"
    if options is not None:
        strategy = MegatronStrategy(**options)
        replicas = strategy.layout.data_parallel_size(world)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (STEPS * BATCH, SEQUENCE + 1), generator=generator)
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    record = Losses()
    fit = trainer(strategy, max_steps=steps, callbacks=[record, _First(f"{saved}.first")])
    pl.seed_everything(5, verbose=False)
    module = GPTLightningModule(_config(jitter), learning_rate=1e-3)
    fit.fit(module, DataLoader(rows, batch_size=BATCH // replicas), ckpt_path=resumed)
    fit.save_checkpoint(saved)
    return record.losses, record.norms


def _run(layout: str, *args: Any) -> list[tuple[list[float], list[float]]]:
    return run_ranks(LAYOUTS[layout][0], _train, layout, *args, timeout_s=110)


def _tensors(path: Path | str) -> dict[str, Tensor]:
    """Return weights and moments by name."""
    checkpoint = (
        read_full(str(path)) if Path(path).is_dir() else torch.load(path, weights_only=False)
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPTModel(_config()).named_parameters()}
    [optimizer] = checkpoint["optimizer_states"]
    # As the module's groups list them: with weight decay first.
    names = [name for name, shape in shapes.items() if len(shape) > 1]
    names += [name for name, shape in shapes.items() if len(shape) == 1]
    found = dict(checkpoint["state_dict"])
    for index, values in optimizer["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert values[key].shape == shapes[names[index]]
            found[f"{names[index]}.{key}"] = values[key]
    return found


def _differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@cache
def _reference() -> list[float]:
    """Return the norms of plain Lightning without interruption."""
    with TemporaryDirectory() as folder:
        [(_, norms)] = _run("plain", f"{folder}/saved", STEPS)
        return norms


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "read_by"),
    [
        ("ep2-on-two", "etp2-on-two"),
        _slow("ep4", "ep2-etp2"),
        _slow("ep2-fsdp", "ep2-etp2"),
        _slow("ep4", "one"),
        _slow("one", "ep2-fsdp"),
        _slow("ep2-fsdp", "etp2-fsdp"),
        _slow("etp2-fsdp", "ep4-fsdp"),
        _slow("ep2-etp2", "ep4"),
        _slow("ep2-etp2", "ep2-pp2"),
        _slow("ep2-pp2", "ep2-tp2"),
        _slow("ep4-fsdp", "ep2-tp2"),
        _slow("ep2-tp2", "ep4-fsdp"),
        _slow("ep4", "ep2-tp2-fsdp"),
        _slow("one", "ep2-etp2"),
    ],
)
def test_a_layout_reads_the_checkpoint_of_another(
    saved_by: str, read_by: str, tmp_path: Path
) -> None:
    """What was loaded is saved again before the next step: the same bits. Then norms are compared;
    fp32, sums in another order: 1e-5.
    """
    saved, resumed = tmp_path / "saved", tmp_path / "resumed"
    _run(saved_by, str(saved), STOP)
    [(_, norms), *_] = _run(read_by, str(resumed), STEPS, str(saved))
    before, loaded = _tensors(saved), _tensors(f"{resumed}.first")
    assert _differing(loaded, before) == []
    moments = before["decoder.layers.1.mlp.experts.linear_fc1.weight.exp_avg"]
    assert moments.shape == (EXPERTS, 2 * WIDTH, HIDDEN) and all(m.any() for m in moments)
    assert norms == pytest.approx(_reference()[STOP:], rel=1e-5)


@pytest.mark.slow  # test_expert_parameters has a module of experts that is smaller
def test_plain_lightning_and_a_layout_read_each_other(tmp_path: Path) -> None:
    saved, plain = tmp_path / "saved", tmp_path / "plain.ckpt"
    _run("ep2-tp2", str(saved), STOP)
    consolidate(str(saved), str(plain))
    # Their data begin anew: plain checkpoints do not count samples.
    _run("plain", str(tmp_path / "a"), STEPS, str(plain))
    assert _differing(_tensors(tmp_path / "a.first"), _tensors(saved)) == []
    _run("plain", str(plain), STOP)
    _run("ep4", str(tmp_path / "b"), STEPS, str(plain))
    assert _differing(_tensors(tmp_path / "b.first"), _tensors(plain)) == []


@pytest.mark.parametrize(
    "layout",
    [_slow("ep2-tp2"), _slow("ep4"), _slow("ep2-pp2"), _slow("ep4-fsdp"), _slow("ep2-fsdp")],
)
def test_resuming_is_bit_equal(layout: str, tmp_path: Path) -> None:
    """With dropout, and with random factors of the router's inputs."""
    full, saved, resumed = (tmp_path / name for name in ("full", "saved", "resumed"))
    expected = _run(layout, str(full), STEPS, None, 0.1)
    _run(layout, str(saved), STOP, None, 0.1)
    found = _run(layout, str(resumed), STEPS, str(saved), 0.1)
    for rank, (losses, norms) in enumerate(expected):
        assert found[rank] == (losses[STOP:], norms[STOP:])
    assert _differing(_tensors(resumed), _tensors(full)) == []
